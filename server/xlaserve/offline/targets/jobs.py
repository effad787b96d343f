"""Requests to a process that compiles, and its answers: JSON, one line each."""

from dataclasses import dataclass, field

from xlaserve.runtime.programs.compilation import XlaOptions
from xlaserve.runtime.programs.footprint import Footprint


@dataclass(frozen=True, slots=True)
class Job:
    """One version of a model, to be compiled for one kind of device."""

    model: str
    path: str
    """A version directory, or a file that is a whole model."""
    target: str
    count: int = 1
    config_directory: str = ""
    """Directory of its `config.json` or `config.pbtxt`; empty for none."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Parameters of a configuration that override the written ones."""
    flags: tuple[str, ...] = ()
    """XLA flags besides the target's."""
    options: XlaOptions = field(default_factory=XlaOptions)
    """Server options; by default those of a default configuration."""
    cache_directory: str = ""
    """Directory where results are kept and found again (results.py); empty for none."""


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """One executable, which the process that compiled it has dropped."""

    key: str
    """The hash of everything that it depends on."""
    device: str
    """The first of its devices, for the reservation: `cuda:0`."""
    rows: int
    """0 for a model without a batch dimension, or where `sizes` begin with the rows."""
    sizes: tuple[int, ...]
    """Sizes of open dimensions besides the batch."""
    footprint: Footprint
    compile_seconds: float
    """0 where the result was found in the cache."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes that a server would reserve for the model once it is loaded (ModelMemory)."""

    parameters_bytes: int
    constants_bytes: int
    temporaries_bytes: int
    executables_bytes: int
    per_device: dict[str, int]
    states_bytes: int = 0
    """Bytes of the slots of a generator."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a model does not load on a kind of device."""

    reason: str
    """One line."""
    operation: str = ""
    """The unsupported operation; empty for other failures."""
    location: str = ""
    """The author's line, where the artifact says."""

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
    """Concurrent executions on one device."""
    parameters_bytes: int = 0
    """Bytes of one copy per device, as arrays."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions that the compiler process used."""
    notice: str = ""
    """Why requests would not be batched; empty if they would."""
    problem: Problem | None = None
