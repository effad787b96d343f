"""xlaserve: serve JAX models over the V2 (Open Inference) protocol."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlaserve.authoring.cpu.optimizing import optimize
    from xlaserve.authoring.export import Exportable, export_model
    from xlaserve.authoring.export_stream import ExportableStream, export_stream
    from xlaserve.generation.exporting import export_generator
    from xlaserve.grpc.services.services import Service
    from xlaserve.local.process import NotServing
    from xlaserve.local.servers import AsyncServer, Server, serve
    from xlaserve.python_models.author import Answer, InferenceError, PythonModel, Request
    from xlaserve.python_models.context import Context
    from xlaserve.serving.models_api import Models
    from xlaserve.tensors import content_types

    __version__: str

__all__ = [
    "__version__",
    "Answer",
    "AsyncServer",
    "content_types",
    "Context",
    "Exportable",
    "ExportableStream",
    "export_generator",
    "export_model",
    "export_stream",
    "InferenceError",
    "Models",
    "NotServing",
    "optimize",
    "PythonModel",
    "Request",
    "serve",
    "Server",
    "Service",
]

_AUTHOR = "xlaserve.python_models.author"
_HOMES = {
    **dict.fromkeys(("Answer", "InferenceError", "PythonModel", "Request"), _AUTHOR),
    "AsyncServer": "xlaserve.local.servers",
    "Context": "xlaserve.python_models.context",
    "Exportable": "xlaserve.authoring.export",
    "ExportableStream": "xlaserve.authoring.export_stream",
    "export_generator": "xlaserve.generation.exporting",
    "export_model": "xlaserve.authoring.export",
    "export_stream": "xlaserve.authoring.export_stream",
    "Models": "xlaserve.serving.models_api",
    "NotServing": "xlaserve.local.process",
    "optimize": "xlaserve.authoring.cpu.optimizing",
    "serve": "xlaserve.local.servers",
    "Server": "xlaserve.local.servers",
    "Service": "xlaserve.grpc.services.services",
}
_CLIENT = ("AsyncClient", "CallFailed", "Client")
_MODULES = {"content_types": "xlaserve.tensors.content_types"}


def __getattr__(name: str) -> Any:
    # Imported lazily: servers and clients must not wait for jax.
    if name == "__version__":
        return import_module("xlaserve.build").number()
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    hint = f"; did you mean xlaserve.client.{name}?" if name in _CLIENT else ""
    raise AttributeError(f"module 'xlaserve' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
