"""The contents of a model's page: versions, memory, and dependent ensembles.

The page's JSON contains `LoadedReading` unchanged, with its `Meta` descriptions in the schema.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from xlaserve.errors.access import HIDDEN
from xlaserve.model_config.buckets import declared
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.dependents import Dependents
from xlaserve.residence.executed_rows import rows_by_bucket
from xlaserve.residence.registry import Instance, Registry, Version
from xlaserve.residence.reports.monitor import VersionReport, report_of
from xlaserve.row_proofs.verdict import Independence
from xlaserve.runtime.generator.counts import CountsTokens
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.runtime.metadata_parameters import of_input, of_output
from xlaserve.serving.access.sight import Sees, without_names
from xlaserve.serving.observability.events import Origin
from xlaserve.serving.observability.failures import FailedCall, Failures, of_anybody
from xlaserve.tensors import TensorSpec

ANALYSIS = "analysis"
DECLARATION = "declaration"


class TensorReading(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input or output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, str] = {}
    """Parameters as in ModelMetadata: `content_type`, `format`, `labels`, `optional`."""


@dataclass(frozen=True, slots=True)
class RowsReading:
    """Whether the rows of a batch are independent of one another, and how this is known."""

    independence: Annotated[str, Meta(description="`proved`, `mixed`, `unknown`, or empty.")]
    by: Annotated[str, Meta(description="How it is known: `analysis`, `declaration`, or empty.")]
    text: str
    """Details of the analysis."""
    notice: Annotated[str, Meta(description="Why requests are not batched.")]


@dataclass(frozen=True, slots=True)
class CompiledReading:
    """How many programs of a version were compiled, cached or shared, and the time it took."""

    compiled: int
    cached: int
    shared: int
    on_demand: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GeneratorReading:
    """A loaded language model: its slots and cache at one moment, and its inputs."""

    slots: int
    running: Annotated[int, Meta(description="Number of requests in a slot.")]
    positions: Annotated[int, Meta(description="Total number of cache positions.")]
    positions_used: int
    """Cache positions in use by requests that hold a slot."""
    prompt_tokens: Annotated[int, Meta(description="Prompt tokens since the load.")]
    output_tokens: int
    max_length: Annotated[int, Meta(description="Maximum length of a request, in tokens.")]
    has_text: Annotated[bool, Meta(description="Whether OpenAI's endpoints serve the model.")]
    has_template: Annotated[bool, Meta(description="Whether the model accepts chat messages.")]
    no_text: Annotated[
        str,
        Meta(description="Why the model accepts no text; completes a sentence after its name."),
    ]


@dataclass(frozen=True, slots=True)
class LoadedReading:
    """A version loaded in one process."""

    platform: str
    inputs: tuple[TensorReading, ...]
    outputs: tuple[TensorReading, ...]
    max_batch_size: int
    decoupled: bool
    sequences: bool
    steps: tuple[str, ...]
    """Model names of an ensemble's steps."""
    rows: RowsReading
    memory: Annotated[dict[str, int], Meta(description="Memory in bytes, by purpose.")]
    devices: Annotated[dict[str, int], Meta(description="Memory in bytes, by device.")]
    programs: CompiledReading
    pending: int
    """Queued executions."""
    generator: GeneratorReading | None = None
    """The generator's slots and cache; None for a model that does not generate tokens."""


@dataclass(frozen=True, slots=True)
class VersionReading:
    """One version of a model."""

    version: str
    state: str
    reason: str
    loads: int
    load_failures: int
    unloads: int
    load_seconds: float
    """Duration of the last successful load."""
    origin: Origin | None
    """Caller and time of the load; None if never loaded."""
    loaded: LoadedReading | None
    """The loaded instance; None if the version is not loaded."""
    report: VersionReport
    """Counts since the start, and the buckets compiled so far."""


@dataclass(frozen=True, slots=True)
class ModelReading:
    """One model at one moment."""

    name: str
    is_known: bool
    """Whether the registry knows the model: a load was attempted."""
    in_progress: int
    """Requests in progress, over all versions."""
    dependents: tuple[str, ...]
    """Loaded ensembles that use the model."""
    versions: tuple[VersionReading, ...]
    failures: tuple[FailedCall, ...]
    """The last failed requests for the model, newest first."""
    reason: str = ""
    """Why the model has no versions, if a load failed before one was known."""


class ModelBoard:
    """Reads one model from the registry. Event loop only."""

    def __init__(self, registry: Registry, failures: Failures) -> None:
        self._registry = registry
        self._failures = failures

    def read(self, name: str) -> ModelReading:
        """Return a model's current state; a model that is not loaded has no versions."""
        model = self._registry.find(name)
        versions = [] if model is None else sorted(model.versions.values(), key=_number)
        return ModelReading(
            name,
            model is not None,
            0 if model is None else model.requests,
            _over(self._registry, name),
            tuple(_version(self._registry, version) for version in versions),
            tuple(failure for failure in self._failures.last if failure.model == name),
            self._registry.failed.reason(name),
        )


def of_model_in_sight(reading: ModelReading, sees: Sees, owner: str) -> ModelReading:
    """Return a model's reading without hidden models and without other callers' identities."""
    return replace(
        reading,
        dependents=tuple(name for name in reading.dependents if sees(name)),
        versions=tuple(_version_in_sight(one, sees, owner) for one in reading.versions),
        failures=tuple(map(of_anybody, reading.failures)),
        reason=without_names(reading.reason, sees),
    )


def _version_in_sight(version: VersionReading, sees: Sees, owner: str) -> VersionReading:
    loaded, origin = version.loaded, version.origin
    if loaded is not None:
        steps = tuple(name if sees(name) else HIDDEN for name in loaded.steps)
        loaded = replace(loaded, steps=steps)
    if origin is not None:
        origin = msgspec.structs.replace(origin, asker=origin.asker.seen_by(owner))
    reason = without_names(version.reason, sees)
    return replace(version, reason=reason, origin=origin, loaded=loaded)


def _number(version: Version) -> int:
    return int(version.number)


def _over(registry: Registry, name: str) -> tuple[str, ...]:
    """List the ensembles that use a model, directly or indirectly."""
    return tuple(one for one in Dependents(registry).leaving_with(name) if one != name)


def _version(registry: Registry, version: Version) -> VersionReading:
    state, reason = registry.shown_state(version)
    statistics, instance = version.statistics, version.instance
    return VersionReading(
        version.number,
        state,
        reason,
        statistics.loads,
        statistics.load_failures,
        statistics.unloads,
        statistics.load_seconds,
        version.origin,
        None if instance is None else _loaded(instance),
        report_of(version),
    )


def _loaded(instance: Instance) -> LoadedReading:
    info, config, memory = instance.info, instance.config, instance.memory
    return LoadedReading(
        info.platform,
        tuple(_tensor(one, of_input(config, info, one.name)) for one in info.inputs),
        tuple(_tensor(one, of_output(config, one.name)) for one in info.outputs),
        info.max_batch_size,
        info.is_decoupled,
        info.has_sequences,
        tuple(dict.fromkeys(name for name, _ in instance.steps)),
        _rows(info, config),
        {
            "parameters": memory.parameters_bytes,
            "constants": memory.constants_bytes,
            "temporaries": memory.temporaries_bytes,
            "executables": memory.executables_bytes,
            "states": memory.states_bytes,
            "labels": memory.labels_bytes,
        },
        dict(instance.held),
        CompiledReading(
            info.compiled_programs,
            info.cached_programs,
            info.shared_programs,
            info.on_demand_compilations,
            info.compile_seconds,
        ),
        instance.pending,
        _generator(instance),
    )


def _generator(instance: Instance) -> GeneratorReading | None:
    info, runner = instance.info.generation, instance.runner
    if info is None or not isinstance(runner, CountsTokens):
        return None
    counts = runner.counts
    return GeneratorReading(
        counts.slots,
        counts.running,
        counts.positions,
        counts.positions_used,
        counts.prompt_tokens,
        counts.output_tokens,
        info.max_length,
        info.text is not None,
        info.text is not None and info.text.has_template,
        info.no_text,
    )


def _tensor(spec: TensorSpec, parameters: Mapping[str, str]) -> TensorReading:
    return TensorReading(spec.name, spec.datatype.name, tuple(spec.shape), dict(parameters))


def _rows(info: ModelInfo, config: ModelConfig) -> RowsReading:
    verdict, notice = info.verdict, "; ".join(filter(None, (info.training, info.notice)))
    if verdict is None:
        return RowsReading("", "", "", notice)
    by = DECLARATION if declared(config) else ""
    if verdict.independence is Independence.PROVED:
        by = ANALYSIS
    return RowsReading(verdict.independence.value, by, str(verdict), notice)


def executed_rows(report: VersionReport) -> Iterable[tuple[int, int, int]]:
    """Return `rows_by_bucket` for a version's report."""
    return rows_by_bucket(report.totals, sorted({bucket.rows for bucket in report.buckets}))
