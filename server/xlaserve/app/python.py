"""Creates the server API for Python models."""

from xlaserve.residence.measured import MeasuredMemory
from xlaserve.runtime.calls import Calls
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.metrics import ModelMetrics
from xlaserve.settings import Settings


def python_host(
    settings: Settings, calls: Calls, metrics: ModelMetrics, measured: MeasuredMemory
) -> PythonHost | None:
    """Return the server API for the code of Python models; None if they are not allowed."""
    if not settings.allow_python_models:
        return None
    return PythonHost(
        calls,
        metrics,
        settings.python_process_seconds,
        settings.python_process_bytes,
        settings.python_shared_bytes,
        measured.changed,
    )
