"""The arguments that every loader gets in addition to the directory."""

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
"""Default maximum number of shapes per model that are compiled on demand."""

DEFAULT_MAX_SEQUENCES = 65_536
"""Default maximum number of sequence slots per replica."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The arguments of a loader in addition to the directory."""

    model: str
    version: str
    config: ModelConfig
    device: str = "cpu"
    """JAX platform: cpu, cuda or tpu; known to be available."""
    on_stage: Callable[[Stage], None] = lambda stage: None
    """Progress callback, called from the loader's thread."""
    check_cancelled: Callable[[], None] = lambda: None
    """Raises LoadCancelled when the load was cancelled; loaders call it between steps."""
    background_compile: bool = False
    """Whether the load may compile only the smallest and largest bucket; `compile_rest` compiles
    the rest.
    """
    mmap_parameters: bool = False
    """Whether parameters may be memory-mapped from their file instead of read."""
    processes: int = 1
    """Number of processes with the same model; each accounts for its share of mapped pages."""
    max_on_demand_shapes: int = MAX_ON_DEMAND_SHAPES
    """Maximum number of shapes per model that are compiled on demand."""
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    """Maximum number of sequence slots per replica."""
    text_limits: TextLimits = DEFAULT_TEXT_LIMITS
    """Limits for texts in requests to the model."""
    roots: Roots = ANYWHERE
    """Directories that may contain the model's files, after links are resolved."""
    is_sent: bool = False
    """Whether a client sent the model's files, as opposed to the operator providing them."""
    python: PythonHost | None = None
    """Services for a Python model's code; None if Python models are not permitted."""
    mappings: Mappings = UNLIMITED
    """Checks the limit of memory mappings before a program is compiled."""
    compilation: Compilation = field(default_factory=Compilation)
    """Cache of compiled programs, and XLA options."""
    programs: SharedPrograms = field(default_factory=SharedPrograms)
    """Programs shared by loaded models with the same computation."""
    embedding: Declared | None = None
    """The embedding declaration; None for other models."""
    on_memory: Callable[[], None] = lambda: None
    """Called from any thread when the memory attributed to a loaded model changes: the model takes
    over shared programs of another model, or receives programs that another model compiled.
    """
    on_handed_on: Callable[[], None] = lambda: None
    """Called from any thread when this model is unloaded and another model takes over its shared
    programs. The other model's `on_memory` is called next.
    """
