"""Requests that are answered before their end (RFC 9113 8.1): answer first, RST_STREAM later.

On a RST_STREAM directly after the answer, HAProxy drops the answer and reports CANCELLED.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from support.frames import Frame, Kind, data, headers, literals, padded, ping, rst_stream
from support.frames import window_update as widened
from support.memory_client import MESSAGE, OK, REQUEST, STATUS, MemoryClient, Streaming, told

from xlaserve.grpc.http2.states import State
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.grpc.http2.streams import ANSWERED_SECONDS

RESET = "RST_STREAM 1 NO_ERROR"
TRAILERS = literals([("x-end", "1")])
WINDOW = 4000


class Early:
    """A client that has sent a part of the request on stream 1."""

    def __init__(self, **given: int) -> None:
        self.now = 100.0
        limits: dict[str, Any] = {"stream_window_bytes": WINDOW, **given}
        self.client = MemoryClient(Streaming(), now=lambda: self.now, **limits)
        self.client.send(headers(1, REQUEST), data(1, MESSAGE))

    @property
    def stream(self) -> ServerStream:
        return self.client.route.streams[1]

    def refuse(self) -> list[Frame]:
        """Answer with a status while the client is still sending."""
        self.stream.send_headers(STATUS, end=True)
        return self.client.taken()

    def after(self, seconds: float) -> list[Frame]:
        """Advance the clock, and return the frames that are sent then."""
        self.now += seconds
        self.client.core.sweep(1000, 1000)
        return self.client.taken()

    @property
    def state(self) -> State:
        return self.client.core._streams.state_of(1)


def whole(stream: ServerStream) -> None:
    assert stream.answer(OK, [b"abc"], 3, STATUS)


def status(stream: ServerStream) -> None:
    stream.send_headers(STATUS, end=True)


def data_alone(stream: ServerStream) -> None:
    stream.send_headers(OK)
    assert stream.send_data([b"abc"], 3, end=True)


def trailers(stream: ServerStream) -> None:
    stream.send_headers(OK)
    assert stream.send_data([b"abc"], 3)
    stream.send_headers(STATUS, end=True)


def reset_behind(stream: ServerStream) -> None:
    """Reset immediately after the status, as grpclib does for every status except OK."""
    stream.send_headers(STATUS, end=True)
    stream.reset()


ANSWERS: Sequence[Callable[[ServerStream], None]] = (
    whole,
    status,
    data_alone,
    trailers,
    reset_behind,
)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
def test_the_answer_comes_and_the_reset_once_its_client_has_had_time(
    answer: Callable[[ServerStream], None],
) -> None:
    early = Early()
    answer(early.stream)
    frames = early.client.taken()

    assert frames[-1].ends_stream
    assert [] == told(frames)
    assert [] == told(early.after(ANSWERED_SECONDS / 2))
    assert [RESET] == told(early.after(ANSWERED_SECONDS / 2))
    assert [] == told(early.after(ANSWERED_SECONDS))
    assert State.RESET is early.state


ENDS: Mapping[str, Frame] = {
    "DATA": data(1, b"more", end_stream=True),
    "padded DATA": padded(data(1, b"more", end_stream=True), 50),
    "an empty frame": data(1, b"", end_stream=True),
    "trailers": headers(1, TRAILERS, end_stream=True),
    "RST_STREAM": rst_stream(1),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1 << 20, 1, 7])
def test_a_client_that_ends_its_request_is_sent_no_reset(end: str, size: int) -> None:
    early = Early()
    early.refuse()
    sent = early.client.send_in_pieces(bytes(data(1, b"more")) + bytes(ENDS[end]), size)

    assert [] == told(sent) == told(early.after(2 * ANSWERED_SECONDS))
    assert State.CLOSED is early.state


def test_what_is_still_sent_is_dropped_and_nothing_of_it_held() -> None:
    early = Early()
    early.refuse()
    held = early.client.ledger.held
    early.client.send(data(1, bytes(WINDOW // 2)))

    assert 0 == held == early.client.ledger.held
    assert {} == early.client.core.streams
    assert early.client.core._windows.left > early.client.limits.connection_window_bytes // 2


def test_no_client_is_granted_more_of_a_request_that_was_answered() -> None:
    early = Early()
    early.refuse()
    left = WINDOW - len(MESSAGE)
    within = early.client.send(data(1, bytes(left - 9)), padded(data(1, b""), 8))
    past = early.client.send(data(1, b"a"))

    assert [] == [frame for frame in within if frame.stream]
    assert ["RST_STREAM 1 FLOW_CONTROL_ERROR"] == told(past)


def test_the_bytes_of_the_connection_come_back() -> None:
    """Otherwise refused uploads would eventually block all other streams (6.9)."""
    early = Early(connection_window_bytes=65_535)
    early.refuse()
    for number in range(3, 203, 2):
        early.client.send(headers(number, REQUEST))
        early.client.route.streams[number].send_headers(STATUS, end=True)
        early.client.send(data(number, bytes(WINDOW)))
        early.client.send(rst_stream(number))

    assert early.client.alive
    assert early.client.core._windows.left >= 65_535 // 2


def test_trailers_that_do_not_end_are_an_error_still() -> None:
    early = Early()
    early.refuse()

    assert ["RST_STREAM 1 PROTOCOL_ERROR"] == told(early.client.send(headers(1, TRAILERS)))


MOST = 20
CALM = "GOAWAY ENHANCE_YOUR_CALM"
EMPTY: Mapping[str, Frame] = {
    "empty DATA": data(1),
    "only padding": padded(data(1), 5),
    "WINDOW_UPDATE": widened(1, 1),
}


@pytest.mark.parametrize("frame", EMPTY)
def test_frames_that_carry_nothing_count(frame: str) -> None:
    early = Early(max_control_frames=MOST)
    early.refuse()
    early.client.send(*[EMPTY[frame]] * (MOST - 1))
    lives = early.client.alive
    early.client.send(*[EMPTY[frame]] * 5)

    assert lives
    assert [CALM] == early.client.ended


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_refused_request_counts_as_no_frame_too_many(end: str) -> None:
    """A proxy sends the requests of many clients over one connection."""
    early = Early(max_control_frames=MOST, max_resets=MOST)
    early.refuse()
    for number in range(3, 3 + 4 * MOST, 2):
        early.client.send(headers(number, REQUEST))
        early.client.route.streams[number].send_headers(STATUS, end=True)
        last = ENDS[end]
        early.client.send(Frame(last.kind, last.flags, number, last.payload))

    assert early.client.alive
    assert [] == early.client.ended


def test_of_as_many_as_may_be_open_the_oldest_is_reset_at_once() -> None:
    """A client that never ends its streams thus costs no more than its open streams."""
    early = Early(max_streams=3)
    early.refuse()
    frames = []
    for number in (3, 5, 7, 9):
        frames += early.client.send(headers(number, REQUEST))
        early.client.route.streams[number].send_headers(STATUS, end=True)
        frames += early.client.taken()

    assert [RESET, "RST_STREAM 3 NO_ERROR"] == told(frames)
    assert 3 == len(early.client.core._streams.answered)


def test_a_stream_that_was_answered_takes_no_place_of_another() -> None:
    early = Early(max_streams=1)
    early.refuse()

    assert [] == told(early.client.send(headers(3, REQUEST)))
    assert [3] == [*early.client.core.streams]


@pytest.mark.parametrize("cut", [10, 30, 60])
def test_the_rest_of_a_frame_that_came_in_part_is_dropped(cut: int) -> None:
    early = Early()
    frame = bytes(data(1, bytes(100)))
    early.client.send(frame[:cut])
    early.refuse()

    assert [ping(ack=True)] == early.client.send(frame[cut:], ping())
    assert State.HALF_CLOSED_LOCAL is early.state


def test_the_end_of_the_connection_ends_the_wait() -> None:
    early = Early()
    early.refuse()
    early.client.core.lost()

    assert {} == early.client.core._streams.answered


def test_nothing_is_sent_behind_the_answer() -> None:
    early = Early()
    frames = early.refuse()
    early.stream.send_headers(STATUS, end=True)
    early.stream.send_data([b"abc"], 3)
    early.stream.reset()

    assert [Kind.HEADERS] == [frame.kind for frame in frames]
    assert [] == early.client.taken()
