"""The server, as far as the code of a model may use it."""

from dataclasses import dataclass

from xlaserve.models.python.calls import Calls
from xlaserve.models.python.metrics import ModelMetrics


@dataclass(frozen=True, slots=True)
class PythonHost:
    """What the operator gives to Python models that are allowed to run."""

    calls: Calls
    metrics: ModelMetrics
    process_seconds: float = 0.0
    """Seconds that a process of a model may be silent while it has requests; 0 for any."""
