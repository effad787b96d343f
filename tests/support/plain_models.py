"""Models that give one answer to a request, loaded from what was exported."""

from pathlib import Path

from xlaserve.models import jax_export
from xlaserve.models.jax_export import JaxExportModel
from xlaserve.models.loaded import LoadContext


def load_plain(directory: Path, context: LoadContext) -> JaxExportModel:
    """Load an artifact that is not one of steps."""
    model = jax_export.load(directory, context)
    assert isinstance(model, JaxExportModel)
    return model
