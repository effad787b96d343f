"""Exemplars: traced requests attached to histogram buckets (OpenMetrics, Exemplars)."""

from typing import NamedTuple


class Exemplar(NamedTuple):
    """A traced request."""

    trace_id: int
    seconds: float
    at: float
    """End of the request in seconds since the epoch."""
