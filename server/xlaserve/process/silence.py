"""How long another process has been silent while this one was able to notice."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

LOOKS = 20
"""Looks within the time that a process has to answer."""
_SILENT_PART = 5
"""Share of that time after which it is not ready and gets no work."""
STOPPED_SECONDS = 2.0
"""Seconds that a process may be stopped (SIGSTOP) before it is replaced: more than an accident."""


class Silence:
    """Counts seconds without a message. Of one event loop, or thread.

    What this process slept itself counts as two looks at most: who was stopped together with the
    other end, or waits for the processor, does not take that one for dead.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` is the time that the other end has to answer, in seconds."""
        self.limit = limit
        self.step = limit / LOOKS
        """Seconds between two looks."""
        self.seconds = 0.0
        """Seconds without a message by the last look."""
        self._clock = clock
        self._looked = clock()

    @property
    def is_long(self) -> bool:
        """Tell whether the other end counts as silent."""
        return self.seconds >= self.limit / _SILENT_PART

    @property
    def is_over(self) -> bool:
        """Tell whether the other end has had its time."""
        return self.seconds >= self.limit

    def heard(self) -> None:
        """Record a message."""
        self.seconds = 0.0
        self._looked = self._clock()

    def look(self) -> None:
        """Count the time since the last look."""
        now = self._clock()
        self.seconds += min(now - self._looked, 2 * self.step)
        self._looked = now


class Stopped(Silence):
    """The silence of a process that may be busy: it counts only while it is stopped."""

    def __init__(
        self,
        pid: int,
        limit: float = STOPPED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        *,
        with_forks: bool = False,
    ) -> None:
        """`with_forks` counts a stopped fork as well."""
        super().__init__(limit, clock)
        self._pid = pid
        self._with_forks = with_forks

    def look(self) -> None:
        """Count the time since the last check, if the process is stopped."""
        if is_stopped(self._pid, with_forks=self._with_forks):
            super().look()
        else:
            self.heard()


def is_stopped(pid: int, *, with_forks: bool = False) -> bool:
    """Tell whether a process is stopped by a signal; false if unknown.

    `with_forks` also looks at those that its first thread has forked.
    """
    with suppress(OSError, IndexError):
        # The name before it, in brackets, may hold anything.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
    return with_forks and any(map(is_stopped, _forks(pid)))


def _forks(pid: int) -> Iterable[int]:
    with suppress(OSError):
        return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return ()
