"""A schedule of arrivals, drawn before the first one and independent of the server."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.generation.lengths import Lengths

MOST_ARRIVALS = 100_000
"""Limit of arrivals: the times of all their tokens are kept."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is due."""

    at: float
    """Seconds after the beginning."""
    lengths: Lengths
    counted: bool = True
    """Whether it is due after the warm-up."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All arrivals of a measurement, ascending."""

    arrivals: Sequence[Arrival]
    rate: float
    """Arrivals per second, on average."""
    warmup: float
    duration: float
    """Seconds in which arrivals are counted, after the warm-up."""
    seed: int


def poisson(
    rate: float, lengths: Iterable[Lengths], *, warmup: float, duration: float, seed: int
) -> Schedule:
    """Return arrivals at random, independent of one another: a Poisson process.

    Raises BenchmarkRefused for too many, or none.
    """
    seconds = warmup + duration
    if rate * seconds > MOST_ARRIVALS:
        raise BenchmarkRefused(
            f"--rate {rate:g} for {seconds:g} s: expected at most {MOST_ARRIVALS} requests"
        )
    random = np.random.default_rng(seed)
    # The number is Poisson, and given it the times are uniform: no sum of gaps can go astray.
    times = np.sort(random.uniform(0, seconds, random.poisson(rate * seconds))).tolist()
    arrivals = [Arrival(at, one, at >= warmup) for at, one in zip(times, lengths, strict=False)]
    if not any(one.counted for one in arrivals):
        raise BenchmarkRefused(
            f"--rate {rate:g} for {duration:g} s: no request arrives: use a longer --duration or"
            " another --seed"
        )
    return Schedule(arrivals, rate, warmup, duration, seed)
