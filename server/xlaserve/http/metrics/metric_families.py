"""Metrics of models and versions, with their help texts and sources."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

from xlaserve.http.metrics.generation_families import OF_GENERATION, GenerationReading
from xlaserve.http.metrics.metric_family import Family, Row, counter, escape, gauge, histogram, one
from xlaserve.residence.executed_rows import ExecutedRows
from xlaserve.residence.registry import Instance, Model
from xlaserve.runtime.loaded import Bucket
from xlaserve.serving.observability.events import MAX_TEXT, cut
from xlaserve.serving.stations.backlog import NO_BACKLOG, Backlog
from xlaserve.serving.statistics import (
    NO_OFFLOADS,
    REQUEST_BOUNDS_NS,
    FailureReason,
    Totals,
    VersionStatistics,
)

# --- Model versions ---


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """Load counts of several versions, with the same attributes as the statistics of one."""

    loads: int
    load_failures: int
    unloads: int
    load_seconds: float = 0.0
    """Duration of the last successful load."""


@dataclass(frozen=True, slots=True)
class VersionReading:
    """The state of a model version during a scrape."""

    totals: Totals
    statistics: VersionStatistics | LoadCounts
    instance: Instance | None
    """The loaded instance; None if the version is not loaded, or for versions that share one
    series."""
    ready: int
    """1 if the version is ready; for versions that share a series, the number of ready ones."""
    backlog: Backlog = NO_BACKLOG
    """Queued executions; none while the version is not loaded."""
    generation: GenerationReading | None = None
    """State of a loaded generator; None for other versions."""
    executed: ExecutedRows | None = None
    """Executions by bucket; None for versions that share one series."""
    failure: str = ""
    """Why the last load failed; empty after a success."""


_VERSION_LABELS = ("model", "version")

_REASONS: Mapping[FailureReason, str] = MappingProxyType(
    {
        FailureReason.REJECTED: "REJECTED",
        FailureReason.CANCELLED: "CANCELED",
        FailureReason.BACKEND: "BACKEND",
        FailureReason.INVALID: "OTHER",
    }
)
"""Triton's labels for failure reasons."""

LOAD_FAILURES = "xlaserve_model_load_failures_total"
"""Also has rows for models without a known version."""

FAILURE = "xlaserve_model_failure"
"""Also has rows for models without a known version."""

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Powers of two, like the sizes of large batches; see EXACT_ROWS of the statistics."""

REQUEST_SECONDS = "xlaserve_request_seconds"
"""The histogram whose buckets have exemplars."""
_SECONDS_LE = tuple(f',le="{bound / 1e9:g}"' for bound in REQUEST_BOUNDS_NS)
_INFINITE = ',le="+Inf"'
_ROWS_LE = tuple(f',le="{bound}"' for bound in BATCH_BOUNDS)


def seconds_bound(number: int) -> str:
    """Return the `le` label of a bucket of the request duration histogram."""
    return (*_SECONDS_LE, _INFINITE)[number]


def _histogram(bounds: Iterable[str], counts: Iterable[int], total: float) -> list[Row]:
    """Return the rows of a histogram; `counts` has one element more than `bounds`."""
    cumulative = list(accumulate(counts))
    count = cumulative[-1]
    below = zip((*bounds, _INFINITE), cumulative, strict=True)
    return [*(("_bucket", le, n) for le, n in below), ("_count", "", count), ("_sum", "", total)]


def _request_seconds(reading: VersionReading) -> list[Row]:
    totals = reading.totals
    if not totals.success.count:
        return []
    return _histogram(_SECONDS_LE, totals.request_buckets, totals.success.ns / 1e9)


def _batch_rows(reading: VersionReading) -> list[Row]:
    totals = reading.totals
    if not totals.execution_count:
        return []
    counts = [0] * (len(BATCH_BOUNDS) + 1)
    for batch in totals.batches:
        bucket = min((batch.batch_size - 1).bit_length(), len(BATCH_BOUNDS))
        counts[bucket] += batch.compute_infer.count
    return _histogram(_ROWS_LE, counts, totals.inference_count)


def _failures(reading: VersionReading) -> list[Row]:
    failures = reading.totals.failures
    return [("", f',reason="{word}"', failures[reason]) for reason, word in _REASONS.items()]


def _offloads(reading: VersionReading) -> Iterable[Row]:
    offloads = reading.totals.offloads
    if offloads == NO_OFFLOADS:
        return ()
    return [
        ("", ',outcome="executed"', offloads.batches),
        ("", ',outcome="refused"', offloads.refused),
        ("", ',outcome="lost"', offloads.lost),
    ]


def _cached(reading: VersionReading, value: int) -> Iterable[Row]:
    instance = reading.instance
    return one(value) if instance is not None and instance.config.response_cache else ()


def _bytes(reading: VersionReading) -> list[Row]:
    if reading.instance is None:
        return []
    memory = reading.instance.memory
    return [
        ("", ',part="parameters"', memory.parameters_bytes),
        ("", ',part="constants"', memory.constants_bytes),
        ("", ',part="temporaries"', memory.temporaries_bytes),
        ("", ',part="executables"', memory.executables_bytes),
        ("", ',part="states"', memory.states_bytes),
        ("", ',part="labels"', memory.labels_bytes),
    ]


def _device_bytes(reading: VersionReading) -> list[Row]:
    if reading.instance is None:
        return []
    held = reading.instance.memory.per_device
    return [("", f',device="{escape(device)}"', size) for device, size in held.items()]


def _sizes(reading: VersionReading) -> Sequence[int]:
    return () if reading.instance is None else reading.instance.bucket_sizes


def _bucket_executions(reading: VersionReading) -> list[Row]:
    if reading.executed is None:
        return []
    counts = reading.executed.by_bucket(reading.totals, _sizes(reading))
    return [("", f',rows="{rows}"', count) for rows, count in sorted(counts.items())]


def _padding(reading: VersionReading) -> Iterable[Row]:
    if reading.executed is None:
        return ()
    return one(reading.executed.padding(reading.totals, _sizes(reading)))


def _buckets(reading: VersionReading, read: Callable[[Bucket], float]) -> list[Row]:
    if reading.instance is None:
        return []
    seconds: dict[int, float] = {}
    for bucket in reading.instance.info.buckets:
        seconds[bucket.rows] = seconds.get(bucket.rows, 0.0) + read(bucket)
    return [("", f',rows="{rows}"', value) for rows, value in seconds.items()]


def _when_loaded(read: Callable[[Instance], float]) -> Callable[[VersionReading], Iterable[Row]]:
    def rows(reading: VersionReading) -> Iterable[Row]:
        return () if reading.instance is None else one(read(reading.instance))

    return rows


def _of_version(family: Family[VersionReading]) -> Family[VersionReading]:
    """Prefix the rows of a family with the labels of the version."""
    return replace(family, labels=(*_VERSION_LABELS, *family.labels))


def failure_rows(reason: str) -> Iterable[Row]:
    """Return the row of a failure with its truncated reason, or nothing if there is none."""
    return (("", f',reason="{escape(cut(reason, MAX_TEXT))}"', 1),) if reason else ()


def _when_generating(family: Family[GenerationReading]) -> Family[VersionReading]:
    """Adapt a family of generators to all versions."""

    def read(reading: VersionReading) -> Iterable[Row]:
        return () if reading.generation is None else family.read(reading.generation)

    return Family(family.name, family.kind, family.help, read, family.labels)


_ROWS: tuple[Family[VersionReading], ...] = (
    counter(
        "nv_inference_request_success",
        "Answered requests",
        lambda r: one(r.totals.success.count),
    ),
    counter(
        "nv_inference_request_failure",
        "Failed requests to a ready model, by reason: REJECTED by a limit, CANCELED by the client"
        " or its deadline, BACKEND if the model failed, OTHER if the request does not match the"
        " model",
        _failures,
        "reason",
    ),
    counter(
        "nv_inference_count",
        "Rows of answered requests; one per request of a model without batches",
        lambda r: one(r.totals.inference_count),
    ),
    counter(
        "nv_inference_exec_count",
        "Model executions for answered requests",
        lambda r: one(r.totals.execution_count),
    ),
    counter(
        "nv_inference_request_duration_us",
        "Time of answered requests, from the lookup of the model",
        lambda r: one(r.totals.success.ns // 1000),
    ),
    counter(
        "nv_inference_queue_duration_us",
        "Part of that time spent in the queue",
        lambda r: one(r.totals.queue.ns // 1000),
    ),
    counter(
        "nv_inference_compute_input_duration_us",
        "Part of that time spent checking and decoding inputs",
        lambda r: one(r.totals.compute_input.ns // 1000),
    ),
    counter(
        "nv_inference_compute_infer_duration_us",
        "Part of that time spent executing the model, including transfers to and from the device",
        lambda r: one(r.totals.compute_infer.ns // 1000),
    ),
    counter(
        "nv_inference_compute_output_duration_us",
        "The rest of that time, until the answer was complete",
        lambda r: one(r.totals.compute_output.ns // 1000),
    ),
    counter(
        "nv_cache_num_hits_per_model",
        "Requests answered from the response cache; absent for models without one",
        lambda r: _cached(r, r.totals.cache_hit.count),
    ),
    counter(
        "nv_cache_num_misses_per_model",
        "Response cache misses",
        lambda r: _cached(r, r.totals.cache_miss.count),
    ),
    counter(
        "nv_cache_hit_duration_per_model",
        "Microseconds spent on lookups that hit",
        lambda r: _cached(r, r.totals.cache_hit.ns // 1000),
    ),
    counter(
        "nv_cache_miss_duration_per_model",
        "Microseconds spent on lookups that missed, and on storing their answers",
        lambda r: _cached(r, r.totals.cache_miss.ns // 1000),
    ),
    gauge(
        "nv_inference_pending_request_count",
        "Queued executions",
        lambda r: one(r.backlog.pending),
    ),
    gauge(
        "xlaserve_queue_age_seconds",
        "Seconds since the oldest queued execution was submitted, 0 if none is queued",
        lambda r: one(r.backlog.oldest_seconds),
    ),
    gauge(
        "nv_model_load_duration_secs",
        "Seconds of the last load, while the model is loaded",
        lambda r: () if r.instance is None else one(r.statistics.load_seconds),
    ),
    histogram(
        REQUEST_SECONDS,
        "Latency of answered requests; absent until there is one",
        _request_seconds,
    ),
    histogram(
        "xlaserve_batch_size",
        "Rows per execution; absent until there is one",
        _batch_rows,
    ),
    gauge(
        "xlaserve_model_ready",
        "1 if the model is ready, 0 otherwise",
        lambda r: one(r.ready),
    ),
    gauge(
        "xlaserve_model_bytes",
        "Memory of a loaded model: parameters, constants, temporaries of the largest batch, "
        "executables, states of sequences, labels of classes",
        _bytes,
        "part",
    ),
    gauge(
        "xlaserve_model_device_bytes",
        "Memory of a loaded model on each device; absent if unknown",
        _device_bytes,
        "device",
    ),
    counter(
        "xlaserve_bucket_executions_total",
        "Executions by compiled batch size, over all loads of the version",
        _bucket_executions,
        "rows",
    ),
    counter(
        "xlaserve_padding_rows_total",
        "Padding rows computed by these executions",
        _padding,
    ),
    counter(
        "xlaserve_offloaded_batches_total",
        "Batches offered to an idle worker, by outcome: executed there, refused and executed"
        " locally, or lost with the worker; absent before the first",
        _offloads,
        "outcome",
    ),
    counter(
        "xlaserve_offloaded_bytes_total",
        "Bytes of tensors sent between workers for these batches, in both directions",
        lambda reading: one(reading.totals.offloads.bytes) if reading.totals.offloads.bytes else (),
    ),
    gauge(
        "xlaserve_model_compile_seconds",
        "Seconds of compilation since the last load, while the model is loaded",
        _when_loaded(lambda instance: instance.info.compile_seconds),
    ),
    counter(
        "xlaserve_model_on_demand_compilations_total",
        "Shapes compiled on demand since the last load",
        _when_loaded(lambda instance: instance.info.on_demand_compilations),
    ),
    gauge(
        "xlaserve_bucket_compile_seconds",
        "Compilation seconds per batch size; 0 rows for models without batches",
        lambda r: _buckets(r, lambda bucket: bucket.compile_seconds),
        "rows",
    ),
    gauge(
        "xlaserve_bucket_execution_seconds",
        "Fastest warm-up execution per batch size in seconds; 0 if not measured",
        lambda r: _buckets(r, lambda bucket: bucket.seconds),
        "rows",
    ),
    counter(
        "xlaserve_model_loads_total",
        "Successful loads and reloads",
        lambda r: one(r.statistics.loads),
    ),
    counter(
        LOAD_FAILURES,
        "Failed or cancelled loads and reloads; the version is empty for those that failed before"
        " one was chosen",
        lambda r: one(r.statistics.load_failures),
    ),
    counter(
        "xlaserve_model_unloads_total",
        "Unloads",
        lambda r: one(r.statistics.unloads),
    ),
    gauge(
        FAILURE,
        "1 from a failed load until the next successful one, with the reason of the repository"
        " index; the version is empty if the load failed before one was chosen",
        lambda r: failure_rows(r.failure),
        "reason",
    ),
    *map(_when_generating, OF_GENERATION),
)

OF_VERSIONS = tuple(map(_of_version, _ROWS))
"""One row for each version in the registry, until the files of its model are deleted."""


# --- Models ---


OF_MODELS: tuple[Family[Model], ...] = (
    gauge(
        "xlaserve_requests_in_progress",
        "Requests in progress, over all versions",
        lambda model: one(model.requests),
        "model",
    ),
)
