"""Receive windows: client data is charged, granted again, and limited (RFC 9113, 5.2, 6.9)."""

from collections.abc import Callable
from typing import Any

import pytest
from support.frames import (
    PREFACE,
    Error,
    Frame,
    Kind,
    continuation,
    data,
    headers,
    literals,
    padded,
    parse,
    settings,
)
from support.memory_client import MemoryClient, Streaming

from xlaserve.grpc.http2.connection import ServerConnection
from xlaserve.grpc.http2.frames import DEFAULT_WINDOW
from xlaserve.grpc.http2.headers import HARD_FACTOR
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, Placement, Problem
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

REQUEST = literals([(":method", "POST"), (":scheme", "http"), (":path", "/a")])
PLENTY = 1 << 40


def message(size: int) -> bytes:
    """Make a message that has this size including its prefix."""
    return PREFIX.pack(0, size - PREFIX_BYTES) + bytes(size - PREFIX_BYTES)


class Client:
    """An in-memory connection, and the windows that the server granted on it."""

    message_first = True
    placement: Placement | None = None

    def __init__(self, **limits: Any) -> None:
        shared = Shared(Ledger(PLENTY), MessageMemory(0))
        self.core = ServerConnection(Http2Limits(**limits), lambda head: self, shared)
        self.core.start()
        self.window = DEFAULT_WINDOW
        self.answered: list[Frame] = []
        self.messages: list[int] = []
        self.problems: list[Problem] = []
        self.send(PREFACE, settings())

    def begin(self, stream: ServerStream) -> None:
        if stream.problem is not None:
            self.problems.append(stream.problem)
        if stream.message is not None:
            self.messages.append(len(stream.message))

    def send(self, *parts: bytes | Frame) -> None:
        """Send, then record window grants and errors."""
        sent = b"".join(map(bytes, parts))
        frames, rest = parse(sent.removeprefix(PREFACE))
        assert not rest
        self.window -= sum(len(frame.payload) for frame in frames if frame.kind == Kind.DATA)
        self.core.receive(sent)
        for frame in parse(b"".join(self.core.take_output()))[0]:
            if frame.kind == Kind.WINDOW_UPDATE and not frame.stream:
                self.window += int.from_bytes(frame.payload, "big")
            elif frame.kind in (Kind.RST_STREAM, Kind.GOAWAY):
                self.answered.append(frame)

    @property
    def said(self) -> list[tuple[str, int, str]]:
        """The streams or connection that the server ended: frame, stream, and error code."""
        return [
            (Kind(f.kind).name, f.stream, Error(int.from_bytes(f.payload[at : at + 4], "big")).name)
            for f in self.answered
            for at in [4 if f.kind == Kind.GOAWAY else 0]
        ]


# # --- charging ---------------------------------------------------------------------------------

SIZE = 500_000

WAYS: dict[str, Callable[[int, bytes], list[Frame]]] = {
    "one frame": lambda stream, body: [data(stream, body, end_stream=True)],
    "one frame, and its end": lambda stream, body: [
        data(stream, body),
        data(stream, end_stream=True),
    ],
    "frames of 16 KB": lambda stream, body: [
        data(stream, body[at : at + 16_384], end_stream=at + 16_384 >= len(body))
        for at in range(0, len(body), 16_384)
    ],
    "a padded frame": lambda stream, body: [padded(data(stream, body, end_stream=True), 255)],
    "small frames with much padding": lambda stream, body: [
        padded(data(stream, body[at : at + 5000], end_stream=at + 5000 >= len(body)), 255)
        for at in range(0, len(body), 5000)
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_window_of_the_connection_comes_back_however_messages_are_framed(way: str) -> None:
    """Otherwise a client stalls after 16 MiB on a connection that seems healthy."""
    client = Client()
    least = client.window
    for number in range(40):
        stream = 2 * number + 1
        client.send(headers(stream, REQUEST), *WAYS[way](stream, message(SIZE)))
        least = min(least, client.window)

    assert [] == client.said
    assert [SIZE - PREFIX_BYTES] * 40 == client.messages
    assert 40 * SIZE > Http2Limits().connection_window_bytes
    assert least >= Http2Limits().connection_window_bytes // 2
    assert client.window <= Http2Limits().connection_window_bytes


def test_data_for_a_stream_that_was_reset_is_charged_to_the_connection() -> None:
    """It uses up the connection window, which must be granted again (5.2.1)."""
    client = Client(connection_window_bytes=100_000, max_header_bytes=1000)
    client.send(headers(1, literals([(":method", "POST"), (":path", "/a")])))  # no :scheme
    assert [("RST_STREAM", 1, "PROTOCOL_ERROR")] == client.said
    for _ in range(40):
        client.send(data(1, bytes(10_000)))

    assert [("RST_STREAM", 1, "PROTOCOL_ERROR")] == client.said
    assert client.window >= 50_000


# # --- exceeding --------------------------------------------------------------------------------

SMALL = 100_000

PAST_THE_CONNECTION: dict[str, list[Frame]] = {
    "a whole message": [data(1, message(SMALL + 1))],
    "a message that ends its request": [data(1, message(SMALL + 1), end_stream=True)],
    "the beginning of a message": [data(1, message(2 * SMALL)[: SMALL + 1])],
    "more of a message": [
        data(1, message(3 * SMALL)[:SMALL]),
        data(1, bytes(SMALL + 1)),
    ],
    "padding": [padded(data(1, message(SMALL - 255)), 255)],
}


@pytest.mark.parametrize("kind", PAST_THE_CONNECTION)
def test_past_the_window_of_the_connection_it_ends(kind: str) -> None:
    """6.9.1: with FLOW_CONTROL_ERROR, although the stream window would allow it."""
    client = Client(connection_window_bytes=SMALL, stream_window_bytes=1 << 20)
    client.send(headers(1, REQUEST), *PAST_THE_CONNECTION[kind])

    assert [("GOAWAY", 0, "FLOW_CONTROL_ERROR")] == client.said
    assert client.core.failed is not None
    assert "window" in client.core.failed.reason
    assert [] == client.messages


def test_up_to_the_window_of_the_connection_all_is_well() -> None:
    client = Client(connection_window_bytes=SMALL, stream_window_bytes=1 << 20)
    client.send(headers(1, REQUEST), data(1, message(SMALL), end_stream=True))
    client.send(headers(3, REQUEST), padded(data(3, message(SMALL - 256), end_stream=True), 255))

    assert [] == client.said
    assert [SMALL - PREFIX_BYTES, SMALL - 256 - PREFIX_BYTES] == client.messages


PAST_THE_STREAM: dict[str, list[Frame]] = {
    "a whole message": [data(1, message(SMALL + 1))],
    "a message that ends its request": [data(1, message(SMALL + 1), end_stream=True)],
    "the beginning of a message": [data(1, message(2 * SMALL)[: SMALL + 1])],
    "padding": [padded(data(1, message(SMALL - 255), end_stream=True), 255)],
    "padding of nothing": [
        data(1, message(2 * SMALL)[:2]),  # no length prefix yet, so no window is granted
        *[padded(data(1), 255)] * (SMALL // 256 + 1),
    ],
}


@pytest.mark.parametrize("kind", PAST_THE_STREAM)
def test_past_the_window_of_a_stream_it_is_reset(kind: str) -> None:
    """6.9.1: with FLOW_CONTROL_ERROR; the other streams continue."""
    client = Client(stream_window_bytes=SMALL)
    client.send(headers(1, REQUEST), *PAST_THE_STREAM[kind])
    client.send(headers(3, REQUEST), data(3, message(1000), end_stream=True))

    assert [("RST_STREAM", 1, "FLOW_CONTROL_ERROR")] == client.said[:1]
    assert "GOAWAY" not in {what for what, _, _ in client.said}
    assert [1000 - PREFIX_BYTES] == client.messages


def test_up_to_the_window_of_a_stream_all_is_well() -> None:
    client = Client(stream_window_bytes=SMALL)
    client.send(headers(1, REQUEST), data(1, message(SMALL), end_stream=True))
    client.send(headers(3, REQUEST), padded(data(3, message(SMALL - 256), end_stream=True), 255))

    assert [] == client.said
    assert [SMALL - PREFIX_BYTES, SMALL - 256 - PREFIX_BYTES] == client.messages


@pytest.mark.parametrize("size", [256, 1000])
def test_padding_is_no_part_of_a_message(size: int) -> None:
    """A content-length does not count it either (6.1, 8.1.1)."""
    lines = [(":method", "POST"), (":scheme", "http"), (":path", "/a")]
    block = literals([*lines, ("content-length", str(size))])
    client = Client()
    client.send(headers(1, block), padded(data(1, message(size), end_stream=True), 200))

    assert [] == client.said
    assert [size - PREFIX_BYTES] == client.messages


# # --- granting ---------------------------------------------------------------------------------


def test_nothing_is_granted_on_a_stream_that_its_client_has_ended() -> None:
    """6.9: no further data can come on it."""
    client = MemoryClient(Streaming())
    client.send(headers(1, REQUEST), data(1, message(100), end_stream=True))
    client.core.streams[1].grant(1 << 24)

    assert [] == client.taken()


@pytest.mark.parametrize("wanted", [1, 1 << 19, (1 << 20) + 1, 1 << 26])
def test_what_is_granted_is_what_is_wanted_or_the_usual_window(wanted: int) -> None:
    """6.9: in one WINDOW_UPDATE, and none while the window suffices."""
    client = MemoryClient(Streaming())
    client.send(headers(1, REQUEST))
    stream = client.core.streams[1]
    stream.grant(wanted)
    granted = client.taken()
    stream.grant(wanted)

    assert [] == client.taken()
    assert max(wanted, 1 << 20) == stream.recv_window
    increments = [int.from_bytes(frame.payload, "big") for frame in granted]
    assert ([wanted - (1 << 20)] if wanted > 1 << 20 else []) == increments


# # --- unfinished header blocks -----------------------------------------------------------------

TICKS = 3


def test_a_header_block_that_does_not_end_ends_the_connection_in_time() -> None:
    """No other frame may come before its end (6.10), so the connection could only wait."""
    client = Client()
    client.send(headers(1, REQUEST[:5], end_headers=False))
    for _ in range(TICKS):
        client.core.sweep(TICKS, TICKS)
        client.send()
    before = list(client.said)
    # Another CONTINUATION without END_HEADERS does not end it.
    client.send(continuation(1, REQUEST[5:10], end_headers=False))
    client.core.sweep(TICKS, TICKS)
    client.send()

    assert [] == before
    assert [("GOAWAY", 0, "ENHANCE_YOUR_CALM")] == client.said
    assert client.core.failed is not None
    assert "header block" in client.core.failed.reason


def test_a_header_block_that_ends_late_is_a_request_like_any_other() -> None:
    client = Client()
    client.send(headers(1, REQUEST[:5], end_headers=False))
    for _ in range(TICKS):
        client.core.sweep(TICKS, TICKS)
    client.send(continuation(1, REQUEST[5:]), data(1, message(100), end_stream=True))
    for _ in range(2 * TICKS):
        client.core.sweep(TICKS, TICKS)
    client.send()

    assert [] == client.said
    assert [100 - PREFIX_BYTES] == client.messages


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_header_block_in_frames_without_end_is_refused_by_count_or_size(size: int) -> None:
    client = Client(max_control_frames=200, max_header_bytes=2000)
    client.send(headers(1, REQUEST[:5], end_headers=False))
    sent = 0
    while client.core.failed is None and sent < 500:
        client.send(continuation(1, bytes(size), end_headers=False))
        sent += 1

    assert [("GOAWAY", 0, "ENHANCE_YOUR_CALM")] == client.said
    assert sent <= (2000 * HARD_FACTOR // size + 1 if size == 1000 else 201)
