"""What is counted of a client, with a clock that the test turns."""

import pytest
from support.clock import HandClock

from xlaserve.transport.http2.errors import ConnectionFailure
from xlaserve.transport.http2.frames import ErrorCode
from xlaserve.transport.http2.limits import FRAMES_FOR_AN_ANSWER, Conduct, Http2Limits

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
