"""Model configuration and statistics as JSON, with the field names of Triton's endpoints."""

import math
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import betterproto
import msgspec

from xlaserve.model_config.schema import Field, schema_of
from xlaserve.residence.reports.monitor import VersionReport
from xlaserve.runtime.config_served import ServedConfig
from xlaserve.serving.statistics import BatchStatistics, Totals

T = TypeVar("T")

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# --- Configuration ---


def config_json(config: ServedConfig) -> dict[str, Json]:
    """Return a configuration as proto-JSON with proto field names and 64-bit integers as numbers.

    All fields are present, except messages that were not set.
    """
    return _message(config.message())


def _message(message: betterproto.Message) -> dict[str, Json]:
    members: dict[str, Json] = {}
    for field in schema_of(type(message)).by_name.values():
        if field.oneof and betterproto.which_one_of(message, field.oneof)[0] != field.attribute:
            continue
        value = getattr(message, field.attribute)
        if field.kind == "map":
            members[field.name] = {str(key): _one(field, each) for key, each in value.items()}
        elif field.repeated:
            members[field.name] = [_one(field, each) for each in value]
        elif field.kind != "message" or betterproto.serialized_on_wire(value):
            members[field.name] = _one(field, value)
    return members


def _one(field: Field, value: Any) -> Json:
    if isinstance(value, betterproto.Message):
        return _message(value)
    if field.kind == "enum":
        return str(value.name)
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE.get(value, "NaN")
    assert isinstance(value, bool | int | float | str)
    return value


_NOT_FINITE = MappingProxyType({math.inf: "Infinity", -math.inf: "-Infinity"})

# --- Statistics ---


class Duration(msgspec.Struct):
    """A number of events and their total time."""

    count: int
    ns: int


class InferStatistics(msgspec.Struct):
    """Durations of a model's requests."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class InferBatchStatistics(msgspec.Struct):
    """Durations of the executions of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class MemoryUsage(msgspec.Struct):
    """Memory of a model in one memory pool, in bytes."""

    type: str
    id: int
    byte_size: int


class CompileStatistics(msgspec.Struct):
    """Durations of compiling and executing one batch size; an xlaserve extension."""

    batch_size: int
    sizes: list[int]
    """Sizes of the model's variable dimensions besides the batch."""
    compile_ns: int
    execution_ns: int
    """Fastest execution during the warm-up."""


class ModelStatistics(msgspec.Struct):
    """Counts and durations of one model version."""

    name: str
    version: str
    last_inference: int
    """Milliseconds since the epoch."""
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    response_stats: dict[str, Duration]
    """Always empty; Triton fills it for decoupled models."""
    batch_stats: list[InferBatchStatistics]
    memory_usage: list[MemoryUsage]
    compile_stats: list[CompileStatistics]


class Statistics(msgspec.Struct):
    """The statistics of some model versions."""

    model_stats: list[ModelStatistics]


def statistics_json(reports: Iterable[VersionReport]) -> Statistics:
    """Return statistics with the fields of Triton's response, for msgspec to serialize."""
    return Statistics([_statistics(report) for report in reports])


def _statistics(report: VersionReport) -> ModelStatistics:
    totals = report.totals
    return ModelStatistics(
        report.name,
        report.version,
        totals.last_inference_ms,
        totals.inference_count,
        totals.execution_count,
        _converted(totals, InferStatistics),
        response_stats={},
        batch_stats=[_converted(batch, InferBatchStatistics) for batch in totals.batches],
        memory_usage=[
            MemoryUsage(use.kind, use.device_id, use.size_bytes) for use in report.memory
        ],
        compile_stats=[
            CompileStatistics(
                bucket.rows,
                list(bucket.sizes),
                round(bucket.compile_seconds * 1e9),
                round(bucket.seconds * 1e9),
            )
            for bucket in report.buckets
        ],
    )


def _converted(counted: BatchStatistics | Totals, kind: type[T]) -> T:
    """Return the fields that the JSON has; others of the engine's are not shown."""
    return msgspec.convert(counted, kind, from_attributes=True)
