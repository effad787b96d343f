"""A function of arrays in StableHLO with its calling convention: the form that lasts.

What `jax.export` writes is read by JAX for half a year. StableHLO promises five years, so that is
what is kept, and the JAX that runs gets an artifact of its own made around it.
"""

# Much of jax is typed, but not all that is called here.
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
"""Versions of StableHLO that are written, the first of them that can express all of a function,
with the JAX that reads it and everything after that. Jax 0.6.2 is of June 2025."""
STABLEHLO_VERSIONS = ("1.11.0", "1.14.0", "1.16.0")
"""Versions readable by every supported JAX. Modules of others do not last."""

_HINT = "sdy.sharding_rule"
"""Attribute of a custom call with its sharding."""

_SHOWN_ELEMENTS = 16
"""Most elements of a constant in a text; longer ones are left out."""

_OPERATION = re.compile(r"operation '(?:vhlo\.)?([\w.]+)'")
_REASON_CHARACTERS = 200

_MAX_FRAMES = 64
"""Limit of cached kinds of arguments and results, some kilobytes each."""

Tree: TypeAlias = "int | Mapping[str, Tree] | list[Tree] | tuple[Tree, ...] | None"
"""Arguments or results; each leaf is the position of its array."""

_VERSION = re.compile(rb"ML\xefR\x0dStableHLO_v([0-9.]+)\0")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Abstract:
    """Datatype and shape of an argument or a result."""

    dtype: str
    shape: str
    """Sizes and expressions of symbolic dimensions as JAX writes them: `b, 784`."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A function for one device, without side effects."""

    module: bytes
    """A portable artifact of StableHLO, which is called as `jax.export` calls its own."""
    calling_convention: int
    """The version of the calling convention, as `jax.export` numbers it."""
    platforms: tuple[str, ...]
    """Platforms, in the order of the module's platform index."""
    arguments: tuple[Abstract, ...]
    results: tuple[Abstract, ...]
    unused: tuple[int, ...]
    """Positions of the arguments that the module does not take."""
    is_open: bool
    """Whether the module leaves shapes or the platform open until it is compiled."""
    takes: Tree
    """`((argument, ...), {})`"""
    returns: Tree


def of_artifact(exported: Exported) -> Computation:
    """Extract the durable parts of an artifact for one device, with its module unchanged."""
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
    """Extract the durable parts of an artifact, in StableHLO that old and new JAX read."""
    computation = of_artifact(exported)
    return dataclasses.replace(computation, module=portable(computation.module))


def to_artifact(computation: Computation) -> Exported:
    """Return a computation as an artifact of the JAX that runs; raises whatever JAX raises."""
    # Its class has fields that only JAX may know, others with every version: what has the same
    # arguments and results is exported, and the rest of it replaced.
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
    """Return an artifact as `jax.export` writes it, with the module of the computation."""
    # Older versions of JAX read that longer than what a newer one puts there itself.
    return bytes(
        dataclasses.replace(exported, mlir_module_serialized=computation.module).serialize()
    )


def _frame(computation: Computation) -> Exported:
    """Return an artifact with a computation's arguments and results only."""
    bare = dataclasses.replace(computation, module=b"")
    # What was traced hangs on to the artifact, and that stays in caches of JAX when the model is
    # gone: more than a megabyte for each load. What was read has nothing but its fields.
    return jax.export.deserialize(bytearray(_frame_file(_Outline(repr(bare), bare))))


@dataclass(frozen=True, slots=True)
class _Outline:
    """A computation without its module, compared by its text: trees have no hash."""

    text: str
    computation: Computation = dataclasses.field(compare=False)


# To trace one takes a fifth of the load of a small model, and many models are alike.
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
    """Return a tree with the leaves at their positions."""
    if tree is None:
        return None
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, Mapping):
        return {key: planted(branch, leaves) for key, branch in tree.items()}
    branches = [planted(branch, leaves) for branch in tree]
    return tuple(branches) if isinstance(tree, tuple) else branches


# --- StableHLO ---------------------------------------------------------------------------------


@contextmanager
def parsed(module: bytes) -> Iterator[Any]:
    """Read a portable artifact for the length of a block; yields its module of MLIR.

    Raises whatever JAX raises for one that the JAX which runs cannot read.
    """
    with mlir.make_ir_context() as context:
        yield stablehlo.deserialize_portable_artifact(context, module)


def text_of(module: bytes) -> str:
    """Print a portable artifact without its larger constants; raises as `parsed` does."""
    with parsed(module) as whole:
        return str(whole.operation.get_asm(large_elements_limit=_SHOWN_ELEMENTS))


def portable(module: bytes) -> bytes:
    """Write a portable artifact again in the oldest of our versions of StableHLO that can say it.

    One that none of them can say stays as it is: `not_lasting` tells. Raises as `parsed` does.
    """
    with _plain(module) as whole:
        for version in READ_FROM:
            try:
                return _serialized(whole, version)
            except ValueError:
                continue
    return module


def is_lasting(module: bytes) -> bool:
    """Tell whether every JAX that a server runs on reads a portable artifact."""
    return stablehlo_version(module) in STABLEHLO_VERSIONS


def not_lasting(module: bytes, written_by: str = "") -> str:
    """Explain which JAX versions can read a portable artifact; empty if all can.

    `written_by` is the version of the JAX that wrote it, the one that runs where it is empty.
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
    """Name the obstacle to writing a portable artifact for an older StableHLO version."""
    heard: list[str] = []

    def hear(diagnostic: Any) -> bool:
        heard.append(str(diagnostic.message))
        return True

    with _plain(module) as whole, whole.context.attach_diagnostic_handler(hear):
        try:
            _serialized(whole, STABLEHLO_VERSIONS[-1])
        except ValueError as error:
            heard.append(str(error))
    found = next((_OPERATION.search(text) for text in heard if _OPERATION.search(text)), None)
    if found is not None:
        return f"that has no word for {found[1]}"
    return (heard or ["it is written in a newer one"])[0].splitlines()[0][:_REASON_CHARACTERS]


def neutral(module: bytes) -> bytes:
    """Strip source names and lines from a portable artifact, for comparisons."""
    with _plain(module) as whole:
        strip = PassManager.parse("builtin.module(strip-debuginfo)", whole.context)
        strip.run(whole.operation)
        whole.operation.attributes["sym_name"] = ir.StringAttr.get("model", whole.context)
        return _comparable(whole)


def is_same(left: bytes, right: bytes) -> bool:
    """Tell whether two portable artifacts are the same computation, in whatever version."""
    with _plain(left) as one, _plain(right) as other:
        return _comparable(one) == _comparable(other)


@contextmanager
def _plain(module: bytes) -> Iterator[Any]:
    """Read a portable artifact as `parsed` does, without what only new versions of StableHLO say.

    JAX says of linear algebra how it may be split over devices, and an artifact here is for one.
    """
    with parsed(module) as whole:
        if _HINT.encode() in module:
            whole.operation.walk(_without_hint)
        if composites.MARK.encode() in module:
            composites.without_composites(whole)
        # It would write to stderr what it cannot say, where that is no failure.
        heard = whole.context.attach_diagnostic_handler(lambda diagnostic: True)
        with heard:
            yield whole


def _without_hint(operation: Any) -> Any:
    if _HINT in operation.attributes:
        del operation.attributes[_HINT]
    return ir.WalkResult.ADVANCE


def _comparable(module: Any) -> bytes:
    """Return bytes that are equal for equal modules."""
    try:
        return _serialized(module, newest_stablehlo())
    except ValueError:
        # Operations that StableHLO does not have: of no version, so as they are in memory.
        written = BytesIO()
        module.operation.write_bytecode(written)
        return written.getvalue()


def _serialized(module: Any, version: str) -> bytes:
    return bytes(stablehlo.serialize_portable_artifact(module, version))


def stablehlo_version(module: bytes) -> str:
    """Return the StableHLO version of a portable artifact; empty if unknown."""
    found = _VERSION.match(module)
    return found[1].decode() if found else ""


def too_new(module: bytes, written_by: str) -> str:
    """Explain that a portable artifact is too new for the running JAX; empty if it is not.

    `written_by` is the version of the JAX that wrote it, empty where that is not known.
    """
    version, newest = stablehlo_version(module), newest_stablehlo()
    if not version or _numbers(version) <= _numbers(newest):
        return ""
    by = READ_FROM.get(version, written_by)
    way_out = f": serve it with jax {by} or newer" if by else ""
    return f"it is StableHLO {version}, {newest} is the newest that can be read{way_out}"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def newest_stablehlo() -> str:
    """Return the newest StableHLO version that the running JAX reads."""
    return str(stablehlo.get_current_version())
