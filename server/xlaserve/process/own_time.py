"""Time of another process, without its waits for a processor."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """What a process was doing at a moment."""

    processor_seconds: float
    """What all of its threads have taken by then."""
    is_runnable: bool
    """Whether one of them runs, or waits for a processor."""


class OwnTime:
    """Counts seconds on the clock but for those of a wait for a processor. Of one thread.

    A process that sleeps, or waits for another one, has all of them. One that can run has what it
    runs: on a machine with others that is less than what passes. To be looked at often.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        """Those that it had by the last look."""
        self._pid = pid
        self._clock = clock
        self._looked = clock()
        self._took = seen(pid).processor_seconds

    def look(self) -> None:
        """Count the time since the last look."""
        now, found = self._clock(), seen(self._pid)
        passed = now - self._looked
        if found.is_runnable:
            passed = min(passed, max(0.0, found.processor_seconds - self._took))
        self.seconds += passed
        self._looked, self._took = now, found.processor_seconds


def seen(pid: int) -> Seen:
    """Return what a process does; where nobody knows it waits for no processor."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    if not fields:
        return Seen(0.0, False)
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return Seen(ticks / os.sysconf("SC_CLK_TCK"), "R" in _states(pid))


_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Positions behind the name in /proc/PID/stat."""


def _states(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from _fields(thread / "stat")[_STATE : _STATE + 1]


def _fields(stat: Path) -> list[str]:
    with suppress(OSError):
        # The name before it, in brackets, may hold anything.
        return stat.read_text().rpartition(")")[2].split()
    return []
