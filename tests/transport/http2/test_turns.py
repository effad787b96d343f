"""No turn of a connection is long while others wait, whatever its client sends or reads."""

import asyncio
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, cast

import pytest
from support.clock import HandClock
from support.frames import (
    PREFACE,
    Frame,
    Kind,
    Setting,
    continuation,
    data,
    headers,
    ping,
    settings,
    window_update,
)
from support.memory_client import MESSAGE, REQUEST, MemoryClient, Unary, answer, request

from xlaserve.grpc.http2.busy_poll import BusyPoll
from xlaserve.grpc.http2.connection import ReceiveBuffer, ServerConnection
from xlaserve.grpc.http2.frame_reader import TURN_SECONDS
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import PREFIX, Placement
from xlaserve.grpc.http2.protocol import Http2Protocol
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.grpc.http2.streams import Streams
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

MOST_SECONDS = 0.005
"""Maximum length of a turn in seconds."""


class Costly(Unary):
    """A route whose requests each take time on the event loop."""

    def __init__(self, clock: HandClock, seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds

    def begin(self, stream: ServerStream) -> None:
        super().begin(stream)
        self._clock.now += self._seconds


def whole_request(number: int, *more: tuple[str, str]) -> bytes:
    block = request(*more) if more else REQUEST
    return bytes(headers(number, block)) + bytes(data(number, MESSAGE, end_stream=True))


def turns(client: MemoryClient, clock: HandClock, octets: bytes) -> list[float]:
    """Deliver bytes as an event loop does; return the length of each turn by the clock."""
    found = []
    while octets:
        began = clock.now
        space = client.core.receive_buffer()
        count = min(len(space), len(octets))
        space[:count] = octets[:count]
        octets = octets[count:]
        done = client.core.received(count)
        found.append(clock.now - began)
        while not done:
            began = clock.now
            done = client.core.proceed()
            found.append(clock.now - began)
    return found


@pytest.mark.parametrize("seconds", [0.00005, 0.0002, 0.0004])
def test_requests_that_take_long_leave_others_their_turn(seconds: float) -> None:
    """The remaining requests are handled in order, each once."""
    clock = HandClock()
    client = MemoryClient(Costly(clock, seconds), now=clock, max_streams=1000)
    numbers = range(1, 601, 2)
    taken = turns(client, clock, b"".join(map(whole_request, numbers)))

    assert list(numbers) == list(client.route.streams)
    assert max(taken) < MOST_SECONDS
    assert len(taken) <= 2 + 300 * seconds / TURN_SECONDS


def test_what_takes_no_time_is_one_turn() -> None:
    clock = HandClock()
    client = MemoryClient(Costly(clock, 0), now=clock)
    taken = turns(client, clock, b"".join(map(whole_request, range(1, 65, 2))))

    assert [0.0] == taken


def let_blocks_take(
    seconds_a_byte: float, client: MemoryClient, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advance the clock for each byte of a header block that is decoded."""
    reader = client.core._headers._begun_reader()
    read_new = reader.read_new

    def slowly(block: bytes) -> Any:
        clock.now += len(block) * seconds_a_byte
        return read_new(block)

    monkeypatch.setattr(reader, "read_new", slowly)


@pytest.mark.parametrize("size", [100, 1000, 14_000])
def test_header_work_counts_as_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: the time for decoding header blocks must count."""
    clock = HandClock()
    client = MemoryClient(Costly(clock, 0), now=clock, max_streams=1000)
    seconds_a_byte = 0.1e-6
    let_blocks_take(seconds_a_byte, client, clock, monkeypatch)
    octets = b"".join(whole_request(n, ("x", f"{n:0{size}}")) for n in range(1, 121, 2))
    taken = turns(client, clock, octets)

    assert 60 == len(client.route.streams)
    assert 60 * size * seconds_a_byte <= sum(taken)
    assert max(taken) < MOST_SECONDS


def in_one_frame(number: int, block: bytes) -> bytes:
    return bytes(headers(number, block))


def in_pieces(number: int, block: bytes) -> bytes:
    first, *others, last = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    return (
        bytes(headers(number, first, end_headers=False))
        + b"".join(bytes(continuation(number, one, end_headers=False)) for one in others)
        + bytes(continuation(number, last, end_headers=True))
    )


@pytest.mark.parametrize("write", [in_one_frame, in_pieces])
def test_a_long_header_block_is_not_begun_late_in_a_turn(
    write: Callable[[int, bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare symbols of the Huffman code are slowest: 64 KB of them take about 2 ms."""
    clock = HandClock()
    route = Costly(clock, 0.0005)
    client = MemoryClient(route, now=clock, max_streams=1000, max_work=10**9)
    let_blocks_take(2.8e-3 / (60 << 10), client, clock, monkeypatch)
    block = request(("x", "y" * (60 << 10)))
    small = b"".join(map(whole_request, range(1, 13, 2)))
    taken = turns(client, clock, small + b"".join(write(n, block) for n in range(13, 33, 2)))

    assert client.alive
    assert 31 == client.core._streams.highest
    assert 10 * 2.8e-3 <= sum(taken)
    assert max(taken) < MOST_SECONDS


def test_a_block_in_many_frames_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    client = MemoryClient(Costly(clock, 0), now=clock)
    reader = client.core._headers._begun_reader()
    read = reader.read

    def slowly(block: bytes) -> Any:
        clock.now += 0.001
        return read(block)

    monkeypatch.setattr(reader, "read", slowly)
    block = request(("x", "y" * 1500))
    octets = b"".join(
        bytes(headers(n, block[:10], end_headers=False))
        + bytes(continuation(n, block[10:], end_headers=True))
        + bytes(data(n, MESSAGE, end_stream=True))
        for n in range(1, 41, 2)
    )

    assert max(turns(client, clock, octets)) < MOST_SECONDS
    assert 20 == len(client.route.streams)


@pytest.mark.parametrize("work", [16, 100, 1024])
def test_frames_are_bounded_without_a_clock_too(work: int) -> None:
    """`max_work_per_pass` limits frames if they are cheap or the clock stands still."""
    clock = HandClock()
    client = MemoryClient(now=clock, max_work=work, max_control_frames=10**6)
    taken = turns(client, clock, bytes(ping()) * 2000)

    assert 2000 == sum(frame == ping(ack=True) for frame in client.taken())
    assert abs(len(taken) - 2000 / work) <= 1


def test_a_request_counts_as_sixteen_frames() -> None:
    clock = HandClock()
    client = MemoryClient(now=clock, max_work=64, max_streams=1000)
    taken = turns(client, clock, b"".join(map(whole_request, range(1, 201, 2))))

    assert 100 * 16 / 64 <= len(taken) <= 100 * (18 + len(REQUEST) // 16) / 64 + 1


# # --- reads that fill the buffer --------------------------------------------------------------


class Reading:
    """A clock that every query advances, as consecutive reads do."""

    def __init__(self, seconds: float) -> None:
        self.now = 1000.0
        self.seconds = seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def long_message(size: int) -> bytes:
    return bytes(headers(1, REQUEST)) + b"".join(
        bytes(data(1, part))
        for part in [PREFIX.pack(0, size) + bytes(16_000), *[bytes(16_000)] * (size // 16_000)]
    )


def test_reads_that_follow_one_another_are_of_one_turn() -> None:
    """libuv reads up to 32 times from a socket before it serves others, while each read is full."""
    clock = Reading(0.0005)
    client = MemoryClient(now=clock)
    octets = long_message(16_000_000)
    in_a_row, most = 0, 0
    while octets:
        space = client.core.receive_buffer()
        count = min(len(space), len(octets))
        space[:count] = octets[:count]
        octets = octets[count:]
        if client.core.received(count):
            in_a_row = in_a_row + 1 if count == len(space) else 0
        else:
            in_a_row = 0
            while not client.core.proceed():
                pass
        most = max(most, in_a_row)

    assert 1 <= most <= TURN_SECONDS / 0.0005
    assert client.alive


def test_reads_that_are_not_full_are_turns_of_their_own() -> None:
    """However short the time between them."""
    clock = Reading(0.002)
    client = MemoryClient(now=clock)
    for number in range(1, 99, 2):
        octets = whole_request(number)
        client.core.receive_buffer()[: len(octets)] = octets

        assert client.core.received(len(octets))


def test_what_is_received_directly_is_bounded_too() -> None:
    """It costs no work on frames, but the loop might otherwise keep reading."""
    clock = Reading(0.004)
    client = MemoryClient(now=clock, max_frame_bytes=1 << 22, stream_window_bytes=1 << 23)
    size = 4 << 20
    octets = bytes(headers(1, REQUEST)) + bytes(data(1, PREFIX.pack(0, size - 5) + bytes(size - 5)))
    client.core.receive_buffer()[:100_000] = octets[:100_000]
    assert client.core.received(100_000)
    space = client.core.receive_buffer()

    assert len(octets) - 100_000 == len(space)  # directly into the message buffer
    space[:] = octets[100_000:]
    assert client.core.received(len(space)) is False
    assert client.core.proceed()
    client.send(data(1, end_stream=True))
    assert [size - 5] == [len(m) for m in client.route.messages.values()]  # type: ignore[union-attr]


# # --- single expensive frames ------------------------------------------------------------------


def test_settings_go_over_the_streams_once_for_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame holds 2,730 values; with 256 streams that would be 700,000 steps."""
    client = MemoryClient()
    client.send(*(headers(number, REQUEST) for number in range(1, 513, 2)))
    calls = []
    change = Streams.change_peer_window

    def counted(streams: Streams, window: int, widest: int) -> None:
        calls.append(window)
        change(streams, window, widest)

    monkeypatch.setattr(Streams, "change_peer_window", counted)
    values = [(Setting.INITIAL_WINDOW_SIZE, value % 1000) for value in range(2730)]
    client.send(settings(*values))

    assert 1 == len(calls)
    assert {2729 % 1000} == {stream.send_window for stream in client.core.streams.values()}


def test_settings_that_change_no_window_go_over_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    client = MemoryClient()
    monkeypatch.delattr(Streams, "change_peer_window")
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 65_535), (Setting.MAX_FRAME_SIZE, 20_000)))

    assert client.alive


# --- the shell ------------------------------------------------------------------------------


class Transport:
    """A transport that accepts all output immediately."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name
        self.octets = b""
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> None: ...

    def is_closing(self) -> bool:
        return False

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.octets += b"".join(parts)
        self.log.append(f"{self.name} writes")

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Server:
    """Connections of one loop, whose requests advance the clock."""

    message_first = True
    placement: Placement | None = None

    def __init__(self, clock: HandClock, begin: Callable[[ServerStream], object]) -> None:
        self.clock = clock
        self._begin = begin
        self.log: list[str] = []
        self.begun: list[int] = []
        self._buffer = ReceiveBuffer()

    def begin(self, stream: ServerStream) -> None:
        self.begun.append(stream.id)
        self._begin(stream)

    def connect(self, protocol: Http2Protocol, transport: asyncio.Transport) -> ServerConnection:
        shared = Shared(Ledger(1 << 40), MessageMemory(0))
        return ServerConnection(
            Http2Limits(max_streams=1000),
            lambda head: self,
            shared,
            wake=protocol.wake,
            buffer=self._buffer,
            now=self.clock,
        )

    def admit(self, protocol: Http2Protocol) -> bool:
        return True

    def disconnected(self, protocol: Http2Protocol) -> None: ...

    def connection(self, name: str, *frames: Frame) -> tuple[Http2Protocol, Transport]:
        protocol = Http2Protocol(self, self._buffer, BusyPoll(0, lambda call: None))
        transport = Transport(self.log, name)
        protocol.connection_made(cast(Any, transport))
        read(protocol, PREFACE + bytes(settings()) + b"".join(map(bytes, frames)))
        self.log.clear()
        transport.octets = b""
        return protocol, transport


def read(protocol: Http2Protocol, octets: bytes) -> None:
    protocol.get_buffer(-1)[: len(octets)] = octets
    protocol.buffer_updated(len(octets))


async def test_another_connection_has_its_turn_within_the_work_of_one() -> None:
    """The rest of a long pass is postponed, its socket is not read, and no frame is lost."""
    clock = HandClock()

    def begin(stream: ServerStream) -> None:
        clock.now += 0.0002
        answer(stream, b"abc")

    server = Server(clock, begin)
    busy, busy_transport = server.connection("busy")
    other, other_transport = server.connection("other")
    read(busy, b"".join(whole_request(n) for n in range(1, 401, 2)))
    begun, began = len(server.begun), clock.now
    assert 0 < begun < 200
    assert not busy_transport.reading
    read(other, whole_request(1))

    assert clock.now - began <= 0.0002
    assert other_transport.octets
    turns_ = 0
    while not busy_transport.reading:
        before = clock.now
        await asyncio.sleep(0)
        turns_ += 1
        assert clock.now - before < MOST_SECONDS
    assert 201 == len(server.begun)
    assert 200 * 0.0002 / MOST_SECONDS <= turns_ + 1
    assert 200 * 3 == _frames(busy_transport.octets)


def _frames(octets: bytes) -> int:
    at, count = 0, 0
    while at < len(octets):
        at += 9 + int.from_bytes(octets[at : at + 3], "big")
        count += 1
    return count


async def test_a_client_that_reads_quickly_does_not_hold_the_others_up() -> None:
    """A long answer is sent in several turns, even if its client reads all of it immediately."""
    size = 16 << 20
    server = Server(HandClock(), lambda stream: None)
    wide = settings((Setting.INITIAL_WINDOW_SIZE, 1 << 30))
    quick, transport = server.connection("quick", wide, window_update(0, 1 << 30))
    other, _ = server.connection("other")
    streams: list[ServerStream] = []
    server._begin = streams.append
    read(quick, whole_request(1))
    answer(streams[0], bytes(size))
    await asyncio.sleep(0)
    first = len(transport.octets)
    server._begin = answer
    read(other, whole_request(1))
    order = list(server.log)
    while quick.core.streams or quick.core.output:
        await asyncio.sleep(0)

    assert 1 << 20 <= first <= 4 << 20
    assert "other writes" == order[-1]
    assert len(transport.octets) > size


async def test_a_turn_goes_on_however_the_reads_fall() -> None:
    """Random reads on two alternating connections: each request is answered once, in order."""
    random = Random("turns")
    clock = HandClock()

    def begin(stream: ServerStream) -> None:
        clock.now += random.choice((0, 0.0001, 0.0009))
        answer(stream, b"%d" % stream.id)

    server = Server(clock, begin)
    connections = [server.connection(name) for name in ("a", "b")]
    waiting = [b"".join(whole_request(n) for n in range(1, 301, 2)) for _ in connections]
    while any(waiting) or not all(transport.reading for _, transport in connections):
        for at, (protocol, transport) in enumerate(connections):
            if waiting[at] and transport.reading:
                size = random.choice((1, 100, 5000))
                read(protocol, waiting[at][:size])
                waiting[at] = waiting[at][size:]
        await asyncio.sleep(0)
    await asyncio.sleep(0)

    for _, transport in connections:
        assert 150 * 3 == _frames(transport.octets)
        assert b"299" in transport.octets
    assert 300 == len(server.begun)
    assert Kind.HEADERS == connections[0][1].octets[3]
