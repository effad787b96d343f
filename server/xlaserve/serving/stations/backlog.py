"""Number and age of a station's queued executions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SECOND_NS = 1e9


@dataclass(frozen=True, slots=True)
class Backlog:
    """Number and age of queued executions."""

    pending: int = 0
    """Number of queued executions."""
    oldest_seconds: float = 0.0
    """Age of the oldest queued execution; 0 if none is queued."""

    @classmethod
    def of(cls, pending_since: Iterable[int], now_ns: int) -> "Backlog":
        """Compute the backlog from submission times."""
        times = list(pending_since)
        # A call submitted after the clock was read would have a negative age.
        return cls(len(times), max(0, now_ns - min(times, default=now_ns)) / _SECOND_NS)

    @classmethod
    def together(cls, backlogs: Sequence["Backlog"]) -> "Backlog":
        """Return the combined backlog of several models."""
        return cls(
            sum(each.pending for each in backlogs),
            max((each.oldest_seconds for each in backlogs), default=0.0),
        )


NO_BACKLOG = Backlog()
