"""Measurement of event loop lag."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence

LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the histogram's buckets, in seconds; an additional last bucket has no bound."""

_EVERY_SECONDS = 0.1


class LoopLag:
    """Measures ten times a second how late the event loop runs a timer."""

    def __init__(self) -> None:
        self._buckets = [0] * (len(LAG_BOUNDS) + 1)
        self.seconds = 0.0
        """Sum of all lags."""

    @property
    def buckets(self) -> Sequence[int]:
        """Return the number of lags in each bucket."""
        return tuple(self._buckets)

    def note(self, seconds: float) -> None:
        """Record a lag in seconds."""
        lag = max(0.0, seconds)
        self._buckets[bisect_left(LAG_BOUNDS, lag)] += 1
        self.seconds += lag

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_SECONDS
            await asyncio.sleep(_EVERY_SECONDS)
            self.note(loop.time() - due)
