"""The pending executions of a station at one moment: number and age."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SECOND_NS = 1e9


@dataclass(frozen=True, slots=True)
class Backlog:
    """Queued executions."""

    pending: int = 0
    """The number of them."""
    oldest_seconds: float = 0.0
    """Age of the oldest in seconds, or 0."""

    @classmethod
    def of(cls, pending_since: Iterable[int], now_ns: int) -> "Backlog":
        """Return the figures for submission times."""
        times = list(pending_since)
        # One that was submitted after the clock was read has not waited a negative time.
        return cls(len(times), max(0, now_ns - min(times, default=now_ns)) / _SECOND_NS)

    @classmethod
    def together(cls, backlogs: Sequence["Backlog"]) -> "Backlog":
        """Return the figures of several models."""
        return cls(
            sum(each.pending for each in backlogs),
            max((each.oldest_seconds for each in backlogs), default=0.0),
        )


NO_BACKLOG = Backlog()
"""Nothing waits."""
