"""Schedule of request arrivals, drawn in advance and independent of the server."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.generation.lengths import Lengths

MOST_ARRIVALS = 100_000
"""Maximum number of arrivals, because the times of all their tokens are kept in memory."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A scheduled request."""

    at: float
    """Due time in seconds after the start."""
    lengths: Lengths
    counted: bool = True
    """Whether the request is due after the warm-up, and is included in the results."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All arrivals of a measurement, in order of their due times."""

    arrivals: Sequence[Arrival]
    rate: float
    """Average number of arrivals per second."""
    warmup: float
    duration: float
    """Seconds after the warm-up in which arrivals are counted."""
    seed: int


def poisson(
    rate: float, lengths: Iterable[Lengths], *, warmup: float, duration: float, seed: int
) -> Schedule:
    """Draw the arrivals of a Poisson process: independent of one another.

    Raises BenchmarkRefused if there are too many or none.
    """
    seconds = warmup + duration
    if rate * seconds > MOST_ARRIVALS:
        raise BenchmarkRefused(
            f"--rate {rate:g} for {seconds:g} s: expected at most {MOST_ARRIVALS} requests"
        )
    random = np.random.default_rng(seed)
    # Draw the number of arrivals, then uniform times, which avoids accumulating rounding errors.
    times = np.sort(random.uniform(0, seconds, random.poisson(rate * seconds))).tolist()
    arrivals = [Arrival(at, one, at >= warmup) for at, one in zip(times, lengths, strict=False)]
    if not any(one.counted for one in arrivals):
        raise BenchmarkRefused(
            f"--rate {rate:g} for {duration:g} s: no request arrives: use a longer --duration or"
            " another --seed"
        )
    return Schedule(arrivals, rate, warmup, duration, seed)
