"""Requests to a compiler process and its answers: one JSON object per line."""

from dataclasses import dataclass, field

from xlaserve.runtime.programs.compilation import XlaOptions
from xlaserve.runtime.programs.footprint import Footprint


@dataclass(frozen=True, slots=True)
class Job:
    """One version of a model, to be compiled for one kind of device."""

    model: str
    path: str
    """A version directory, or a self-contained model file."""
    target: str
    count: int = 1
    config_directory: str = ""
    """Directory of the model's `config.json` or `config.pbtxt`; empty if there is none."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Configuration parameters that override parameters in the file."""
    flags: tuple[str, ...] = ()
    """XLA flags in addition to the target's."""
    options: XlaOptions = field(default_factory=XlaOptions)
    """XLA options of the server; by default those of default settings."""
    cache_directory: str = ""
    """Directory of cached results (results.py); empty to cache none."""


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The result of compiling one executable, which the process has discarded."""

    key: str
    """Hash of everything that the executable depends on."""
    device: str
    """The first of the program's devices, for the memory reservation: `cuda:0`."""
    rows: int
    """Rows of a batch; 0 for a model without a batch dimension, or if `sizes` begins with the
    rows."""
    sizes: tuple[int, ...]
    """Sizes of variable dimensions besides the batch."""
    footprint: Footprint
    compile_seconds: float
    """Compilation time in seconds; 0 if the result was cached."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes that a server would reserve for the loaded model (ModelMemory)."""

    parameters_bytes: int
    constants_bytes: int
    temporaries_bytes: int
    executables_bytes: int
    per_device: dict[str, int]
    states_bytes: int = 0
    """Bytes of a generator's slots."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a model cannot be loaded on a kind of device."""

    reason: str
    """The reason in one line."""
    operation: str = ""
    """The unsupported operation; empty for other failures."""
    location: str = ""
    """The author's source line, if the artifact records it."""

    def __str__(self) -> str:
        place = f" ({self.location})" if self.location else ""
        return f"{self.operation}{place}: {self.reason}" if self.operation else self.reason


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a job: programs, or a problem."""

    job: Job
    programs: tuple[CompiledProgram, ...] = ()
    reserved: Reserved | None = None
    max_batch_size: int = 0
    in_flight: int = 1
    """Number of concurrent executions on one device."""
    parameters_bytes: int = 0
    """Bytes of one replica's parameters per device."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package versions in the compiler process."""
    notice: str = ""
    """Why requests would not be batched; empty if they would be."""
    problem: Problem | None = None
