"""Sent frames: well-formed, none on closed streams, and DATA within the windows."""

from collections.abc import Callable, Mapping

import pytest
from support.clock import HandClock
from support.frames import (
    Frame,
    Kind,
    Setting,
    data,
    goaway,
    headers,
    literals,
    parse,
    ping,
    rst_stream,
    settings,
    window_update,
)
from support.memory_client import (
    MESSAGE,
    OK,
    REQUEST,
    STATUS,
    MemoryClient,
    Streaming,
    Unary,
    answer,
    request,
)

from xlaserve.grpc.http2.messages import PREFIX
from xlaserve.grpc.http2.stream import ServerStream

LARGEST = 16_384
END_STREAM, END_HEADERS, ACK = 1, 4, 1

DEFINED: Mapping[int, tuple[int, bool]] = {
    Kind.DATA: (END_STREAM, True),
    Kind.HEADERS: (END_STREAM | END_HEADERS, True),
    Kind.RST_STREAM: (0, True),
    Kind.SETTINGS: (ACK, False),
    Kind.PING: (ACK, False),
    Kind.GOAWAY: (0, False),
    Kind.WINDOW_UPDATE: (0, True),
    Kind.CONTINUATION: (END_HEADERS, True),
}
"""Flags that a server sends with each frame type, and whether it has a stream (6.1 to 6.10)."""


def test_what_we_send_is_well_formed() -> None:
    """4.1, 8.4: types, flags and the reserved bit are valid; nothing is pushed."""
    client = MemoryClient(max_streams=4)
    core = client.core
    octets = b""

    def sends(*frames: Frame) -> None:
        nonlocal octets
        core.receive(b"".join(map(bytes, frames)))
        while core.output:
            octets += b"".join(core.take_output())
            core.pump()

    for stream in (1, 3, 5):
        sends(headers(stream, REQUEST), data(stream, MESSAGE, end_stream=True))
    sends(headers(7, REQUEST), data(7, PREFIX.pack(0, 1 << 21)), headers(9, REQUEST))
    streams = client.route.streams
    answer(streams[1], b"abc")
    answer(streams[3], bytes(40_000))
    long = literals([("x", "y" * 40_000)])
    streams[5].send_headers(OK + long)
    sends(ping(), window_update(0, 1 << 20), window_update(3, 0), window_update(5, 1))
    streams[5].send_data([MESSAGE], len(MESSAGE), end=True)
    core.go_away()
    core.leave()
    sends(Frame(Kind.PING, 0, 0, b"short"))
    frames, rest = parse(octets)

    assert b"" == rest
    assert {*DEFINED} - {Kind.SETTINGS} <= {frame.kind for frame in frames}
    at = 0
    for frame in frames:
        flags, on_a_stream = DEFINED[frame.kind]
        assert 0 == frame.flags & ~flags
        assert not octets[at + 5] & 0x80
        assert len(frame.payload) <= LARGEST
        # WINDOW_UPDATE is sent on both.
        assert frame.stream % 2 == 1 if on_a_stream and frame.stream else frame.stream == 0
        assert frame.stream or not on_a_stream or frame.kind == Kind.WINDOW_UPDATE
        at += 9 + len(frame.payload)


ENDS: Mapping[str, Callable[[MemoryClient], object]] = {
    "answered": lambda client: answer(client.route.streams[1]),
    "reset by the client": lambda client: client.send(rst_stream(1)),
    "reset for an error": lambda client: client.send(window_update(1, 0)),
    "reset by us": lambda client: client.route.streams[1].reset(),
    "lost with its connection": lambda client: client.core.lost(),
    "ended with its connection": lambda client: client.core.end(),
}
ACTS: Mapping[str, Callable[[ServerStream], object]] = {
    "a whole answer": answer,
    "a long answer": lambda stream: answer(stream, bytes(100_000)),
    "headers": lambda stream: stream.send_headers(OK),
    "a status": lambda stream: stream.send_headers(STATUS, end=True),
    "data": lambda stream: stream.send_data([MESSAGE], len(MESSAGE)),
    "the end": lambda stream: stream.send_data([], 0, end=True),
    "a reset": lambda stream: stream.reset(),
    "more window": lambda stream: stream.grant(1 << 21),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ended", [True, False])
def test_nothing_is_sent_on_a_closed_stream(end: str, act: str, ended: bool) -> None:
    """5.1: the handler may answer before it learns of the close; no memory is reserved then."""
    client = MemoryClient(Streaming())
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=ended))
    stream = client.route.streams[1]
    ENDS[end](client)
    client.taken()
    held = client.ledger.held
    ACTS[act](stream)

    assert [] == client.taken()
    assert 0 == held == client.ledger.held
    assert {} == client.core.streams


@pytest.mark.parametrize("end", ["reset by the client", "reset by us", "ended with its connection"])
def test_what_was_pending_goes_with_its_stream(end: str) -> None:
    """5.1: widening a window later does not send it."""
    client = MemoryClient(Unary())
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 10)))
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True))
    answer(client.route.streams[1], bytes(1000))
    ENDS[end](client)
    client.taken()

    assert 0 == client.ledger.held
    frames = client.send(window_update(1, 5000), settings((Setting.INITIAL_WINDOW_SIZE, 5000)))
    assert [] == [frame for frame in frames if frame.stream]


def test_no_window_holds_back_anything_but_data() -> None:
    """5.2.1, 6.9: the windows of both the stream and the connection are exhausted."""
    client = MemoryClient(Unary())
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 65_535)))
    for stream in (1, 3, 5):
        client.send(headers(stream, REQUEST), data(stream, MESSAGE, end_stream=True))
    answer(client.route.streams[1], bytes(65_535))
    client.taken()
    assert client.core.is_held_back
    client.route.streams[3].send_headers(OK)
    client.route.streams[3].send_headers(STATUS, end=True)
    frames = client.send(ping(), settings(), rst_stream(5), window_update(1, 0))
    client.core.leave()
    frames += client.taken()

    kinds = [Kind.HEADERS, Kind.HEADERS, Kind.PING, Kind.SETTINGS, Kind.RST_STREAM, Kind.GOAWAY]
    assert kinds == [frame.kind for frame in frames]


def test_an_empty_frame_needs_no_window() -> None:
    """6.9: the end of a stream is sent immediately."""
    client = MemoryClient(Streaming())
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 0)))
    client.send(headers(1, REQUEST, end_stream=True))
    stream = client.route.streams[1]
    stream.send_headers(OK)
    stream.send_data([], 0, end=True)

    assert [(Kind.HEADERS, False), (Kind.DATA, True)] == [
        (frame.kind, frame.ends_stream) for frame in client.taken()
    ]


@pytest.mark.parametrize("short", [1, 5, 10])
def test_nothing_leaves_while_a_window_is_negative(short: int) -> None:
    """6.9.2: sending resumes only when the window is positive."""
    client = MemoryClient(Unary())
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 10)))
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True))
    answer(client.route.streams[1], bytes(100))
    client.taken()
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 10 - short)))
    assert -short == client.core.streams[1].send_window
    quiet = client.send(window_update(1, short))
    assert [] == quiet
    frames = client.send(window_update(1, 3))

    assert [3] == [len(frame.payload) for frame in frames]


def test_the_client_that_leaves_gets_what_is_pending() -> None:
    """6.8: a client's GOAWAY ends no stream."""
    client = MemoryClient(Unary())
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 10)))
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True))
    answer(client.route.streams[1], bytes(100))
    client.send(goaway())
    client.taken()
    frames = client.send(window_update(1, 1000))

    assert [Kind.DATA, Kind.HEADERS] == [frame.kind for frame in frames]
    assert frames[-1].ends_stream


@pytest.mark.parametrize("head", [1, 255, 256, 300, 511, 512, 5000])
@pytest.mark.parametrize("trailers", [1, 256, 700, 4096])
def test_the_lengths_of_a_whole_answer_are_those_of_its_parts(head: int, trailers: int) -> None:
    """4.1: checks the frames of an answer that is joined into one buffer."""
    client = MemoryClient(Unary())
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True))
    body = bytes(head + trailers)
    client.route.streams[1].answer(b"h" * head, [body], len(body), b"t" * trailers)
    frames = client.taken()

    assert [b"h" * head, body, b"t" * trailers] == [frame.payload for frame in frames]
    assert [False, False, True] == [frame.ends_stream for frame in frames]


def test_trailers_leave_behind_the_data_that_waits() -> None:
    """8.1: the trailers end the stream, not the DATA before them."""
    client = MemoryClient(Unary())
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 10)))
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True))
    stream = client.route.streams[1]
    stream.send_headers(OK)
    stream.send_data([bytes(100)], 100)
    stream.send_headers(STATUS, end=True)
    client.taken()
    frames = client.send(window_update(1, 1000))

    assert [(Kind.DATA, False), (Kind.HEADERS, True)] == [(f.kind, f.ends_stream) for f in frames]
    assert STATUS == frames[-1].payload


@pytest.mark.parametrize("act", [act for act in ACTS if act != "more window"])
def test_whatever_is_sent_later_is_announced(act: str) -> None:
    """Outside of a read, the output would otherwise wait for the next read."""
    woken: list[int] = []
    client = MemoryClient(Unary(), wake=lambda: woken.append(1))
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True))
    assert [] == woken
    ACTS[act](client.route.streams[1])

    assert woken
    assert client.taken()


def test_answers_that_wait_to_be_written_fill_a_flush() -> None:
    """5.2: answers that a client does not read are not serialized, but parked and counted."""
    client = MemoryClient(Unary())
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20)), window_update(0, 1 << 22))
    for number in range(21):
        stream = 2 * number + 1
        client.send(headers(stream, REQUEST), data(stream, MESSAGE, end_stream=True))
    for number in range(20):
        answer(client.route.streams[2 * number + 1], bytes(15_000))
    last = client.route.streams[41]
    answer(last, bytes(100_000))

    assert 100_005 == last.unsent
    client.taken()
    assert {} == client.core.streams
    assert 0 == client.ledger.held


@pytest.mark.parametrize("memory", [1000, 1 << 20])
def test_memory_is_reserved_for_open_streams_alone(memory: int) -> None:
    """A closed stream needs no memory, and unavailable memory is refused."""
    client = MemoryClient(Streaming(), limit=memory)
    client.send(headers(1, REQUEST), headers(3, REQUEST))
    closed, stream = client.route.streams[1], client.route.streams[3]
    client.send(rst_stream(1))

    assert closed.reserve(5000)
    assert 0 == client.ledger.held
    assert stream.reserve(5000) is (memory > 5000)
    assert client.ledger.held == 5000 * (memory > 5000)
    client.core.lost()
    assert 0 == client.ledger.held


@pytest.mark.parametrize(("timeout", "seconds"), [("2S", 2.0), ("1500m", 1.5), (None, None)])
def test_a_deadline_counts_from_the_headers(timeout: str | None, seconds: float | None) -> None:
    """gRPC over HTTP/2, Timeout: it runs while the message arrives."""
    clock = HandClock(100.0)
    client = MemoryClient(Unary(), now=clock)
    client.send(headers(1, request(*([("grpc-timeout", timeout)] if timeout else []))))
    clock.now = 150.0
    client.send(data(1, MESSAGE, end_stream=True))
    deadline = client.route.streams[1].deadline

    assert deadline == (None if seconds is None else 100.0 + seconds)
