"""Slices at known indices, which JAX lowers to a gather if a size is symbolic."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir.dialects import stablehlo

from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import Value
from xlaserve.row_proofs.program import Operation
from xlaserve.row_proofs.rules import indexing
from xlaserve.row_proofs.rules.shape import Slices, sliced_at
from xlaserve.row_proofs.sizes import ZERO, Size, is_at_most, plus
from xlaserve.row_proofs.walk import Walker


def gather(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Apply the rule of a slice if the index is known, else that of a gather."""
    found = _slice(operation, *operands)
    return [found] if found is not None else indexing.gather(operation, operands, walker)


def _slice(operation: Operation, operand: Value, indices: Value) -> Value | None:
    """Return the abstract value of a single slice at a known index; None for other gathers."""
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    shape, index_shape = (kind.shape for kind in operation.operand_types)
    targets = tuple(numbers.start_index_map)
    at = indices.fact
    is_one = len(index_shape) == 1 and numbers.index_vector_dim == 0
    if not is_one or not isinstance(at, Constant) or isinstance(operand.fact, Constant):
        return None
    if len(numbers.operand_batching_dims) or (at.fixed.size != len(targets) and not at.is_splat):
        return None
    taken = operation.sizes("slice_sizes") or ()
    starts = [ZERO] * len(shape)
    for number, axis in enumerate(targets):
        place = 0 if at.is_splat else number
        starts[axis] = Size(int(at.per_row.flat[place]), int(at.fixed.flat[place]))
    ends = [plus(*both) for both in zip(starts, taken, strict=True)]
    # A slice out of bounds would be clamped.
    if not all(
        is_at_most(ZERO, start) and is_at_most(end, size)
        for start, end, size in zip(starts, ends, shape, strict=True)
    ):
        return None
    slices = Slices(taken, tuple(starts), tuple(ends), (1,) * len(shape))
    return _without(sliced_at(operation, operand, slices), tuple(numbers.collapsed_slice_dims))


def _without(value: Value, gone: Sequence[int]) -> Value:
    """Remove dimensions of size 1."""
    if not gone:
        return value
    if value.blocked is not None:
        return Value((), value.blocked)
    kept = tuple(one for axis, one in enumerate(value.dimensions) if axis not in gone)
    return Value(kept, sized=value.sized)
