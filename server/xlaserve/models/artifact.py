"""The serialized `jax.export` artifact: read back, checked, and kept from calling foreign code."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.export
import numpy as np
from jax.export import Exported
from jax.interpreters import mlir

from xlaserve.errors import InvalidModel
from xlaserve.models import files, manifest
from xlaserve.models.manifest import ARTIFACT, Manifest
from xlaserve.models.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.models.weights import WeightEntry
from xlaserve.tensors import Shape, TensorSpec, datatype_of, describe

BATCH_DIMENSION = "b"
"""The name of the symbolic dimension that export gives the batch."""

_SHOWN_ELEMENTS = 16
"""Of a constant; the text of a module leaves longer ones out."""

_SAFE_CUSTOM_CALLS = re.compile(
    "|".join(
        (
            # Linear algebra, on the CPU and on GPUs.
            r"lapack_\w+_ffi",
            r"(cusolver|cublas|cusparse|hipsolver|hipblas)_\w+_ffi",
            r"(cu|hip)_lu_pivots_to_permutation",
            r"Eigh|Qr|ProductOfElementaryHouseholderReflectors|LuDecomposition",
            # Random numbers.
            r"(cu|hip)_threefry2x32_ffi",
            # Hints to the compiler, and operations that StableHLO has no word for yet.
            r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement",
            r"ApproxTopK|AllocateBuffer|shape_assertion",
            r"stablehlo\.dynamic_\w+",
        )
    )
)
# Not in it, though jax.export lets them through: kernels of the model's own (Pallas), which may
# touch any device memory, and calls into TensorFlow. Callbacks into Python never come this far.

_CUSTOM_CALL = re.compile(
    r'custom_call @(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[\w.$-]+))'
    r'|call_target_name\s*=\s*"(?P<generic>(?:[^"\\]|\\.)*)"'
)


class _Abstract(Protocol):
    """Shape and dtype of an argument or a result; dimensions are integers or symbolic."""

    @property
    def shape(self) -> tuple[object, ...]: ...

    @property
    def dtype(self) -> "np.dtype[Any]": ...


def read(directory: Path, described: Manifest) -> Exported:
    """Read the artifact that a manifest describes; raises InvalidModel.

    The artifact is the one that was exported (its hash is), JAX can read it, and it calls nothing
    outside XLA but the kernels of the list above.
    """
    record = described.files[ARTIFACT]
    data = files.read_checked(directory, ARTIFACT, limit_bytes=LIMIT_ARTIFACT_BYTES, record=record)
    return deserialize(data, described.jax_version)


def deserialize(data: bytearray, jax_version: str = "", *, name: str = ARTIFACT) -> Exported:
    """Turn the bytes of an artifact into what can be called; raises InvalidModel.

    `jax_version` is that of the JAX that wrote it, where that is known.
    """
    try:
        exported = jax.export.deserialize(data)
        text = _module_text(exported)
    # JAX has no error of its own for this: parsing what it does not know ends in any of its parts.
    except Exception as error:
        written = f"was written by jax {jax_version[:32]} and " if jax_version else ""
        raise InvalidModel(
            f"{name} {written}cannot be read by the jax "
            f"{jax.__version__} that runs here: {_first_line(error)}. Export it again, with a "
            f"version that is at most six months older and no newer than jax {jax.__version__}"
        ) from error
    check_custom_calls(text, name)
    return exported


def _module_text(exported: Exported) -> str:
    # Without its constants, which would be text twice their size, written while all threads wait.
    with mlir.make_ir_context():
        operation = exported.mlir_module(serialized=False).operation
        return str(operation.get_asm(large_elements_limit=_SHOWN_ELEMENTS))


def release(exported: Exported) -> None:
    """Drop the module of an artifact that is compiled; it cannot be compiled again."""
    # The caches of JAX keep the artifacts that they saw, up to 4096 of them, with their constants.
    # jax.clear_caches() would do too, but slow the next call of every other model.
    object.__setattr__(exported, "mlir_module_serialized", b"")


def check_custom_calls(text: str, name: str = ARTIFACT) -> None:
    """Raise InvalidModel when a StableHLO module calls foreign code that is not known as safe."""
    for match in _CUSTOM_CALL.finditer(text):
        target = next(group for group in match.groups() if group is not None)
        if not _SAFE_CUSTOM_CALLS.fullmatch(target):
            raise InvalidModel(
                f"{name} calls '{target[:64]}', which is not among the functions that a "
                "model may call"
            )


def check(
    exported: Exported,
    described: Manifest,
    entries: Sequence[WeightEntry],
    platform: str,
    *,
    sized: bool = False,
) -> None:
    """Raise InvalidModel when artifact, manifest and weights do not describe the same function.

    `sized`: dimensions besides the batch may be open, a configuration says their sizes.
    """
    check_runs(exported, platform)
    _check_trees(exported, described)
    count = len(described.parameters)
    _check_parameters(exported.in_avals[:count], described, {e.name: e for e in entries})
    batch = BATCH_DIMENSION if described.max_batch_size else None
    _check_tensors("input", exported.in_avals[count:], described.inputs, batch, sized=sized)
    _check_tensors("output", exported.out_avals, described.outputs, batch, sized=sized)


def check_runs(exported: Exported, platform: str, name: str = ARTIFACT) -> None:
    """Raise InvalidModel when an artifact is not for one device of this platform alone."""
    if platform not in exported.platforms:
        raise InvalidModel(
            f"{name} was exported for {', '.join(exported.platforms)}, "
            f"this server runs on {platform}"
        )
    if exported.nr_devices != 1:
        raise InvalidModel(f"{name} was exported for {exported.nr_devices} devices, expected 1")
    if exported.ordered_effects or exported.unordered_effects:
        raise InvalidModel(f"{name} has side effects, a model may not have any")


def _check_trees(exported: Exported, described: Manifest) -> None:
    leaves = list(range(len(exported.in_avals)))
    count = len(described.parameters)
    arguments: object = ((leaves[:count], leaves[count:]), {})
    if jax.tree.unflatten(exported.in_tree, leaves) != arguments or (
        len(leaves) != count + len(described.inputs)
    ):
        raise InvalidModel(
            f"{ARTIFACT} does not take the {len(described.parameters)} parameters and "
            f"{len(described.inputs)} inputs of {manifest.FILE_NAME}"
        )
    results = list(range(len(exported.out_avals)))
    if jax.tree.unflatten(exported.out_tree, results) != results or (
        len(results) != len(described.outputs)
    ):
        raise InvalidModel(
            f"{ARTIFACT} does not return the {len(described.outputs)} outputs of "
            f"{manifest.FILE_NAME}"
        )


def _check_parameters(
    avals: Sequence[_Abstract],
    described: Manifest,
    entries: Mapping[str, WeightEntry],
) -> None:
    if set(entries) != set(described.parameters):
        odd = min(set(entries) ^ set(described.parameters))
        raise InvalidModel(
            f"parameter '{odd}' is not in both {manifest.WEIGHTS} and {manifest.FILE_NAME}"
        )
    for name, aval in zip(described.parameters, avals, strict=True):
        entry = entries[name]
        if (entry.dtype, entry.shape) != (aval.dtype, aval.shape):
            raise InvalidModel(
                f"parameter '{name}': expected {aval.dtype.name}[{_written(aval.shape)}], "
                f"got {describe(entry.dtype.name, entry.shape)}"
            )


def _check_tensors(
    kind: str,
    avals: Sequence[_Abstract],
    specs: Sequence[TensorSpec],
    batch: str | None,
    *,
    sized: bool,
) -> None:
    for spec, aval in zip(specs, avals, strict=True):
        shape = _shape(f"{kind} '{spec.name}'", aval.shape, batch, sized=sized)
        if (spec.datatype.dtype, spec.shape) != (aval.dtype, shape):
            raise InvalidModel(
                f"{kind} '{spec.name}': expected {describe(aval.dtype.name, shape)} as the "
                f"artifact has it, got {spec} from {manifest.FILE_NAME}"
            )


def specs_of(
    kind: str,
    names: Sequence[str],
    avals: Sequence[_Abstract],
    batch: str | None,
    *,
    sized: bool = False,
) -> tuple[TensorSpec, ...]:
    """Describe arguments or results as V2 does; raises InvalidModel that names the tensor.

    `batch` is the name of the symbolic dimension that all start with, None where none may be open.
    """
    specs: list[TensorSpec] = []
    for name, aval in zip(names, avals, strict=True):
        # JAX has dtypes that numpy knows nothing of: the keys of random numbers.
        datatype = datatype_of(aval.dtype) if isinstance(aval.dtype, np.dtype) else None
        if datatype is None:
            raise InvalidModel(f"{kind} '{name}' has dtype {aval.dtype}, which V2 has no name for")
        shape = _shape(f"{kind} '{name}'", aval.shape, batch, sized=sized)
        specs.append(TensorSpec(name, datatype, shape))
    return tuple(specs)


def _shape(
    what: str, dimensions: Sequence[object], batch: str | None, *, sized: bool = False
) -> Shape:
    """Return the shape with -1 for the batch; raises InvalidModel for other open dimensions."""
    shape = tuple(size if isinstance(size, int) else -1 for size in dimensions)
    problem = ""
    if batch is not None and [str(size) for size in dimensions[:1]] != [batch]:
        problem = "its first dimension is not the batch"
    elif -1 in shape[1:] and not sized:
        problem = "but only the batch, as the first dimension, may be open"
    elif -1 in shape[:1] and batch is None:
        problem = "but its first dimension is open and max_batch_size is 0"
    if problem:
        raise InvalidModel(f"{what} has the shape ({_written(dimensions)}), {problem}")
    return shape


def _written(dimensions: Sequence[object]) -> str:
    return ", ".join(map(str, dimensions))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
