"""The minimal load client, against servers that violate the protocol."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hpack import Encoder

from xlaserve.bench.errors import ServerUnreachable
from xlaserve.bench.grpc_target import GrpcTarget
from xlaserve.bench.load import Measured, Step, Timing, run_step
from xlaserve.dialing.address import parse_address
from xlaserve.grpc.http2 import frames
from xlaserve.grpc.http2.frames import END_HEADERS, END_STREAM, HEADER_BYTES, NUMBER, Setting
from xlaserve.tensors import DATATYPES, TensorSpec

Answer = Callable[[int], bytes]
"""Called with the stream of a complete request."""

INPUTS = [(TensorSpec("x", DATATYPES["FP32"], (40_000,)), np.zeros(40_000, np.float32))]
TIMING = Timing(warmup=0.0, duration=0.05, timeout=20.0)
MESSAGE = b"\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return frames.frame_header(len(payload), kind, flags, stream) + payload


def headers(stream: int, flags: int = 0, **fields: str) -> bytes:
    """Return a HEADERS frame; names of fields are written with _ for -."""
    pairs = [(name.replace("_", "-").replace("STATUS", ":status"), v) for name, v in fields.items()]
    return frame(frames.HEADERS, END_HEADERS | flags, stream, Encoder().encode(pairs))


def ok(stream: int) -> bytes:
    """Return a complete answer."""
    return (
        headers(stream, STATUS="200")
        + frame(frames.DATA, 0, stream, MESSAGE)
        + headers(stream, END_STREAM, grpc_status="0")
    )


@asynccontextmanager
async def speaking(
    answer: Answer, *, first: bytes | None = None, window: int = 1 << 20
) -> AsyncIterator[str]:
    """Serve hand-written HTTP/2; `first` replaces the settings frame."""

    handlers: list[asyncio.Task[None] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        greeting = frames.settings({Setting.INITIAL_WINDOW_SIZE: window})
        writer.write(greeting if first is None else first)
        try:
            await reader.readexactly(len(frames.PREFACE))
            while True:
                head = await reader.readexactly(HEADER_BYTES)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                stream = NUMBER.unpack(head[5:])[0]
                if head[3] == frames.DATA:
                    more = NUMBER.pack(len(payload))
                    for number in {0, stream} if payload else set():
                        writer.write(frame(frames.WINDOW_UPDATE, 0, number, more))
                    if head[4] & END_STREAM:
                        writer.write(answer(stream))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1") as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, handlers))


async def measure(url: str, streams: int = 1) -> Measured:
    """Run a load on one connection."""
    target = GrpcTarget(parse_address(url), "m", "", timeout=TIMING.timeout)
    return await run_step(Step(1, streams), TIMING, target.connector(INPUTS))


@pytest.mark.parametrize("window", [1000, 1 << 20])
async def test_requests_wait_for_the_windows_of_the_server(window: int) -> None:
    """160 kB in frames that fit; some servers widen their windows byte by byte."""
    async with speaking(ok, window=window) as url:
        measured = await measure(url, streams=3)

    assert {} == measured.errors
    assert len(measured.latencies) >= 3


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (lambda s: headers(s, END_STREAM, STATUS="200", grpc_status="14"), "UNAVAILABLE"),
        (lambda s: headers(s, END_STREAM, STATUS="200", grpc_status="77"), "grpc-status 77"),
        (lambda s: headers(s, END_STREAM, STATUS="503"), "HTTP 503"),
        (lambda s: headers(s, END_STREAM, STATUS="200", grpc_status="0"), "no message"),
        (lambda s: frame(frames.RST_STREAM, 0, s, NUMBER.pack(7)), "stream reset, code 7"),
        (
            lambda s: headers(s, STATUS="200") + frame(frames.DATA, END_STREAM, s, MESSAGE),
            "no status",
        ),
    ],
)
async def test_what_is_not_an_answer_is_counted_by_its_status(answer: Answer, status: str) -> None:
    async with speaking(answer) as url:
        measured = await measure(url, streams=2)

    assert [status] == list(measured.errors)
    assert 0 == len(measured.latencies)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            frame(frames.GOAWAY, 0, 0, NUMBER.pack(1) + NUMBER.pack(11)),
            "connection ended by the server, code 11",
        ),
        (b"\xff" * 64, "not HTTP/2: expected frames of at most 1048576 bytes, got 16777215"),
        (frame(frames.HEADERS, END_HEADERS, 1, b"\xff" * 8), "not HTTP/2: "),
    ],
)
async def test_a_connection_that_ends_takes_its_requests_along(reply: bytes, reason: str) -> None:
    async with speaking(lambda stream: reply) as url:
        measured = await measure(url, streams=3)

    assert 3 == measured.errors.total()
    assert all(found.startswith(reason) for found in measured.errors)


async def test_headers_may_come_in_pieces_and_with_padding() -> None:
    def answer(stream: int) -> bytes:
        block = Encoder().encode([(":status", "200"), ("grpc-status", "0")])
        padded = bytes([3]) + block[:1] + b"\0\0\0"
        return (
            frame(frames.DATA, 0, stream, MESSAGE)
            + frame(frames.HEADERS, END_STREAM | 0x8, stream, padded)
            + frame(frames.CONTINUATION, END_HEADERS, stream, block[1:])
        )

    async with speaking(answer) as url:
        measured = await measure(url)

    assert {} == measured.errors
    assert len(measured.latencies) > 0


async def test_a_table_of_headers_is_followed() -> None:
    """The server ignores the table size of 0: its header blocks differ for equal answers."""
    encoder = Encoder()

    def answer(stream: int) -> bytes:
        status = "0" if stream % 4 == 1 else "8"
        block = encoder.encode([(":status", "200"), ("grpc-status", status), ("x-more", "1")])
        data = frame(frames.DATA, 0, stream, MESSAGE)
        return data + frame(frames.HEADERS, END_HEADERS | END_STREAM, stream, block)

    async with speaking(answer) as url:
        measured = await measure(url)

    assert ["RESOURCE_EXHAUSTED"] == list(measured.errors)
    assert abs(len(measured.latencies) - measured.errors.total()) <= 1


@pytest.mark.parametrize("first", [b"HTTP/1.1 400 Bad Request\r\n\r\n", ok(1)])
async def test_a_server_that_begins_with_something_else_is_said(first: bytes) -> None:
    async with speaking(ok, first=first) as url:
        with pytest.raises(ServerUnreachable, match="not HTTP/2: the first frame is not SETTINGS"):
            await measure(url)
