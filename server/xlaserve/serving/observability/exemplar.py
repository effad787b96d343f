"""A traced request as the exemplar of a histogram bucket (OpenMetrics, Exemplars)."""

from typing import NamedTuple


class Exemplar(NamedTuple):
    """One request."""

    trace_id: int
    seconds: float
    at: float
    """End of the request, in seconds since the epoch."""
