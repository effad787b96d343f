"""Connection and header handling that grpclib leaves to the server."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import h2.events
import pytest
from grpclib.metadata import encode_grpc_message
from support.engines import own_engine_only
from support.frames import PREFACE, Error
from support.server import Serve
from support.wire import connect, request_headers

from xlaserve.app import grpc as grpc_assembly
from xlaserve.grpc.edge import shorten
from xlaserve.grpc.request_headers import refusal

LIVE = "/inference.GRPCInferenceService/ServerLive"


def headers(*more: tuple[str, str], path: str = LIVE) -> list[tuple[str, str]]:
    return request_headers(path, *more)


@pytest.mark.parametrize(
    ("lines", "status", "text"),
    [
        (headers(), "0", ""),
        (headers(("grpc-timeout", "9" * 400 + "S")), "3", "grpc-timeout"),
        (headers(("grpc-timeout", "1X")), "3", "grpc-timeout"),
        (headers(("mm-model-id-bin", "abcde")), "13", "-bin"),
        (headers(("mm-model-id-bin", "!!!!")), "13", "-bin"),
        (headers(("mm-model-id-bin", "YWJj")), "0", ""),
        (headers(("mm-model-id-bin", "YWI")), "0", ""),
        (headers(path="/inference.GRPCInferenceService/Nope"), "12", "Method not found"),
    ],
)
async def test_every_request_gets_an_answer(
    serve: Serve, tmp_path: Path, lines: Sequence[tuple[str, str]], status: str, text: str
) -> None:
    """No request goes unanswered, and the connection keeps serving."""
    async with serve(tmp_path) as server, connect(server.url) as wire:
        answer = await wire.trailers(wire.send(lines))
        following = await wire.trailers(wire.send(headers()))

    assert status == answer["grpc-status"]
    assert text in answer.get("grpc-message", "")
    assert "0" == following["grpc-status"]


@pytest.mark.parametrize("missing", [":method", ":path", "te"])
async def test_a_request_without_a_header_that_it_must_have_is_reset(
    serve: Serve, tmp_path: Path, missing: str
) -> None:
    """RFC 9113, 8.1.1; gRPC over HTTP/2, Requests."""
    async with serve(tmp_path) as server, connect(server.url) as wire:
        wire.send([line for line in headers() if line[0] != missing])
        end = await wire.until(h2.events.StreamReset)
        following = await wire.trailers(wire.send(headers()))

    assert 1 == end.error_code  # PROTOCOL_ERROR
    assert "0" == following["grpc-status"]


@own_engine_only
async def test_a_client_that_is_refused_again_and_again_is_sent_away(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests after it fail as they should; grpcio reconnects, and its valid requests succeed."""
    monkeypatch.setattr(grpc_assembly, "MAX_REFUSALS", 3)
    nothing, codes = "/inference.GRPCInferenceService/Nope", []
    async with serve(tmp_path) as server:
        async with connect(server.url) as wire:
            for _ in range(4):
                await wire.trailers(wire.send(headers(path=nothing)))
            goaway = await wire.until(h2.events.ConnectionTerminated)
        async with grpc.aio.insecure_channel(server.url) as channel:
            for _ in range(9):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(nothing)(b"", timeout=30)
                codes.append(refused.value.code())
            alive = await channel.unary_unary(LIVE)(b"", timeout=30)

    assert (Error.ENHANCE_YOUR_CALM, 7) == (goaway.error_code, goaway.last_stream_id)
    assert {grpc.StatusCode.UNIMPLEMENTED} == set(codes)
    assert b"\x08\x01" == alive


async def test_a_request_without_a_message_is_refused(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path) as server, connect(server.url) as wire:
        answer = await wire.trailers(wire.send_nothing(headers()))

    assert ("12", "ServerLive needs one message, got none") == (
        answer["grpc-status"],
        answer["grpc-message"].rpartition("/")[2],
    )


async def test_a_malformed_message_says_nothing_of_what_it_held(
    serve: Serve, tmp_path: Path
) -> None:
    async with serve(tmp_path) as server, connect(server.url) as wire:
        ask = headers(path="/inference.GRPCInferenceService/ModelReady")
        answer = await wire.trailers(wire.send(ask, b"\x0a\x7f"))

    assert ("13", "the request is not a valid ModelReadyRequest message") == (
        answer["grpc-status"],
        answer["grpc-message"],
    )


async def test_connections_over_the_limit_are_sent_away(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path, max_connections=1) as server:
        async with connect(server.url) as first:
            await first.trailers(first.send(headers()))
            async with connect(server.url) as second:
                end = await second.until(h2.events.ConnectionTerminated)

            assert 11 == end.error_code  # ENHANCE_YOUR_CALM

            answer = await first.trailers(first.send(headers()))

            assert "0" == answer["grpc-status"]


async def test_a_client_of_grpc_that_is_sent_away_is_told_and_does_not_insist(
    serve: Serve, tmp_path: Path
) -> None:
    """Were SETTINGS sent before the GOAWAY, grpcio would reconnect 400 times a second and hang."""
    async with serve(tmp_path, max_connections=1) as server, connect(server.url) as first:
        await first.trailers(first.send(headers()))
        admitted, admit = Counter[bool](), server.application.grpc.admit

        def counted(protocol: Any) -> bool:
            found = admit(protocol)
            admitted[found] += 1
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.application.grpc, "admit", counted)
            async with grpc.aio.insecure_channel(server.url) as channel:
                live: Any = channel.unary_unary(LIVE)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await live(b"", timeout=60)

    assert grpc.StatusCode.UNAVAILABLE is raised.value.code()
    assert {False: 1} == admitted


async def test_the_limit_of_streams_is_advertised(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path, max_streams_per_connection=7) as server:
        async with connect(server.url) as wire:
            await wire.trailers(wire.send(headers()))

            assert 7 == wire.h2.remote_settings.max_concurrent_streams


async def test_a_connection_that_closes_leaves_nothing_behind(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for _ in range(20):
            async with connect(server.url) as wire:
                await wire.trailers(wire.send(headers()))
        grpc_server = server.application.grpc
        while grpc_server.connections:
            await asyncio.sleep(0)

        assert (0, 0) == (grpc_server.open_streams, len(grpc_server._refused))


async def test_a_drain_announces_the_end(serve: Serve, tmp_path: Path) -> None:
    """The first GOAWAY names no stream, and the last names the last stream (RFC 9113, 6.8)."""
    async with serve(tmp_path) as server:
        reader, writer = await asyncio.open_connection(*server.url.split(":"))
        writer.write(PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        await reader.readexactly(9)
        drain = asyncio.create_task(server.application.grpc.drain(5))
        came = await reader.read()
        await drain
        writer.close()

    goaway = bytes([0, 0, 8, 7, 0]) + bytes(4)
    without, with_the_last = (
        goaway + last.to_bytes(4, "big") + bytes(4) for last in (2**31 - 1, 0)
    )
    assert 0 <= came.find(without) < came.find(with_the_last)


async def test_a_drain_leaves_no_connection_open(serve: Serve, tmp_path: Path) -> None:
    """This includes a client that ignores GOAWAY and one above the connection limit."""
    async with serve(tmp_path, max_connections=1) as server:
        async with connect(server.url) as wire, connect(server.url) as refused:
            await wire.trailers(wire.send(headers()))
            await refused.until(h2.events.ConnectionTerminated)
            grpc_server = server.application.grpc
            await grpc_server.drain(5)

            assert (0, 0) == (grpc_server.connections, len(grpc_server._refused))


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600", "%"])
def test_a_message_fits_into_headers_once_it_is_encoded(character: str) -> None:
    short = shorten(character * 10_000)

    assert len(encode_grpc_message(short)) <= 2048
    assert short.endswith("...")
    assert "short" == shorten("short")


def test_headers_that_are_right_are_let_through() -> None:
    assert refusal(headers(("grpc-timeout", "10S"), ("x-bin", "YWJj,YWI"))) is None
