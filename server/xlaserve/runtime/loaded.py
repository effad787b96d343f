"""The interface between the core and every kind of loaded model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from xlaserve.row_proofs.verdict import Verdict
from xlaserve.runtime.embedding.info import EmbeddingInfo
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.tensors import Parameter, Shape, Tensor, TensorSpec


class Resident(Protocol):
    """A tensor that a model left on its device, perhaps with padding rows after the real ones.

    Only for the next model of an ensemble: it takes the device array as it is where it can.
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
        """Fetch the real rows to the host. Blocks until they are computed."""
        ...


Value: TypeAlias = "Tensor | Resident"
"""A tensor on the host, or one that stayed on a device between two steps."""


Optional: TypeAlias = Mapping[str, Tensor | None]
"""Inputs that a request may leave out, each with its default.

That is one element for all of it, or a whole tensor without the batch dimension; None where the
code of the model sees that the input is absent.
"""

NONE_OPTIONAL: Optional = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that one loaded model holds, as measured after its compilation."""

    parameters_bytes: int = 0
    constants_bytes: int = 0
    """Constants that executables hold beside their code, on accelerators, as the compiler says."""
    temporaries_bytes: int = 0
    """Scratch memory, inputs and outputs of the largest bucket: once for each replica on the host,
    IN_FLIGHT times for each on an accelerator."""
    executables_bytes: int = 0
    per_device: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The same bytes by the device that holds them: `cpu:0`, `cuda:1`. Empty where a kind of model
    does not know; otherwise the sum is `total_bytes`."""
    states_bytes: int = 0
    """Bytes of sequence states: all slots of all replicas, used or not."""
    computation: str = ""
    """Key of the parts shared with other models; empty if none are shared."""
    alone_per_device: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes by device if no other model held a part of it; empty where no other does."""

    def alone_on_devices(self, first: str) -> Mapping[str, int]:
        """Return the maximum per device if no other model were loaded."""
        return self.alone_per_device or self.on_devices(first)

    def on_devices(self, first: str) -> Mapping[str, int]:
        """Return its bytes per device: all on the first if unknown."""
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
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """One batch size that is compiled, on every device that the model is placed on."""

    rows: int
    """0 for the one executable of a model without a batch dimension."""
    compile_seconds: float
    """The sum over the devices."""
    seconds: float
    """The fastest execution of the warm-up; 0 if it measured none."""
    sizes: tuple[int, ...] = ()
    """Sizes of dimensions besides the batch that the artifact leaves open."""
    split_rows: int = 0
    """Rows of the pieces that a batch of this size is executed in; 0 where it is executed whole."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The description of a loaded model, known without executing it."""

    platform: str
    """Its runtime, as ModelMetadata reports it: `jax_export`, `identity`, `ensemble`."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """The most rows per request. 0 where the first dimension is fixed, or where requests of any
    number of rows are executed one by one.
    """
    memory: ModelMemory = field(default_factory=ModelMemory)
    compile_seconds: float = 0.0
    """Seconds of compilation since the load began, including that of dropped programs."""
    buckets: tuple[Bucket, ...] = ()
    """Buckets that are compiled by now: with the load, ascending, and then on demand."""
    compiled_programs: int = 0
    """Programs that were compiled for it since its load began; of trials too."""
    cached_programs: int = 0
    """Programs that were not, since the compilation cache had them."""
    shared_programs: int = 0
    """Programs that were not, since another model of the same computation had them."""
    on_demand_compilations: int = 0
    """Requests that were the first to ask for their shape."""
    loops_follow_inputs: bool = False
    """Whether the length of some loop is not known to be a constant: what the warm-up measured says
    nothing of what a request takes, and such a model never runs on the event loop."""
    verdict: Verdict | None = None
    """Verdict on its rows; None where the first dimension is fixed, or no proof was requested."""
    is_decoupled: bool = False
    """Whether it gives any number of answers to a request: it is Generating."""
    state_bytes: int = 0
    """Bytes that it holds for a request between two answers."""
    has_sequences: bool = False
    """Whether each request belongs to a sequence, named by its parameters."""
    optional: Optional = field(default_factory=lambda: NONE_OPTIONAL)
    """The inputs that a request may leave out, with their defaults."""
    echoes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Outputs that an answer has where the request has an input, whose name is behind each."""
    ragged: frozenset[str] = frozenset()
    """Inputs whose shapes may differ between requests of a batch."""
    takes_parameters: bool = False
    """Whether its code is given the parameters of requests, whatever their names."""
    takes_tensor_parameters: bool = False
    """Whether the model's code receives the parameters of single tensors."""
    is_lenient: bool = False
    """Whether its code may give outputs of other shapes and datatypes, or none."""
    generation: GenerationInfo | None = None
    """The facts of a generator; None for every other model."""
    matmul_precision: str = ""
    """Precision of FP32 products that the artifact leaves open, by JAX's name; empty where it
    cannot be chosen, as on the CPU.
    """
    embedding: EmbeddingInfo | None = None
    """The facts of an embedding model, if declared."""
    training: str = ""
    """Why it looks like training mode, and what to do, for the log of its load; else empty."""
    notice: str = ""
    """Why its requests are not batched, for the load's log entry; empty if there is nothing to
    report.
    """

    @property
    def is_ragged(self) -> bool:
        """Tell whether requests may differ in sizes other than rows."""
        return any(-1 in spec.shape[1:] for spec in self.inputs)


class InFlight(Protocol):
    """An execution that was dispatched to a device."""

    def fetch(self) -> Mapping[str, Value]:
        """Wait for completion, and return what `Executable.execute` would return.

        Raises OutOfMemory: a device's lack of memory may be known only now.
        """
        ...


class Dispatching(Protocol):
    """Starts executions on accelerators, which compute while the host does something else."""

    @property
    def queues(self) -> Sequence[str]:
        """Return each replica's dispatch queue: `cuda:1` for that of one device.

        What is in one line is to be dispatched by one thread, which gives it its order.
        """
        ...

    def dispatch(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> InFlight:
        """Start what `Executable.execute` does, without waiting for the device.

        The inputs must not change before it is fetched. Raises OutOfMemory.
        """
        ...


class Executable(Protocol):
    """A model, or one of its programs for a shape."""

    @property
    def dispatching(self) -> Dispatching | None:
        """Return the asynchronous dispatcher; None where the host computes."""
        ...

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Run once, on inputs that were checked against `info.inputs`. Blocks.

        With `resident` the outputs may stay on the device; otherwise all are host arrays.
        Raises OutOfMemory when the device has too little memory.
        """
        ...


class Answer(NamedTuple):
    """One of the answers to a request."""

    outputs: Mapping[str, Tensor]
    is_last: bool = False
    """Whether it is known to be the last one; nothing more is computed then."""


class Answers(Protocol):
    """The answers to one request, each computed when it is asked for: a generator is one."""

    def __next__(self) -> Answer:
        """Return the next answer; raises StopIteration at the end. Blocks."""
        ...

    def close(self) -> None:
        """Release the answers' resources, once and in a thread, after the last `__next__` returned.

        Also of a request that is cancelled, or whose `__next__` raised. Blocks.
        """
        ...


@runtime_checkable
class Generating(Protocol):
    """A model that gives any number of answers to one request: it is decoupled."""

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
        """Return the answers to a request, all computed by one replica. Called in a thread.

        All of them are computed by one replica. Different requests may be answered side by side,
        the answers of one are asked for one after the other, in any thread.
        """
        ...


class OnDemand(Protocol):
    """The shapes of a model that are compiled when a request first asks for them. Thread-safe.

    There is a bound to their number: the one that was not asked for longest is dropped.
    """

    def shape_of(self, inputs: Mapping[str, Value]) -> Hashable:
        """Return the shape to compile for these inputs; None where the load compiled it.

        Raises InvalidTensor for sizes that contradict one another.
        """
        ...

    def find(self, shape: Hashable) -> Executable | None:
        """Return the executable of a shape, shared by all holders; None if missing."""
        ...

    def compile(self, shape: Hashable) -> Executable:
        """Compile and warm a shape, and take it into `info`. Blocks.

        Raises OutOfMemory, or InvalidModel where the model cannot be compiled for it.
        """
        ...


class LoadedModel(Executable, Protocol):
    """One model version in memory, ready to execute. Thread-safe; knows no asyncio."""

    @property
    def on_demand(self) -> OnDemand | None:
        """Return the compiler of other shapes; None if the load compiled all."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Describe the model; later compilations change its memory and its buckets."""
        ...

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        ...

    @property
    def batch_limit(self) -> int:
        """Return the largest useful batch: more rows would not lower the time per row.

        1 where batching gains nothing, 0 where requests must not be put together: there is no batch
        dimension, its rows depend on one another, or other dimensions are open.
        """
        ...

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's time for the bucket that would execute this many rows.

        Infinity where it measured nothing, since it may not end.
        """
        ...

    def padded_rows(self, rows: int) -> int:
        """Return that bucket's size: a batch assembled in this size needs no further copy.

        A model whose rows depend on one another has no padding.
        """
        ...

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return an estimate of the next `compile_rest` step's memory, in bytes by device.

        Empty where nothing is left.
        """
        ...

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: "Callable[[Stage], None]" = lambda stage: None,
    ) -> None:
        """Compile and warm the programs that `background_compile` deferred. Blocks.

        Requests may execute meanwhile; each bucket serves once it is warm, and `info` then has its
        memory. Ends early and quietly behind `close`; raises what `check_cancelled` raises before
        each step, OutOfMemory or InvalidModel; what was compiled until then stays.
        """
        ...

    def stop(self) -> None:
        """Stop compiling: `compile_rest` returns at its next step. Does not block."""
        ...

    def close(self) -> None:
        """Drop every buffer and executable. `execute` must not be called afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """The progress of a load."""

    name: str
    """Name of the stage: reading, proving, compiling, warming, or one specific to a kind of model.
    """
    step: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.step} of {self.steps}" if self.steps else self.name
