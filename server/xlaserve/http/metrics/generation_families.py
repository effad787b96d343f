"""Metrics of generators, with their help texts and sources."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from xlaserve.http.metrics.metric_family import Family, Row, counter, gauge, histogram, one
from xlaserve.runtime.generator.counts import BOUNDS_NS, GenerationCounts, Times

_LE = (*(f',le="{bound / 1e9:g}"' for bound in BOUNDS_NS), ',le="+Inf"')


@dataclass(frozen=True, slots=True)
class GenerationReading:
    """The state of one generator, or the sum of several, during a scrape."""

    counts: GenerationCounts
    waiting: int
    """Requests waiting for a slot."""

    @classmethod
    def together(cls, readings: "Sequence[GenerationReading | None]") -> "GenerationReading | None":
        """Return the sums over generators, or None if there are none."""
        found = [reading for reading in readings if reading is not None]
        if not found:
            return None
        return cls.sum_of(found)

    @classmethod
    def sum_of(cls, found: "Sequence[GenerationReading]") -> "GenerationReading":
        """Return the sums over generators, zeros if there are none."""
        counts = GenerationCounts.sum_of([reading.counts for reading in found])
        return cls(counts, sum(reading.waiting for reading in found))


def _times(times: Times) -> Iterable[Row]:
    buckets = list(accumulate(times.buckets))  # a copy: the generator's thread goes on counting
    if not buckets[-1]:
        return []
    return [
        *(("_bucket", le, count) for le, count in zip(_LE, buckets, strict=True)),
        ("_count", "", buckets[-1]),
        ("_sum", "", times.total_ns / 1e9),
    ]


OF_GENERATION: tuple[Family[GenerationReading], ...] = (
    histogram(
        "xlaserve_generation_first_token_seconds",
        "Time from the submission of a generator request to its first token; absent until there"
        " is one",
        lambda reading: _times(reading.counts.first_token),
    ),
    histogram(
        "xlaserve_generation_token_seconds",
        "Time between consecutive tokens of a request; absent until there is one",
        lambda reading: _times(reading.counts.token),
    ),
    gauge(
        "xlaserve_generation_waiting",
        "Requests to a generator waiting for a slot",
        lambda reading: one(reading.waiting),
    ),
    gauge(
        "xlaserve_generation_running",
        "Requests with a slot, which equals the slots in use",
        lambda reading: one(reading.counts.running),
    ),
    gauge(
        "xlaserve_generation_slots",
        "Total number of slots",
        lambda reading: one(reading.counts.slots),
    ),
    gauge(
        "xlaserve_generation_positions_used",
        "Cache positions in use by requests with a slot",
        lambda reading: one(reading.counts.positions_used),
    ),
    gauge(
        "xlaserve_generation_positions",
        "Total cache positions of all slots",
        lambda reading: one(reading.counts.positions),
    ),
    counter(
        "xlaserve_generation_prompt_tokens_total",
        "Prompt tokens of requests that got a slot since the last load",
        lambda reading: one(reading.counts.prompt_tokens),
    ),
    counter(
        "xlaserve_generation_cached_tokens_total",
        "Prompt tokens reused from the prefix cache since the last load",
        lambda reading: one(reading.counts.cached_tokens),
    ),
    counter(
        "xlaserve_generation_prefix_lookups_total",
        "Prompts looked up in the prefix cache since the last load",
        lambda reading: one(reading.counts.prefix_lookups),
    ),
    counter(
        "xlaserve_generation_prefix_hits_total",
        "Prompts with a prefix cache hit since the last load",
        lambda reading: one(reading.counts.prefix_hits),
    ),
    counter(
        "xlaserve_generation_output_tokens_total",
        "Tokens generated since the last load",
        lambda reading: one(reading.counts.output_tokens),
    ),
    counter(
        "xlaserve_generation_preemptions_total",
        "Requests preempted by requests of higher priority since the last load",
        lambda reading: one(reading.counts.preemptions),
    ),
    counter(
        "xlaserve_generation_steps_total",
        "Decode steps since the last load, each with one token per participating slot",
        lambda reading: one(reading.counts.steps),
    ),
    counter(
        "xlaserve_generation_step_rows_total",
        "Rows computed by those steps, including rows without a request",
        lambda reading: one(reading.counts.step_rows),
    ),
    counter(
        "xlaserve_generation_chunks_total",
        "Prompt chunks computed since the last load",
        lambda reading: one(reading.counts.chunks),
    ),
    counter(
        "xlaserve_generation_host_seconds_total",
        "Host time between device programs, for scheduling and answering",
        lambda reading: one(reading.counts.host_ns / 1e9),
    ),
)
"""Metrics per version, only for loaded generators."""


def _usage(reading: GenerationReading) -> float:
    counts = reading.counts
    return counts.positions_used / counts.positions if counts.positions else 0.0


OF_GENERATORS: tuple[Family[GenerationReading], ...] = (
    gauge(
        "xlaserve_generators_waiting",
        "Requests to all generators waiting for a slot",
        lambda reading: one(reading.waiting),
    ),
    gauge(
        "xlaserve_generators_running",
        "Requests to all generators with a slot",
        lambda reading: one(reading.counts.running),
    ),
    gauge(
        "xlaserve_generators_cache_usage_ratio",
        "Share of all cache positions in use by requests with a slot, 0 to 1; the maximum over"
        " several processes",
        lambda reading: one(_usage(reading)),
    ),
)
"""Sums over all generators without labels, always present: load balancers of server pools read
them."""
