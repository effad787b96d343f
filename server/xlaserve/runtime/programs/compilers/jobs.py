"""Messages between the server and a compiler process. Does not import JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field

READY = b"ready\n"
"""First line that a process writes, once it can compile."""


@dataclass(frozen=True, slots=True)
class Array:
    """Dtype and shape of an argument."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """The packing of parameters, as in `packing.Packing`."""

    count: int
    buffers: tuple[tuple[str, int], ...]
    places: Mapping[int, tuple[int, int, int, tuple[int, ...]]]
    turned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """A job that proves row independence or analyses loops (`rows`)."""

    module: str
    """Digest of the module. A verdict names lines of the source, and models with the same
    computation may have different sources.
    """
    parameters: int
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]
    platforms: tuple[str, ...]
    of_loops: bool = False
    """Whether to analyse only the loops."""


@dataclass(frozen=True, slots=True)
class Named:
    """An input or output of a trial; all dimensions but the first have a size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Executions of an artifact that test whether rows depend on other rows (`trials`)."""

    inputs: tuple[Named, ...]
    outputs: tuple[Named, ...]
    is_thorough: bool
    """Whether other rows also contain NaN, infinities and large numbers (`neighbours`)."""
    is_wide: bool = True
    """Whether 64-bit types are enabled."""
    first: tuple[tuple[int, ...], ...] = ()
    """Input shapes of a first execution; empty for none."""
    is_of_zeros: bool = True
    """Whether the first execution uses zeros, like a warm-up, or the random numbers of an export.
    """
    first_seconds: float = 0.0
    """Processor time limit of the first execution, in seconds."""
    processor_seconds: float = 0.0
    """Processor time limit of the other executions, in seconds; 0 for the limit of a job."""
    parameter_bytes: int = 0
    """Number of bytes of parameters that follow the artifact; 0 for random parameters."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job: compile one program for a CPU device, prove row independence, or try rows."""

    model: str
    computation: str
    device: int
    """Index of the device, which is the same in the server and the compiler process."""
    packing: Packed
    leaves: tuple[Array, ...]
    inputs: tuple[Array, ...]
    program: Mapping[str, str]
    """The program part of the cache key, field by field (`cache_key.program`)."""
    environment: Mapping[str, str]
    """Versions, flags and processor of the server; a process with different ones refuses the
    job."""
    is_niced: bool = True
    """Whether to lower the process's priority. This is permanent: only root may raise it again."""
    proof: Proof | None = None
    """The question, if the job asks for a verdict instead of a program."""
    trial: Trial | None = None
    artifact_bytes: int = 0
    """Number of bytes of the artifact that follows the line; 0 if the previous job had the same
    artifact.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a job; the bytes of a program or verdict follow it, unless it is an error."""

    program: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    executable_bytes: int = 0
    sha256: str = ""
    """Digest of the program: XLA loads and runs corrupt programs without a check."""
    error: str = ""
    """Error of JAX or XLA about the computation."""
    refused: str = ""
    """Why the server must compile the program itself."""
    processor_seconds: float = 0.0
    """Processor time of the job in seconds; much less than the elapsed time if no core was free."""
