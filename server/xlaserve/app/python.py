"""Python models are given the settings and the services of the server here."""

from xlaserve.residence.measured import MeasuredMemory
from xlaserve.runtime.calls import Calls
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.metrics import ModelMetrics
from xlaserve.settings import Settings


def python_host(
    settings: Settings, calls: Calls, metrics: ModelMetrics, measured: MeasuredMemory
) -> PythonHost | None:
    """Return the server as the code of models may use it; None where none is run."""
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
