"""The memory that a model will need, predicted from its headers without JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from xlaserve.errors import InvalidModel
from xlaserve.models import files, manifest, weights
from xlaserve.models.buckets import DEFAULT_MAX_BATCH_SIZE, buckets_up_to
from xlaserve.models.manifest import Manifest
from xlaserve.models.roots import ANYWHERE, Roots
from xlaserve.tensors import TensorSpec

EXECUTABLE_BYTES = 1 << 19
"""Code and tables of one compiled bucket: 0.2 to 0.6 MB for small models. The CPU backend does not
report them."""

LIMIT_ARTIFACT_BYTES = 256 << 20
"""A larger artifact has parameters baked in, which cost many times their size while compiled."""

COPIES_WHILE_COMPILED = 8
"""Copies of an artifact's constant in memory then: measured 7 to 9, on the CPU. One stays."""


Parts: TypeAlias = Callable[[str], int]
"""Tells into how many parts a parameter is split, each on a device of its own."""


def whole(name: str) -> int:
    """Leave a parameter in one part."""
    return 1


def predict_exported(directory: Path, parts: Parts = whole, roots: Roots = ANYWHERE) -> int:
    """Return the bytes that a model with a manifest will need, compiled, on each of its devices.

    Raises InvalidModel.
    """
    described = manifest.read(directory, roots)
    entries = weights.read_entries(directory, manifest.WEIGHTS, roots)
    parameters = sum(entry.nbytes for entry in entries)
    if parameters != described.parameters_bytes:
        raise InvalidModel(
            f"{manifest.WEIGHTS} has {parameters} bytes of parameters, "
            f"{manifest.FILE_NAME} says {described.parameters_bytes}"
        )
    batch = described.max_batch_size or 1
    tensors = sum(_tensor_bytes(s, batch) for s in (*described.inputs, *described.outputs))
    executables = len(buckets_up_to(batch)) * _program_bytes(directory, described, roots)
    return sum(entry.nbytes // parts(entry.name) for entry in entries) + tensors + executables


def shared_bytes(
    directory: Path, compiled_from: Callable[[str], int], roots: Roots = ANYWHERE
) -> int:
    """Return the part of `predict_exported` that other models of the computation hold already.

    `compiled_from` says how many programs there are of a file; 0 for what has no such file. It is
    an estimate: size and hash of the module are what the manifest says, which the load checks
    before it reads a parameter.
    """
    if not (directory / manifest.FILE_NAME).exists():
        return 0
    described = manifest.read(directory, roots)
    record = described.files.get(manifest.STABLEHLO)
    if record is None:
        return 0
    batch_sizes = len(buckets_up_to(described.max_batch_size or 1))
    programs = min(compiled_from(record.sha256), batch_sizes)
    # As `_program_bytes` has it: what is predicted less this is what the model adds.
    module = max(
        one.size_bytes for name, one in described.files.items() if name != manifest.WEIGHTS
    )
    return programs * (EXECUTABLE_BYTES + module)


def _program_bytes(directory: Path, described: Manifest, roots: Roots) -> int:
    """Return what one program takes, with the module while it is compiled."""
    return EXECUTABLE_BYTES + max(
        files.size_of(directory, name, limit_bytes=LIMIT_ARTIFACT_BYTES, roots=roots)
        for name in described.files
        if name != manifest.WEIGHTS
    )


def predict_single_file(path: Path, parts: Parts = whole, roots: Roots = ANYWHERE) -> int:
    """Return the bytes that an artifact without a manifest will need; raises InvalidModel.

    More than it holds once it is loaded: its parameters, which are constants, pass through all
    stages of the compiler. It counts as one with a batch, since only JAX could tell.
    """
    limit = LIMIT_ARTIFACT_BYTES
    artifact = files.size_of(path.parent, path.name, limit_bytes=limit, roots=roots)
    buckets = len(buckets_up_to(DEFAULT_MAX_BATCH_SIZE))
    return buckets * EXECUTABLE_BYTES + COPIES_WHILE_COMPILED * artifact


def predict_onnx(path: Path, parts: Parts = whole, roots: Roots = ANYWHERE) -> int:
    """Return the bytes that an ONNX model will need: those of its files, and its executables.

    Its tensors are known once it is converted. Raises InvalidModel.
    """
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    buckets = len(buckets_up_to(DEFAULT_MAX_BATCH_SIZE))
    sizes = (
        files.size_of(file.parent, file.name, limit_bytes=1 << 62, roots=roots) for file in found
    )
    return sum(sizes) + buckets * EXECUTABLE_BYTES


def _tensor_bytes(spec: TensorSpec, batch: int) -> int:
    count = spec.datatype.itemsize
    for size in spec.shape:
        count *= batch if size == -1 else size
    return count
