"""Metrics of the server itself and of its GPUs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from xlaserve.grpc.reasons import KNOWN_REASONS
from xlaserve.http.metrics.metric_family import Family, Row, counter, escape, histogram, one
from xlaserve.serving.observability.failures import Failures
from xlaserve.serving.observability.gpus import GpuReading
from xlaserve.serving.observability.loop_lag import LAG_BOUNDS, LoopLag
from xlaserve.storage.fetching import FetchCounts


@dataclass(frozen=True, slots=True)
class ObservingReading:
    """Sources of the server's own metrics."""

    failures: Failures = field(default_factory=Failures)
    lag: LoopLag = field(default_factory=LoopLag)
    dropped_records: Callable[[], int] | None = None
    """Returns the number of dropped access records; None if there is no access log."""
    dropped_spans: Callable[[], int] | None = None
    """Returns the number of dropped spans; None if no spans are exported."""
    gpus: Callable[[], Sequence[GpuReading]] = tuple
    lost_records: Callable[[], int] = int
    """Number of log records lost."""


def _refusals(reading: ObservingReading) -> Iterable[Row]:
    counts = {**dict.fromkeys(KNOWN_REASONS, 0), **reading.failures.counts}
    return [("", f'reason="{escape(reason)}"', count) for reason, count in sorted(counts.items())]


def _lag(reading: ObservingReading) -> Iterable[Row]:
    counts = list(accumulate(reading.lag.buckets))
    bounds = [*(f"{bound:g}" for bound in LAG_BOUNDS), "+Inf"]
    rows: list[Row] = [
        ("_bucket", f'le="{bound}"', count) for bound, count in zip(bounds, counts, strict=True)
    ]
    return [*rows, ("_count", "", counts[-1]), ("_sum", "", reading.lag.seconds)]


def _counted(read: Callable[[], int] | None) -> Iterable[Row]:
    return () if read is None else one(read())


def _gpu(name: str, kind: str, text: str, quantity: str) -> Family[ObservingReading]:
    """Return the metric for a per-GPU quantity from NVML."""

    def read(reading: ObservingReading) -> Iterable[Row]:
        return [
            ("", f'gpu_uuid="{escape(gpu.uuid)}"', gpu.values[quantity])
            for gpu in reading.gpus()
            if quantity in gpu.values
        ]

    absent = "absent without NVML, or if the GPU does not report it"
    return Family(name, kind, f"{text}; {absent}", read, ("gpu_uuid",))


_OF_GPUS = (
    _gpu("nv_gpu_utilization", "gauge", "Utilization of a GPU, 0 to 1", "utilization"),
    _gpu("nv_gpu_memory_total_bytes", "gauge", "Memory of a GPU", "memory_total_bytes"),
    _gpu(
        "nv_gpu_memory_used_bytes",
        "gauge",
        "Memory of a GPU in use by all processes",
        "memory_used_bytes",
    ),
    _gpu("nv_gpu_power_usage", "gauge", "Power draw of a GPU, in watts", "power_watts"),
    _gpu("nv_gpu_power_limit", "gauge", "Power limit of a GPU, in watts", "power_limit_watts"),
    _gpu(
        "nv_energy_consumption",
        "counter",
        "Energy consumed by a GPU since its driver was loaded, in joules",
        "energy_joules",
    ),
    _gpu(
        "xlaserve_gpu_temperature_celsius", "gauge", "Temperature of a GPU", "temperature_celsius"
    ),
)
"""GPU metrics, under Triton's names where Triton has the same metric."""

OF_OBSERVING: tuple[Family[ObservingReading], ...] = (
    counter(
        "xlaserve_refusals_total",
        "Failed requests of all operations, by error class: Cancelled if the client disconnected,"
        " Rpc and a status if gRPC itself refused the request, Unexpected if the log has a"
        " traceback; known classes are exported from startup",
        _refusals,
        "reason",
    ),
    histogram(
        "xlaserve_event_loop_lag_seconds",
        "Event loop lag, sampled ten times a second",
        _lag,
    ),
    counter(
        "xlaserve_access_records_dropped_total",
        "Access records dropped or not written; absent without an access log",
        lambda reading: _counted(reading.dropped_records),
    ),
    counter(
        "xlaserve_log_records_lost_total",
        "Log records lost because the disk is full, or the reader of the log is gone or too slow",
        lambda reading: one(reading.lost_records()),
    ),
    counter(
        "xlaserve_spans_dropped_total",
        "Lost spans; absent unless trace_mode is opentelemetry",
        lambda reading: _counted(reading.dropped_spans),
    ),
    *_OF_GPUS,
)


OF_FETCHING: tuple[Family[FetchCounts], ...] = (
    counter(
        "xlaserve_fetched_bytes_total",
        "Bytes fetched from stores; this and the following are absent without a repository in a"
        " store",
        lambda counts: one(counts.fetched_bytes),
    ),
    counter(
        "xlaserve_fetched_models_total",
        "Model versions fetched completely",
        lambda counts: one(counts.models),
    ),
    counter(
        "xlaserve_fetch_seconds_total",
        "Total time of fetching model versions",
        lambda counts: one(counts.seconds),
    ),
    counter(
        "xlaserve_fetch_failures_total",
        "Failed fetches, excluding cancelled ones",
        lambda counts: one(counts.failures),
    ),
    counter(
        "xlaserve_fetch_retries_total",
        "Retried requests to stores",
        lambda counts: one(counts.retries),
    ),
    counter(
        "xlaserve_store_request_failures_total",
        "Requests to stores that failed after all retries; a request for a file fails its fetch",
        lambda counts: one(counts.refused),
    ),
)
