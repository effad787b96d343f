"""What every kind of loaded model offers to the core, whatever it is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from xlaserve.models.config import ModelConfig
from xlaserve.tensors import Tensor, TensorSpec


class Resident(Protocol):
    """A tensor that a model left on its device, perhaps with padding rows after the real ones.

    Only for the next model of an ensemble: it takes the device array as it is where it can.
    """

    @property
    def rows(self) -> int:
        """Return how many of its rows are real."""
        ...

    def numpy(self) -> Tensor:
        """Fetch the real rows to the host. Blocks until they are computed."""
        ...


Value: TypeAlias = "Tensor | Resident"
"""A tensor on the host, or one that stayed on a device between two steps."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one loaded model holds, in bytes, as measured after its compilation."""

    parameters_bytes: int = 0
    constants_bytes: int = 0
    """Small parameters that are part of the executables instead of arguments."""
    temporaries_bytes: int = 0
    """Scratch memory, inputs and outputs of the largest bucket."""
    executables_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts."""
        return (
            self.parameters_bytes
            + self.constants_bytes
            + self.temporaries_bytes
            + self.executables_bytes
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a loaded model without executing it."""

    platform: str
    """What runs it, as ModelMetadata reports it: `jax_export`, `identity`, `ensemble`."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """The most rows of one request; 0 where the first dimension is not a batch."""
    memory: ModelMemory = field(default_factory=ModelMemory)
    compile_seconds: float = 0.0


class LoadedModel(Protocol):
    """One model version in memory, ready to execute. Thread-safe; knows no asyncio."""

    @property
    def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False
    ) -> Mapping[str, Value]:
        """Run once, on inputs that were checked against `info.inputs`. Blocks.

        With `resident` the outputs may stay on the device; otherwise all are host arrays.
        Raises OutOfMemory when the device has no room.
        """
        ...

    def expected_seconds(self, rows: int) -> float:
        """Return what the warm-up measured for the bucket that holds so many rows."""
        ...

    def close(self) -> None:
        """Drop every buffer and executable. Nothing may call `execute` any more."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """How far a load has come."""

    name: str
    """reading, compiling or warming."""
    step: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.step} of {self.steps}" if self.steps else self.name


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a loader is given besides the directory."""

    model: str
    version: str
    config: ModelConfig
    device: str = "cpu"
    """A JAX platform: cpu, cuda or tpu, already checked to be present."""
    on_stage: Callable[[Stage], None] = lambda stage: None
    """Called from the loader's thread as the load goes on."""
    check_cancelled: Callable[[], None] = lambda: None
    """Raises LoadCancelled when the load was called off; loaders call it between steps."""
    mmap_parameters: bool = False
    """Whether parameters may stay in their file, mapped into memory, instead of being read."""
