"""The shell of a connection: admission, backpressure, reading, and closing."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.clock import HandClock
from support.conditions import until
from support.frames import (
    PREFACE,
    Frame,
    Kind,
    Setting,
    data,
    goaway,
    headers,
    parse,
    ping,
    rst_stream,
    settings,
    window_update,
)
from support.memory_client import MESSAGE, OK, REQUEST, STATUS, answer

from xlaserve.grpc.http2 import protocol as shell
from xlaserve.grpc.http2.busy_poll import BusyPoll
from xlaserve.grpc.http2.connection import RECEIVE_BYTES, ReceiveBuffer, ServerConnection
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import Placement
from xlaserve.grpc.http2.protocol import Http2Protocol
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

HIGH = 1 << 18
"""Bytes that a transport buffers before it pauses writing."""


class Transport:
    """Buffers output until its client reads, and pauses the protocol as asyncio does."""

    def __init__(self, *, alpn: str | None = None, half_closes: bool = True) -> None:
        self.protocol: Http2Protocol | None = None
        self.buffered = b""
        self.read_by_client = b""
        self.reading = True
        self.closed = False
        self.aborted = False
        self.ended = False
        self._paused = False
        self._alpn = alpn
        self._half_closes = half_closes
        self.high = 0
        self.eof_error: OSError | None = None

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return len(self.buffered) if self._paused else 0  # the kernel has it, else

    def get_extra_info(self, name: str) -> Any:
        if self._alpn is None:
            return None
        alpn = self._alpn
        return SimpleNamespace(selected_alpn_protocol=lambda: alpn)

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def can_write_eof(self) -> bool:
        return self._half_closes

    def write_eof(self) -> None:
        if self.eof_error is not None:
            raise self.eof_error
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def writelines(self, parts: Iterable[bytes]) -> None:
        assert not self.ended
        self.buffered += b"".join(parts)
        if len(self.buffered) > self.high and not self._paused:
            self._paused = True
            assert self.protocol is not None
            self.protocol.pause_writing()

    def drain(self) -> None:
        """Let the client read everything."""
        self.read_by_client += self.buffered
        self.buffered = b""
        if self._paused:
            self._paused = False
            assert self.protocol is not None
            self.protocol.resume_writing()

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    @property
    def frames(self) -> list[Frame]:
        """The frames written so far."""
        return parse(self.read_by_client + self.buffered)[0]

    @property
    def code(self) -> str:
        """The error code that ended the connection."""
        (said,) = [f for f in self.frames if f.kind == Kind.GOAWAY]
        return ErrorCode(int.from_bytes(said.payload[4:8], "big")).name


class Host:
    """The server that owns the connections."""

    message_first = True
    placement: Placement | None = None

    def __init__(
        self,
        begin: Callable[[ServerStream], object] = lambda stream: None,
        limits: Http2Limits | None = None,
    ) -> None:
        self._begin = begin
        self._limits = limits or Http2Limits()
        self.admits = True
        self.gone: list[Http2Protocol] = []
        self.ledger = Ledger(1 << 40)
        self.clock = HandClock()
        self.streams: list[ServerStream] = []
        self._buffer = ReceiveBuffer()

    def begin(self, stream: ServerStream) -> None:
        self.streams.append(stream)
        self._begin(stream)

    def connect(self, protocol: Http2Protocol, transport: asyncio.Transport) -> ServerConnection:
        shared = Shared(self.ledger, MessageMemory(0))
        return ServerConnection(
            self._limits,
            lambda head: self,
            shared,
            wake=protocol.wake,
            buffer=self._buffer,
            now=self.clock,
        )

    def admit(self, protocol: Http2Protocol) -> bool:
        return self.admits

    def disconnected(self, protocol: Http2Protocol) -> None:
        self.gone.append(protocol)

    def connection(self, transport: Transport, *, greets: bool = True) -> Http2Protocol:
        made = Http2Protocol(self, self._buffer, BusyPoll(0, lambda call: None))
        transport.protocol = made
        made.connection_made(cast(Any, transport))
        if greets:
            read(made, PREFACE + bytes(settings()))
        return made


def read(protocol: Http2Protocol, *parts: bytes | Frame) -> None:
    octets = b"".join(map(bytes, parts))
    protocol.get_buffer(-1)[: len(octets)] = octets
    protocol.buffer_updated(len(octets))


def asked(number: int) -> bytes:
    return bytes(headers(number, REQUEST)) + bytes(data(number, MESSAGE, end_stream=True))


# # --- opening ----------------------------------------------------------------------------------


async def test_the_server_speaks_first() -> None:
    """3.4."""
    transport = Transport()
    Host().connection(transport, greets=False)

    assert [Kind.SETTINGS, Kind.WINDOW_UPDATE] == [frame.kind for frame in transport.frames]
    assert HIGH == transport.high


async def test_a_connection_too_many_is_told_why_and_closed() -> None:
    host = Host()
    host.admits = False
    transport = Transport()
    host.connection(transport, greets=False)

    assert "ENHANCE_YOUR_CALM" == transport.code
    assert transport.ended


@pytest.mark.parametrize(("alpn", "fine"), [("h2", True), ("http/1.1", False), ("", False)])
async def test_tls_needs_alpn(alpn: str, fine: bool) -> None:
    """9.2, 3.2: without ALPN h2 the client does not know that it speaks HTTP/2."""
    transport = Transport(alpn=alpn, half_closes=False)
    Host().connection(transport, greets=False)

    assert fine is not transport.closed
    assert fine or transport.code == "INADEQUATE_SECURITY"


async def test_a_client_that_does_not_greet_is_dropped_in_time() -> None:
    """`preface_seconds`: half a preface is none. The timeout does not depend on sweeps."""
    host = Host(limits=Http2Limits(preface_seconds=0.05))
    greeted, silent = Transport(), Transport()
    host.connection(greeted)
    read(host.connection(silent, greets=False), PREFACE[:10])
    assert not silent.ended

    await until(lambda: silent.ended)

    assert "SETTINGS_TIMEOUT" == silent.code
    # The timeout of the other client expired before.
    assert not greeted.ended


async def test_a_connection_that_is_gone_is_not_held_by_its_timer() -> None:
    host, transport = Host(), Transport()
    protocol = host.connection(transport, greets=False)
    protocol.connection_lost(None)
    gone = weakref.ref(protocol)
    transport.protocol = None
    host.gone.clear()
    del protocol

    gc.collect()
    assert gone() is None


async def test_a_client_that_has_greeted_may_say_nothing() -> None:
    transport = Transport()
    protocol = Host().connection(transport)
    for _ in range(50):
        protocol.sweep(message_ticks=3, answer_ticks=3)

    assert not transport.ended
    read(protocol, ping())
    assert ping(ack=True) == transport.frames[-1]


async def test_a_client_that_takes_nothing_is_cut_off_in_time() -> None:
    """This includes ended connections: an unread GOAWAY does not delay the close."""
    transport = Transport(alpn="h2", half_closes=False)
    protocol = Host().connection(transport)
    transport._paused, transport.buffered = True, b"x" * 1000
    for _ in range(4):
        protocol.sweep(message_ticks=3, answer_ticks=3)
    transport.buffered = b"x" * 999
    protocol.end()
    assert transport.closed
    for _ in range(4):
        protocol.sweep(message_ticks=3, answer_ticks=3)
        assert not transport.aborted
    protocol.sweep(message_ticks=3, answer_ticks=3)

    assert transport.aborted


# --- backpressure ------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_holds_its_answers_back() -> None:
    """No more is serialized than the transport accepts; the rest is on the ledger."""
    size = 4 << 20
    transport = Transport()
    host = Host(lambda stream: answer(stream, bytes(size)))
    wide = settings((Setting.INITIAL_WINDOW_SIZE, 1 << 30))
    protocol = host.connection(transport)
    read(protocol, wide, window_update(0, 1 << 30), asked(1))

    assert HIGH <= len(transport.buffered) <= 3 * HIGH
    assert host.ledger.held >= size - 3 * HIGH
    seen = []
    while transport.buffered:
        transport.drain()
        seen.append(host.ledger.held)
        await asyncio.sleep(0)
    assert sorted(seen, reverse=True) == seen
    assert 0 == host.ledger.held
    body = b"".join(f.payload for f in transport.frames if f.kind == Kind.DATA)
    assert size + 5 == len(body)


async def test_control_frames_leave_though_answers_are_held_back() -> None:
    transport = Transport()
    host = Host(lambda stream: answer(stream, bytes(1 << 20)))
    protocol = host.connection(transport)
    read(protocol, settings((Setting.INITIAL_WINDOW_SIZE, 1 << 30)), window_update(0, 1 << 30))
    read(protocol, asked(1), ping())

    assert ping(ack=True) in transport.frames


# # --- closing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [True, False], ids=["is lost", "breaks the protocol"])
async def test_answers_that_nobody_reads_are_let_go_of_in_turns(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Freeing hundreds of MB takes tens of milliseconds; the ledger is updated immediately."""
    monkeypatch.setattr(shell, "_LETTING_GO_SECONDS", 0)
    made: list[weakref.ref[Any]] = []

    def there() -> int:
        return sum(one() is not None for one in made)

    def answer_large(stream: ServerStream) -> bool:
        array = np.zeros(1 << 20, np.uint8)
        made.append(weakref.ref(array))
        return stream.answer(OK, [array.data], array.nbytes, STATUS)

    transport = Transport()
    host = Host(answer_large)
    protocol = host.connection(transport)
    count = 8
    read(protocol, *(asked(2 * number + 1) for number in range(count)))
    host.streams.clear()
    assert count == there()
    if lost:
        protocol.connection_lost(None)
    else:
        read(protocol, ping(b"short"))

    assert count - 1 <= there()
    assert 0 == host.ledger.held
    await until(lambda: not there())


async def test_an_error_is_told_before_the_connection_is_closed() -> None:
    """5.4.1; remaining client data is read and dropped: an early close would lose the GOAWAY."""
    transport = Transport()
    protocol = Host().connection(transport)
    read(protocol, ping(b"short"))

    assert "FRAME_SIZE_ERROR" == transport.code
    assert transport.ended
    assert not transport.aborted
    assert RECEIVE_BYTES == len(protocol.get_buffer(-1))
    read(protocol, asked(1))
    assert "FRAME_SIZE_ERROR" == transport.code


async def test_a_client_that_stays_after_the_end_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell, "_LINGER_SECONDS", 0.0)
    transport = Transport()
    protocol = Host().connection(transport)
    protocol.end(ErrorCode.NO_ERROR, "enough")
    while not transport.aborted:
        await asyncio.sleep(0)

    assert "NO_ERROR" == transport.code


@pytest.mark.parametrize("half_closes", [True, False])
async def test_where_no_end_can_be_written_the_connection_is_closed(half_closes: bool) -> None:
    """TLS cannot half-close, and the client may have closed first."""
    transport = Transport(half_closes=half_closes)
    transport.eof_error = OSError("the client has gone")
    protocol = Host().connection(transport)
    protocol.end()

    assert transport.closed
    assert not transport.ended


async def test_a_client_that_leaves_is_closed_behind_its_last_answer() -> None:
    """6.8."""
    transport = Transport()
    host = Host()
    protocol = host.connection(transport)
    read(protocol, asked(1), asked(3), goaway())
    answer(host.streams[0], b"one")
    await asyncio.sleep(0)
    open_ = not transport.ended
    answer(host.streams[1], b"two")
    await asyncio.sleep(0)

    assert open_
    assert transport.ended
    assert 6 == sum(f.kind in (Kind.HEADERS, Kind.DATA) for f in transport.frames)


async def test_a_client_that_leaves_with_nothing_open_is_closed_at_once() -> None:
    transport = Transport()
    read(Host().connection(transport), goaway())

    assert transport.ended


async def test_a_lost_connection_is_told_to_the_server_once() -> None:
    host = Host()
    transport = Transport()
    protocol = host.connection(transport)
    read(protocol, asked(1))
    protocol.connection_lost(None)

    assert [protocol] == host.gone
    assert {} == protocol.core.streams
    assert 0 == host.ledger.held
    answer(host.streams[0], b"late")
    await asyncio.sleep(0)
    assert not protocol.core.output


async def test_a_connection_that_ends_within_a_pass_reads_on() -> None:
    """Otherwise the loss of its client would go unnoticed."""
    transport = Transport()
    host = Host()

    def begin(stream: ServerStream) -> None:
        host.clock.now += 0.001

    host._begin = begin
    protocol = host.connection(transport)
    read(protocol, *(asked(n) for n in range(1, 41, 2)))
    assert not transport.reading
    protocol.end()

    assert transport.reading
    begun = len(host.streams)
    await asyncio.sleep(0)
    assert begun == len(host.streams)


async def test_a_request_that_is_reset_within_a_pass_is_not_answered() -> None:
    transport = Transport()
    host = Host()
    protocol = host.connection(transport)
    read(protocol, asked(1), rst_stream(1), asked(3))
    for stream in host.streams:
        answer(stream, b"abc")
    await asyncio.sleep(0)

    assert {3} == {f.stream for f in transport.frames if f.kind in (Kind.HEADERS, Kind.DATA)}
