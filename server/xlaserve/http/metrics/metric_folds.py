"""Merging of the metrics of several workers, with a rule for each family."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from xlaserve.http.metrics.metric_family import Family, escape, gauge

WORKER_LABEL = "worker"

_LINES_AT_A_TIME = 1000
"""Lines parsed before the event loop serves requests: about 2 ms."""


class Fold(Enum):
    """Rule for merging the rows of several workers with the same name and labels."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    EACH = "each"
    """Rows are kept separate, with a label that names the worker."""


FOLDS: Mapping[str, Fold] = MappingProxyType(
    {
        # Metrics of versions.
        "nv_inference_request_success": Fold.SUM,
        "nv_inference_request_failure": Fold.SUM,
        "nv_inference_count": Fold.SUM,
        "nv_inference_exec_count": Fold.SUM,
        "nv_inference_request_duration_us": Fold.SUM,
        "nv_inference_queue_duration_us": Fold.SUM,
        "nv_inference_compute_input_duration_us": Fold.SUM,
        "nv_inference_compute_infer_duration_us": Fold.SUM,
        "nv_inference_compute_output_duration_us": Fold.SUM,
        "nv_cache_num_hits_per_model": Fold.SUM,
        "nv_cache_num_misses_per_model": Fold.SUM,
        "nv_cache_hit_duration_per_model": Fold.SUM,
        "nv_cache_miss_duration_per_model": Fold.SUM,
        "nv_inference_pending_request_count": Fold.SUM,
        "xlaserve_queue_age_seconds": Fold.MAX,
        "nv_model_load_duration_secs": Fold.MAX,
        "xlaserve_request_seconds": Fold.SUM,
        "xlaserve_batch_size": Fold.SUM,
        # Ready only if all workers are ready.
        "xlaserve_model_ready": Fold.MIN,
        # Each worker counts its share of the mapped memory.
        "xlaserve_model_bytes": Fold.SUM,
        "xlaserve_model_device_bytes": Fold.SUM,
        "xlaserve_bucket_executions_total": Fold.SUM,
        "xlaserve_padding_rows_total": Fold.SUM,
        "xlaserve_offloaded_batches_total": Fold.SUM,
        "xlaserve_offloaded_bytes_total": Fold.SUM,
        "xlaserve_model_compile_seconds": Fold.MAX,
        "xlaserve_model_on_demand_compilations_total": Fold.SUM,
        "xlaserve_bucket_compile_seconds": Fold.MAX,
        "xlaserve_bucket_execution_seconds": Fold.MIN,
        # A client's load loads the model in every worker; a replaced worker starts counting anew.
        "xlaserve_model_loads_total": Fold.MAX,
        "xlaserve_model_load_failures_total": Fold.MAX,
        "xlaserve_model_unloads_total": Fold.MAX,
        "xlaserve_model_failure": Fold.MAX,
        # Metrics of generators.
        "xlaserve_generation_first_token_seconds": Fold.SUM,
        "xlaserve_generation_token_seconds": Fold.SUM,
        "xlaserve_generation_waiting": Fold.SUM,
        "xlaserve_generation_running": Fold.SUM,
        "xlaserve_generation_slots": Fold.SUM,
        "xlaserve_generation_positions_used": Fold.SUM,
        "xlaserve_generation_positions": Fold.SUM,
        "xlaserve_generation_prompt_tokens_total": Fold.SUM,
        "xlaserve_generation_cached_tokens_total": Fold.SUM,
        "xlaserve_generation_prefix_lookups_total": Fold.SUM,
        "xlaserve_generation_prefix_hits_total": Fold.SUM,
        "xlaserve_generation_output_tokens_total": Fold.SUM,
        "xlaserve_generation_preemptions_total": Fold.SUM,
        "xlaserve_generation_steps_total": Fold.SUM,
        "xlaserve_generation_step_rows_total": Fold.SUM,
        "xlaserve_generation_chunks_total": Fold.SUM,
        "xlaserve_generation_host_seconds_total": Fold.SUM,
        "xlaserve_generators_waiting": Fold.SUM,
        "xlaserve_generators_running": Fold.SUM,
        "xlaserve_generators_cache_usage_ratio": Fold.MAX,
        # Metrics of models.
        "xlaserve_requests_in_progress": Fold.SUM,
        # Metrics of the server.
        "xlaserve_capacity_bytes": Fold.SUM,
        "xlaserve_capacity_used_bytes": Fold.SUM,
        "xlaserve_device_capacity_bytes": Fold.SUM,
        "xlaserve_device_capacity_used_bytes": Fold.SUM,
        "xlaserve_connections": Fold.SUM,
        "xlaserve_store_readable": Fold.MIN,
        "xlaserve_repository_readable": Fold.MIN,
        "xlaserve_repository_skipped_entries": Fold.MAX,
        "xlaserve_abandoned_work": Fold.SUM,
        "xlaserve_memory_mappings": Fold.EACH,
        "xlaserve_memory_mappings_limit": Fold.EACH,
        "xlaserve_held_bytes": Fold.SUM,
        "xlaserve_held_limit_bytes": Fold.SUM,
        "xlaserve_held_refusals_total": Fold.SUM,
        "xlaserve_held_waits_total": Fold.SUM,
        "xlaserve_refusals_total": Fold.SUM,
        "xlaserve_event_loop_lag_seconds": Fold.EACH,
        # Metrics of the machine, the same in each worker.
        "nv_gpu_utilization": Fold.MAX,
        "nv_gpu_memory_total_bytes": Fold.MAX,
        "nv_gpu_memory_used_bytes": Fold.MAX,
        "nv_gpu_power_usage": Fold.MAX,
        "nv_gpu_power_limit": Fold.MAX,
        "nv_energy_consumption": Fold.MAX,
        "xlaserve_gpu_temperature_celsius": Fold.MAX,
        "xlaserve_access_records_dropped_total": Fold.SUM,
        "xlaserve_log_records_lost_total": Fold.SUM,
        "xlaserve_spans_dropped_total": Fold.SUM,
        "xlaserve_fetched_bytes_total": Fold.SUM,
        "xlaserve_fetched_models_total": Fold.SUM,
        "xlaserve_fetch_seconds_total": Fold.SUM,
        "xlaserve_fetch_failures_total": Fold.SUM,
        "xlaserve_store_request_failures_total": Fold.SUM,
        "xlaserve_fetch_retries_total": Fold.SUM,
        "xlaserve_program_lookups_total": Fold.SUM,
        "xlaserve_program_lookup_seconds_total": Fold.SUM,
        "xlaserve_program_read_bytes_total": Fold.SUM,
        "xlaserve_program_writes_total": Fold.SUM,
        "xlaserve_program_written_bytes_total": Fold.SUM,
        # Metrics of each process (prometheus_client).
        "process_virtual_memory_bytes": Fold.EACH,
        "process_resident_memory_bytes": Fold.EACH,
        "process_start_time_seconds": Fold.EACH,
        "process_cpu_seconds_total": Fold.EACH,
        "process_open_fds": Fold.EACH,
        "process_max_fds": Fold.EACH,
    }
)
"""The merging rule of each metric family of the server."""

OF_CODE: Mapping[str, Fold] = MappingProxyType(
    {"counter": Fold.SUM, "histogram": Fold.SUM, "gauge": Fold.EACH}
)
"""Rules for metrics of model code, by type; the meaning of a gauge is unknown."""

_COMBINE: Mapping[Fold, Callable[[float, float], float]] = MappingProxyType(
    {Fold.SUM: lambda one, other: one + other, Fold.MAX: max, Fold.MIN: min}
)


@dataclass(slots=True)
class _Folded:
    """One family with the rows merged so far."""

    head: list[str]
    rule: Fold
    rows: dict[str, float] = field(default_factory=dict)
    """Values by row name with labels, in order of arrival."""

    def add(self, worker: str, key: str, value: float) -> None:
        """Add a row of one worker."""
        if self.rule is Fold.EACH:
            self.rows[_with_worker(key, worker)] = value
        elif key in self.rows:
            self.rows[key] = _COMBINE[self.rule](self.rows[key], value)
        else:
            self.rows[key] = value

    def text(self) -> str:
        """Return the family in the text format."""
        lines = (f"{key} {value}\n" for key, value in self.rows.items())
        return "".join((*self.head, *lines))


class FoldedMetrics:
    """Merges the workers' metrics in Prometheus' text format."""

    def __init__(self) -> None:
        self._families: dict[str, _Folded] = {}

    def add(self, worker: str, text: str) -> Iterator[None]:
        """Add one worker's metrics; yields regularly so that the event loop can serve requests.

        The format requires all rows of a family to follow its type line.
        """
        head: list[str] = []
        family: _Folded | None = None
        for number, line in enumerate(text.split("\n")):
            if number % _LINES_AT_A_TIME == _LINES_AT_A_TIME - 1:
                yield
            if line.startswith("# HELP "):
                head = [f"{line}\n"]
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                head.append(f"{line}\n")
                rule = FOLDS.get(name) or OF_CODE.get(kind, Fold.EACH)
                family = self._families.setdefault(name, _Folded(head, rule))
                head = []
            elif line and family is not None:
                # Label values may contain spaces; the row's value does not.
                key, _, value = line.rpartition(" ")
                family.add(worker, key, _number(value))

    def texts(self) -> Iterator[str]:
        """Yield the families one by one, in the text format."""
        return (family.text() for family in self._families.values())


OF_WORKERS: tuple[Family[Mapping[str, bool]], ...] = (
    gauge(
        "xlaserve_worker_answered",
        "1 if this response includes a process's values, 0 if the process did not answer in time;"
        " absent with one process",
        lambda workers: [
            ("", f'{WORKER_LABEL}="{escape(worker)}"', int(is_in))
            for worker, is_in in workers.items()
        ],
        WORKER_LABEL,
    ),
)
"""Per-worker metrics of a merged response."""


def of_workers(present: Mapping[str, bool]) -> str:
    """Return the OF_WORKERS families in the text format."""
    rows = (line for family in OF_WORKERS for line in (family.head, *family.lines("", present)))
    return "".join(rows)


class MetricsSnapshot(NamedTuple):
    """The metrics of one worker."""

    text: str
    exemplars: Mapping[str, tuple[float, str]]
    """Time and text of each exemplar, by the name and labels of its row."""


def newest(found: Iterable[Mapping[str, tuple[float, str]]]) -> dict[str, str]:
    """Return the newest serialized exemplar of each row."""
    last: dict[str, tuple[float, str]] = {}
    for exemplars in found:
        for row, exemplar in exemplars.items():
            last[row] = max(exemplar, last.get(row, exemplar))
    return {row: text for row, (_, text) in last.items()}


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _with_worker(key: str, worker: str) -> str:
    # As the first label, so that a bucket's bound remains the last.
    name, _, labels = key.removesuffix("}").partition("{")
    more = f",{labels}" if labels else ""
    return f'{name}{{{WORKER_LABEL}="{escape(worker)}"{more}}}'
