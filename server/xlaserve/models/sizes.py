"""What a model will need in memory, predicted from its headers without JAX."""

from pathlib import Path

from xlaserve.errors import InvalidModel
from xlaserve.models import files, manifest, weights
from xlaserve.models.buckets import buckets_up_to
from xlaserve.tensors import TensorSpec

EXECUTABLE_BYTES = 1 << 19
"""Code and tables of one compiled bucket: 0.2 to 0.6 MB for small models. The CPU backend does not
report them."""

LIMIT_ARTIFACT_BYTES = 256 << 20
"""A larger artifact has parameters baked in, which cost five times their size while loaded."""


def predict_exported(directory: Path) -> int:
    """Return the bytes that a model with a manifest will need, compiled; raises InvalidModel."""
    described = manifest.read(directory)
    artifact = files.size_of(directory, manifest.ARTIFACT, limit_bytes=LIMIT_ARTIFACT_BYTES)
    parameters = sum(entry.nbytes for entry in weights.read_entries(directory, manifest.WEIGHTS))
    if parameters != described.parameters_bytes:
        raise InvalidModel(
            f"{manifest.WEIGHTS} has {parameters} bytes of parameters, "
            f"{manifest.FILE_NAME} says {described.parameters_bytes}"
        )
    batch = described.max_batch_size
    tensors = sum(_tensor_bytes(s, batch) for s in (*described.inputs, *described.outputs))
    executables = len(buckets_up_to(batch or 1)) * (EXECUTABLE_BYTES + artifact)
    return parameters + tensors + executables


def _tensor_bytes(spec: TensorSpec, batch: int) -> int:
    count = spec.datatype.itemsize
    for size in spec.shape:
        count *= batch if size == -1 else size
    return count
