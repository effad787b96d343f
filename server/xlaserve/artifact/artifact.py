"""Reads a model's `jax.export` artifact, validates it, and rejects unsafe custom calls."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.export
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.export import Exported
from jax.extend.mlir import ir

from xlaserve.artifact import custom_calls, dimensions, element_types, manifest, wrapper
from xlaserve.artifact.computation import (
    Abstract,
    Computation,
    Tree,
    neutral,
    parsed,
    to_artifact,
    too_new,
)
from xlaserve.artifact.manifest import ARTIFACT, STABLEHLO, Durable, Manifest
from xlaserve.artifact.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.artifact.weights import WeightEntry
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.files import FileRecord
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.tensors import Datatype, Shape, TensorSpec, datatype_of, describe

BATCH_DIMENSION = "b"
"""Name of the symbolic batch dimension in exported models."""

_PAIRS = ": give its real and imaginary parts one more dimension, of size 2, in the function"

_SHOWN_ELEMENTS = 16
"""Constants with more elements are omitted from a module's text."""

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
            # Compiler hints, and operations that StableHLO lacks.
            r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement",
            r"ApproxTopK|AllocateBuffer|shape_assertion",
            r"stablehlo\.dynamic_\w+",
        )
    )
)
# Not listed, though jax.export permits them: custom kernels (Pallas), which can access any device
# memory, and calls into TensorFlow. jax.export itself rejects Python callbacks.

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


def read(directory: Path, described: Manifest, roots: Roots = ANYWHERE) -> Exported:
    """Read and validate the computation that a manifest describes; raises InvalidModel.

    Checks the file's hash, that JAX can compile the module, and that its custom calls are in
    `_SAFE_CUSTOM_CALLS`. The StableHLO file is preferred to the `jax.export` file.
    """
    return read_keyed(directory, described, roots).exported


@dataclass(frozen=True, slots=True)
class Keyed:
    """An artifact with its key, which is equal for equal computations."""

    key: str
    exported: Exported
    file_hash: str = ""
    """Hash of the StableHLO file, or an empty string if there is none."""


def read_keyed(
    directory: Path,
    described: Manifest,
    roots: Roots = ANYWHERE,
    known: Callable[[str], Exported | None] = lambda key: None,
) -> Keyed:
    """Read like `read`. `known` returns a validated artifact for a key, or None."""
    record = described.files.get(ARTIFACT)
    data = _read_file(directory, ARTIFACT, record, roots) if record else bytearray()
    if described.durable is None:
        return keyed(deserialize(data, described.jax_version))
    written = described.files[STABLEHLO]
    module = bytes(_read_file(directory, STABLEHLO, written, roots))
    computation = _computation(module, described)
    key = key_of(module, replace(computation, module=b""))
    if (frame := known(key)) is not None:
        return Keyed(key, replace(frame, mlir_module_serialized=module), written.sha256)
    return Keyed(key, from_computation(computation, described.jax_version), written.sha256)


def keyed(exported: Exported) -> Keyed:
    """Return a `jax.export` artifact with its key, which ignores source locations and names."""
    outline = (
        exported.calling_convention_version,
        exported.platforms,
        exported.module_kept_var_idx,
        exported.uses_global_constants,
        exported.nr_devices,
        list(map(str, exported.disabled_safety_checks)),
        list(map(str, exported.in_avals)),
        list(map(str, exported.out_avals)),
        str(exported.in_shardings_hlo),
        str(exported.out_shardings_hlo),
    )
    return Keyed(key_of(neutral(exported.mlir_module_serialized), outline), exported)


def _read_file(directory: Path, name: str, record: FileRecord, roots: Roots) -> bytearray:
    limit = LIMIT_ARTIFACT_BYTES
    return files.read_checked(directory, name, limit_bytes=limit, record=record, roots=roots)


def from_computation(computation: Computation, jax_version: str) -> Exported:
    """Convert a StableHLO computation into an artifact that can be called; raises InvalidModel."""
    try:
        exported = to_artifact(computation)
        module = _module(exported)
        _check_signature(exported, module)
    except InvalidModel:
        raise
    # JAX has no exception class for unreadable modules.
    except Exception as error:
        raise _unreadable(STABLEHLO, jax_version, computation.module, error) from error
    check_custom_calls(module.text, STABLEHLO)
    return exported


def _computation(module: bytes, described: Manifest) -> Computation:
    durable = described.durable
    assert durable is not None
    positions: list[Tree] = list(range(len(durable.arguments)))
    count = len(described.parameters)
    return Computation(
        module=module,
        calling_convention=durable.calling_convention,
        platforms=described.platforms,
        arguments=tuple(map(_abstract, durable.arguments)),
        results=tuple(map(_abstract, durable.results)),
        unused=durable.unused,
        is_open=durable.is_open,
        takes=((positions[:count], positions[count:]), {}),
        returns=list(range(len(durable.results))),
    )


def durable_of(computation: Computation) -> Durable:
    """Return the manifest's description of a computation."""
    return Durable(
        calling_convention=computation.calling_convention,
        is_open=computation.is_open,
        arguments=tuple(f"{a.dtype}[{a.shape}]" for a in computation.arguments),
        results=tuple(f"{r.dtype}[{r.shape}]" for r in computation.results),
        unused=computation.unused,
    )


def _abstract(text: str) -> Abstract:
    dtype, _, shape = text.removesuffix("]").partition("[")
    return Abstract(dtype, shape)


def deserialize(data: bytearray, jax_version: str = "", *, name: str = ARTIFACT) -> Exported:
    """Deserialize a `jax.export` artifact; raises InvalidModel.

    JAX only reads artifacts of the last six months; older ones are parsed here. `jax_version` is
    the JAX version that wrote the artifact, if known.
    """
    _check_dimensions(data, jax_version, name)
    try:
        exported = jax.export.deserialize(data)
        text = _module(exported).text
    except Exception as refusal:  # JAX has no exception class for unreadable modules
        exported, text = _deserialize_refused(data, jax_version, name, refusal)
    check_custom_calls(text, name)
    return exported


def is_read_by_jax(data: bytearray) -> bool:
    """Tell whether the installed JAX can read the bytes of an artifact without our parser."""
    try:
        _check_dimensions(data)
        _module(jax.export.deserialize(data))
    except Exception:  # JAX may raise any exception
        return False
    return True


def _check_dimensions(data: bytearray, jax_version: str = "", name: str = ARTIFACT) -> None:
    """Raise InvalidModel if an artifact's shapes would take JAX too long to parse."""
    try:
        texts = wrapper.shapes(data, name)
    except InvalidModel as error:
        raise _unreadable(name, jax_version, b"", error) from error
    try:
        dimensions.check(texts)
    except InvalidModel as error:
        raise InvalidModel(f"{name}: {error}") from None


def _deserialize_refused(
    data: bytearray, jax_version: str, name: str, refusal: Exception
) -> tuple[Exported, str]:
    module = b""
    try:
        wrapped = wrapper.read(data, name)
        module = wrapped.computation.module
        jax_version = jax_version or wrapped.jax_version
        exported = to_artifact(wrapped.computation)
        return exported, _module(exported).text
    except InvalidModel:
        raise _unreadable(name, jax_version, module, refusal) from refusal
    except Exception as error:  # JAX has no exception class for unreadable modules
        raise _unreadable(name, jax_version, module, error) from error


def _unreadable(name: str, jax_version: str, module: bytes, error: Exception) -> InvalidModel:
    reason = too_new(module, jax_version[:32]) or _first_line(error)
    written = f"was written by jax {jax_version[:32]} and " if jax_version else ""
    return InvalidModel(
        f"{name} {written}cannot be read by the installed jax {jax.__version__}: {reason}. Run"
        " `xlaserve repo migrate` with the jax that wrote it, or a newer one; if it is damaged,"
        " export it again"
    )


@dataclass(frozen=True, slots=True)
class _Module:
    """The signature and the text of a StableHLO module."""

    text: str
    takes: list[str]
    returns: list[str]


def _module(exported: Exported) -> _Module:
    with parsed(exported.mlir_module_serialized) as module:
        main: Any = ir.SymbolTable(module.operation)["main"]
        return _Module(
            # Large constants are omitted: as text they take twice their size, and printing holds
            # the GIL.
            str(module.operation.get_asm(large_elements_limit=_SHOWN_ELEMENTS)),
            [str(tensor) for tensor in main.type.inputs],
            [str(tensor) for tensor in main.type.results],
        )


def _check_signature(exported: Exported, module: _Module) -> None:
    """Raise InvalidModel if a module's signature differs from its manifest's.

    XLA would report it later, and less clearly.
    """
    kept = [exported.in_avals[index] for index in exported.module_kept_var_idx]
    # The first argument is the platform index if there are several platforms.
    takes = module.takes[len(exported.platforms) > 1 :]
    for kind, found, avals in (
        ("takes", takes, kept),
        ("returns", module.returns, exported.out_avals),
    ):
        expected = [_tensor_type(aval) for aval in avals]
        if found != expected:
            raise InvalidModel(
                f"{STABLEHLO} {kind} {_few(found)}, expected {_few(expected)} as in "
                f"{manifest.FILE_NAME}"
            )


def _tensor_type(aval: _Abstract) -> str:
    sizes = [str(size) if isinstance(size, int) else "?" for size in aval.shape]
    return f"tensor<{'x'.join([*sizes, element_types.name_of(aval.dtype.name)])}>"


def _few(types: Sequence[str]) -> str:
    return ", ".join(types)[:200]


def check_custom_calls(text: str, name: str = ARTIFACT) -> None:
    """Raise InvalidModel if a StableHLO module makes a custom call that is not known to be safe."""
    for match in _CUSTOM_CALL.finditer(text):
        target = next(group for group in match.groups() if group is not None)
        if not _SAFE_CUSTOM_CALLS.fullmatch(target):
            raise InvalidModel(f"{name} calls '{target[:64]}', which models may not call")
        if custom_calls.is_missing(target):
            raise InvalidModel(
                f"{name} calls '{target[:64]}', which jaxlib {jaxlib.version.__version__} does"
                " not have: serve it with the jax that exported it, or export it again with the"
                " installed one"
            )


def check(
    exported: Exported,
    described: Manifest,
    entries: Sequence[WeightEntry],
    platform: str,
    *,
    sized: bool = False,
) -> None:
    """Raise InvalidModel unless artifact, manifest and weights describe the same function.

    With `sized`, other dimensions may be dynamic too: the configuration gives their sizes.
    """
    check_runs(exported, platform)
    _check_trees(exported, described)
    count = len(described.parameters)
    _check_parameters(exported.in_avals[:count], described, {e.name: e for e in entries})
    batch = BATCH_DIMENSION if described.is_open else None
    _check_tensors("input", exported.in_avals[count:], described.inputs, batch, sized=sized)
    _check_tensors("output", exported.out_avals, described.outputs, batch, sized=sized)


def check_runs(exported: Exported, platform: str, name: str = ARTIFACT) -> None:
    """Raise InvalidModel unless an artifact can run on a single device of this platform."""
    if platform not in exported.platforms:
        raise InvalidModel(
            f"{name} was exported for {', '.join(exported.platforms)}, "
            f"this server runs on {platform}: export it with platforms=['{platform}', ...]"
        )
    if exported.nr_devices != 1:
        raise InvalidModel(
            f"{name} was exported for {exported.nr_devices} devices, expected 1: "
            "export it without shardings; a configuration may split its parameters (partition)"
        )
    if exported.ordered_effects or exported.unordered_effects:
        raise InvalidModel(
            f"{name} has side effects, which models may not have: export it without callbacks and"
            " debug prints"
        )


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
            f"parameter '{odd}' is in only one of {manifest.WEIGHTS} and {manifest.FILE_NAME}"
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
                f"{kind} '{spec.name}': expected {describe(aval.dtype.name, shape)} as in the "
                f"artifact, got {spec} from {manifest.FILE_NAME}"
            )


def specs_of(
    kind: str,
    names: Sequence[str],
    avals: Sequence[_Abstract],
    batch: str | None,
    *,
    sized: bool = False,
) -> tuple[TensorSpec, ...]:
    """Return the V2 specs of arguments or results; raises InvalidModel that names the tensor.

    `batch` is the name of their symbolic first dimension, or None if that must be fixed.
    """
    specs: list[TensorSpec] = []
    for name, aval in zip(names, avals, strict=True):
        datatype = datatype_of_aval(kind, name, aval)
        shape = _shape(f"{kind} '{name}'", aval.shape, batch, sized=sized)
        specs.append(TensorSpec(name, datatype, shape))
    return tuple(specs)


def datatype_of_aval(kind: str, name: str, aval: _Abstract) -> Datatype:
    """Return the datatype of an argument or a result; raises InvalidModel that names the tensor."""
    # JAX has dtypes that are not numpy's, such as random keys.
    datatype = datatype_of(aval.dtype) if isinstance(aval.dtype, np.dtype) else None
    if datatype is None:
        raise unnamed(kind, name, aval.dtype)
    return datatype


def unnamed(kind: str, name: str, dtype: Any) -> InvalidModel:
    """Return the error for a JAX dtype that has no V2 datatype, such as FP8 or int4."""
    advice = ""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        advice = _PAIRS
    elif jnp.issubdtype(dtype, jnp.number):
        advice = f": make it {_wider(dtype)}, and cast in the function"
    return InvalidModel(
        f"{kind} '{name}' has dtype {dtype}, which the V2 protocol does not have{advice}"
    )


def _wider(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.integer):
        return "INT8 or UINT8"
    return "FP32" if str(dtype) == "float8_e8m0fnu" else "FP16 or FP32"  # FP16 has a smaller range


def _shape(
    what: str, dimensions: Sequence[object], batch: str | None, *, sized: bool = False
) -> Shape:
    """Return the shape with -1 for dynamic dimensions; raises InvalidModel if one must be fixed."""
    shape = tuple(size if isinstance(size, int) else -1 for size in dimensions)
    problem = ""
    if batch is not None and [str(size) for size in dimensions[:1]] != [batch]:
        problem = "and its first dimension is not the batch"
    elif -1 in shape[1:] and not sized:
        problem = (
            "but dimensions other than a leading batch need sizes: set compiled_shapes or"
            " max_on_demand_shapes at export or as parameters of its configuration"
        )
    elif -1 in shape[:1] and batch is None:
        problem = "but only some inputs have a dynamic first dimension"
    if problem:
        raise InvalidModel(f"{what} has the shape ({_written(dimensions)}), {problem}")
    return shape


def _written(dimensions: Sequence[object]) -> str:
    return ", ".join(map(str, dimensions))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def key_of(module: bytes, outline: object) -> str:
    """Return a computation's key: a hash of its module and its calling convention.

    Parameters and file names are not part of the key.
    """
    digest = hashlib.sha256(repr(outline).encode())
    digest.update(module)
    return digest.hexdigest()
