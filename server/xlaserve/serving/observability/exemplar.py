"""A request that was traced, as the example of a bucket of a histogram (OpenMetrics, Exemplars)."""

from typing import NamedTuple


class Exemplar(NamedTuple):
    """One request."""

    trace_id: int
    seconds: float
    at: float
    """When it ended, in seconds since the epoch."""
