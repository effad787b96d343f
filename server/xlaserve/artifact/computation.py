"""A StableHLO function with its calling convention, the long-term form of a model.

JAX reads `jax.export` artifacts for six months, while StableHLO is readable for five years. So
exports contain StableHLO, from which the installed JAX's own artifact is built at load time.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.export import Exported, SymbolicScope
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.extend.mlir.passmanager import PassManager
from jax.interpreters import mlir

from xlaserve.artifact import composites, dimensions

READ_FROM: Mapping[str, str] = MappingProxyType(
    {
        "1.11.0": "0.6.2",
        "1.14.0": "0.9.2",
        "1.16.0": "0.10.0",
        "1.17.0": "0.10.2",
        "1.18.0": "0.11.2",
    }
)
"""StableHLO versions that exports may use, each with the first JAX that reads it. An export uses
the lowest one that can express the function. Jax 0.6.2 is of June 2025."""
STABLEHLO_VERSIONS = ("1.11.0", "1.14.0", "1.16.0")
"""Versions readable by every supported JAX; models in other versions are not portable."""

_HINT = "sdy.sharding_rule"
"""Sharding attribute of custom calls."""

_SHOWN_ELEMENTS = 16
"""Constants with more elements are omitted from a module's text."""

_OPERATION = re.compile(r"operation '(?:vhlo\.)?([\w.]+)'")
_REASON_CHARACTERS = 200

_MAX_FRAMES = 64
"""Maximum number of cached signatures, a few kilobytes each."""

Tree: TypeAlias = "int | Mapping[str, Tree] | list[Tree] | tuple[Tree, ...] | None"
"""The structure of arguments or results; each leaf is the index of an array."""

_VERSION = re.compile(rb"ML\xefR\x0dStableHLO_v([0-9.]+)\0")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Abstract:
    """Datatype and shape of an argument or a result."""

    dtype: str
    shape: str
    """Dimensions as JAX prints them, sizes or symbolic expressions: `b, 784`."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A pure function for one device."""

    module: bytes
    """A StableHLO portable artifact with the calling convention of `jax.export`."""
    calling_convention: int
    """Version of the calling convention, as `jax.export` numbers it."""
    platforms: tuple[str, ...]
    """Platforms, in the order of the module's platform index."""
    arguments: tuple[Abstract, ...]
    results: tuple[Abstract, ...]
    unused: tuple[int, ...]
    """Indices of the arguments that the module does not take."""
    is_open: bool
    """Whether shapes or the platform are only fixed when the module is compiled."""
    takes: Tree
    """Structure of the arguments: `((argument, ...), {})`."""
    returns: Tree


def of_artifact(exported: Exported) -> Computation:
    """Extract the computation of an artifact for one device, with its module unchanged."""
    count = len(exported.in_avals)
    return Computation(
        module=exported.mlir_module_serialized,
        calling_convention=exported.calling_convention_version,
        platforms=tuple(exported.platforms),
        arguments=tuple(_abstract(aval) for aval in exported.in_avals),
        results=tuple(_abstract(aval) for aval in exported.out_avals),
        unused=tuple(sorted(set(range(count)) - set(exported.module_kept_var_idx))),
        is_open=exported.uses_global_constants,
        takes=jax.tree.unflatten(exported.in_tree, range(count)),
        returns=jax.tree.unflatten(exported.out_tree, range(len(exported.out_avals))),
    )


def lasting(exported: Exported) -> Computation:
    """Extract the computation of an artifact, in the oldest StableHLO that can express it."""
    computation = of_artifact(exported)
    return dataclasses.replace(computation, module=portable(computation.module))


def to_artifact(computation: Computation) -> Exported:
    """Return a computation as an artifact of the installed JAX; raises JAX's exceptions."""
    # The class has fields private to JAX, which change between versions. So an artifact with the
    # same signature is exported, and its other fields are replaced.
    with jax.enable_x64(True):
        frame = _frame(computation)
    kept = set(range(len(computation.arguments))) - set(computation.unused)
    return dataclasses.replace(
        frame,
        mlir_module_serialized=computation.module,
        calling_convention_version=computation.calling_convention,
        platforms=computation.platforms,
        module_kept_var_idx=tuple(sorted(kept)),
        uses_global_constants=computation.is_open,
    )


def to_file(exported: Exported, computation: Computation) -> bytes:
    """Return an artifact in `jax.export`'s format, with the computation's module."""
    # Older JAX versions can read this module, but not the one that a newer JAX writes.
    return bytes(
        dataclasses.replace(exported, mlir_module_serialized=computation.module).serialize()
    )


def _frame(computation: Computation) -> Exported:
    """Return an artifact that has a computation's signature, and an empty body."""
    bare = dataclasses.replace(computation, module=b"")
    # Deserialize, because a traced artifact refers to its trace, which JAX's caches keep after the
    # model is unloaded: more than a megabyte per load.
    return jax.export.deserialize(bytearray(_frame_file(_Outline(repr(bare), bare))))


@dataclass(frozen=True, slots=True)
class _Outline:
    """A computation without its module, hashed and compared by its text, as trees cannot be."""

    text: str
    computation: Computation = dataclasses.field(compare=False)


# Tracing takes a fifth of the load of a small model, and many models have equal signatures.
@lru_cache(_MAX_FRAMES)
def _frame_file(outline: _Outline) -> bytes:
    computation = outline.computation
    dimensions.check(one.shape for one in (*computation.arguments, *computation.results))
    scope = SymbolicScope()
    arguments = [_struct(abstract, scope) for abstract in computation.arguments]
    results = [_struct(abstract, scope) for abstract in computation.results]

    def model(*_: object, **__: object) -> object:
        return planted(computation.returns, [jnp.zeros(r.shape, r.dtype) for r in results])

    positional, named = planted(computation.takes, arguments)
    frame = jax.export.export(jax.jit(model), platforms=["cpu"])(*positional, **named)
    return bytes(frame.serialize())


def _abstract(aval: ShapedArray) -> Abstract:
    return Abstract(aval.dtype.name, ", ".join(map(str, aval.shape)))


def _struct(abstract: Abstract, scope: SymbolicScope) -> jax.ShapeDtypeStruct:
    shape = dimensions.symbolic(abstract.shape, scope)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(abstract.dtype))


def planted(tree: Tree, leaves: Sequence[_T]) -> Any:
    """Return a tree with each index replaced by its leaf."""
    if tree is None:
        return None
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, Mapping):
        return {key: planted(branch, leaves) for key, branch in tree.items()}
    branches = [planted(branch, leaves) for branch in tree]
    return tuple(branches) if isinstance(tree, tuple) else branches


# --- StableHLO serialization -------------------------------------------------------------------


@contextmanager
def parsed(module: bytes) -> Iterator[Any]:
    """Within this context, parse a portable artifact; yields its MLIR module.

    Raises JAX's exceptions if the installed version cannot read the artifact.
    """
    with mlir.make_ir_context() as context:
        yield stablehlo.deserialize_portable_artifact(context, module)


def text_of(module: bytes) -> str:
    """Print a portable artifact, without large constants; raises the exceptions of `parsed`."""
    with parsed(module) as whole:
        return str(whole.operation.get_asm(large_elements_limit=_SHOWN_ELEMENTS))


def portable(module: bytes) -> bytes:
    """Serialize a portable artifact again, in the oldest possible version in `READ_FROM`.

    Returns the artifact unchanged if no version can; `not_lasting` explains why. Raises the
    exceptions of `parsed`.
    """
    with _plain(module) as whole:
        for version in READ_FROM:
            try:
                return _serialized(whole, version)
            except ValueError:
                continue
    return module


def is_lasting(module: bytes) -> bool:
    """Tell whether every supported JAX version can read a portable artifact."""
    return stablehlo_version(module) in STABLEHLO_VERSIONS


def not_lasting(module: bytes, written_by: str = "") -> str:
    """Explain which JAX versions can read a portable artifact; an empty string if all can.

    `written_by` is the JAX version that wrote it, by default the installed one.
    """
    if is_lasting(module):
        return ""
    version, newest = stablehlo_version(module), STABLEHLO_VERSIONS[-1]
    reads = READ_FROM.get(version, written_by or jax.__version__)
    return (
        f"it is StableHLO {version}, which jax {reads} and newer read, and not {newest}, which is "
        f"read from {READ_FROM[newest]} on: {_obstacle(module)}"
    )


def _obstacle(module: bytes) -> str:
    """Return the reason why a portable artifact needs a newer StableHLO version."""
    diagnostics: list[str] = []

    def hear(diagnostic: Any) -> bool:
        diagnostics.append(str(diagnostic.message))
        return True

    with _plain(module) as whole, whole.context.attach_diagnostic_handler(hear):
        try:
            _serialized(whole, STABLEHLO_VERSIONS[-1])
        except ValueError as error:
            diagnostics.append(str(error))
    found = next((_OPERATION.search(text) for text in diagnostics if _OPERATION.search(text)), None)
    if found is not None:
        return f"that lacks the operation {found[1]}"
    return (diagnostics or ["it uses a newer StableHLO"])[0].splitlines()[0][:_REASON_CHARACTERS]


def neutral(module: bytes) -> bytes:
    """Return a portable artifact without source locations and names, for comparisons."""
    with _plain(module) as whole:
        strip = PassManager.parse("builtin.module(strip-debuginfo)", whole.context)
        strip.run(whole.operation)
        whole.operation.attributes["sym_name"] = ir.StringAttr.get("model", whole.context)
        return _comparable(whole)


def is_same(left: bytes, right: bytes) -> bool:
    """Tell whether two portable artifacts are the same computation, in any StableHLO version."""
    with _plain(left) as one, _plain(right) as other:
        return _comparable(one) == _comparable(other)


@contextmanager
def _plain(module: bytes) -> Iterator[Any]:
    """Parse like `parsed`, and remove or replace features of new StableHLO versions.

    The removed attribute is the sharding rule of linear algebra, which one device does not need.
    """
    with parsed(module) as whole:
        if _HINT.encode() in module:
            whole.operation.walk(_without_hint)
        if composites.MARK.encode() in module:
            composites.without_composites(whole)
        # Failing to serialize is expected here, so keep MLIR from reporting it on stderr.
        handler = whole.context.attach_diagnostic_handler(lambda diagnostic: True)
        with handler:
            yield whole


def _without_hint(operation: Any) -> Any:
    if _HINT in operation.attributes:
        del operation.attributes[_HINT]
    return ir.WalkResult.ADVANCE


def _comparable(module: Any) -> bytes:
    """Serialize a module so that equal modules give equal bytes."""
    try:
        return _serialized(module, newest_stablehlo())
    except ValueError:
        # The module has operations outside StableHLO, which no version can express.
        written = BytesIO()
        module.operation.write_bytecode(written)
        return written.getvalue()


def _serialized(module: Any, version: str) -> bytes:
    return bytes(stablehlo.serialize_portable_artifact(module, version))


def stablehlo_version(module: bytes) -> str:
    """Return the StableHLO version of a portable artifact, or an empty string if unknown."""
    found = _VERSION.match(module)
    return found[1].decode() if found else ""


def too_new(module: bytes, written_by: str) -> str:
    """Explain that a portable artifact is too new for the installed JAX; else an empty string.

    `written_by` is the JAX version that wrote it, or an empty string if unknown.
    """
    version, newest = stablehlo_version(module), newest_stablehlo()
    if not version or _numbers(version) <= _numbers(newest):
        return ""
    by = READ_FROM.get(version, written_by)
    way_out = f": serve it with jax {by} or newer" if by else ""
    return f"it is StableHLO {version}, {newest} is the newest supported{way_out}"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def newest_stablehlo() -> str:
    """Return the newest StableHLO version that the installed JAX reads."""
    return str(stablehlo.get_current_version())
