"""The parts of a model's `config.json` or `config.pbtxt` that the server acts on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from xlaserve.errors import InvalidModel
from xlaserve.model_config.ragged import BatchInput, BatchOutput
from xlaserve.model_config.sequence_batching import SequenceBatching
from xlaserve.model_config.warmup import Sample
from xlaserve.tensors import Datatype, Shape
from xlaserve_proto import inference


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions on disk are served (ModelVersionPolicy of the model configuration).

    Exactly one rule holds: the `latest` n, or every one (`latest` is None and `specific` empty),
    or the `specific` ones.
    """

    latest: int | None = 1
    specific: tuple[int, ...] = ()

    def select(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Return the versions to serve, ascending."""
        ascending = sorted(versions)
        if self.specific:
            return tuple(version for version in ascending if version in self.specific)
        return tuple(ascending if self.latest is None else ascending[-self.latest :])


@dataclass(frozen=True, slots=True)
class ConfigTensor:
    """One `input` or `output` of a configuration."""

    name: str
    datatype: Datatype
    dims: Shape
    """Dimensions as written: without the batch dimension if `max_batch_size` is positive."""
    reshape: Shape | None = None
    """The model's shape, if it differs from the clients'."""
    is_optional: bool = False
    """Whether a request may omit it."""
    is_ragged: bool = False
    """Whether its shape may differ between requests of a batch."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of queued requests (ModelQueuePolicy); 0 if not set."""

    default_timeout_microseconds: int = 0
    """Longest wait of a request."""
    max_queue_size: int = 0
    """Limit of queued requests."""
    allow_timeout_override: bool = False
    """Whether a request's shorter `timeout` counts."""
    delays_expired: bool = False
    """Whether expired requests are queued last instead of refused."""


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The dynamic batching of requests (ModelDynamicBatching); 0 where nothing is said."""

    preferred_batch_size: tuple[int, ...] = ()
    """Ascending; a batch of one of these sizes does not wait for the delay."""
    max_queue_delay_microseconds: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    preserve_ordering: bool = False
    """Whether answers leave in the order of their requests."""
    priority_levels: int = 0
    """Number of levels, 1 first; 0 without priorities."""
    default_priority_level: int = 0
    """The level of requests that name none."""
    priority_queue_policy: Mapping[int, QueuePolicy] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Queue policies by priority level; other levels use the default policy."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """One entry of the `checksum` agent (ModelRepositoryAgents)."""

    file: str
    """Relative to the model's directory."""
    md5: str
    """MD5 in lower-case hexadecimal."""


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step of an ensemble."""

    model_name: str
    model_version: str
    """Empty for whichever version the policy of the model serves."""
    input_map: Mapping[str, str]
    """Input of the step's model -> tensor of the ensemble."""
    output_map: Mapping[str, str]
    """Output of the step's model -> tensor of the ensemble."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model configuration; missing parts are taken from the artifact."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0
    """0 where the configuration does not say, or says 0."""
    default_model_filename: str = ""
    """The model file in the version directory; empty for the kind's default."""
    cc_model_filenames: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The same for GPUs of a compute capability: `9.0` -> file."""
    is_unbatched: bool = False
    """Whether `max_batch_size: 0` was written: no batching."""
    inputs: tuple[ConfigTensor, ...] = ()
    outputs: tuple[ConfigTensor, ...] = ()
    version_policy: VersionPolicy = field(default_factory=VersionPolicy)
    dynamic_batching: DynamicBatching = field(default_factory=DynamicBatching)
    is_decoupled: bool = False
    """Whether it declares any number of answers per request."""
    warmup: tuple[Sample, ...] = ()
    """Warm-up requests."""
    response_cache: bool = False
    """Whether answers are cached for equal requests."""
    sequence_batching: SequenceBatching | None = None
    """How sequences are served; None for a model whose requests are independent."""
    steps: tuple[EnsembleStep, ...] = ()
    """Not empty for an ensemble; each follows those whose tensors it takes."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of files that a load verifies."""
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    labels: Mapping[str, tuple[bytes, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Names of the classes of outputs, by output and by index; read from their files."""
    without_effect: tuple[str, ...] = field(default=(), compare=False)
    """Fields written that change no answer, by the table of `config_fields`; for the log."""
    message: inference.ModelConfig | None = field(default=None, compare=False, repr=False)
    """The whole configuration, ignored fields included; None without a file."""

    def with_defaults(self, parameters: Mapping[str, str]) -> "ModelConfig":
        """Return it with defaults for missing parameters."""
        return replace(self, parameters=MappingProxyType({**parameters, **self.parameters}))

    def of_artifact(self) -> "ModelConfig":
        """Return the configuration with the model's own tensors: reshaped, with controls and
        states.

        What lists no inputs, or no outputs, leaves them to the artifact, which has all.
        """
        sequences = self.sequence_batching
        if sequences is None:
            return self._of_model() if self.is_reshaped else self
        inputs = [ConfigTensor(one.name, one.datatype, (1,)) for one in sequences.controls]
        inputs += [ConfigTensor(one.input_name, one.datatype, one.dims) for one in sequences.states]
        shown = {tensor.name for tensor in self.outputs}
        outputs = [
            ConfigTensor(one.output_name, one.datatype, one.dims)
            for one in sequences.states
            if one.output_name not in shown
        ]
        return replace(
            self,
            inputs=(*self.inputs, *inputs) if self.inputs else (),
            outputs=(*self.outputs, *outputs) if self.outputs else (),
        )

    @property
    def is_reshaped(self) -> bool:
        """Tell whether clients see other shapes than the model."""
        return any(one.reshape is not None for one in (*self.inputs, *self.outputs))

    def _of_model(self) -> "ModelConfig":
        inputs, outputs = (
            tuple(one if one.reshape is None else replace(one, dims=one.reshape) for one in side)
            for side in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    @property
    def is_ensemble(self) -> bool:
        """Tell whether the model is an ensemble."""
        return bool(self.steps)

    def check_name(self, directory: str) -> None:
        """Raise InvalidModel if the model calls itself other than its directory.

        Nor may an ensemble have itself as a step; a longer circle takes knowledge of the others.
        """
        if self.name not in ("", directory):
            raise InvalidModel(
                f"expected the name of its directory, '{directory}', got '{self.name}'"
            )
        for step in self.steps:
            if step.model_name == directory:
                raise InvalidModel(f"ensemble '{directory}' is a step of itself")
