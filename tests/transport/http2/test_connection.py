"""The connection as its shell uses it: reads, turns, timeouts and the end."""

import pytest
from support.clock import HandClock
from support.frames import (
    Frame,
    Kind,
    Setting,
    data,
    headers,
    padded,
    ping,
    rst_stream,
    settings,
    window_update,
)
from support.memory_client import (
    MESSAGE,
    REQUEST,
    MemoryClient,
    Streaming,
    Unary,
    answer,
    request,
)

from xlaserve.grpc.http2.connection import RECEIVE_BYTES, ReceiveBuffer
from xlaserve.grpc.http2.frame_reader import TURN_SECONDS
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.messages import PREFIX, Problem
from xlaserve.grpc.http2.stream import ServerStream

OPEN = headers(1, REQUEST)
ENDED = data(1, MESSAGE, end_stream=True)
UNKNOWN = 0x2A


def read(client: MemoryClient, *parts: Frame | bytes) -> bool:
    """Receive one read; return whether all of it was handled."""
    octets = b"".join(map(bytes, parts))
    space = client.core.receive_buffer()
    space[: len(octets)] = octets
    return client.core.received(len(octets))


class Call:
    """A call that records why it was cancelled."""

    awaits_client = False

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def cancel(self, reason: str) -> None:
        self.reasons.append(reason)


# --- reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 8, 9, 5000, 16_000])
def test_a_read_is_as_long_as_ever_behind_what_another_has_left(left: int) -> None:
    client = MemoryClient()
    frame = bytes(OPEN) if left < 10 else bytes(Frame(Kind.GOAWAY, 0, 0, bytes(16_384)))
    client.send(frame[:left])
    space = client.core.receive_buffer()

    assert RECEIVE_BYTES == len(space)
    assert RECEIVE_BYTES == len(client.core.receive_buffer())
    assert 2 * RECEIVE_BYTES == len(ReceiveBuffer().octets)


@pytest.mark.parametrize("ends", [True, False])
def test_a_stream_that_is_reset_while_its_message_is_received_leaves_others_alone(
    ends: bool,
) -> None:
    """The rest of its frame comes in an ordinary read, followed by other frames."""
    client = MemoryClient()
    octets = bytes(data(1, PREFIX.pack(0, 100_000) + bytes(100_000)))
    client.send(OPEN, window_update(1, 1), octets[:40_000])
    assert len(octets) - 40_000 == len(client.core.receive_buffer())
    if ends:
        client.core._streams.open[1].reset()
    else:
        read(client, octets[40_000:50_000])
        client.core._streams.open[1].reset()
    client.taken()
    rest = octets[40_000 if ends else 50_000 :]
    assert read(client, rest, ping())

    assert [ping(ack=True)] == client.taken()


def test_what_is_received_directly_is_a_whole_read_when_its_space_is_filled() -> None:
    """The socket may hold more: other connections run first once the turn's time is over."""
    clock = HandClock()
    client = MemoryClient(now=clock)
    octets = bytes(data(1, PREFIX.pack(0, 100_000) + bytes(100_000)))
    read(client, OPEN, octets[:40_000])
    client.core.receive_buffer()
    clock.now += 1
    space = client.core.receive_buffer()
    space[:] = octets[40_000:]
    client.core._reader._until = clock.now

    assert not client.core.received(len(space))


def full(kind: int = UNKNOWN) -> bytes:
    """Return a frame as large as a read."""
    return bytes(Frame(kind, 0, 0, bytes(RECEIVE_BYTES - 9)))


@pytest.mark.parametrize(("late", "done"), [(-1e-6, True), (0.0, False), (1e-6, False)])
def test_a_full_read_is_of_the_same_turn_until_that_ends(late: float, done: bool) -> None:
    clock = HandClock(0.0)
    client = MemoryClient(now=clock)
    read(client, full())
    clock.now = TURN_SECONDS + late

    assert done is read(client, full())


def test_a_short_read_ends_its_turn() -> None:
    """The next read has a full turn."""
    clock = HandClock(0.0)
    client = MemoryClient(now=clock)
    assert read(client, ping())
    clock.now = 1.0

    assert read(client, full())


def test_a_full_read_of_which_some_is_left_is_not_done() -> None:
    """This applies however early in the turn it is."""
    client = MemoryClient(max_work=64, max_control_frames=10**6)
    many = bytes(ping()) * (RECEIVE_BYTES // 17)

    assert not read(client, many.ljust(RECEIVE_BYTES, b"\0"))


@pytest.mark.parametrize(("frames", "done"), [(63, True), (64, True), (65, False)])
def test_a_pass_handles_so_many_frames(frames: int, done: bool) -> None:
    """It reports remaining frames only if there are some."""
    client = MemoryClient(max_work=64)

    assert done is read(client, *[ping()] * frames)
    assert min(64, frames) == len(client.taken())
    assert client.core.proceed()
    assert frames - min(64, frames) == len(client.taken())


def test_nothing_is_received_behind_the_end_of_a_connection() -> None:
    client = MemoryClient()
    assert read(client, Frame(Kind.PING, 0, 0, b"short"))
    assert ["GOAWAY FRAME_SIZE_ERROR"] == [*filter(None, _ends(client))]
    assert read(client, ping(), OPEN, ENDED)

    assert [] == client.taken()
    assert {} == client.route.streams


def _ends(client: MemoryClient) -> list[str]:
    client.taken()
    return client.ended


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Kind.SETTINGS, 16_384),
        (Kind.PING, 16_384),
        (Kind.GOAWAY, 16_384),
        (Kind.HEADERS, RECEIVE_BYTES // 2),
    ],
)
def test_the_longest_frame_that_waits_until_it_is_whole(kind: Kind, most: int) -> None:
    """10.5: at most half a read, whatever the header limit; control frames at most 16 KB."""
    outcomes = []
    for length in (most, most + 1):
        client = MemoryClient(max_header_bytes=1 << 20)
        stream = 1 if kind is Kind.HEADERS else 0
        client.send(bytes(Frame(kind, 4, stream, bytes(length)))[:20])
        outcomes.append(client.ended)

    assert [[], ["GOAWAY ENHANCE_YOUR_CALM"]] == outcomes


def test_a_header_frame_of_just_the_limit_waits() -> None:
    """10.5.1: four times max_header_bytes, padding included."""
    client = MemoryClient(max_header_bytes=1024)
    frame = padded(headers(1, request(("x", "y" * 3796))), 255)
    assert 4096 == len(frame.payload)
    client.send_in_pieces(bytes(frame), 1000)

    assert client.alive
    assert {1} == set(client.core.streams)


# --- writes --------------------------------------------------------------------------------------


class AtOnce(Unary):
    """A route that answers the first two requests immediately."""

    def begin(self, stream: ServerStream) -> None:
        super().begin(stream)
        if stream.id < 5:
            answer(stream, b"abc")


@pytest.mark.parametrize("size", [3, 20_000])
def test_output_is_not_announced_while_frames_are_handled(size: int) -> None:
    """It leaves once all frames are handled; later answers are announced once."""
    woken: list[int] = []
    client = MemoryClient(AtOnce(), wake=lambda: woken.append(1))
    client.send(OPEN, ENDED, headers(3, REQUEST), data(3, MESSAGE, end_stream=True))
    assert [] == woken
    client.send(headers(5, REQUEST), data(5, MESSAGE, end_stream=True))
    stream = client.route.streams[5]
    answer(stream, bytes(size))

    assert [1] == woken[:1]


def test_a_long_answer_leaves_piece_by_piece() -> None:
    """`pump` produces more each time the previous output has been taken."""
    client = MemoryClient()
    client.send(
        settings((Setting.INITIAL_WINDOW_SIZE, 1 << 22)), window_update(0, 1 << 22), OPEN, ENDED
    )
    answer(client.route.streams[1], bytes(1 << 20))
    pieces = 0
    while client.core.output:
        client.core.take_output()
        client.core.pump()
        pieces += 1

    assert 4 <= pieces <= 6
    assert {} == client.core.streams


def test_frames_of_answers_are_counted() -> None:
    """Progress of a connection is thus visible to whoever monitors it."""
    client = MemoryClient()
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 20_000)), OPEN, ENDED)
    seen = [client.core.frames_sent]
    answer(client.route.streams[1], bytes(30_000))
    seen.append(client.core.frames_sent)
    client.send(window_update(1, 20_000))
    seen.append(client.core.frames_sent)

    assert [0, 2, 3] == seen


def test_a_connection_is_held_back_by_its_own_window_alone() -> None:
    client = MemoryClient()
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20)), OPEN, ENDED)
    told = [client.core.is_held_back]
    answer(client.route.streams[1], bytes(100_000))
    told.append(client.core.is_held_back)
    client.send(window_update(0, 50_000))
    told.append(client.core.is_held_back)

    assert [False, True, False] == told


# # --- timeouts
# ------------------------------------------------------------------------------------


def test_a_message_has_its_time_and_no_more() -> None:
    """From the headers on, whatever arrives; its memory is released at the deadline."""
    client = MemoryClient()
    client.core.sweep(2, 9)
    client.send(OPEN, data(1, PREFIX.pack(0, 1000) + bytes(500)))
    for _ in range(2):
        client.core.sweep(2, 9)
        client.send(data(1, b"a"))
    assert {} == client.route.streams
    client.core.sweep(2, 9)

    assert Problem.EXPIRED is client.route.streams[1].problem


def test_a_request_that_was_begun_does_not_expire() -> None:
    client = MemoryClient()
    client.send(OPEN, ENDED)
    for _ in range(5):
        client.core.sweep(2, 9)

    assert client.route.streams[1].problem is None
    assert {1} == set(client.core.streams)


def test_an_answer_that_is_not_read_is_cut_off() -> None:
    """7: ENHANCE_YOUR_CALM after this many sweeps without progress."""
    client = MemoryClient()
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 10)), OPEN, ENDED)
    stream = client.route.streams[1]
    stream.call = call = Call()
    client.core.sweep(9, 2)
    answer(stream, bytes(100))
    client.taken()
    for _ in range(2):
        client.core.sweep(9, 2)
    client.send(window_update(1, 10))  # the client reads a little, which restarts its timeout
    for _ in range(2):
        client.core.sweep(9, 2)
    assert client.ended == []
    client.core.sweep(9, 2)
    client.taken()

    assert ["RST_STREAM 1 ENHANCE_YOUR_CALM"] == client.ended
    assert ["the client does not read the answer"] == call.reasons
    assert 0 == client.ledger.held


def test_an_answer_that_waits_for_the_connection_is_not_cut_off() -> None:
    """5.2: its stream's window is open, but other streams may use up the connection's."""
    client = MemoryClient()
    client.send(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20)), OPEN, ENDED)
    answer(client.route.streams[1], bytes(100_000))
    for _ in range(9):
        client.core.sweep(2, 2)

    assert {1} == set(client.core.streams)


# --- the end -------------------------------------------------------------------------------------


def test_a_lost_connection_is_failed_and_its_account_closed() -> None:
    client = MemoryClient()
    client.send(OPEN, data(1, PREFIX.pack(0, 10) + b"abc"))
    client.core.lost()

    assert client.core.failed is not None
    assert ErrorCode.NO_ERROR is client.core.failed.code
    assert 0 == client.ledger.held
    assert read(client, ping())
    assert [] == client.taken()


def test_an_ended_connection_keeps_its_reason_when_it_is_lost() -> None:
    client = MemoryClient()
    client.core.end(ErrorCode.ENHANCE_YOUR_CALM, "enough")
    client.core.lost()

    assert client.core.failed is not None
    assert "enough" == client.core.failed.reason


def test_what_an_account_holds_is_released_with_its_connection() -> None:
    """This includes reservations made by others than streams."""
    client = MemoryClient()
    client.core.account.hold(100)
    client.core.lost()

    assert 0 == client.ledger.held


def test_no_stream_is_opened_behind_the_last_goaway() -> None:
    """6.8, 8.7: this holds even if no stream is open."""
    client = MemoryClient()
    client.core.leave()
    client.send(OPEN, ENDED)

    assert {} == client.core.streams
    assert ["GOAWAY NO_ERROR", "RST_STREAM 1 REFUSED_STREAM"] == client.ended


@pytest.mark.parametrize("frame", [rst_stream(1), Frame(Kind.PING, 0, 0, b"short")])
def test_a_call_hears_why_nobody_wants_its_answer(frame: Frame) -> None:
    """It learns once whether the stream was reset or its connection ended."""
    client = MemoryClient(Streaming())
    client.send(OPEN)
    client.route.streams[1].call = call = Call()
    client.send(frame)
    client.core.lost()

    assert 1 == len(call.reasons)
    assert ("reset" in call.reasons[0]) is (frame.kind == Kind.RST_STREAM)
