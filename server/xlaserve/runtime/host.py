"""Server services available to a Python model's code."""

from collections.abc import Callable
from dataclasses import dataclass

from xlaserve.runtime.calls import Calls
from xlaserve.runtime.metrics import ModelMetrics


@dataclass(frozen=True, slots=True)
class PythonHost:
    """Services and limits for Python models, if the operator permits such models."""

    calls: Calls
    metrics: ModelMetrics
    process_seconds: float = 0.0
    """Time in seconds that a process with pending requests may be silent; 0 for no limit."""
    process_bytes: int = 0
    """Memory limit of a model's process in bytes; 0 for no limit."""
    shared_bytes: int = 0
    """Shared memory between the server and each process, for tensors, in bytes; 0 for none."""
    memory_changed: Callable[[str], None] = lambda model: None
    """Called from any thread when the memory of a loaded model has changed."""
