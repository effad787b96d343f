"""Operations that rearrange elements without changing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xlaserve.row_proofs import sizes
from xlaserve.row_proofs.constants import MAX_ELEMENTS, Constant, fitting
from xlaserve.row_proofs.domain import (
    Along,
    Dimension,
    Dimensions,
    RowNumber,
    Segments,
    Value,
    factor,
    has_rows,
    is_uniform,
    joined,
    joined_dimension,
    moves,
    reshaped,
    size_of,
    uniform,
    with_finding,
)
from xlaserve.row_proofs.findings import Finding, Mixes, NoRule, Problem
from xlaserve.row_proofs.program import Operation, Shape
from xlaserve.row_proofs.rules import segments
from xlaserve.row_proofs.rules.elementwise import of_constant
from xlaserve.row_proofs.rules.row_numbers import WIDE
from xlaserve.row_proofs.sizes import BATCH, ONE, ZERO, Size, static


def depends_on_size(operation: Operation, reason: str, *, surely: bool = True) -> Finding:
    """Return the finding that an operation's result depends on the batch size.

    With `surely=False`, the dependency is only possible.
    """
    return Finding(surely, operation.name, reason, operation.location())


def static_shape(shape: Shape) -> tuple[int, ...] | None:
    """Return a shape as integers if it is static and small enough to evaluate; else None."""
    if not all(size.is_static for size in shape):
        return None
    found = tuple(size.fixed for size in shape)
    return found if 0 < np.prod(found) <= MAX_ELEMENTS else None


def kept(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Return the operands unchanged."""
    del operation
    return list(operands)


def iota(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Count along one dimension."""
    del operands
    shape, axis = operation.types[0].shape, operation.integer("iota_dimension")
    known = static_shape(shape)
    if known is not None:
        counted = np.arange(known[axis]).reshape(
            [-1 if n == axis else 1 for n in range(len(known))]
        )
        found = fitting(Constant(np.broadcast_to(counted, known)), operation.types[0].dtype)
        if found is not None:
            return [of_constant(found, shape, operation)]
    dimensions = tuple(
        factor(size, Along.ANY if number == axis else Along.UNIFORM)
        for number, size in enumerate(shape)
    )
    is_number = shape[axis] == BATCH and operation.types[0].dtype in WIDE
    return [Value(dimensions, fact=RowNumber(axis) if is_number else None)]


def broadcast_in_dim(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Map the operand's dimensions to those of the result; new ones are uniform."""
    shape, places = operation.types[0].shape, operation.integers("broadcast_dimensions")
    return [_broadcast(operation, operands[0], shape, places)]


def _broadcast(operation: Operation, value: Value, shape: Shape, places: Sequence[int]) -> Value:
    if value.blocked is not None:
        return Value((), value.blocked)
    dimensions = list(uniform(shape))
    for dimension, place in zip(value.dimensions, places, strict=True):
        if dimension:
            dimensions[place] = dimension
    return Value(tuple(dimensions), sized=value.sized, fact=_broadcast_fact(value, shape, places))


def _broadcast_fact(
    value: Value, shape: Shape, places: Sequence[int]
) -> Constant | RowNumber | None:
    fact = value.fact
    if isinstance(fact, RowNumber):
        return RowNumber(places[fact.dimension])
    if not isinstance(fact, Constant):
        return None
    if fact.is_splat:
        return fact
    if fact.fixed.size == 1:
        return fact.map(lambda a: a.reshape(()))
    known = static_shape(shape)
    if known is None:
        return None
    thin = [1] * len(known)
    for size, place in zip(fact.fixed.shape, places, strict=True):
        thin[place] = size
    order = np.argsort(places)
    return fact.map(lambda a: np.broadcast_to(a.transpose(order).reshape(thin), known))


def transpose(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Permute the dimensions."""
    (value,), order = operands, operation.integers("permutation")
    fact = value.fact
    if isinstance(fact, Segments) and value.blocked is not None:
        blocks = [_transposed(block, order) for block in fact.values]
        axis = order.index(fact.dimension)
        return [segments.put_together(blocks, fact.sizes, axis, value.blocked)]
    return [_transposed(value, order)]


def _transposed(value: Value, order: Sequence[int]) -> Value:
    if value.blocked is not None:
        return Value((), value.blocked)
    fact = value.fact
    if isinstance(fact, Constant) and not fact.is_splat:
        fact = fact.map(lambda a: a.transpose(order))
    elif isinstance(fact, RowNumber):
        fact = RowNumber(order.index(fact.dimension))
    dimensions = tuple(value.dimensions[place] for place in order)
    return Value(dimensions, sized=value.sized, fact=fact)


def reshape(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Regroup the factors for the new shape."""
    (value,), shape = operands, operation.types[0].shape
    before = operation.operand_types[0].shape
    moved = ones_moved(before, shape)
    if value.blocked is not None:
        return [_blocks_regrouped(value, before, shape) or Value((), value.blocked)]
    return [_regrouped(value, shape, moved)]


def _blocks_regrouped(value: Value, before: Shape, shape: Shape) -> Value | None:
    """Reshape each block, if the dimension along which the blocks lie is kept."""
    fact = value.fact
    if not isinstance(fact, Segments) or value.blocked is None:
        return None
    axis = _still_at(before, fact.dimension, shape)
    if axis is None:
        return None
    blocks = [
        block
        if block.blocked is not None
        else _regrouped(block, (*shape[:axis], size, *shape[axis + 1 :]), None)
        for block, size in zip(fact.values, fact.sizes, strict=True)
    ]
    return segments.put_together(blocks, fact.sizes, axis, value.blocked)


def _regrouped(value: Value, shape: Shape, moved: dict[int, int] | None) -> Value:
    fact = value.fact
    if isinstance(fact, Constant) and not fact.is_splat:
        known = static_shape(shape)
        fact = fact.map(lambda a: a.reshape(known)) if known is not None else None
    elif isinstance(fact, RowNumber):
        axis = moved.get(fact.dimension) if moved is not None else None
        fact = None if axis is None else RowNumber(axis)
    return Value(reshaped(value.dimensions, shape), sized=value.sized, fact=fact)


def _still_at(before: Shape, axis: int, after: Shape) -> int | None:
    """Return the new position of a dimension that the reshape does not merge; None if it does."""
    major, whole = _product(before[:axis]), _product(before)
    for place, size in enumerate(after):
        if size == before[axis] and major is not None and _product(after[:place]) == major:
            return place if _product(after) == whole else None
    return None


def _product(shape: Shape) -> Size | None:
    whole: Size | None = ONE
    for size in shape:
        whole = whole and sizes.product(whole, size)
    return whole


def ones_moved(before: Shape, after: Shape) -> dict[int, int] | None:
    """Return new positions of dimensions if only ones of size 1 are added or removed; else None."""
    places = [axis for axis, size in enumerate(before) if size != ONE]
    targets = [axis for axis, size in enumerate(after) if size != ONE]
    if [before[axis] for axis in places] != [after[axis] for axis in targets]:
        return None
    return dict(zip(places, targets, strict=True))


# --- Slicing -----------------------------------------------------------------------------------


def cut(
    operation: Operation, dimension: Dimension, start: Size, taken: Size, stride: int = 1
) -> tuple[Dimension, Finding | None]:
    """Slice one dimension; also returns the finding if the result depends on the batch size."""
    whole = size_of(dimension)
    if start == ZERO and taken == whole and stride == 1:
        return dimension, None
    if is_uniform(dimension):
        return factor(taken, Along.UNIFORM), None
    if has_rows(dimension):
        return _rows_cut(dimension, start, taken, stride), None
    finding = None
    if not start.is_static or moves(dimension):
        finding = depends_on_size(
            operation, "takes elements at an index that depends on the batch size", surely=False
        )
    return factor(taken, Along.ANY), finding


def _rows_cut(dimension: Dimension, start: Size, taken: Size, stride: int) -> Dimension:
    """Slice a dimension that contains the rows: whole blocks of rows, or one index of each row."""
    place = next(n for n, part in enumerate(dimension) if part.along is Along.ROW)
    inner = size_of(dimension[place + 1 :])
    if stride == 1:
        block = inner and sizes.product(BATCH, inner)
        first = block and _times(start, block)
        count = block and _times(taken, block)
        if first is not None and count is not None and count.fixed:
            along = max((part.along for part in dimension[:place]), default=Along.UNIFORM)
            outer = factor(count, along)
            return (*outer, *dimension[place:])
    is_one_of_each = not place and inner == static(stride) and taken == BATCH
    if stride > 1 and is_one_of_each and start.is_static and 0 <= start.fixed < stride:
        return (dimension[0],)
    raise Mixes("selects some of the rows")


def _times(size: Size, block: Size) -> Size | None:
    return ZERO if size == ZERO else sizes.quotient(size, block)


def slice_(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Slice every dimension."""
    (value,) = operands
    shape = operation.types[0].shape
    starts, limits = operation.sizes("start_indices") or (), operation.sizes("limit_indices") or ()
    slices = Slices(shape, starts, limits, operation.integers("strides"))
    return [sliced_at(operation, value, slices)]


class Slices(NamedTuple):
    """The shape of a slice, and its start, limit and stride in each dimension."""

    shape: Shape
    starts: Shape
    limits: Shape
    strides: Sequence[int]

    def at(self, axis: int, start: Size, taken: Size) -> Slices:
        """Return slices with another start and size in one dimension."""
        new = taken, start, sizes.plus(start, taken)
        shape, starts, limits = (
            (*old[:axis], one, *old[axis + 1 :])
            for old, one in zip((self.shape, self.starts, self.limits), new, strict=True)
        )
        return Slices(shape, starts, limits, self.strides)


def sliced_at(operation: Operation, value: Value, slices: Slices) -> Value:
    """Slice a value, by its blocks if it was concatenated."""
    fact = value.fact
    if isinstance(fact, Segments) and slices.strides[fact.dimension] == 1:
        axis = fact.dimension

        def of_block(block: Value, start: Size, taken: Size) -> Value:
            return _sliced(operation, block, slices.at(axis, start, taken))

        found = segments.cut(value, slices.starts[axis], slices.shape[axis], of_block)
        if found is not None:
            return found
    if value.blocked is not None:
        return Value((), value.blocked)
    return _sliced(operation, value, slices)


def _sliced(operation: Operation, value: Value, slices: Slices) -> Value:
    shape, starts, limits, strides = slices
    if ZERO in shape:
        return Value(uniform(shape))
    found: list[Dimension] = []
    sized = value.sized
    for axis, dimension in enumerate(value.dimensions):
        if strides[axis] != 1 and not limits[axis].is_static and not has_rows(dimension):
            raise NoRule("takes strided elements of a dimension whose size is the batch size")
        left, finding = cut(operation, dimension, starts[axis], shape[axis], strides[axis])
        found.append(left)
        sized = sized or finding
    fact = value.fact
    if isinstance(fact, Constant) and not fact.is_splat:
        fact = _constant_cut(fact, starts, limits, strides)
    if isinstance(fact, Constant) and not fact.is_splat:
        found = list(of_constant(fact, shape, operation).dimensions)
        sized = sized if not fact.is_static else None
    elif not isinstance(fact, Constant):
        fact = None
    return Value(tuple(found), sized=sized, fact=fact)


def _constant_cut(
    fact: Constant, starts: Shape, limits: Shape, strides: Sequence[int]
) -> Constant | None:
    """Slice a constant; None if the bounds depend on the batch size."""
    if not all(bound.is_static for bound in (*starts, *limits)):
        return None
    bounds = tuple(
        slice(start.fixed, limit.fixed, stride)
        for start, limit, stride in zip(starts, limits, strides, strict=True)
    )
    return fact.map(lambda a: a[bounds])


# --- Concatenation and padding -----------------------------------------------------------------


def concatenate(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Concatenate values along a dimension."""
    axis = operation.integer("dimension")
    known = [value.fact for value in operands if isinstance(value.fact, Constant)]
    shape = static_shape(operation.types[0].shape)
    if len(known) == len(operands) and shape is not None:
        return [_constants_joined(operation, known, axis)]
    blocks, of = _apart(operation, operands, axis)
    try:
        together = joined([_without(value, axis) for value in blocks])
        if together.blocked is not None:
            return [segments.put_together(blocks, of, axis, together.blocked)]
        along, finding = _one_behind_the_other(operation, blocks, of, axis)
    except Problem as problem:
        finding = Finding(problem.mixed, operation.name, str(problem), operation.location())
        return [segments.put_together(blocks, of, axis, finding)]
    dimensions = (*together.dimensions[:axis], along, *together.dimensions[axis + 1 :])
    result = Value(dimensions, sized=together.sized)
    return [with_finding(result, finding) if finding else result]


def _apart(
    operation: Operation, operands: Sequence[Value], axis: int
) -> tuple[list[Value], list[Size]]:
    """Return the blocks to concatenate, expanding operands that were concatenated before."""
    blocks: list[Value] = []
    of: list[Size] = []
    for value, kind in zip(operands, operation.operand_types, strict=True):
        if isinstance(value.fact, Segments) and value.fact.dimension == axis:
            blocks.extend(value.fact.values)
            of.extend(value.fact.sizes)
        elif kind.shape[axis] != ZERO:
            blocks.append(value)
            of.append(kind.shape[axis])
    return blocks, of


def _without(value: Value, axis: int) -> Value:
    if value.blocked is not None:
        return value
    # Rows along the concatenated dimension are checked separately.
    return Value((*value.dimensions[:axis], (), *value.dimensions[axis + 1 :]), sized=value.sized)


def _one_behind_the_other(
    operation: Operation, operands: Sequence[Value], of: Sequence[Size], axis: int
) -> tuple[Dimension, Finding | None]:
    dimensions = [value.dimensions[axis] for value in operands]
    size = operation.types[0].shape[axis]
    if any(has_rows(dimension) for dimension in dimensions):
        others = (
            has_rows(dimension)
            for value in operands
            for number, dimension in enumerate(value.dimensions)
            if number != axis
        )
        if any(others):
            raise Mixes("computes something for every pair of rows")
        return _blocks_joined(dimensions), None
    is_moved = any(not one.is_static for one in of[:-1]) or moves(dimensions[-1])
    finding = depends_on_size(
        operation, "writes at an index that depends on the batch size", surely=False
    )
    return factor(size, Along.ANY), finding if is_moved else None


def _blocks_joined(dimensions: Sequence[Dimension]) -> Dimension:
    """Concatenate blocks of whole rows."""
    count = 0
    inner: Dimension | None = None
    for dimension in dimensions:
        place = next((n for n, part in enumerate(dimension) if part.along is Along.ROW), None)
        if place is None:
            raise NoRule("concatenates rows with other values")
        rest = dimension[place:]
        if inner is not None and size_of(inner) != size_of(rest):
            raise NoRule("concatenates blocks of rows of different lengths")
        inner = rest if inner is None else joined_dimension(inner, rest)
        count += math.prod(part.size.fixed for part in dimension[:place])
    return (*factor(static(count), Along.ANY), *(inner or ()))


def _constants_joined(operation: Operation, known: Sequence[Constant], axis: int) -> Value:
    fixed, per_row = [], []
    for kind, fact in zip(operation.operand_types, known, strict=True):
        shape = tuple(size.fixed for size in kind.shape)
        fixed.append(np.broadcast_to(fact.fixed, shape))
        per_row.append(np.broadcast_to(fact.per_row, shape))
    whole = Constant(np.concatenate(fixed, axis), np.concatenate(per_row, axis))
    return of_constant(whole, operation.types[0].shape, operation)


def pad(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Pad with a constant at the edges and between elements."""
    value, filler = operands
    if filler.has_rows:
        raise NoRule("pads with a value that is not a constant")
    low, high = (
        operation.sizes("edge_padding_low") or (),
        operation.sizes("edge_padding_high") or (),
    )
    between = operation.integers("interior_padding")
    shape, sized = operation.types[0].shape, value.sized or filler.sized
    found: list[Dimension] = []
    rows: int | None = None
    for axis, dimension in enumerate(value.dimensions):
        if low[axis] == high[axis] == ZERO and not between[axis]:
            found.append(dimension)
            continue
        if has_rows(dimension):
            if between[axis] or not _is_none_or_more(low[axis], high[axis]):
                raise Mixes("inserts elements between rows, or removes rows")
            rows = axis
            found.append(dimension)
            continue
        found.append(factor(shape[axis], Along.ANY))
        if not low[axis].is_static or not operation.operand_types[0].shape[axis].is_static:
            sized = sized or depends_on_size(
                operation, "writes at an index that depends on the batch size", surely=False
            )
    result = Value(tuple(found), sized=sized)
    if rows is None:
        return [result]
    # A later slice may remove the padding next to the rows.
    reason = "pads the batch with other elements"
    finding = Finding(False, operation.name, reason, operation.location())
    of = low[rows], operation.operand_types[0].shape[rows], high[rows]
    edges = [
        Value(uniform((*shape[:rows], size, *shape[rows + 1 :])), sized=filler.sized) for size in of
    ]
    return [segments.put_together([edges[0], result, edges[2]], of, rows, finding)]


def _is_none_or_more(*counts: Size) -> bool:
    return all(one.per_row >= 0 and one.at(1) >= 0 for one in counts)


def reverse(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Reverse dimensions."""
    (value,) = operands
    found, sized = list(value.dimensions), value.sized
    for axis in operation.integers("dimensions"):
        dimension = found[axis]
        if has_rows(dimension):
            raise Mixes("reverses the order of the rows")
        if is_uniform(dimension):
            continue
        size = operation.types[0].shape[axis]
        if not size.is_static:
            sized = sized or depends_on_size(operation, "indexes from the end of the batch")
        found[axis] = factor(size, Along.ANY)
    fact = value.fact if isinstance(value.fact, Constant) and value.fact.is_splat else None
    return [Value(tuple(found), sized=sized, fact=fact)]


def bitcast_convert(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Reinterpret bits as another type; the last dimension may appear, vanish or change."""
    (value,) = operands
    shape, before = operation.types[0].shape, operation.operand_types[0].shape
    if len(shape) == len(before):
        return [Value(value.dimensions, sized=value.sized)]
    if len(shape) > len(before):
        return [Value((*value.dimensions, factor(shape[-1], Along.ANY)), sized=value.sized)]
    if has_rows(value.dimensions[-1]):
        raise Mixes("combines the bits of several rows")
    dimensions: Dimensions = value.dimensions[:-1]
    return [Value(dimensions, sized=value.sized)]


def random_bits(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Draw random bits: they vary along every dimension, and with the batch size."""
    (state,) = operands
    if state.has_rows:
        raise NoRule("draws random bits from a state that differs between rows")
    sized = state.sized
    if not all(size.is_static for size in operation.types[1].shape):
        sized = sized or depends_on_size(operation, "draws as many bits as rows", surely=False)
    return [
        Value(tuple(factor(size, Along.ANY) for size in kind.shape), sized=sized)
        for kind in operation.types
    ]
