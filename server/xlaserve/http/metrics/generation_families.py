"""Metrics of generators: name, meaning and source of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from xlaserve.http.metrics.metric_family import Family, Row, one
from xlaserve.runtime.generator.counts import BOUNDS_NS, GenerationCounts, Times

_LE = (*(f',le="{bound / 1e9:g}"' for bound in BOUNDS_NS), ',le="+Inf"')


@dataclass(frozen=True, slots=True)
class GenerationReading:
    """A generator at the moment of a scrape, or several together."""

    counts: GenerationCounts
    waiting: int
    """Requests waiting for a slot."""

    @classmethod
    def together(cls, readings: "Sequence[GenerationReading | None]") -> "GenerationReading | None":
        """Return the sums over generators; None without any."""
        found = [reading for reading in readings if reading is not None]
        if not found:
            return None
        return cls.sum_of(found)

    @classmethod
    def sum_of(cls, found: "Sequence[GenerationReading]") -> "GenerationReading":
        """Return the sums, of none too."""
        counts = GenerationCounts.sum_of([reading.counts for reading in found])
        return cls(counts, sum(reading.waiting for reading in found))


def _times(times: Times) -> Iterable[Row]:
    buckets = list(accumulate(times.buckets))  # a copy: its thread goes on
    if not buckets[-1]:
        return []
    return [
        *(("_bucket", le, count) for le, count in zip(_LE, buckets, strict=True)),
        ("_count", "", buckets[-1]),
        ("_sum", "", times.total_ns / 1e9),
    ]


_LABELS = ("model", "version")

OF_GENERATION: tuple[Family[GenerationReading], ...] = (
    Family(
        "xlaserve_generation_first_token_seconds",
        "histogram",
        "Time from when a request to a generator was submitted to its first token; absent until "
        "there is one",
        lambda reading: _times(reading.counts.first_token),
        (*_LABELS, "le"),
    ),
    Family(
        "xlaserve_generation_token_seconds",
        "histogram",
        "Time from each token of a request to the next; absent until there is one",
        lambda reading: _times(reading.counts.token),
        (*_LABELS, "le"),
    ),
    Family(
        "xlaserve_generation_waiting",
        "gauge",
        "Requests to a generator that wait for a slot",
        lambda reading: one(reading.waiting),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_running",
        "gauge",
        "Requests that have a slot, and so the slots in use",
        lambda reading: one(reading.counts.running),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_slots",
        "gauge",
        "Slots that there are",
        lambda reading: one(reading.counts.slots),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_positions_used",
        "gauge",
        "Positions of the cache that hold a token of a request that has a slot",
        lambda reading: one(reading.counts.positions_used),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_positions",
        "gauge",
        "Positions of the cache that there are, of all slots",
        lambda reading: one(reading.counts.positions),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_prompt_tokens_total",
        "counter",
        "Tokens of prompts of the requests that were given a slot since the last load",
        lambda reading: one(reading.counts.prompt_tokens),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_cached_tokens_total",
        "counter",
        "Those of these tokens whose rows were kept of another prompt, and were not computed again",
        lambda reading: one(reading.counts.cached_tokens),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_prefix_lookups_total",
        "counter",
        "Prompts for which rows of others were looked for since the last load",
        lambda reading: one(reading.counts.prefix_lookups),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_prefix_hits_total",
        "counter",
        "Prompts that were given rows of others since the last load",
        lambda reading: one(reading.counts.prefix_hits),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_output_tokens_total",
        "counter",
        "Tokens that were generated since the last load",
        lambda reading: one(reading.counts.output_tokens),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_preemptions_total",
        "counter",
        "Slots that requests have given up to others of a better priority since the last load",
        lambda reading: one(reading.counts.preemptions),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_steps_total",
        "counter",
        "Steps since the last load, each with a token for every slot that takes part",
        lambda reading: one(reading.counts.steps),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_step_rows_total",
        "counter",
        "Rows that those steps computed, of which some may have had no request",
        lambda reading: one(reading.counts.step_rows),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_chunks_total",
        "counter",
        "Chunks of prompts that were computed since the last load",
        lambda reading: one(reading.counts.chunks),
        _LABELS,
    ),
    Family(
        "xlaserve_generation_host_seconds_total",
        "counter",
        "Time between the programs, in which the thread of a generator decides and answers",
        lambda reading: one(reading.counts.host_ns / 1e9),
        _LABELS,
    ),
)
"""Families with rows for loaded generators alone."""


def _usage(reading: GenerationReading) -> float:
    counts = reading.counts
    return counts.positions_used / counts.positions if counts.positions else 0.0


OF_GENERATORS: tuple[Family[GenerationReading], ...] = (
    Family(
        "xlaserve_generators_waiting",
        "gauge",
        "Requests to all generators of the server that wait for a slot",
        lambda reading: one(reading.waiting),
    ),
    Family(
        "xlaserve_generators_running",
        "gauge",
        "Requests to all generators of the server that have a slot",
        lambda reading: one(reading.counts.running),
    ),
    Family(
        "xlaserve_generators_cache_usage_ratio",
        "gauge",
        "Positions of all caches that hold a token of a request that has a slot, of those that "
        "there are: 0 to 1; of several processes the fullest",
        lambda reading: one(_usage(reading)),
    ),
)
"""One row each, without labels and in every server, as what picks a server of a pool reads them."""
