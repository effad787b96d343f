"""Counters of a generator, written by its own thread and readable from any thread."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

BOUNDS_NS = tuple(
    round(milliseconds * 1_000_000)
    for milliseconds in (
        *(0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500),
        *(1000, 2500, 5000, 10_000, 30_000, 60_000),
    )
)
"""Upper bounds of the histogram's buckets in nanoseconds; a last bucket is unbounded."""


class Times:
    """A histogram of times in nanoseconds."""

    __slots__ = ("buckets", "total_ns")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_NS) + 1)
        """Number of durations in each bucket; the last bucket is unbounded."""
        self.total_ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Add a number of equal times."""
        self.buckets[bisect_left(BOUNDS_NS, ns)] += count
        self.total_ns += ns * count

    def include(self, other: "Times") -> None:
        """Add all times of another histogram."""
        self.buckets = [one + more for one, more in zip(self.buckets, other.buckets, strict=True)]
        self.total_ns += other.total_ns


@dataclass(slots=True)
class GenerationCounts:
    """Counters of a generator: totals since it was loaded, and its present state.

    One thread writes. A reader may see one counter updated for a request and another not yet.
    """

    slots: int = 0
    positions: int = 0
    """Capacity of the cache in positions, all slots together."""
    running: int = 0
    """Requests with a slot."""
    positions_used: int = 0
    """Positions in use by requests with a slot."""
    prompt_tokens: int = 0
    """Prompt tokens of requests with a slot."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, which were not computed."""
    prefix_lookups: int = 0
    prefix_hits: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    """Number of preemptions."""
    steps: int = 0
    step_rows: int = 0
    """Rows computed by all steps, including rows without a request."""
    chunks: int = 0
    """Number of computed prompt chunks."""
    host_ns: int = 0
    """Time that the generator's thread spent outside of programs, in nanoseconds."""
    first_token: Times = field(default_factory=Times)
    """Time from submission to the first token."""
    token: Times = field(default_factory=Times)
    """Time between tokens of a request."""

    @classmethod
    def sum_of(cls, counts: "Sequence[GenerationCounts]") -> "GenerationCounts":
        """Add up the counts of several generators."""
        found = cls()
        for one in counts:
            for name in _NUMBERS:
                setattr(found, name, getattr(found, name) + getattr(one, name))
            found.first_token.include(one.first_token)
            found.token.include(one.token)
        return found


_NUMBERS = tuple(
    name for name, one in GenerationCounts.__dataclass_fields__.items() if one.type is int
)


@runtime_checkable
class CountsTokens(Protocol):
    """A model that generates tokens."""

    @property
    def counts(self) -> GenerationCounts:
        """Return the model's live counters."""
        ...
