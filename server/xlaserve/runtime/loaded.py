"""The interface between the core and every kind of loaded model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from xlaserve.row_proofs.verdict import Verdict
from xlaserve.runtime.embedding.info import EmbeddingInfo
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.tensors import Parameter, Shape, Tensor, TensorSpec


class Resident(Protocol):
    """A tensor that a model left on its device, possibly with padding rows at the end.

    Only the next step of an ensemble receives one; it uses the device array directly if it can.
    """

    @property
    def rows(self) -> int:
        """Return the number of rows without padding."""
        ...

    @property
    def shape(self) -> Shape:
        """Return the shape without padding rows."""
        ...

    def numpy(self) -> Tensor:
        """Copy the rows without padding to the host. Blocks until they are computed."""
        ...


Value: TypeAlias = "Tensor | Resident"
"""A tensor on the host, or on a device between two steps of an ensemble."""


Optional: TypeAlias = Mapping[str, Tensor | None]
"""Optional inputs, each with its default.

The default is one element to fill the tensor with, or a whole tensor without the batch dimension.
None means that the model's code sees that the input is absent.
"""

NONE_OPTIONAL: Optional = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one loaded model in bytes, measured after compilation."""

    parameters_bytes: int = 0
    constants_bytes: int = 0
    """Constants in executables besides the code, as reported by the compiler; accelerators only."""
    temporaries_bytes: int = 0
    """Temporaries, inputs and outputs of the largest bucket: once per replica on the host,
    IN_FLIGHT times per replica on an accelerator.
    """
    executables_bytes: int = 0
    per_device: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes by device (`cpu:0`, `cuda:1`); the sum is `total_bytes`. Empty if the kind of model
    does not report devices.
    """
    states_bytes: int = 0
    """Bytes of sequence states: all slots of all replicas, used or not."""
    labels_bytes: int = 0
    """Class labels of the configuration, on the host; counted on the first device."""
    computation: str = ""
    """Key of the parts shared with other models, or an empty string if none are shared."""
    alone_per_device: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes by device as if the model shared nothing; empty if it shares nothing."""

    def with_labels(self, size: int) -> "ModelMemory":
        """Return this memory and that of the configuration's labels."""
        if not size:
            return self
        return replace(
            self,
            labels_bytes=size,
            per_device=_more_on_first(self.per_device, size),
            alone_per_device=_more_on_first(self.alone_per_device, size),
        )

    def alone_on_devices(self, first: str) -> Mapping[str, int]:
        """Return the maximum bytes by device that the model would need if it shared nothing."""
        return self.alone_per_device or self.on_devices(first)

    def on_devices(self, first: str) -> Mapping[str, int]:
        """Return the bytes by device; if unknown, attribute all to the first device."""
        return self.per_device or {first: self.total_bytes}

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts."""
        return (
            self.parameters_bytes
            + self.constants_bytes
            + self.temporaries_bytes
            + self.executables_bytes
            + self.states_bytes
            + self.labels_bytes
        )


def _more_on_first(sizes: Mapping[str, int], more: int) -> Mapping[str, int]:
    first = next(iter(sizes), None)
    return sizes if first is None else MappingProxyType({**sizes, first: sizes[first] + more})


@dataclass(frozen=True, slots=True)
class Bucket:
    """A batch size compiled for every device of the model."""

    rows: int
    """Number of rows; 0 for the only executable of a model without a batch dimension."""
    compile_seconds: float
    """Compilation time in seconds, summed over the devices."""
    seconds: float
    """Fastest execution during warm-up in seconds; 0 if not measured."""
    sizes: tuple[int, ...] = ()
    """Sizes of dynamic dimensions other than the batch."""
    split_rows: int = 0
    """Rows per piece if batches of this size are executed in pieces, otherwise 0."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The description of a loaded model."""

    platform: str
    """The runtime, as reported in ModelMetadata: `jax_export`, `identity`, `ensemble`."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """Maximum number of rows per request; 0 if the first dimension is fixed or if requests of any
    number of rows are executed one by one.
    """
    memory: ModelMemory = field(default_factory=ModelMemory)
    compile_seconds: float = 0.0
    """Compilation time since the load began in seconds, including evicted programs."""
    buckets: tuple[Bucket, ...] = ()
    """Buckets compiled so far: during the load in ascending order, then on demand.
    """
    compiled_programs: int = 0
    """Programs compiled since the load began, including those of row trials."""
    cached_programs: int = 0
    """Programs taken from the compilation cache instead of compiled."""
    shared_programs: int = 0
    """Programs taken from another model with the same computation instead of compiled."""
    on_demand_compilations: int = 0
    """Number of compilations caused by a request with a new shape."""
    loops_follow_inputs: bool = False
    """Whether the number of iterations of some loop may depend on inputs. Warm-up times do not
    predict request times then, and the model never runs on the event loop.
    """
    verdict: Verdict | None = None
    """Whether rows are independent; None if the first dimension is fixed or no proof was requested.
    """
    is_decoupled: bool = False
    """Whether a request may have any number of answers (the model is Generating)."""
    state_bytes: int = 0
    """Memory per request between two answers, in bytes."""
    has_sequences: bool = False
    """Whether every request belongs to a sequence, identified by request parameters."""
    optional: Optional = field(default_factory=lambda: NONE_OPTIONAL)
    """Inputs that a request may omit, with their defaults."""
    echoes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Output name -> input name: the answer has the output only if the request has the input."""
    ragged: frozenset[str] = frozenset()
    """Inputs whose shapes may differ between requests of a batch."""
    takes_parameters: bool = False
    """Whether the model's code receives arbitrary request parameters."""
    takes_tensor_parameters: bool = False
    """Whether the model's code receives parameters of individual tensors."""
    is_lenient: bool = False
    """Whether the model's code may return other shapes and datatypes than declared, or omit
    outputs.
    """
    generation: GenerationInfo | None = None
    """Facts about a generator; None for other models."""
    matmul_precision: str = ""
    """Precision of FP32 matrix products that the artifact does not specify, by JAX's name; empty if
    not selectable, as on the CPU.
    """
    embedding: EmbeddingInfo | None = None
    """Facts about an embedding model; None for other models."""
    training: str = ""
    """Why the model seems to be in training mode and how to fix it, for the load's log; or empty.
    """
    notice: str = ""
    """Why requests to this model are not batched, for the load's log entry; or empty."""

    @property
    def is_ragged(self) -> bool:
        """Tell whether requests may differ in dimensions other than the batch."""
        return any(-1 in spec.shape[1:] for spec in self.inputs)


class InFlight(Protocol):
    """An execution that was dispatched to a device."""

    def fetch(self) -> Mapping[str, Value]:
        """Wait for completion, and return the result, as `Executable.execute` would.

        Raises OutOfMemory: a device may report exhausted memory only at this point.
        """
        ...


class Dispatching(Protocol):
    """Starts executions on accelerators without waiting for them."""

    @property
    def queues(self) -> Sequence[str]:
        """Return the dispatch queue of each replica; `cuda:1` for a single device.

        One thread must dispatch all executions of a queue, which defines their order.
        """
        ...

    def dispatch(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> InFlight:
        """Start an execution like `Executable.execute`, without waiting for the device.

        The inputs must not change until the result has been fetched. Raises OutOfMemory.
        """
        ...


class Executable(Protocol):
    """A loaded model, or its program for one shape."""

    @property
    def dispatching(self) -> Dispatching | None:
        """Return the interface for asynchronous dispatch, or None if the host computes."""
        ...

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Execute on inputs that were checked against `info.inputs`. Blocks.

        With `resident` the outputs may stay on the device; otherwise all are host arrays. Raises
        OutOfMemory.
        """
        ...


class Answer(NamedTuple):
    """One of the answers to a request."""

    outputs: Mapping[str, Tensor]
    is_last: bool = False
    """Whether this is known to be the last answer; nothing more is computed then."""


class Answers(Protocol):
    """An iterator over the answers to one request; each is computed on demand."""

    def __next__(self) -> Answer:
        """Return the next answer; raises StopIteration at the end. Blocks."""
        ...

    def close(self) -> None:
        """Release the resources. Called once, on a thread, after the last `__next__` has returned.

        Also called if the request is cancelled or `__next__` raises. Blocks.
        """
        ...


@runtime_checkable
class Generating(Protocol):
    """A decoupled model: gives any number of answers to a request."""

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        ...

    def generate(
        self,
        inputs: Mapping[str, Value],
        parameters: Mapping[str, Parameter],
        *,
        replica: int = 0,
    ) -> Answers:
        """Return the answers to a request. Called on a worker thread.

        One replica computes all of them. Answers to different requests may be computed
        concurrently; those of one request one after the other, on any thread.
        """
        ...


class OnDemand(Protocol):
    """Compiles shapes of a model when a request first needs them. Thread-safe.

    Their number is limited: the least recently used shape is evicted.
    """

    def shape_of(self, inputs: Mapping[str, Value]) -> Hashable:
        """Return the shape to compile for these inputs, or None if it was compiled at load.

        Raises InvalidTensor if the inputs' sizes contradict each other.
        """
        ...

    def find(self, shape: Hashable) -> Executable | None:
        """Return the executable of a shape, or None if it is not compiled."""
        ...

    def compile(self, shape: Hashable) -> Executable:
        """Compile and warm a shape, and add it to `info`. Blocks.

        Raises OutOfMemory, or InvalidModel if the model cannot be compiled for the shape.
        """
        ...


class LoadedModel(Executable, Protocol):
    """A loaded model version, ready to execute. Thread-safe; does not use asyncio."""

    @property
    def on_demand(self) -> OnDemand | None:
        """Return the on-demand compiler, or None if all shapes were compiled at load."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Return the description; later compilations change its memory and buckets."""
        ...

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        ...

    @property
    def batch_limit(self) -> int:
        """Return the largest useful batch: more rows would not lower the time per row.

        1 if batching gains nothing. 0 if requests must not be batched: there is no batch dimension,
        its rows depend on each other, or other dimensions are dynamic.
        """
        ...

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's time for the bucket that would execute this many rows.

        Infinity if not measured, because the execution may not terminate.
        """
        ...

    def padded_rows(self, rows: int) -> int:
        """Return the bucket size for this many rows: a batch of this size needs no further copy.

        A model with dependent rows has no padding.
        """
        ...

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return the estimated memory of the next `compile_rest` step, in bytes by device.

        Empty if nothing remains to compile.
        """
        ...

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: "Callable[[Stage], None]" = lambda stage: None,
    ) -> None:
        """Compile and warm the programs that `background_compile` deferred. Blocks.

        Requests may execute meanwhile. Each bucket is used once it is warm, and `info` then
        includes its memory. Returns early, without an error, after `stop` or `close`. Calls
        `check_cancelled` before each step and raises its exception, OutOfMemory or InvalidModel;
        programs compiled before the error remain usable.
        """
        ...

    def stop(self) -> None:
        """Stop compiling: `compile_rest` returns before its next step. Does not block."""
        ...

    def close(self) -> None:
        """Release all buffers and executables. `execute` must not be called afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """The progress of a load."""

    name: str
    """Name of the stage: reading, proving, compiling, warming, or specific to a kind of model."""
    step: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.step} of {self.steps}" if self.steps else self.name
