"""The fields of a model configuration that the server uses."""

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
    """Which versions on disk are served (ModelVersionPolicy).

    Either the `latest` n versions, or the `specific` ones, or all if `latest` is None and
    `specific` is empty.
    """

    latest: int | None = 1
    specific: tuple[int, ...] = ()

    def select(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Return the versions to serve, in ascending order."""
        ascending = sorted(versions)
        if self.specific:
            return tuple(version for version in ascending if version in self.specific)
        return tuple(ascending if self.latest is None else ascending[-self.latest :])


@dataclass(frozen=True, slots=True)
class ConfigTensor:
    """An input or output tensor in a configuration."""

    name: str
    datatype: Datatype
    dims: Shape
    """Dimensions as configured: without the batch dimension if `max_batch_size` is positive."""
    reshape: Shape | None = None
    """The model's shape, if it differs from the one that clients see."""
    is_optional: bool = False
    """Whether a request may omit the input."""
    is_ragged: bool = False
    """Whether the input's shape may differ between requests of a batch."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of queued requests (ModelQueuePolicy); 0 for no limit."""

    default_timeout_microseconds: int = 0
    """Maximum time in the queue."""
    max_queue_size: int = 0
    """Maximum number of queued requests."""
    allow_timeout_override: bool = False
    """Whether a request's `timeout` applies if it is shorter."""
    delays_expired: bool = False
    """Whether expired requests are moved to the end of the queue instead of rejected."""


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Dynamic batching (ModelDynamicBatching); fields that are not configured are 0."""

    preferred_batch_size: tuple[int, ...] = ()
    """Batch sizes that are executed without waiting for the queue delay, in ascending order."""
    max_queue_delay_microseconds: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    preserve_ordering: bool = False
    """Whether responses are sent in the order of their requests."""
    priority_levels: int = 0
    """Number of priority levels, of which 1 is the highest; 0 without priorities."""
    default_priority_level: int = 0
    """Priority level of requests that do not specify one."""
    priority_queue_policy: Mapping[int, QueuePolicy] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Queue policies by priority level; other levels use the default policy."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum from the `checksum` agent (ModelRepositoryAgents)."""

    file: str
    """Path relative to the model's directory."""
    md5: str
    """MD5 in lowercase hexadecimal."""


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step of an ensemble."""

    model_name: str
    model_version: str
    """Version of the step's model; an empty string resolves like a request without a version."""
    input_map: Mapping[str, str]
    """The ensemble's tensor for each input of the step's model."""
    output_map: Mapping[str, str]
    """The ensemble's tensor for each output of the step's model."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model configuration; omitted fields are taken from the artifact."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0
    """Maximum rows per request; 0 if the configuration has 0 or omits the field."""
    default_model_filename: str = ""
    """File name of the model in its version directory; empty for the format's default."""
    cc_model_filenames: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """File names for GPUs by compute capability, such as `9.0`."""
    is_unbatched: bool = False
    """Whether the configuration has `max_batch_size: 0`, which disables batching."""
    inputs: tuple[ConfigTensor, ...] = ()
    outputs: tuple[ConfigTensor, ...] = ()
    version_policy: VersionPolicy = field(default_factory=VersionPolicy)
    dynamic_batching: DynamicBatching = field(default_factory=DynamicBatching)
    is_decoupled: bool = False
    """Whether the model gives any number of responses per request."""
    warmup: tuple[Sample, ...] = ()
    """Requests executed before the model is ready."""
    response_cache: bool = False
    """Whether responses are cached and reused for equal requests."""
    sequence_batching: SequenceBatching | None = None
    """How sequences are batched; None if requests are independent."""
    steps: tuple[EnsembleStep, ...] = ()
    """Steps of an ensemble, in an order that respects their dependencies; empty for other models.
    """
    checksums: tuple[Checksum, ...] = ()
    """Checksums that a load verifies."""
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    labels: Mapping[str, tuple[bytes, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Class labels of each output, by index; read from the label files."""
    labels_bytes: int = field(default=0, compare=False)
    """Memory of the labels; outputs that name one file share it."""
    without_effect: tuple[str, ...] = field(default=(), compare=False)
    """Configured fields that have no effect (see `fields.FIELDS`); logged with the load."""
    message: inference.ModelConfig | None = field(default=None, compare=False, repr=False)
    """The whole configuration, including ignored fields; None if there is no configuration file."""

    def with_defaults(self, parameters: Mapping[str, str]) -> "ModelConfig":
        """Return the configuration with default values for missing parameters."""
        return replace(self, parameters=MappingProxyType({**parameters, **self.parameters}))

    def of_artifact(self) -> "ModelConfig":
        """Return the configuration with the tensors of the artifact.

        Shapes are the model's after `reshape`, and the controls and states of sequences are
        included. If no inputs, or no outputs, are configured, they stay empty, and the artifact
        defines them.
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
        """Tell whether clients see other shapes than the model, because of `reshape`."""
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
        """Raise InvalidModel if the configured name differs from that of the directory.

        Also raises if an ensemble is a step of itself, but does not detect longer cycles.
        """
        if self.name not in ("", directory):
            raise InvalidModel(
                f"expected the name of its directory, '{directory}', got '{self.name}'"
            )
        for step in self.steps:
            if step.model_name == directory:
                raise InvalidModel(f"ensemble '{directory}' is a step of itself")
