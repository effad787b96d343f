"""Limits per client, with a fake clock."""

import pytest
from support.clock import HandClock
from support.frames import Kind, data, headers
from support.memory_client import MESSAGE, REQUEST, STATUS, MemoryClient, Unary, answer

from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.limits import FRAMES_FOR_AN_ANSWER, MAX_REFUSALS, Conduct, Http2Limits

LIMITS = Http2Limits(max_resets=3, max_control_frames=5, window_seconds=30)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def conduct(clock: HandClock) -> Conduct:
    return Conduct(LIMITS, clock)


def test_too_many_resets_end_the_connection(conduct: Conduct) -> None:
    for _ in range(3):
        conduct.count_reset()
    with pytest.raises(ConnectionFailure, match="max_stream_resets") as failure:
        conduct.count_reset()

    assert ErrorCode.ENHANCE_YOUR_CALM is failure.value.code


def test_too_many_control_frames_end_the_connection(conduct: Conduct) -> None:
    for _ in range(5):
        conduct.count_control()
    with pytest.raises(ConnectionFailure, match="max_control_frames"):
        conduct.count_control()


def test_counts_start_anew_with_each_window(conduct: Conduct, clock: HandClock) -> None:
    for _ in range(4):
        for _ in range(3):
            conduct.count_reset()
        clock.now += 31

    for _ in range(3):
        conduct.count_reset()
    with pytest.raises(ConnectionFailure):
        conduct.count_reset()


def test_a_window_is_over_when_its_time_is(conduct: Conduct, clock: HandClock) -> None:
    for _ in range(3):
        conduct.count_reset()
    clock.now += LIMITS.window_seconds
    conduct.count_reset()

    assert 1 == conduct.resets


def test_who_is_served_may_cancel_and_acknowledge_as_much(conduct: Conduct) -> None:
    conduct.served = 2
    for _ in range(3 + 2):
        conduct.count_reset()
    for _ in range(5 + 2 * FRAMES_FOR_AN_ANSWER):
        conduct.count_control()

    with pytest.raises(ConnectionFailure):
        conduct.count_reset()
    with pytest.raises(ConnectionFailure):
        conduct.count_control()


def test_what_was_served_before_the_window_does_not_count(
    conduct: Conduct, clock: HandClock
) -> None:
    conduct.served = 1000
    for _ in range(4):
        conduct.count_reset()
    clock.now += 31
    for _ in range(1000 + 2):
        conduct.count_reset()
    with pytest.raises(ConnectionFailure):
        conduct.count_reset()


# --- refusals ------------------------------------------------------------------------------------


class Asking:
    """A client whose requests are answered normally or refused with a status alone."""

    def __init__(self, max_refusals: int = MAX_REFUSALS) -> None:
        self.clock = HandClock()
        self.client = MemoryClient(Unary(), now=self.clock, max_refusals=max_refusals)
        self.stream = -1

    def ask(self) -> None:
        self.stream += 2
        body = data(self.stream, MESSAGE, end_stream=True)
        self.client.send(headers(self.stream, REQUEST), body)

    def refused(self, count: int = 1) -> list[str]:
        for _ in range(count):
            self.ask()
            self.client.route.streams.pop(self.stream).send_headers(STATUS, end=True)
            self.client.taken()
        return self.client.ended


def test_a_client_that_is_refused_too_often_is_asked_to_go() -> None:
    """It is not cut off: requests in flight are answered, later streams are refused (6.8)."""
    asking = Asking(max_refusals=3)
    asking.ask()
    in_flight = asking.client.route.streams[1]

    assert [] == asking.refused(3)
    assert ["GOAWAY ENHANCE_YOUR_CALM"] == asking.refused()
    goaway = next(f for f in asking.client.all if f.kind == Kind.GOAWAY)
    assert 9 == int.from_bytes(goaway.payload[:4], "big")
    assert b"3 requests" in goaway.payload
    asking.ask()
    assert "RST_STREAM 11 REFUSED_STREAM" == asking.client.ended[-1]
    assert answer(in_flight, b"abc")
    assert {1} == {f.stream for f in asking.client.taken()}
    assert asking.client.alive


def test_a_client_that_was_asked_to_go_is_told_no_later_stream() -> None:
    """6.8: a later GOAWAY must not name a higher last stream."""
    asking = Asking(max_refusals=3)
    asking.refused(4)
    asking.client.core.go_away()
    asking.client.core.leave()

    assert [] == asking.client.taken()


def test_refusals_are_counted_in_windows_and_beside_answers() -> None:
    asking = Asking(max_refusals=3)
    asking.refused(3)
    asking.ask()
    answer(asking.client.route.streams[asking.stream])
    assert [] == asking.refused()
    asking.clock.now += 31
    assert [] == asking.refused(3)

    assert ["GOAWAY ENHANCE_YOUR_CALM"] == asking.refused()


def test_ten_thousand_refusals_are_too_many() -> None:
    asking = Asking()

    assert [] == asking.refused(MAX_REFUSALS)
    assert ["GOAWAY ENHANCE_YOUR_CALM"] == asking.refused()
    assert MAX_REFUSALS == 10_000


def test_what_fails_behind_a_part_of_its_answer_is_no_refusal() -> None:
    asking = Asking(max_refusals=1)
    for _ in range(3):
        asking.ask()
        stream = asking.client.route.streams[asking.stream]
        stream.send_headers(b"\x88")
        stream.send_headers(STATUS, end=True)
        asking.client.taken()

    assert [] == asking.client.ended
