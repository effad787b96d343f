"""Measures the running time of another process, without the time it waits for a CPU."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """A sample of a process."""

    processor_seconds: float
    """CPU time of all threads of the process so far."""
    is_runnable: bool
    """Whether at least one thread is running or waiting for a CPU."""


class OwnTime:
    """Measures the wall-clock time of a process, excluding the time it waits for a CPU.

    While the process sleeps or waits for another one, wall-clock time counts in full; while it is
    runnable, only its CPU time counts, which is less on a busy machine. Sample often (`look`),
    always from the same thread.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        """The total, up to the last sample."""
        self._pid = pid
        self._clock = clock
        self._looked = clock()
        self._took = seen(pid).processor_seconds

    def look(self) -> None:
        """Add the time since the last sample."""
        now, found = self._clock(), seen(self._pid)
        passed = now - self._looked
        if found.is_runnable:
            passed = min(passed, max(0.0, found.processor_seconds - self._took))
        self.seconds += passed
        self._looked, self._took = now, found.processor_seconds


def seen(pid: int) -> Seen:
    """Sample a process; one whose state cannot be read counts as not runnable."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    if not fields:
        return Seen(0.0, False)
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return Seen(ticks / os.sysconf("SC_CLK_TCK"), "R" in _states(pid))


_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Field positions after the process name in /proc/PID/stat."""


def _states(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from _fields(thread / "stat")[_STATE : _STATE + 1]


def _fields(stat: Path) -> list[str]:
    with suppress(OSError):
        # The process name comes first, in parentheses, and may contain spaces and parentheses.
        return stat.read_text().rpartition(")")[2].split()
    return []
