"""xlaserve: serve JAX models over the V2 (Open Inference) protocol."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlaserve.models.export import Exportable, export_model

__version__ = metadata.version("xlaserve")

__all__ = ["__version__", "Exportable", "export_model"]


def __getattr__(name: str) -> Any:
    # Imported on first use: whoever only serves or asks must not wait for jax.
    if name in ("Exportable", "export_model"):
        from xlaserve.models import export

        return getattr(export, name)
    raise AttributeError(f"module 'xlaserve' has no attribute {name!r}")
