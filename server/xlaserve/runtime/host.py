"""The server as seen by the code of a model."""

from collections.abc import Callable
from dataclasses import dataclass

from xlaserve.runtime.calls import Calls
from xlaserve.runtime.metrics import ModelMetrics


@dataclass(frozen=True, slots=True)
class PythonHost:
    """Services and limits for permitted Python models."""

    calls: Calls
    metrics: ModelMetrics
    process_seconds: float = 0.0
    """Limit of a process's silence while it has requests, in seconds; 0 for none."""
    process_bytes: int = 0
    """Limit of a process's memory; 0 for none."""
    shared_bytes: int = 0
    """Memory that each process shares with the server, for tensors on their way; 0 for none."""
    memory_changed: Callable[[str], None] = lambda model: None
    """Called in any thread when a loaded model holds another amount of memory than before."""
