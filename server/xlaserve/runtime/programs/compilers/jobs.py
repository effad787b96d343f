"""Requests to a process that compiles for loads, and its answers. Needs no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field

READY = b"ready\n"
"""The first line of a process, once it can compile."""


@dataclass(frozen=True, slots=True)
class Array:
    """Dtype and shape of an argument."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """The form of the parameters, as `packing.Packing` has it."""

    count: int
    buffers: tuple[tuple[str, int], ...]
    places: Mapping[int, tuple[int, int, int, tuple[int, ...]]]
    turned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """A question about the rows of a computation (`rows.prove`, `rows.loops_follow_inputs`)."""

    module: str
    """Digest of its module: a verdict names its lines, which models of one computation may have
    of different authors."""
    parameters: int
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]
    platforms: tuple[str, ...]
    of_loops: bool = False
    """Whether the loops alone are asked about."""


@dataclass(frozen=True, slots=True)
class Named:
    """An input or an output of a trial: every dimension but the first has a size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Executions of an artifact that show whether a row depends on those beside it (`trials`)."""

    inputs: tuple[Named, ...]
    outputs: tuple[Named, ...]
    is_thorough: bool
    """Whether rows are tried beside NaN, infinities and large numbers too (`neighbours`)."""
    is_wide: bool = True
    """Whether 64-bit types exist."""
    first: tuple[tuple[int, ...], ...] = ()
    """Shapes of the inputs of a first execution; empty for none."""
    is_of_zeros: bool = True
    """Whether that is on zeros, as a warm-up is, or on the random numbers of an export."""
    first_seconds: float = 0.0
    """Limit of that execution alone, in seconds of the processor."""
    processor_seconds: float = 0.0
    """Limit of the rest, in seconds of the processor; 0 for the time of a job."""
    parameter_bytes: int = 0
    """Length of the parameters after the artifact; 0 for random ones."""


@dataclass(frozen=True, slots=True)
class Job:
    """One program on one CPU device, one proof, or one trial."""

    model: str
    computation: str
    device: int
    """Index of the device in the compiler process, which sees the same devices as the server."""
    packing: Packed
    leaves: tuple[Array, ...]
    inputs: tuple[Array, ...]
    program: Mapping[str, str]
    """The key of the program, field by field (`cache_key.program`)."""
    environment: Mapping[str, str]
    """Versions, flags and processor of the server; a process that differs refuses the job."""
    is_niced: bool = True
    """Whether requests come before it. A process that was niced once stays so: the system lets
    nobody but root take that back."""
    proof: Proof | None = None
    """The question, where a verdict is wanted and no program."""
    trial: Trial | None = None
    artifact_bytes: int = 0
    """Length of the artifact behind the line; 0 where the process had it with the job before."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a job: a program or a verdict follows the line, or an error."""

    program: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    executable_bytes: int = 0
    sha256: str = ""
    """The digest of the program: XLA loads and runs whatever bits it is given."""
    error: str = ""
    """The objection of JAX or XLA to the computation."""
    refused: str = ""
    """Why it has to be compiled in the server."""
    processor_seconds: float = 0.0
    """Processor time of the job: much less than it took where the process had no core."""
