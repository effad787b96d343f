"""Graceful shutdown of the gRPC server: requests on their way are served (RFC 9113, 6.8)."""

import asyncio
import socket
from pathlib import Path

import hpack
import pytest
from support.conditions import until
from support.engines import own_engine_only
from support.frames import Error, Flag, Frame, Kind, data, headers, literals, parse, ping
from support.server import Serve
from support.wire import connect, request_headers, sent

from xlaserve.grpc import server as grpc_server

LIVE = request_headers("/inference.GRPCInferenceService/ServerLive")
MESSAGE = bytes(5)
ALIVE = b"\0\0\0\0\2\x08\1"
WAITING = 20
TRIPS = 20
SECONDS = 30
LAST = 2**31 - 1


async def received(client: socket.socket) -> list[Frame]:
    """Return all frames until the server closes the connection; a reset raises."""
    loop, octets = asyncio.get_running_loop(), b""
    async with asyncio.timeout(SECONDS):
        while more := await loop.sock_recv(client, 1 << 16):
            octets += more
    frames, rest = parse(octets)
    assert not rest
    return frames


def last_streams(frames: list[Frame]) -> list[int]:
    return [int.from_bytes(f.payload[:4], "big") for f in frames if f.kind == Kind.GOAWAY]


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_connections_in_the_accept_queue_are_served(
    serve: Serve, tmp_path: Path, kind: str
) -> None:
    """The kernel has accepted them, and their requests have arrived: they must not be reset."""
    settings = {} if kind == "tcp" else {"grpc_endpoint": f"unix:{tmp_path}/s"}
    async with serve(tmp_path, **settings) as server:
        clients = []
        for _ in range(WAITING):
            if kind == "tcp":
                host, _, port = server.url.rpartition(":")
                client = socket.create_connection((host, int(port)), timeout=SECONDS)
            else:
                client = socket.socket(socket.AF_UNIX)
                client.connect(f"{tmp_path}/s")
            client.sendall(sent(LIVE))
            client.setblocking(False)
            clients.append(client)
        draining = asyncio.ensure_future(server.application.grpc.drain(SECONDS))
        answers = await asyncio.gather(*map(received, clients))
        await draining
        for client in clients:
            client.close()

    for frames in answers:
        assert [ALIVE] == [frame.payload for frame in frames if frame.kind == Kind.DATA]
        assert LAST == last_streams(frames)[0]
        assert 1 == last_streams(frames)[-1]


async def test_a_connection_is_closed_when_its_last_request_has_ended(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for other connections: a second GOAWAY follows after a round trip."""
    monkeypatch.setattr(grpc_server, "_ARRIVAL_SECONDS", 3600.0)
    async with serve(tmp_path) as server:
        host, _, port = server.url.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
            client.sendall(sent(LIVE))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            async with connect(server.url) as other:
                # The client answers no PING, because nothing reads its socket.
                await other.trailers(other.send(LIVE))
                draining = asyncio.ensure_future(server.application.grpc.drain(SECONDS))
                octets = b""
                async with asyncio.timeout(SECONDS):
                    while not any(f.kind == Kind.PING for f in parse(octets)[0]):
                        octets += await loop.sock_recv(client, 1 << 16)
                (trip,) = (f for f in parse(octets)[0] if f.kind == Kind.PING)
                await loop.sock_sendall(client, bytes(ping(trip.payload, ack=True)))
                frames = parse(octets)[0] + await received(client)
                assert not draining.done()
            await draining

    assert not trip.flags & Flag.ACK
    assert [LAST, 1] == last_streams(frames)[:2]


async def test_streams_behind_the_last_are_refused_and_the_others_are_answered(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REFUSED_STREAM says that nothing was processed: the client may retry elsewhere (6.8, 8.7)."""
    monkeypatch.setattr(grpc_server, "_ARRIVAL_SECONDS", 3600.0)
    loop = asyncio.get_running_loop()
    async with serve(tmp_path) as server, connect(server.url) as other:
        await other.trailers(other.send(LIVE))  # answers no PING, so the drain waits for it
        host, _, port = server.url.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
            client.sendall(sent(LIVE, whole=False))
            client.setblocking(False)
            await until(lambda: server.application.grpc.open_streams)
            drain = asyncio.ensure_future(server.application.grpc.drain(SECONDS))
            octets = b""
            async with asyncio.timeout(SECONDS):
                while not any(f.kind == Kind.PING for f in parse(octets)[0]):
                    octets += await loop.sock_recv(client, 1 << 16)
                trip = next(f for f in parse(octets)[0] if f.kind == Kind.PING)
                await loop.sock_sendall(client, bytes(ping(trip.payload, ack=True)))
                while len(last_streams(parse(octets)[0])) < 2:
                    octets += await loop.sock_recv(client, 1 << 16)
            late = bytes(headers(3, literals(LIVE))) + bytes(data(3, MESSAGE, end_stream=True))
            await loop.sock_sendall(client, late + bytes(data(1, MESSAGE, end_stream=True)))
            frames = parse(octets)[0] + await received(client)
            assert not drain.done()
        other.writer.close()
        await drain

    assert [LAST, 1] == last_streams(frames)[:2]
    assert [(3, Error.REFUSED_STREAM.to_bytes(4, "big"))] == [
        (frame.stream, frame.payload) for frame in frames if frame.kind == Kind.RST_STREAM
    ]
    assert [(1, ALIVE)] == [(f.stream, f.payload) for f in frames if f.kind == Kind.DATA]


@own_engine_only
async def test_a_connection_stays_until_its_client_has_ended_what_was_answered(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc-core drops the last answers of a stream if the connection ends before it has read them.

    It ends its side of the stream once it has read the status.
    """
    monkeypatch.setattr(grpc_server, "_ARRIVAL_SECONDS", 3600.0)
    monkeypatch.setattr(grpc_server, "_LOOK_SECONDS", 0.0)  # its phases follow each other at once
    loop, octets = asyncio.get_running_loop(), b""

    async def until_sent(kind: Kind, count: int = 1) -> list[Frame]:
        nonlocal octets
        async with asyncio.timeout(SECONDS):
            while len(found := [f for f in parse(octets)[0] if f.kind == kind]) < count:
                more = await loop.sock_recv(client, 1 << 16)
                assert more, "the server has closed the connection"
                octets += more
        return found

    async with serve(tmp_path) as server:
        host, _, port = server.url.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
            # Answered at once, as there is no such method.
            client.sendall(sent(request_headers("/no/such"), whole=False))
            client.setblocking(False)
            await until_sent(Kind.HEADERS)
            drain = asyncio.ensure_future(server.application.grpc.drain(SECONDS))
            (trip,) = await until_sent(Kind.PING)
            await loop.sock_sendall(client, bytes(ping(trip.payload, ack=True)))
            await until_sent(Kind.GOAWAY, 2)
            frames = []
            for number in range(TRIPS):
                await loop.sock_sendall(client, bytes(ping(b"still on")))
                frames = await until_sent(Kind.PING, 2 + number)
            await loop.sock_sendall(client, bytes(data(1, b"", end_stream=True)))
            await received(client)
            await drain

    assert b"still on" == frames[-1].payload


@own_engine_only
async def test_a_message_that_is_on_its_way_is_waited_for(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has stalled for message_timeout_seconds, the client gets an error."""
    monkeypatch.setattr(grpc_server, "_ARRIVAL_SECONDS", 0.01)
    async with serve(tmp_path, message_timeout_seconds=0.5) as server:
        host, _, port = server.url.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
            client.sendall(sent(LIVE, whole=False))
            client.setblocking(False)
            await until(lambda: server.application.grpc.open_streams)
            drain = asyncio.ensure_future(server.application.grpc.drain(SECONDS))
            frames = await received(client)
            await drain
    (answer,) = (frame.payload for frame in frames if frame.kind == Kind.HEADERS)

    fields: dict[object, object] = dict(hpack.Decoder().decode(answer))

    assert "no message within" in str(fields["grpc-message"])
