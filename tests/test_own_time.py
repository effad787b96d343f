"""How much of the elapsed time another process could run."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from support.conditions import until

from xlaserve.process import own_time
from xlaserve.process.own_time import OwnTime, Seen, seen

SLEEPS = "sum(range(10_000_000)); import time; time.sleep(3600)"
SPINS_IN_A_THREAD = """
import threading
def spin():
    while True:
        pass
thread = threading.Thread(target=spin)
thread.start()
thread.join()
"""

LOOKS = {
    "asleep": ([Seen(2.0, False), Seen(2.0, False)], 1.0),
    "running": ([Seen(2.0, True), Seen(2.9, True)], 0.9),
    "waiting": ([Seen(2.0, True), Seen(2.0, True)], 0.0),
    "running in several threads": ([Seen(2.0, True), Seen(5.0, True)], 1.0),
    "gone": ([Seen(2.0, True), Seen(0.0, False)], 1.0),
    "not known before": ([Seen(2.0, True), Seen(0.0, True)], 0.0),
}
"""Two observations of a process, and how much of the second in between it could run."""


@pytest.mark.parametrize("looks", LOOKS)
def test_a_second_counts_unless_it_is_a_wait_for_a_processor(
    looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = LOOKS[looks]
    left, now = iter(found), iter([10.0, 11.0])
    monkeypatch.setattr(own_time, "seen", lambda pid: next(left))
    had = OwnTime(1, lambda: next(now))
    had.look()

    assert expected == pytest.approx(had.seconds)


async def is_seen(code: str, holds: Callable[[Seen], bool]) -> Seen:
    """Return an observation of a process, once the condition holds."""
    found: list[Seen] = []

    def look(pid: int) -> bool:
        found.append(seen(pid))
        return holds(found[-1])

    with subprocess.Popen([sys.executable, "-c", code]) as process:  # noqa: ASYNC220
        try:
            await until(lambda: look(process.pid))
        finally:
            process.kill()
    return found[-1]


async def test_a_process_that_sleeps_waits_for_no_processor() -> None:
    found = await is_seen(SLEEPS, lambda now: now.processor_seconds > 0.05 and not now.is_runnable)

    assert not found.is_runnable


async def test_a_thread_that_runs_is_the_process() -> None:
    """The main thread sleeps meanwhile."""
    found = await is_seen(
        SPINS_IN_A_THREAD, lambda now: now.processor_seconds > 0.2 and now.is_runnable
    )

    assert found.is_runnable


def test_nothing_is_known_of_a_process_that_is_not_there() -> None:
    assert Seen(0.0, False) == seen(1 << 30)
