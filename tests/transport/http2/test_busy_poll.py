"""The event loop polls while requests come in quick succession, and sleeps otherwise."""

from collections.abc import Callable

import pytest
from support.clock import HandClock

from xlaserve.grpc.http2.busy_poll import QUICK_IN_A_ROW, BusyPoll

SECONDS = 1.0


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def due() -> list[Callable[[], None]]:
    """Callbacks that the loop would run in its next iteration."""
    return []


def come(poll: BusyPoll, clock: HandClock, times: int, *, apart: float = SECONDS / 2) -> None:
    for _ in range(times):
        clock.now += apart
        poll.arrived()
        poll.answered()


def test_after_some_that_came_quickly_the_loop_stays_awake(
    clock: HandClock, due: list[Callable[[], None]]
) -> None:
    poll = BusyPoll(SECONDS, due.append, clock)
    come(poll, clock, QUICK_IN_A_ROW)
    before = len(due)
    come(poll, clock, 3)

    assert (0, 1) == (before, len(due))


def test_it_goes_on_until_nothing_comes_in_time(
    clock: HandClock, due: list[Callable[[], None]]
) -> None:
    """It resumes only after another run of quick requests."""
    poll = BusyPoll(SECONDS, due.append, clock)
    come(poll, clock, QUICK_IN_A_ROW + 1)
    turns = 0
    while due:
        due.pop()()
        clock.now += SECONDS / 4
        turns += 1
    come(poll, clock, QUICK_IN_A_ROW - 1)

    assert 6 == turns
    assert [] == due


@pytest.mark.parametrize(("seconds", "apart"), [(SECONDS, 2 * SECONDS), (0.0, 1e-6)])
def test_it_sleeps_between_those_that_are_rare_and_where_it_is_told_to(
    clock: HandClock, due: list[Callable[[], None]], seconds: float, apart: float
) -> None:
    come(BusyPoll(seconds, due.append, clock), clock, 10 * QUICK_IN_A_ROW, apart=apart)

    assert [] == due


def test_it_does_not_stay_awake_for_what_is_still_worked_on(
    clock: HandClock, due: list[Callable[[], None]]
) -> None:
    """Threads need the processor then."""
    poll = BusyPoll(SECONDS, due.append, clock)
    for _ in range(10 * QUICK_IN_A_ROW):
        clock.now += SECONDS / 2
        poll.arrived()

    assert [] == due
