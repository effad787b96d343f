"""Measures how long another process has been silent while this one was able to notice."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

CHECKS = 20
"""Number of checks within the time that a process has to answer."""
_SILENT_PART = 5
"""After a fifth of that time the process counts as unready and gets no work."""
STOPPED_SECONDS = 2.0
"""Seconds that a process may be stopped (SIGSTOP) before it is replaced; a shorter stop may be
accidental."""


class Silence:
    """Counts seconds without a message. Not thread-safe.

    A gap between two checks counts as at most twice the interval. So if this process was itself
    stopped, or got no CPU time, it does not take the other one for dead.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` is the time in which the other process must answer, in seconds."""
        self.limit = limit
        self.step = limit / CHECKS
        """Seconds between two checks."""
        self.seconds = 0.0
        """Seconds without a message, up to the last check."""
        self._clock = clock
        self._looked = clock()

    @property
    def is_long(self) -> bool:
        """Tell whether the other process counts as silent, and so as unready."""
        return self.seconds >= self.limit / _SILENT_PART

    @property
    def is_over(self) -> bool:
        """Tell whether the other process has exceeded its time limit."""
        return self.seconds >= self.limit

    def heard(self) -> None:
        """Record a message."""
        self.seconds = 0.0
        self._looked = self._clock()

    def look(self) -> None:
        """Add the time since the last check."""
        now = self._clock()
        self.seconds += min(now - self._looked, 2 * self.step)
        self._looked = now


class Stopped(Silence):
    """Measures how long a process has been stopped (SIGSTOP); a busy process does not count."""

    def __init__(
        self,
        pid: int,
        limit: float = STOPPED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        *,
        with_forks: bool = False,
    ) -> None:
        """`with_forks` also counts the process if one of its forked children is stopped."""
        super().__init__(limit, clock)
        self._pid = pid
        self._with_forks = with_forks

    def look(self) -> None:
        """Add the time since the last check, if the process is stopped; otherwise start from 0."""
        if is_stopped(self._pid, with_forks=self._with_forks):
            super().look()
        else:
            self.heard()


def is_stopped(pid: int, *, with_forks: bool = False) -> bool:
    """Tell whether a process is stopped by a signal; False if unknown.

    `with_forks` also checks the children of its main thread.
    """
    with suppress(OSError, IndexError):
        # The process name comes first, in parentheses, and may contain spaces and parentheses.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
    return with_forks and any(map(is_stopped, _forks(pid)))


def _forks(pid: int) -> Iterable[int]:
    with suppress(OSError):
        return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return ()
