"""xlaserve: serve JAX models over the V2 (Open Inference) protocol."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xlaserve import build

if TYPE_CHECKING:
    from xlaserve.core.serving.models_api import Models
    from xlaserve.models.export import Exportable, export_model
    from xlaserve.models.export_stream import ExportableStream, export_stream
    from xlaserve.models.generation.exporting import export_generator
    from xlaserve.models.optimizing import optimize
    from xlaserve.models.python.author import Answer, InferenceError, PythonModel, Request
    from xlaserve.models.python.context import Context
    from xlaserve.transport.grpc.services import Service

__version__ = build.number()

__all__ = [
    "__version__",
    "Answer",
    "Context",
    "Exportable",
    "ExportableStream",
    "export_generator",
    "export_model",
    "export_stream",
    "InferenceError",
    "Models",
    "optimize",
    "PythonModel",
    "Request",
    "Service",
]

_AUTHOR = "xlaserve.models.python.author"
_HOMES = {
    **dict.fromkeys(("Answer", "InferenceError", "PythonModel", "Request"), _AUTHOR),
    "Context": "xlaserve.models.python.context",
    "Exportable": "xlaserve.models.export",
    "ExportableStream": "xlaserve.models.export_stream",
    "export_generator": "xlaserve.models.generation.exporting",
    "export_model": "xlaserve.models.export",
    "export_stream": "xlaserve.models.export_stream",
    "Models": "xlaserve.core.serving.models_api",
    "optimize": "xlaserve.models.optimizing",
    "Service": "xlaserve.transport.grpc.services",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: whoever only serves or asks must not wait for jax.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'xlaserve' has no attribute {name!r}")
