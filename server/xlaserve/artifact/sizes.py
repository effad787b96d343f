"""Predicts the memory that a model will need, from file headers and its StableHLO module."""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.artifact import foreseen, manifest, weights
from xlaserve.artifact.foreseen import Foreseen, Serving
from xlaserve.artifact.manifest import Manifest
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.buckets import DEFAULT_MAX_BATCH_SIZE, buckets_up_to
from xlaserve.tensors import TensorSpec

EXECUTABLE_BYTES = 1 << 19
"""Code and tables of one compiled program: 0.2 to 0.6 MB for small models. The CPU backend does not
report the actual size."""

LIMIT_ARTIFACT_BYTES = 256 << 20
"""Maximum size of an artifact. A larger one must contain parameters, which compilation duplicates.
"""

COPIES_WHILE_COMPILED = 8
"""Copies of an artifact's constants in memory during compilation: 7 to 9 were measured on the CPU.
One copy remains."""


ESTIMATING = "xlaserve.runtime.estimating"
"""The module that estimates temporaries; it imports JAX."""

LIMIT_ESTIMATED_BYTES = 4 << 20
"""Maximum size of a module to estimate. A larger one contains constants, which would have to be
read twice."""

MAX_ESTIMATES = 64
"""Maximum number of cached estimates."""

_SPARE = 1.6
"""Safety factor of estimates: on the CPU, XLA leaves gaps between buffers."""

_CODE: Mapping[str, tuple[int, float]] = MappingProxyType({"cuda": (2 << 10, 3.0)})
"""Code size of a program on accelerators: a constant, and a multiple of its module's size."""

_ESTIMATING = ThreadPoolExecutor(1, "estimate")

ON_THE_HOST = Serving()

Parts: TypeAlias = Callable[[str], int]
"""Returns the number of shards that a parameter is split into."""


def whole(name: str) -> int:
    """Return 1: the parameter is not split."""
    return 1


def predict_exported(
    directory: Path, parts: Parts = whole, roots: Roots = ANYWHERE, serving: Serving = ON_THE_HOST
) -> int:
    """Predict a model's memory per device in bytes, from its manifest and file headers.

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
    # Raises if the module is too large, before it is read.
    module = _module_bytes(directory, described, roots)
    programs = foreseen.programs(described, serving)
    scratch = _scratch_bytes(directory, described, roots, serving, programs)
    code = programs.count * _code_bytes(serving.platform, module)
    held = sum(entry.nbytes // parts(entry.name) for entry in entries)
    return held + serving.in_flight * scratch + code + module


def shared_bytes(
    directory: Path,
    compiled_from: Callable[[str], int],
    roots: Roots = ANYWHERE,
    serving: Serving = ON_THE_HOST,
) -> int:
    """Return the part of `predict_exported` that other models of the same computation already hold.

    `compiled_from` returns the number of compiled programs for a file hash. The manifest's sizes
    and hashes are used unverified, since the load checks them before it reads parameters.
    """
    if not (directory / manifest.FILE_NAME).exists():
        return 0
    described = manifest.read(directory, roots)
    record = described.files.get(manifest.STABLEHLO)
    if record is None:
        return 0
    there = min(compiled_from(record.sha256), foreseen.programs(described, serving).count)
    # Computed as in `predict_exported`, so that the difference is this model's part.
    module = max(
        one.size_bytes for name, one in described.files.items() if name != manifest.WEIGHTS
    )
    return there * EXECUTABLE_BYTES + (module if there else 0)


def _module_bytes(directory: Path, described: Manifest, roots: Roots) -> int:
    return max(
        files.size_of(directory, name, limit_bytes=LIMIT_ARTIFACT_BYTES, roots=roots)
        for name in described.files
        if name != manifest.WEIGHTS
    )


def _code_bytes(platform: str, module: int) -> int:
    """Return the code size of one program."""
    base, times = _CODE.get(platform, (EXECUTABLE_BYTES, 0.0))
    return base + round(times * min(module, LIMIT_ESTIMATED_BYTES))


def _scratch_bytes(
    directory: Path, described: Manifest, roots: Roots, serving: Serving, programs: Foreseen
) -> int:
    """Return the memory for inputs, outputs and temporaries of one execution, in bytes."""
    shapes = tuple(map(programs.shape, described.named_shapes))
    inputs = sum(
        _bytes_of(spec, shape) for spec, shape in zip(described.inputs, shapes, strict=True)
    )
    outputs = sum(_tensor_bytes(spec, programs.rows) for spec in described.outputs)
    record = described.files.get(manifest.STABLEHLO)
    if record is None or described.durable is None or record.size_bytes > LIMIT_ESTIMATED_BYTES:
        return inputs + outputs
    key = _EstimateKey(
        record.sha256,
        partial(
            files.read_checked,
            directory,
            manifest.STABLEHLO,
            limit_bytes=LIMIT_ESTIMATED_BYTES,
            roots=roots,
        ),
        tuple(shape for index, shape in enumerate(shapes) if _is_taken(described, index)),
        len(described.parameters) - len(set(described.durable.unused) & _parameters(described)),
        described.platforms.index(serving.platform)
        if serving.platform in described.platforms
        else 0,
        programs.rows,
        widens=not serving.is_accelerator,
    )
    rest = _within(key, serving.patience_seconds)
    return inputs + (outputs if rest is None else max(outputs, round(_SPARE * rest)))


def _parameters(described: Manifest) -> set[int]:
    return set(range(len(described.parameters)))


def _is_taken(described: Manifest, index: int) -> bool:
    assert described.durable is not None
    return len(described.parameters) + index not in described.durable.unused


@dataclass(frozen=True, slots=True)
class _EstimateKey:
    """The key of a cached estimate; it contains the module's hash, not the module."""

    sha256: str
    read: Callable[[], bytes | bytearray] = field(compare=False)
    shapes: tuple[tuple[int, ...], ...]
    kept: int
    platform: int
    rows: int
    widens: bool


def _within(key: _EstimateKey, seconds: float | None) -> int | None:
    """Return the estimate, or None if it takes longer than `seconds`.

    An estimate that takes longer is completed in the background and cached for later calls. Also
    returns None while JAX has not been imported, since this function does not import it.
    """
    if ESTIMATING not in sys.modules:
        return None
    if seconds is None:
        return _estimated(key)
    try:
        return _ESTIMATING.submit(_estimated, key).result(seconds)
    except TimeoutError:
        return None


@lru_cache(MAX_ESTIMATES)
def _estimated(key: _EstimateKey) -> int | None:
    """Return the bytes of an execution's outputs and temporaries, or None if analysis fails."""
    module = bytes(key.read())
    try:
        found = sys.modules[ESTIMATING].of_module(
            module,
            key.shapes,
            key.kept,
            key.platform,
            widens=key.widens,
            rows=key.rows,
        )
    # JAX may raise anything for an invalid module; the load will report the problem.
    except Exception:
        return None
    return int(found)


def predict_single_file(
    path: Path, parts: Parts = whole, roots: Roots = ANYWHERE, serving: Serving = ON_THE_HOST
) -> int:
    """Predict the memory of an artifact without a manifest, in bytes; raises InvalidModel.

    The result includes the peak during compilation, in which the parameters, stored as constants,
    exist several times. A batch dimension is assumed, since detecting one requires JAX.
    """
    limit = LIMIT_ARTIFACT_BYTES
    artifact = files.size_of(path.parent, path.name, limit_bytes=limit, roots=roots)
    buckets = _buckets(serving)
    return buckets * EXECUTABLE_BYTES + COPIES_WHILE_COMPILED * artifact


def predict_onnx(
    path: Path, parts: Parts = whole, roots: Roots = ANYWHERE, serving: Serving = ON_THE_HOST
) -> int:
    """Predict the memory of an ONNX model in bytes: the sizes of its files and executables.

    The tensors are only known after conversion. Raises InvalidModel.
    """
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    buckets = _buckets(serving)
    sizes = (
        files.size_of(file.parent, file.name, limit_bytes=1 << 62, roots=roots) for file in found
    )
    return sum(sizes) + buckets * EXECUTABLE_BYTES


def _buckets(serving: Serving) -> int:
    """Return the number of programs compiled with the load."""
    return 2 if serving.in_background else len(buckets_up_to(DEFAULT_MAX_BATCH_SIZE))


def _tensor_bytes(spec: TensorSpec, batch: int) -> int:
    return _bytes_of(spec, [batch if size == -1 else size for size in spec.shape])


def _bytes_of(spec: TensorSpec, shape: Sequence[int]) -> int:
    return spec.datatype.itemsize * prod(shape)
