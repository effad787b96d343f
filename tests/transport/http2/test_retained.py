"""Ended requests leave nothing behind: no stream, ledger bytes, memory or garbage.

The garbage collector is disabled: objects must be freed by their last reference.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support.frames import (
    Frame,
    Setting,
    continuation,
    data,
    headers,
    ping,
    priority,
    rst_stream,
    settings,
    window_update,
)
from support.memory_client import (
    MESSAGE,
    REQUEST,
    STATUS,
    MemoryClient,
    Streaming,
    Unary,
    answer,
    request,
)

from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.messages import PREFIX, Problem
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.memory import MessageMemory, Octets

LONG = 1 << 20
TICKS = 3


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Watch:
    """Tracks which streams and buffers of a connection are still alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, route: Streaming | Unary) -> None:
        self.memory: list[weakref.ref[Any]] = []
        self.streams: list[weakref.ref[Any]] = []
        take, made = MessageMemory.take, ServerStream.__init__

        def watched_take(memory: MessageMemory, size: int) -> Octets:
            octets = take(memory, size)
            self.memory.append(weakref.ref(octets))
            return octets

        def watched_init(stream: ServerStream, *given: Any) -> None:
            self.streams.append(weakref.ref(stream))
            made(stream, *given)

        monkeypatch.setattr(MessageMemory, "take", watched_take)
        monkeypatch.setattr(ServerStream, "__init__", watched_init)
        self.client = MemoryClient(route, max_control_frames=10**6, max_resets=10**6)

    @property
    def alive(self) -> tuple[int, int]:
        """The number of live streams, and of live message buffers."""
        return (
            sum(ref() is not None for ref in self.streams),
            sum(ref() is not None for ref in self.memory),
        )

    def forget(self) -> None:
        """Have the route drop its requests, as it does when answers are cancelled."""
        route = self.client.route
        route.streams.clear()
        if isinstance(route, Unary):
            route.messages.clear()


class Call:
    """A call that answers a request, and references its stream."""

    awaits_client = False

    def __init__(self, stream: ServerStream) -> None:
        self.stream = stream
        self.reasons: list[str] = []

    def cancel(self, reason: str) -> None:
        """Record the reason."""
        self.reasons.append(reason)


def narrow(client: MemoryClient) -> None:
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 0)))


def ask(client: MemoryClient, *frames: Frame) -> None:
    client.send(headers(1, REQUEST), *frames)


def half(size: int) -> bytes:
    """Return a length prefix, and half of its message."""
    return PREFIX.pack(0, size) + bytes(size // 2)


def beginning(frame: Frame, size: int) -> bytes:
    """Return the first bytes of a frame."""
    return bytes(frame)[:size]


def parked(client: MemoryClient) -> None:
    narrow(client)
    ask(client, data(1, MESSAGE, end_stream=True))
    answer(client.route.streams[1], bytes(10_000))
    assert client.ledger.held >= 10_000


def with_a_call(client: MemoryClient) -> None:
    ask(client, data(1, MESSAGE, end_stream=True))
    stream = client.route.streams[1]
    stream.call = Call(stream)


STAGES: Mapping[str, Callable[[MemoryClient], object]] = {
    "its headers have come": ask,
    "half a prefix": lambda client: ask(client, data(1, b"\0\0")),
    "half a short message": lambda client: ask(client, data(1, half(100))),
    "half a long message": lambda client: ask(client, data(1, half(LONG))),
    "half a long message in frames": lambda client: ask(
        client, data(1, PREFIX.pack(0, LONG)), *[data(1, bytes(16_384))] * 30
    ),
    "a whole message without its end": lambda client: ask(client, data(1, MESSAGE)),
    "a whole message": lambda client: ask(client, data(1, MESSAGE, end_stream=True)),
    "a long message": lambda client: ask(
        client, data(1, half(LONG)), data(1, bytes(LONG // 2), end_stream=True)
    ),
    "more than a message": lambda client: ask(client, data(1, MESSAGE * 2)),
    "an answer that is parked": parked,
    "a call that waits": with_a_call,
}
"""Progress of a request at the time it ends."""

BROKEN: Mapping[str, Callable[[MemoryClient], object]] = {
    "half a DATA frame": lambda client: client.send(
        headers(1, REQUEST), beginning(data(1, half(200)), 50)
    ),
    "half a long DATA frame": lambda client: client.send(
        headers(1, REQUEST), beginning(data(1, half(LONG)), 100_000)
    ),
    "half a header block": lambda client: client.send(
        headers(1, REQUEST[:9], end_headers=False), continuation(1, b"\0", end_headers=False)
    ),
    "half a HEADERS frame": lambda client: client.send(beginning(headers(1, REQUEST), 20)),
    "half a PING": lambda client: client.send(headers(1, REQUEST), beginning(ping(), 12)),
}
"""Progress of a frame or header block that must be completed before any other frame."""


def sweep(client: MemoryClient) -> None:
    for _ in range(TICKS + 2):
        client.core.sweep(TICKS, TICKS)


def end_it(client: MemoryClient) -> None:
    client.core.end(ErrorCode.NO_ERROR, "it is enough")


ENDS: Mapping[str, Callable[[MemoryClient], object]] = {
    "the client resets it": lambda client: client.send(rst_stream(1)),
    "a frame is wrong": lambda client: client.send(window_update(1, 0)),
    "it depends on itself": lambda client: client.send(priority(1, 1)),
    "the connection is wrong": lambda client: client.send(ping(b"short")),
}
"""Client frames that end a request."""

ANY_ENDS: Mapping[str, Callable[[MemoryClient], object]] = {
    "the connection is lost": lambda client: client.core.lost(),
    "the server ends the connection": end_it,
}
"""Ends that are possible even within an incomplete frame."""


@pytest.mark.parametrize("route", [Unary, Streaming])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", [*ENDS, *ANY_ENDS])
def test_a_request_that_ends_leaves_nothing(
    route: type[Unary] | type[Streaming], stage: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch, route())
    STAGES[stage](watch.client)
    assert watch.alive[0] == 1
    (ENDS | ANY_ENDS)[end](watch.client)  # type: ignore[operator]
    watch.forget()

    assert (0, 0) == watch.alive
    assert {} == watch.client.core.streams
    assert 0 == watch.client.ledger.held
    assert 0 == watch.client.core.account.held


@pytest.mark.parametrize("stage", BROKEN)
@pytest.mark.parametrize("end", ANY_ENDS)
def test_a_connection_that_ends_within_a_frame_leaves_nothing(
    stage: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch, Unary())
    BROKEN[stage](watch.client)
    ANY_ENDS[end](watch.client)
    watch.forget()

    assert (0, 0) == watch.alive
    assert 0 == watch.client.ledger.held
    assert b"" == watch.client.core._reader._left
    assert [] == watch.client.core._headers._block


@pytest.mark.parametrize("stage", ["half a DATA frame", "half a long DATA frame"])
def test_a_stream_that_the_server_resets_within_a_frame_leaves_nothing(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the frame may never come; if it does, it is dropped."""
    watch = Watch(monkeypatch, Unary())
    client = watch.client
    BROKEN[stage](client)
    client.core.streams[1].reset(ErrorCode.CANCEL)

    assert (0, 0) == watch.alive
    assert 0 == client.ledger.held
    frame = bytes(data(1, half(200 if "long" not in stage else LONG)))
    client.send(frame[50 if "long" not in stage else 100_000 :], ping())
    assert ping(ack=True) == client.all[-1]


def test_a_request_that_is_late_keeps_no_memory_once_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch, Unary())
    client = watch.client
    STAGES["half a long message"](client)
    sweep(client)
    stream = client.route.streams.pop(1)
    assert Problem.EXPIRED is stream.problem
    stream.send_headers(STATUS, end=True)
    del stream
    watch.forget()

    assert (0, 0) == watch.alive
    assert 0 == client.ledger.held


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_message_that_was_taken_is_kept_by_whoever_took_it(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream does not keep the message until the answer has been sent."""
    watch = Watch(monkeypatch, Unary())
    client = watch.client
    whole = PREFIX.pack(0, size) + bytes(size)
    ask(client, data(1, whole[:2]), data(1, whole[2:], end_stream=True))
    stream = client.route.streams[1]
    message, stream.message = stream.message, None
    assert watch.alive[1] == (size > 3)
    del message
    watch.forget()

    assert 0 == watch.alive[1]
    assert {1} == set(client.core.streams)
    answer(stream, b"abc")
    assert {} == client.core.streams


def test_an_answer_that_has_left_keeps_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, Unary())
    client = watch.client
    for number in range(1, 200, 2):
        client.send(headers(number, REQUEST), data(number, MESSAGE, end_stream=True))
        answer(client.route.streams[number], b"abc")
        watch.forget()

        assert (0, 0) == watch.alive
    assert 0 == client.ledger.held


def test_the_error_of_a_connection_keeps_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback would keep the stream for as long as the connection lingers."""
    watch = Watch(monkeypatch, Unary())
    client = watch.client
    client.send(headers(1, REQUEST), data(1, half(LONG)), data(1, b"more"), ping(b"short"))
    watch.forget()

    assert client.core.failed is not None
    assert (0, 0) == watch.alive


@pytest.mark.parametrize("end", [*ENDS, *ANY_ENDS])
def test_a_stream_that_somebody_keeps_has_no_memory(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a task keeps it that is slow to end."""
    watch = Watch(monkeypatch, Unary())
    STAGES["half a long message"](watch.client)
    kept = watch.client.core.streams[1]
    (ENDS | ANY_ENDS)[end](watch.client)  # type: ignore[operator]

    assert (1, 0) == watch.alive
    assert kept.reader is None
    # A late answer writes nothing, and reserves nothing.
    assert not kept.open
    watch.client.taken()
    assert answer(kept, bytes(100_000))
    assert [] == watch.client.taken()
    assert 0 == watch.client.ledger.held


def test_what_was_to_be_written_goes_with_the_connection() -> None:
    client = MemoryClient()
    client.core.receive(bytes(ping()) * 100)
    assert client.core.output
    client.core.lost()

    assert not client.core.output


@pytest.mark.parametrize("end", [*ENDS, *ANY_ENDS])
def test_a_call_is_cancelled_once_and_let_go_of(end: str) -> None:
    client = MemoryClient()
    with_a_call(client)
    call = client.core.streams[1].call
    assert isinstance(call, Call)
    (ENDS | ANY_ENDS)[end](client)  # type: ignore[operator]
    client.core.lost()

    assert 1 == len(call.reasons)
    assert call.stream.call is None


@pytest.mark.parametrize("end", [*ENDS, *ANY_ENDS])
def test_whoever_waits_for_bytes_to_leave_is_told(end: str) -> None:
    """Otherwise a waiter would wait forever, and keep its stream."""
    client = MemoryClient()
    parked(client)
    told: list[str] = []
    client.core.streams[1].on_sent = lambda: told.append("told")
    (ENDS | ANY_ENDS)[end](client)  # type: ignore[operator]

    assert ["told"] == told


def test_what_is_remembered_of_streams_is_bounded() -> None:
    """This covers ids that were reset, and gaps between ids."""
    client = MemoryClient(max_resets=10**9, max_control_frames=10**9)
    for number in range(1, 40_000, 8):
        client.send(headers(number, REQUEST), window_update(number, 0))
    streams = client.core._streams

    assert {} == streams.open
    assert len(streams._reset) <= 1024
    assert streams._gaps is not None
    assert len(streams._gaps) <= 1024


def test_ten_thousand_aborted_requests_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """H6: 1,000 aborted answers of 10 MiB must not leave memory behind."""
    watch = Watch(monkeypatch, Unary())
    client = watch.client
    narrow(client)
    body = bytes(1000)
    for number in range(1, 4001, 2):
        client.send(headers(number, REQUEST), data(number, MESSAGE, end_stream=True))
        answer(client.route.streams.pop(number), body)
        client.send(rst_stream(number))
        client.all.clear()
        watch.forget()
    blocks = sum(ref() is not None for ref in watch.streams)

    assert 0 == blocks
    assert 0 == client.ledger.held
    assert {} == client.core.blocked
    assert not client.core.output


def test_a_request_with_large_headers_keeps_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, Unary())
    client = watch.client
    fields: list[weakref.ref[Any]] = []
    for number in range(1, 41, 2):
        client.send(headers(number, request(("x", f"{number:010000}"))))
        fields.append(weakref.ref(client.core.streams[number]))
        client.send(rst_stream(number))

    assert 0 == sum(ref() is not None for ref in fields)
    assert 0 == watch.alive[0]


class Waiting(Unary):
    """A route whose requests wait for their answers."""

    def begin(self, stream: ServerStream) -> None:
        super().begin(stream)
        stream.call = Call(stream)


@pytest.mark.parametrize("frames_at_once", [1, 3])
def test_short_messages_count_once_while_their_requests_wait(frames_at_once: int) -> None:
    """However many come in one read; the five bytes of the prefix count too."""
    client = MemoryClient(Waiting())
    numbers = range(1, 2 * frames_at_once, 2)
    request_frames = [(headers(n, REQUEST), data(n, MESSAGE, end_stream=True)) for n in numbers]
    client.send(*(frame for pair in request_frames for frame in pair))
    client.send(ping())
    held = client.ledger.held
    for number in numbers:
        answer(client.route.streams[number])

    assert len(MESSAGE) * frames_at_once == held
    assert 0 == client.ledger.held == client.core.account.held


def test_short_messages_count_no_more_when_the_read_ends_the_connection() -> None:
    client = MemoryClient(Waiting())
    client.send(headers(1, REQUEST), data(1, MESSAGE, end_stream=True), data(0, b""))

    assert not client.alive
    assert 0 == client.ledger.held == client.core.account.held
