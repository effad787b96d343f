"""What the server does with connections and headers that grpclib leaves open."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from grpclib.metadata import encode_grpc_message
from support.server import Serve

from xlaserve.transport.grpc.edge import shorten
from xlaserve.transport.grpc.request_headers import header_problem

LIVE = "/inference.GRPCInferenceService/ServerLive"
EMPTY_MESSAGE = b"\0\0\0\0\0"


def headers(*more: tuple[str, str], path: str = LIVE, **changes: str) -> list[tuple[str, str]]:
    plain = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return [*(plain | changes).items(), *more]


class Wire:
    """A client that sends what it is told, right or wrong."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.h2.initiate_connection()
        self.events: list[Any] = []

    def send(self, lines: Sequence[tuple[str, str]], body: bytes = EMPTY_MESSAGE) -> None:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, lines)
        self.h2.send_data(stream, body, end_stream=True)
        self.writer.write(self.h2.data_to_send())

    async def until(self, kind: type[Any]) -> Any:
        """Return the next event of a kind."""
        async with asyncio.timeout(10):
            while not any(isinstance(event, kind) for event in self.events):
                data = await self.reader.read(65536)
                assert data, f"closed without {kind.__name__}"
                self.events += self.h2.receive_data(data)
        index = next(i for i, event in enumerate(self.events) if isinstance(event, kind))
        return self.events.pop(index)

    async def trailers(self) -> dict[str, str]:
        """Return the headers that end the next answer."""
        await self.until(h2.events.StreamEnded)
        last = next(e for e in reversed(self.events) if hasattr(e, "headers"))
        self.events.clear()
        return dict(last.headers)


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Wire]:
    host, port = url.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


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
    """None falls silent, and the connection serves on."""
    async with serve(tmp_path) as server, connect(server.url) as wire:
        wire.send(lines)
        answer = await wire.trailers()
        wire.send(headers())
        following = await wire.trailers()

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
        wire.events.clear()
        wire.send(headers())
        following = await wire.trailers()

    assert 1 == end.error_code  # PROTOCOL_ERROR
    assert "0" == following["grpc-status"]


async def test_a_request_without_a_message_is_refused(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path) as server, connect(server.url) as wire:
        wire.send(headers(), b"")
        answer = await wire.trailers()

    assert ("12", "ServerLive needs one message, none came") == (
        answer["grpc-status"],
        answer["grpc-message"].rpartition("/")[2],
    )


async def test_a_malformed_message_says_nothing_of_what_it_held(
    serve: Serve, tmp_path: Path
) -> None:
    async with serve(tmp_path) as server, connect(server.url) as wire:
        wire.send(headers(path="/inference.GRPCInferenceService/ModelReady"), b"\0\0\0\0\2\x0a\x7f")
        answer = await wire.trailers()

    assert ("13", "the request is not a valid ModelReadyRequest message") == (
        answer["grpc-status"],
        answer["grpc-message"],
    )


async def test_connections_over_the_limit_are_sent_away(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path, max_connections=1) as server:
        async with connect(server.url) as first:
            first.send(headers())
            await first.trailers()
            async with connect(server.url) as second:
                end = await second.until(h2.events.ConnectionTerminated)

            assert 11 == end.error_code  # ENHANCE_YOUR_CALM

            first.send(headers())

            assert "0" == (await first.trailers())["grpc-status"]


async def test_the_limit_of_streams_is_advertised(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path, max_streams_per_connection=7) as server:
        async with connect(server.url) as wire:
            wire.send(headers())
            await wire.trailers()

            assert 7 == wire.h2.remote_settings.max_concurrent_streams


async def test_a_connection_that_closes_leaves_nothing_behind(serve: Serve, tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for _ in range(20):
            async with connect(server.url) as wire:
                wire.send(headers())
                await wire.trailers()
        grpc_server = server.application.grpc
        while grpc_server.connections:
            await asyncio.sleep(0)

        assert (0, 0) == (grpc_server.connections, len(grpc_server._handlers))


async def test_a_drain_announces_the_end(serve: Serve, tmp_path: Path) -> None:
    """RFC 9113, 6.8: GOAWAY first without, then with the last stream."""
    async with serve(tmp_path) as server:
        async with connect(server.url) as wire:
            wire.send(headers())
            await wire.trailers()
            drain = asyncio.create_task(server.application.grpc.drain(5))
            first = await wire.until(h2.events.ConnectionTerminated)
            await drain

    assert (0, 2**31 - 1) == (first.error_code, first.last_stream_id)


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600", "%"])
def test_a_message_fits_into_headers_once_it_is_encoded(character: str) -> None:
    short = shorten(character * 10_000)

    assert len(encode_grpc_message(short)) <= 2048
    assert short.endswith("...")
    assert "short" == shorten("short")


def test_headers_that_are_right_are_let_through() -> None:
    assert header_problem(headers(("grpc-timeout", "10S"), ("x-bin", "YWJj,YWI"))) is None
