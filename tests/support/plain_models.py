"""Loads exported models that return one answer per request."""

from pathlib import Path

from xlaserve.runtime.exported import jax_export
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.load_context import LoadContext


def load_plain(directory: Path, context: LoadContext) -> JaxExportModel:
    """Load an artifact that is not a stepped model."""
    model = jax_export.load(directory, context)
    assert isinstance(model, JaxExportModel)
    return model
