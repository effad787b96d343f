"""Statistics of a benchmark step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlaserve.bench.load import Measured, Step

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
_MILLISECONDS = 1000


@dataclass(frozen=True, slots=True)
class Result:
    """The statistics of one step; failed requests do not count as answers."""

    step: Step
    answers: int
    seconds: float
    answers_per_second: float
    latency_ms: Mapping[str, float]
    """p50, p90, p95, p99 and max in milliseconds; empty if there was no answer."""
    errors: Mapping[str, int]
    """Status -> number of failed requests."""
    client_cpu: float
    """CPU usage of the client in cores."""

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as a JSON object."""
        return {
            "concurrency": self.step.concurrency,
            "connections": self.step.connections,
            "streams": self.step.streams,
            "answers": self.answers,
            "seconds": self.seconds,
            "answers_per_second": self.answers_per_second,
            "latency_ms": dict(self.latency_ms),
            "errors": dict(self.errors),
            "client_cpu": self.client_cpu,
        }


def result(measured: Measured) -> Result:
    """Compute the statistics of a step."""
    latencies, seconds = measured.latencies, measured.seconds
    count = len(latencies)
    named = {f"p{q:g}": percentile(latencies, q) for q in PERCENTILES} if count else {}
    if count:
        named["max"] = latencies[-1]
    return Result(
        step=measured.step,
        answers=count,
        seconds=seconds,
        answers_per_second=count / seconds if seconds > 0 else 0.0,
        latency_ms={name: value * _MILLISECONDS for name, value in named.items()},
        errors=dict(measured.errors.most_common()),
        client_cpu=measured.client_cpu,
    )


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the smallest value such that `percent` percent of the values do not exceed it."""
    rank = math.ceil(percent / 100 * len(ascending))
    return ascending[max(rank, 1) - 1]
