"""The memory that a model will need, predicted from its headers and its StableHLO."""

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
"""Code and tables of one compiled bucket: 0.2 to 0.6 MB for small models. The CPU backend does not
report them."""

LIMIT_ARTIFACT_BYTES = 256 << 20
"""Limit of artifacts: a larger one contains parameters, which multiply in compilation."""

COPIES_WHILE_COMPILED = 8
"""Copies of an artifact's constant in memory then: measured 7 to 9, on the CPU. One stays."""


ESTIMATING = "xlaserve.runtime.estimating"
"""The estimating module, which needs JAX."""

LIMIT_ESTIMATED_BYTES = 4 << 20
"""A larger module has constants, whose bytes would be read twice."""

MAX_ESTIMATES = 64
"""Limit of cached estimates."""

_SPARE = 1.6
"""Safety factor of estimates: XLA for the CPU leaves gaps between buffers."""

_CODE: Mapping[str, tuple[int, float]] = MappingProxyType({"cuda": (2 << 10, 3.0)})
"""Code size on accelerators: a constant, and a multiple of the module's size."""

_ESTIMATING = ThreadPoolExecutor(1, "estimate")

ON_THE_HOST = Serving()

Parts: TypeAlias = Callable[[str], int]
"""Returns the number of shards of a parameter."""


def whole(name: str) -> int:
    """Leave a parameter in one part."""
    return 1


def predict_exported(
    directory: Path, parts: Parts = whole, roots: Roots = ANYWHERE, serving: Serving = ON_THE_HOST
) -> int:
    """Predict a compiled model's bytes per device from its manifest; raises InvalidModel.

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
    # Raised for one that is too large, before it is read.
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
    """Return the part of `predict_exported` that other models of the computation already hold.

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
    there = min(compiled_from(record.sha256), foreseen.programs(described, serving).count)
    # As `predict_exported` has it: what is predicted less this is what the model adds.
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
    """Return the scratch memory of one execution of the largest program."""
    shapes = tuple(map(programs.shape, described.named_shapes))
    inputs = sum(
        _bytes_of(spec, shape) for spec, shape in zip(described.inputs, shapes, strict=True)
    )
    outputs = sum(_tensor_bytes(spec, programs.rows) for spec in described.outputs)
    record = described.files.get(manifest.STABLEHLO)
    if record is None or described.durable is None or record.size_bytes > LIMIT_ESTIMATED_BYTES:
        return inputs + outputs
    asked = _Asked(
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
    rest = _within(asked, serving.patience_seconds)
    return inputs + (outputs if rest is None else max(outputs, round(_SPARE * rest)))


def _parameters(described: Manifest) -> set[int]:
    return set(range(len(described.parameters)))


def _is_taken(described: Manifest, index: int) -> bool:
    assert described.durable is not None
    return len(described.parameters) + index not in described.durable.unused


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for an estimate. Estimates are remembered by digests, so that no module stays."""

    sha256: str
    read: Callable[[], bytes | bytearray] = field(compare=False)
    shapes: tuple[tuple[int, ...], ...]
    kept: int
    platform: int
    rows: int
    widens: bool


def _within(asked: _Asked, seconds: float | None) -> int | None:
    """Return the estimate, or None if it takes too long; it then continues for later calls.

    None too as long as nobody has imported JAX: memory is reserved before that.
    """
    if ESTIMATING not in sys.modules:
        return None
    if seconds is None:
        return _estimated(asked)
    try:
        return _ESTIMATING.submit(_estimated, asked).result(seconds)
    except TimeoutError:
        return None


@lru_cache(MAX_ESTIMATES)
def _estimated(asked: _Asked) -> int | None:
    """Return the outputs and temporaries of an execution; None where nothing can be said of it."""
    module = bytes(asked.read())
    try:
        found = sys.modules[ESTIMATING].of_module(
            module,
            asked.shapes,
            asked.kept,
            asked.platform,
            widens=asked.widens,
            rows=asked.rows,
        )
    # What JAX meets in a file has no class of its own, and the load says what is wrong with it.
    except Exception:
        return None
    return int(found)


def predict_single_file(
    path: Path, parts: Parts = whole, roots: Roots = ANYWHERE, serving: Serving = ON_THE_HOST
) -> int:
    """Predict the bytes of an artifact without a manifest; raises InvalidModel.

    More than it holds once it is loaded: its parameters, which are constants, pass through all
    stages of the compiler. It counts as one with a batch, since only JAX could tell.
    """
    limit = LIMIT_ARTIFACT_BYTES
    artifact = files.size_of(path.parent, path.name, limit_bytes=limit, roots=roots)
    buckets = _buckets(serving)
    return buckets * EXECUTABLE_BYTES + COPIES_WHILE_COMPILED * artifact


def predict_onnx(
    path: Path, parts: Parts = whole, roots: Roots = ANYWHERE, serving: Serving = ON_THE_HOST
) -> int:
    """Return the bytes that an ONNX model will need: those of its files, and its executables.

    Its tensors are known once it is converted. Raises InvalidModel.
    """
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    buckets = _buckets(serving)
    sizes = (
        files.size_of(file.parent, file.name, limit_bytes=1 << 62, roots=roots) for file in found
    )
    return sum(sizes) + buckets * EXECUTABLE_BYTES


def _buckets(serving: Serving) -> int:
    """Return the number of programs of a model."""
    return 2 if serving.in_background else len(buckets_up_to(DEFAULT_MAX_BATCH_SIZE))


def _tensor_bytes(spec: TensorSpec, batch: int) -> int:
    return _bytes_of(spec, [batch if size == -1 else size for size in spec.shape])


def _bytes_of(spec: TensorSpec, shape: Sequence[int]) -> int:
    return spec.datatype.itemsize * prod(shape)
