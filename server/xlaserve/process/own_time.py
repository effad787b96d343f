"""How long another process has taken, without its waits for a processor."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

_TICKS = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12
"""Fields of /proc/PID/stat after the state: user and system time of all threads (proc(5))."""


class Activity(NamedTuple):
    """What a process does now, and did."""

    is_runnable: bool
    """Whether one of its threads runs, or waits for a processor."""
    processor_seconds: float
    """Processor time of all its threads."""


Read: TypeAlias = Callable[[int], Activity | None]


class OwnTime:
    """Counts the seconds for which a process runs, sleeps, or waits for anything but a processor.

    A machine that has ten times as much to do as it has processors takes ten times as long for a
    load, which says nothing about the model.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        """Seconds of its own by the last look."""
        self._pid = pid
        self._clock = clock
        self._looked = clock()
        self._used = 0.0

    def look(self, read: "Read | None" = None) -> None:
        """Count the time since the last look: processor time if it is runnable, else all of it."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        found = (read or activity)(self._pid)
        if found is not None:
            used, self._used = found.processor_seconds - self._used, found.processor_seconds
            if found.is_runnable:
                passed = min(passed, used)
        self.seconds += passed


def activity(pid: int) -> Activity | None:
    """Return what a process does, None where nobody knows."""
    with suppress(OSError, IndexError, ValueError):
        fields = _fields(Path(f"/proc/{pid}/stat"))
        used = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS
        return Activity(fields[0] == "R" or _has_runnable_thread(pid), used)
    return None


def _has_runnable_thread(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError, IndexError):  # it has ended meanwhile
            if _fields(thread / "stat")[0] == "R":
                return True
    return False


def _fields(path: Path) -> list[str]:
    # The name before them, in brackets, may hold anything.
    return path.read_text().rpartition(")")[2].split()
