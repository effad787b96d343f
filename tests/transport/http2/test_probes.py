"""Client errors and oddities, one row each, and the server's answer.

The connection survives every error of a single request; it ends with an explanatory GOAWAY if
its own state is in doubt. No request goes unanswered.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest
from support import frames
from support.engines import ENGINE, own_engine_only
from support.frames import Frame, Kind, Peer, literals, peer
from support.server import RunningServer, Serve
from support.wire import framed, request_headers

from xlaserve.settings.choices import Http2Engine

SERVICE = "/inference.GRPCInferenceService/"
LIVE = f"{SERVICE}ServerLive"
READY = f"{SERVICE}ModelReady"
EMPTY = framed(b"")
STREAMS = 5
"""Streams per connection that the server allows."""

OK = "grpc-status 0"
DEADLINE_EXCEEDED = "grpc-status 4"
INVALID_ARGUMENT = "grpc-status 3"
NOT_FOUND = "grpc-status 5"
RESOURCE_EXHAUSTED = "grpc-status 8"
UNIMPLEMENTED = "grpc-status 12"
INTERNAL = "grpc-status 13"
MALFORMED = "RST_STREAM PROTOCOL_ERROR"
CLOSED = "closed"

Parts: TypeAlias = Sequence[Frame | bytes]


class Probe(NamedTuple):
    """The frames sent, and their outcome."""

    parts: Parts
    outcome: str
    """The outcome of stream 1, the first stream, or a GOAWAY of the connection."""


def call(path: str, *bodies: bytes, lines: Sequence[tuple[str, str]] = ()) -> Parts:
    """Make a call on stream 1: its headers, and DATA frames of which the last ends it."""
    opening = frames.headers(1, literals(request_headers(path, *lines)))
    last = len(bodies) - 1
    return opening, *(frames.data(1, body, end_stream=at == last) for at, body in enumerate(bodies))


def live(*lines: tuple[str, str]) -> Parts:
    """Make a valid call with these additional headers."""
    return call(LIVE, EMPTY, lines=lines)


def altered(change: Callable[[list[tuple[str, str]]], list[tuple[str, str]]]) -> Parts:
    """Make a call whose headers are altered."""
    block = literals(change(request_headers(LIVE)))
    return frames.headers(1, block), frames.data(1, EMPTY, end_stream=True)


def without(name: str) -> Parts:
    """Make a call without a header."""
    return altered(lambda lines: [line for line in lines if line[0] != name])


def behind(parts: Parts, *more: Frame | bytes) -> Parts:
    """Append frames to a call."""
    return (*parts, *more)


def opened(*more: Frame | bytes) -> Parts:
    """Open a call, and send other frames before its message."""
    return behind(call(LIVE), *more)


def _with_json(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [*lines[:-1], ("content-type", "application/json")]


TRAILERS = frames.headers(1, literals([("x-end", "1")]), end_stream=True)
BAD_UTF8 = framed(b"\x0a\x02\xff\xfe")
TRUNCATED = framed(b"\x0a\x7f")
OTHER_WIRE_TYPE = framed(b"\x08\x05")
ONE_BYTE_FRAMES = [bytes((octet,)) for octet in framed(b"\x0a\x04nope")]
UNKNOWN_FRAME = Frame(0x2A, 0xFF, 1, b"grease")
ALTSVC = Frame(0x0A, 0, 0, b"\0\0h2=:1")
PRIORITY_UPDATE = Frame(0x10, 0, 0, b"\0\0\0\1u=1")

PROBES = {
    # --- messages ---
    "a message of 4 GiB is declared": Probe(
        (*opened(), frames.data(1, b"\0\xff\xff\xff\xff" + bytes(100))), RESOURCE_EXHAUSTED
    ),
    "a message ends early": Probe(call(LIVE, b"\0\0\0\0\x0ahello"), INTERNAL),
    "a prefix ends early": Probe(call(LIVE, b"\0\0\0"), INTERNAL),
    "compressed, but not said how": Probe(call(LIVE, b"\1\0\0\0\0"), INTERNAL),
    "compressed in a way that is not known": Probe(
        call(LIVE, b"\1\0\0\0\0", lines=[("grpc-encoding", "snappy")]), UNIMPLEMENTED
    ),
    "a flag that is neither 0 nor 1": Probe(call(LIVE, b"\2\0\0\0\0"), INTERNAL),
    "no message": Probe(call(LIVE, b""), UNIMPLEMENTED),
    "no body": Probe(
        [frames.headers(1, literals(request_headers(LIVE)), end_stream=True)], UNIMPLEMENTED
    ),
    "two messages": Probe(call(LIVE, EMPTY + EMPTY), UNIMPLEMENTED),
    "text that is not UTF-8": Probe(call(READY, BAD_UTF8), INTERNAL),
    "a field that ends early": Probe(call(READY, TRUNCATED), INTERNAL),
    "a field of another wire type": Probe(call(READY, OTHER_WIRE_TYPE), NOT_FOUND),
    "an empty DATA frame before the message": Probe(call(LIVE, b"", EMPTY), OK),
    "one DATA frame for each byte": Probe(call(READY, *ONE_BYTE_FRAMES), NOT_FOUND),
    # --- headers ---
    "no time at all": Probe(live(("grpc-timeout", "0S")), DEADLINE_EXCEEDED),
    "a time of 400 digits": Probe(live(("grpc-timeout", "9" * 400 + "S")), INVALID_ARGUMENT),
    "a time without a unit": Probe(live(("grpc-timeout", "10")), INVALID_ARGUMENT),
    "a binary header that is not base64": Probe(live(("x-bin", "abcde")), INTERNAL),
    "a binary header of other characters": Probe(live(("x-bin", "!!!!")), INTERNAL),
    "a binary header with two values": Probe(live(("x-bin", "YQ,YWI=")), OK),
    "headers over the limit": Probe(live(("x-name", "a" * 20_000)), RESOURCE_EXHAUSTED),
    "a value of other bytes than ASCII": Probe(live(("x-name", "caf\xc3\xa9")), OK),
    "no :method": Probe(without(":method"), MALFORMED),
    "no :path": Probe(without(":path"), MALFORMED),
    "no :scheme": Probe(without(":scheme"), MALFORMED),
    "no te": Probe(without("te"), MALFORMED),
    "a line break in a value": Probe(live(("x-id", "a\r\nb")), MALFORMED),
    "a NUL in a value": Probe(live(("x-id", "a\0b")), MALFORMED),
    "upper case in a name": Probe(live(("X-Id", "a")), MALFORMED),
    "a header of one connection": Probe(live(("connection", "keep-alive")), MALFORMED),
    "a pseudo-header that is not known": Probe(
        altered(lambda lines: [(":x", "1"), *lines]), MALFORMED
    ),
    "a pseudo-header behind others": Probe(
        altered(lambda lines: [*lines[1:], lines[0]]), MALFORMED
    ),
    "a pseudo-header twice": Probe(altered(lambda lines: [lines[0], *lines]), MALFORMED),
    "a content type with a parameter": Probe(
        altered(lambda lines: [*lines[:-1], ("content-type", "application/grpc; charset=utf-8")]),
        OK,
    ),
    "a content type that only begins so": Probe(
        altered(lambda lines: [*lines[:-1], ("content-type", "application/grpcx; a=b")]),
        "HTTP 415",
    ),
    "a content type of JSON": Probe(
        altered(lambda lines: [*lines[:-1], ("content-type", "application/grpc+json")]), "HTTP 415"
    ),
    "a body of JSON that does not end": Probe(
        [altered(_with_json)[0], frames.data(1, b'{"inputs": [')], "HTTP 415"
    ),
    "a method that there is not": Probe(call(f"{SERVICE}Nope", EMPTY), UNIMPLEMENTED),
    "GET": Probe(altered(lambda lines: [(":method", "GET"), *lines[1:]]), "HTTP 405"),
    # # --- valid frames ---
    "a frame of a kind that is not known": Probe(
        [UNKNOWN_FRAME._replace(stream=0), *opened(UNKNOWN_FRAME), *live()[1:]], OK
    ),
    "ALTSVC": Probe([ALTSVC, *live()], OK),
    "PRIORITY_UPDATE": Probe([PRIORITY_UPDATE, *live()], OK),
    "PRIORITY before and after": Probe(
        [frames.priority(1), *opened(frames.priority(1, 3)), *live()[1:]], OK
    ),
    "padding": Probe([*call(LIVE), frames.padded(live()[1], 255)], OK),  # type: ignore[arg-type]
    "trailers": Probe(opened(frames.data(1, EMPTY), TRAILERS), OK),
    "a header block in pieces": Probe(
        [
            frames.headers(1, literals(request_headers(LIVE))[:9], end_headers=False),
            frames.continuation(1, literals(request_headers(LIVE))[9:20], end_headers=False),
            frames.continuation(1, literals(request_headers(LIVE))[20:]),
            *live()[1:],
        ],
        OK,
    ),
    # # --- errors of one request ---
    "DATA after the end": Probe(
        [*call(READY, b"\0\0\0\0\0", b""), frames.data(1, b"more")], "RST_STREAM STREAM_CLOSED"
    ),
    "a window of 0 is added": Probe(opened(frames.window_update(1, 0)), MALFORMED),
    "more window than there can be": Probe(
        opened(frames.window_update(1, 2**31 - 1)), "RST_STREAM FLOW_CONTROL_ERROR"
    ),
    "trailers that do not end it": Probe(
        opened(frames.headers(1, literals([("x-end", "1")]))), MALFORMED
    ),
    "less body than content-length says": Probe(live(("content-length", "6")), MALFORMED),
    # # --- errors of the connection ---
    "a window of 0 is added to the connection": Probe(
        opened(frames.window_update(0, 0)), "GOAWAY PROTOCOL_ERROR"
    ),
    "a PING of 7 bytes": Probe(opened(frames.ping(b"7 bytes")), "GOAWAY FRAME_SIZE_ERROR"),
    "a PING on a stream": Probe(opened(frames.ping()._replace(stream=1)), "GOAWAY PROTOCOL_ERROR"),
    "a frame of more than 1 MiB": Probe(
        opened(frames.head((1 << 20) + 1, Kind.DATA, 0, 1)), "GOAWAY FRAME_SIZE_ERROR"
    ),
    "a frame that would have 16 MB": Probe(
        opened(frames.head(2**24 - 1, Kind.DATA, 0, 1)), "GOAWAY FRAME_SIZE_ERROR"
    ),
    "a header block that cannot be read": Probe(
        [frames.headers(1, b"\xff\xff\xff\xff\xff")], "GOAWAY COMPRESSION_ERROR"
    ),
    "a stream of the server": Probe(
        [frames.headers(2, literals(request_headers(LIVE)))], "GOAWAY PROTOCOL_ERROR"
    ),
    "more padding than frame": Probe(
        opened(Frame(Kind.DATA, frames.Flag.PADDED, 1, b"\xff1234")), "GOAWAY PROTOCOL_ERROR"
    ),
    "another frame within a header block": Probe(
        [frames.headers(1, literals(request_headers(LIVE)), end_headers=False), frames.ping()],
        "GOAWAY PROTOCOL_ERROR",
    ),
    "CONTINUATION of nothing": Probe(opened(frames.continuation(1, b"")), "GOAWAY PROTOCOL_ERROR"),
    "DATA for a stream that was not opened": Probe([frames.data(1, b"x")], "GOAWAY PROTOCOL_ERROR"),
    "RST_STREAM for a stream that was not opened": Probe(
        [frames.rst_stream(1)], "GOAWAY PROTOCOL_ERROR"
    ),
    "PUSH_PROMISE from a client": Probe(
        opened(Frame(Kind.PUSH_PROMISE, frames.Flag.END_HEADERS, 1, b"\0\0\0\2")),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "a window larger than there can be": Probe(
        [frames.settings((frames.Setting.INITIAL_WINDOW_SIZE, 2**31))], "GOAWAY FLOW_CONTROL_ERROR"
    ),
    "SETTINGS of 5 bytes": Probe([Frame(Kind.SETTINGS, 0, 0, b"12345")], "GOAWAY FRAME_SIZE_ERROR"),
}
"""In the order of the layers: gRPC, HTTP, HTTP/2."""

H2 = {
    "an empty DATA frame before the message": UNIMPLEMENTED,
    "two messages": OK,
    "headers over the limit": CLOSED,
    "no :scheme": OK,
    "a line break in a value": OK,
    "a NUL in a value": OK,
    "upper case in a name": OK,
    "a header of one connection": OK,
    "a pseudo-header that is not known": OK,
    "a pseudo-header behind others": OK,
    "a pseudo-header twice": OK,
    "a frame of a kind that is not known": CLOSED,
    "PRIORITY_UPDATE": CLOSED,
    "a window of 0 is added": CLOSED,
    "trailers that do not end it": CLOSED,
    "less body than content-length says": CLOSED,
}
"""Outcomes with grpclib over h2; where a GOAWAY is expected, it closes without one."""


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with serve(tmp_path, max_streams_per_connection=STREAMS) as running:
        yield running


async def serves_on(client: Peer) -> None:
    """Check that a further call on the connection succeeds."""
    block = literals(request_headers(LIVE))
    client.send(frames.headers(101, block), frames.data(101, EMPTY, end_stream=True))

    assert OK == await client.outcome(101)


@pytest.mark.parametrize("name", PROBES)
async def test_every_client_is_answered(server: RunningServer, name: str) -> None:
    probe = PROBES[name]
    expected = H2.get(name, probe.outcome) if ENGINE is Http2Engine.H2 else probe.outcome
    if ENGINE is Http2Engine.H2 and expected.startswith("GOAWAY"):
        pytest.skip("grpclib closes the connection without a GOAWAY")
    async with peer(server.url) as client:
        client.send(*probe.parts)
        outcome = await client.outcome(1)

        assert expected == outcome
        if not outcome.startswith(("GOAWAY", CLOSED)):
            await serves_on(client)


@own_engine_only
async def test_a_stream_too_many_is_refused(server: RunningServer) -> None:
    """RFC 9113, 5.1.2; the others are served, and so is a new stream once one of them has ended."""
    streams = range(1, 2 * STREAMS + 2, 2)
    block = literals(request_headers(LIVE))
    async with peer(server.url) as client:
        await client.ping()  # the client has acknowledged the limit by then
        client.send(*(frames.headers(stream, block) for stream in streams))
        refused = await client.outcome(streams[-1])
        client.send(*(frames.data(stream, EMPTY, end_stream=True) for stream in streams[:-1]))
        served = [await client.outcome(stream) for stream in streams[:-1]]

        assert "RST_STREAM REFUSED_STREAM" == refused
        assert [OK] * STREAMS == served
        await serves_on(client)


async def test_what_comes_for_a_stream_that_was_abandoned_is_ignored(server: RunningServer) -> None:
    """The peer cannot know yet (RFC 9113, 5.1, closed); a second RST_STREAM changes nothing."""
    async with peer(server.url) as client:
        client.send(
            *call(LIVE), frames.rst_stream(1), frames.rst_stream(1), frames.window_update(1, 9)
        )
        await serves_on(client)


async def test_the_end_of_a_message_that_was_refused_is_taken(server: RunningServer) -> None:
    """A client that has not yet read the refusal keeps sending its message."""
    async with peer(server.url) as client:
        client.send(*PROBES["a message of 4 GiB is declared"].parts)

        assert RESOURCE_EXHAUSTED == await client.outcome(1)
        client.send(*[frames.data(1, bytes(frames.LARGEST_FRAME))] * 3)
        client.send(frames.data(1, b"end", end_stream=True))
        await serves_on(client)
