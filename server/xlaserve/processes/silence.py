"""How long the other end of a channel has been silent while this one listened."""

import time
from collections.abc import Callable

LOOKS = 20
"""Looks within the time that a process has to answer."""
_SILENT_PART = 5
"""The part of that time from which on it is not ready, and is given nothing."""


class Silence:
    """Counts seconds without a message. Of one event loop.

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

    def heard(self) -> None:
        """Know that there was a message."""
        self.seconds = 0.0
        self._looked = self._clock()

    def look(self) -> None:
        """Count the time since the last look."""
        now = self._clock()
        self.seconds += min(now - self._looked, 2 * self.step)
        self._looked = now
