"""The arguments of every loader besides the directory."""

from collections.abc import Callable
from dataclasses import dataclass, field

from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.embedding.declared import Declared
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.loaded import Stage
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.mappings import UNLIMITED, Mappings
from xlaserve.runtime.programs.shared_programs import SharedPrograms

MAX_ON_DEMAND_SHAPES = 64
"""The most shapes of one model that are compiled on request, unless a setting says otherwise."""

DEFAULT_MAX_SEQUENCES = 65_536
"""The most slots for sequences of one replica, unless a setting says otherwise."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The arguments of a loader besides the directory."""

    model: str
    version: str
    config: ModelConfig
    device: str = "cpu"
    """A JAX platform: cpu, cuda or tpu, already checked to be present."""
    on_stage: Callable[[Stage], None] = lambda stage: None
    """Progress callback, called from the loader's thread."""
    check_cancelled: Callable[[], None] = lambda: None
    """Raises LoadCancelled when the load was cancelled; loaders call it between steps."""
    background_compile: bool = False
    """Whether the load may end with the smallest and the largest bucket; `compile_rest` follows."""
    mmap_parameters: bool = False
    """Whether parameters may stay in their file, mapped into memory, instead of being read."""
    processes: int = 1
    """Processes with the same model; each accounts for its part of shared mappings."""
    max_on_demand_shapes: int = MAX_ON_DEMAND_SHAPES
    """The most shapes that a model may ask to have compiled on request."""
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    """The most slots for sequences that a model may ask for, on each replica."""
    text_limits: TextLimits = DEFAULT_TEXT_LIMITS
    """Limits of its clients' texts."""
    roots: Roots = ANYWHERE
    """Directories that its files may lie in, wherever links lead."""
    is_sent: bool = False
    """Whether the model's files were sent by a client, rather than read from the operator's disk.
    """
    python: PythonHost | None = None
    """The server API for a Python model's code; None unless that is allowed."""
    mappings: Mappings = UNLIMITED
    """Admits programs before they are compiled."""
    compilation: Compilation = field(default_factory=Compilation)
    """Cache of its programs, and options of XLA."""
    programs: SharedPrograms = field(default_factory=SharedPrograms)
    """Programs of loaded models, shared by models of the same computation."""
    embedding: Declared | None = None
    """Its declaration as an embedding model; None for other models."""
    on_memory: Callable[[], None] = lambda: None
    """Called in any thread when a loaded model holds more or less than it did: it has to carry
    programs that another one carried, or has those that another one had compiled."""
    on_handed_on: Callable[[], None] = lambda: None
    """Called in any thread when it leaves, and another one carries its programs from now on, whose
    `on_memory` is called next."""
