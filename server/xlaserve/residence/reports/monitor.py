"""Reports on loaded models: statistics, sizes and states."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from xlaserve.residence.registry import Model, Registry, Version
from xlaserve.runtime.loaded import Bucket
from xlaserve.serving.statistics import Totals

_MEMORY_KINDS: Mapping[str, str] = MappingProxyType({"cpu": "CPU", "cuda": "GPU", "tpu": "TPU"})
"""Names of MemoryUsage for the memory of JAX platforms."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """How much of one kind of memory a model uses (MemoryUsage)."""

    kind: str
    """CPU, GPU or TPU."""
    device_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class VersionReport:
    """A ready model version and its statistics (ModelStatistics)."""

    name: str
    version: str
    totals: Totals
    memory: tuple[MemoryUse, ...]
    buckets: tuple[Bucket, ...] = ()
    """Buckets compiled so far."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """A model version on the status page; cheap enough to read every second."""

    name: str
    version: str
    state: str
    reason: str
    size_bytes: int | None
    """Bytes in memory; None if not loaded."""
    compile_seconds: float | None
    pending: int
    """Number of queued executions."""
    success_count: int
    fail_count: int
    request_ns: int
    """Total duration of all successful requests."""
    request_buckets: tuple[int, ...]
    """Number of successful requests by duration, in the intervals of REQUEST_BOUNDS_NS."""
    last_inference_ms: int
    """Time of the last inference in ms since the epoch; 0 if there was none."""


def report(registry: Registry, name: str = "", version: str = "") -> list[VersionReport]:
    """Report on the ready versions of all models, of one model, or on one version.

    Raises ModelNotFound or ModelNotReady if a named model has no such version (statistics
    extension).
    """
    chosen = every_version(registry) if not name else _named(registry, name, version)
    return [report_of(found) for found in chosen if found.instance is not None]


def every_version(registry: Registry) -> list[Version]:
    """List every version that the registry knows, by model and number."""
    return [version for model in registry.models() for version in _ordered(model)]


def _named(registry: Registry, name: str, version: str) -> list[Version]:
    answering, _ = registry.resolve(name, version)
    model = registry.find(name)
    return [answering] if version or model is None else _ordered(model)


def _ordered(model: Model) -> list[Version]:
    return sorted(model.versions.values(), key=lambda version: int(version.number))


def report_of(version: Version) -> VersionReport:
    """Report on one version; without memory and buckets if it is not loaded."""
    totals = version.statistics.totals()
    instance = version.instance
    if instance is None:
        return VersionReport(version.model, version.number, totals, ())
    uses = tuple(_memory_use(name, size) for name, size in instance.held.items() if size)
    return VersionReport(version.model, version.number, totals, uses, instance.info.buckets)


def _memory_use(device: str, size_bytes: int) -> MemoryUse:
    platform, _, number = device.partition(":")
    return MemoryUse(_MEMORY_KINDS.get(platform, platform.upper()), int(number), size_bytes)


def status_rows(registry: Registry) -> list[StatusRow]:
    """List every version that the registry knows, by model and number."""
    return [row for model in registry.models() for row in rows_of_model(registry, model)]


def rows_of_model(registry: Registry, model: Model) -> list[StatusRow]:
    """List the versions of a model, by number."""
    return [_row(registry, version) for version in _ordered(model)]


def _row(registry: Registry, version: Version) -> StatusRow:
    state, reason = registry.shown_state(version)
    instance, statistics = version.instance, version.statistics
    success = statistics.success
    return StatusRow(
        version.model,
        version.number,
        state,
        reason,
        size_bytes=instance.memory.total_bytes if instance else None,
        compile_seconds=instance.info.compile_seconds if instance else None,
        pending=instance.pending if instance else 0,
        success_count=success.count,
        fail_count=statistics.fail_count,
        request_ns=success.ns,
        request_buckets=statistics.request_buckets,
        last_inference_ms=statistics.last_inference_ms,
    )
