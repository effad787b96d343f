"""Tensors with a data-dependent number of rows: padded to a bound, with a row count.

Rows beyond the count are padding, which must not affect results. So only row-wise operators accept
such tensors; others are rejected by name.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.sequences import AnyValue, Counted, tensor_of
from xlaserve.importers.onnx.values import Value, axis_of, integers_of
from xlaserve.tensors import Tensor

_SUFFIX = ".count"


def count_name(output: str) -> str:
    """Return the name of the additional output that has the row count of `output`."""
    return f"{output}{_SUFFIX}"


def filled(value: Counted) -> jax.Array:
    """Return the rows with -1 as padding, or 0 for unsigned and boolean datatypes."""
    rows = value.rows
    place = jax.lax.broadcasted_iota(jnp.int64, rows.shape, value.axis)
    padding = jnp.asarray(0 if rows.dtype.kind in "ub" else -1).astype(rows.dtype)
    return jnp.where(place < value.count, rows, padding)


def known(value: Counted) -> Tensor:
    """Return the rows without padding. The value must be computed from constants only."""
    return _first(np.asarray(value.rows), int(value.count), value.axis)


def cut(found: Mapping[str, Tensor], axes: Mapping[str, int]) -> dict[str, Tensor]:
    """Remove padding and counts from outputs; `axes` gives the row axis of padded outputs."""
    counts = {count_name(name): name for name in axes}
    return {
        name: _first(x, int(found[count_name(name)].item()), axes[name]) if name in axes else x
        for name, x in found.items()
        if name not in counts
    }


def _first(x: Tensor, count: int, axis: int) -> Tensor:
    return x[(slice(None),) * axis + (slice(count),)]


# --- Row-wise operators ------------------------------------------------------------------------

_Rule: TypeAlias = Callable[[Node, Counted, Sequence[AnyValue | None]], int]
"""Returns the row axis of the result; raises InvalidModel if the operator mixes rows."""

_MIXED = (
    "it computes over all rows of its input, whose count depends on data, and would include"
    " padding; end the graph before it and compute the rest from the counted rows"
)


def through(node: Node, arguments: Sequence[AnyValue | None]) -> "_Passing":
    """Return a helper that applies a node to padded rows; raises InvalidModel if rows mix."""
    counted = [value for value in arguments if isinstance(value, Counted)]
    rule = None if node.domain else _ROW_WISE.get(node.operator)
    if rule is None or len(counted) != 1:
        raise InvalidModel(_MIXED)
    return _Passing(counted[0], rule(node, counted[0], arguments))


class _Passing:
    """Applies a row-wise operator to a padded tensor."""

    def __init__(self, counted: Counted, axis: int) -> None:
        self._counted = counted
        self._axis = axis

    def unwrapped(self, arguments: Sequence[AnyValue | None]) -> list[AnyValue | None]:
        """Return the arguments with the padded tensor in place of the `Counted`."""
        return [value.rows if isinstance(value, Counted) else value for value in arguments]

    def wrapped(self, result: Value) -> Counted:
        """Return the result with the row count of the argument."""
        return Counted(jnp.asarray(result), self._counted.count, self._axis)


def _same(_: Node, counted: Counted, arguments: Sequence[AnyValue | None]) -> int:
    if arguments[0] is not counted:
        raise InvalidModel(_MIXED)
    return counted.axis


def _gather(node: Node, counted: Counted, arguments: Sequence[AnyValue | None]) -> int:
    """Gather columns of the rows, or use the rows as indices into a table."""
    x, indices = arguments
    if x is not counted:
        return axis_of(node.integer("axis", 0), tensor_of(_present(x), "it").ndim) + counted.axis
    axis = axis_of(node.integer("axis", 0), counted.rows.ndim)
    if axis == counted.axis:
        raise InvalidModel(_MIXED)
    added = tensor_of(_present(indices), "it").ndim - 1
    return counted.axis + (added if axis < counted.axis else 0)


def _gather_nd(node: Node, counted: Counted, arguments: Sequence[AnyValue | None]) -> int:
    is_place = counted.axis == counted.rows.ndim - 1
    if arguments[1] is not counted or is_place or node.integer("batch_dims", 0):
        raise InvalidModel(_MIXED)
    return counted.axis


def _slice(_: Node, counted: Counted, arguments: Sequence[AnyValue | None]) -> int:
    starts, axes = arguments[1], arguments[3] if len(arguments) > len("xse") else None
    along = range(len(_integers(starts))) if axes is None else _integers(axes)
    if counted.axis in [axis_of(axis, counted.rows.ndim) for axis in along]:
        raise InvalidModel(_MIXED)
    return counted.axis


def _squeeze(_: Node, counted: Counted, arguments: Sequence[AnyValue | None]) -> int:
    # Squeeze without axes would also remove the row dimension if its bound is 1.
    if len(arguments) == 1 or arguments[1] is None:
        raise InvalidModel(_MIXED)
    gone = [axis_of(axis, counted.rows.ndim) for axis in _integers(arguments[1])]
    if counted.axis in gone:
        raise InvalidModel(_MIXED)
    return counted.axis - sum(axis < counted.axis for axis in gone)


def _unsqueeze(_: Node, counted: Counted, arguments: Sequence[AnyValue | None]) -> int:
    added = _integers(arguments[1])
    rank = counted.rows.ndim + len(added)
    new = {axis_of(axis, rank) for axis in added}
    return [axis for axis in range(rank) if axis not in new][counted.axis]


def _transpose(node: Node, counted: Counted, _: Sequence[AnyValue | None]) -> int:
    rank = counted.rows.ndim
    return node.integers("perm", tuple(range(rank))[::-1]).index(counted.axis)


def _integers(value: AnyValue | None) -> list[int]:
    return integers_of(tensor_of(_present(value), "it"))


def _present(value: AnyValue | None) -> AnyValue:
    if value is None:
        raise InvalidModel("a required input is missing")
    return value


_ROW_WISE: Mapping[str, _Rule] = MappingProxyType(
    {
        "Cast": _same,
        "CastLike": _same,
        "Gather": _gather,
        "GatherND": _gather_nd,
        "Identity": _same,
        "Slice": _slice,
        "Squeeze": _squeeze,
        "Transpose": _transpose,
        "Unsqueeze": _unsqueeze,
    }
)
"""Row-wise operators, with the functions that compute the row axis of their results."""
