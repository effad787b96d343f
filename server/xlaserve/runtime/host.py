"""The server, as far as the code of a model may use it."""

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
    """Seconds that a process of a model may be silent while it has requests; 0 for any."""
    process_bytes: int = 0
    """Memory that a process may hold before it is ended; 0 for any."""
    shared_bytes: int = 0
    """Memory that each process shares with the server, for tensors on their way; 0 for none."""
    memory_changed: Callable[[str], None] = lambda model: None
    """Called in any thread when a loaded model holds another amount of memory than before."""
