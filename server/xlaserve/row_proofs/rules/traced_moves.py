"""Traces integers back through counts, data movement and lookups."""

from __future__ import annotations

import math
from types import MappingProxyType

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.domain import (
    ROWS,
    Along,
    Dimensions,
    Factor,
    Value,
    factor,
    has_rows,
    is_uniform,
    moves,
    reshaped,
    uniform,
)
from xlaserve.row_proofs.findings import Problem
from xlaserve.row_proofs.ranges import Range
from xlaserve.row_proofs.rules.reduction import only_operation
from xlaserve.row_proofs.rules.shape import ones_moved
from xlaserve.row_proofs.rules.tracing import (
    Part,
    Place,
    Trace,
    TracingRules,
    known_number,
    moved_place,
)
from xlaserve.row_proofs.sizes import BATCH, ONE, ZERO, minus, static


def _constant(trace: Trace) -> Place | None:
    value = trace.operation.attributes["value"]
    if trace.is_float:
        return _float(trace, value)
    if isinstance(value, ir.DenseIntElementsAttr) and value.is_splat:
        number = value.get_splat_value()
        # Booleans are BoolAttr.
        if isinstance(number, ir.IntegerAttr):
            return known_number(trace, int(number.value))
    return None


def _float(trace: Trace, value: object) -> Place | None:
    """Return the integer that all floats of a constant equal; None if there is none."""
    if not isinstance(value, ir.DenseElementsAttr) or not value.is_splat:
        return None
    attribute = value.get_splat_value()
    number = float(attribute.value) if isinstance(attribute, ir.FloatAttr) else 0.5
    is_negative_zero = number == 0 and math.copysign(1, number) < 0
    if not number.is_integer() or is_negative_zero:
        return None
    return known_number(trace, int(number))


def _iota(trace: Trace) -> Place | None:
    axis = trace.operation.integer("iota_dimension")
    size = trace.operation.types[0].shape[axis]
    if trace.part is not None and trace.part.axis == axis:
        return known_number(trace, trace.part.number)
    counted = list(uniform(trace.shape))
    if size.is_static:
        counted[axis] = factor(size, Along.ANY)
        return Place(Value(tuple(counted)), ranges.below(size))
    if size.offset:
        return None
    # Index `i` of `[b * k]` is `[i // k][i % k]` of `[b][k]`.
    inner, rows = static(size.per_row), list(counted)
    rows[axis] = (ROWS, *factor(inner, Along.UNIFORM))
    counted[axis] = (Factor(BATCH, Along.UNIFORM), *factor(inner, Along.ANY))
    return Place(Value(tuple(counted)), ranges.below(inner), size.per_row, tuple(rows))


def _broadcast(trace: Trace) -> Place | None:
    places = trace.operation.integers("broadcast_dimensions")
    before, shape, part = trace.operation.operand_types[0].shape, trace.shape, None
    if trace.part is not None and trace.part.axis in places:
        axis = places.index(trace.part.axis)
        part = Part(axis, trace.part.number) if before[axis] != ONE else None

    def move(dimensions: Dimensions) -> Dimensions:
        moved = list(uniform(shape))
        for dimension, place in zip(dimensions, places, strict=True):
            if dimension:
                moved[place] = dimension
        return tuple(moved)

    return moved_place(trace.other(0, part), move)


def _reshape(trace: Trace) -> Place | None:
    before, after = trace.operation.operand_types[0].shape, trace.operation.types[0].shape
    part = None
    if trace.part is not None and after[trace.part.axis] != ONE:
        moved = ones_moved(after, before)
        if moved is None:
            return None
        part = Part(moved[trace.part.axis], trace.part.number)
    return moved_place(trace.other(0, part), lambda dimensions: reshaped(dimensions, trace.shape))


def _transpose(trace: Trace) -> Place | None:
    order = trace.operation.integers("permutation")
    part = trace.part and Part(order[trace.part.axis], trace.part.number)
    return moved_place(trace.other(0, part), lambda found: tuple(found[place] for place in order))


def _slice(trace: Trace) -> Place | None:
    operation, part = trace.operation, trace.part
    shape, before = operation.types[0].shape, operation.operand_types[0].shape
    starts, strides = operation.sizes("start_indices") or (), operation.integers("strides")
    if part is not None:
        start = starts[part.axis]
        if not start.is_static:
            return None
        part = Part(part.axis, start.fixed + part.number * strides[part.axis])
    else:
        ones = (
            Part(axis, starts[axis].fixed)
            for axis, size in enumerate(shape)
            if size == ONE != before[axis] and starts[axis].is_static
        )
        part = next(ones, None)

    def move(dimensions: Dimensions) -> Dimensions:
        left = list(dimensions)
        for axis, dimension in enumerate(dimensions):
            if shape[axis] == before[axis] or (part is not None and part.axis == axis):
                continue
            is_static = starts[axis].is_static and shape[axis].is_static
            stays = is_static and not moves(dimension)
            if has_rows(dimension) or not (is_uniform(dimension) or stays):
                raise Problem
            along = Along.UNIFORM if is_uniform(dimension) else Along.ANY
            left[axis] = factor(shape[axis], along)
        return tuple(left)

    return moved_place(trace.other(0, part), move)


def _sliced_at(trace: Trace) -> Place | None:
    """Trace a dynamic slice of one element along one dimension, at a constant index."""
    shape, before = trace.operation.types[0].shape, trace.operation.operand_types[0].shape
    cut = [axis for axis, size in enumerate(shape) if size != before[axis]]
    if len(cut) != 1 or trace.part is not None or shape[cut[0]] != ONE:
        return _of_operand(trace)
    (axis,), start = cut, trace.other(1 + cut[0])
    number = None if start is None else start.item()
    if number is None or not before[axis].is_static:
        return _of_operand(trace)
    return trace.other(0, Part(axis, min(max(number, 0), before[axis].fixed - 1)))


def _concatenated(trace: Trace) -> Place | None:
    axis = trace.operation.integer("dimension")
    if trace.part is None or trace.part.axis != axis:
        return _of_any_operand(trace)
    rest = trace.part.number
    for place, kind in enumerate(trace.operation.operand_types):
        size = kind.shape[axis]
        if not size.is_static:
            return None
        if rest < size.fixed:
            return trace.other(place, Part(axis, rest) if size != ONE else None)
        rest -= size.fixed
    return None


def _of_any_operand(trace: Trace) -> Place | None:
    found: Range | None = None
    for place in range(len(trace.operation.operands)):
        one = trace.other(place)
        if one is None or one.whole is None:
            return None
        found = one.whole if found is None else ranges.spanned(found, one.whole)
    return trace.own(found)


def _kept(trace: Trace) -> Place | None:
    return trace.other(trace.result, trace.part)


def _of_operand(trace: Trace) -> Place | None:
    """Return bounds for elements that are a selection of the operand's elements."""
    found = trace.other(0)
    return None if found is None or found.whole is None else trace.own(found.whole)


def _gathered(trace: Trace) -> Place | None:
    """Trace a gather at one constant index along one dimension, such as `x[..., 1]`."""
    operation = trace.operation
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    shape, index_shape = (kind.shape for kind in operation.operand_types)
    axes, taken = list(numbers.collapsed_slice_dims), operation.sizes("slice_sizes") or ()
    index = trace.other(1)
    number = None if index is None else index.item()
    is_slice = (
        list(numbers.start_index_map) == axes
        and len(axes) == 1
        and set(index_shape) <= {ONE}
        and len(numbers.offset_dims) == len(operation.types[0].shape)
    )
    if number is None or not is_slice or trace.part is not None:
        return _of_operand(trace)
    (axis,) = axes
    if not shape[axis].is_static or any(
        one != other for n, (one, other) in enumerate(zip(shape, taken, strict=True)) if n != axis
    ):
        return _of_operand(trace)
    place = min(max(number, 0), shape[axis].fixed - 1)
    found = trace.other(0, Part(axis, place) if shape[axis] != ONE else None)
    return moved_place(found, lambda whole: (*whole[:axis], *whole[axis + 1 :]))


def _turned(trace: Trace) -> Place | None:
    """Trace a double reversal, which restores the order."""
    inner = trace.tracing.made_by(trace.tracing.same(trace.operation.operands[0]))
    is_reverse = inner is not None and inner.name == trace.operation.name
    axes = trace.operation.integers("dimensions")
    if inner is None or not is_reverse or inner.integers("dimensions") != axes:
        return _of_operand(trace)
    found = trace.tracing.place(inner.operands[0], trace.part)
    return None if found is None or found.is_cut else found


def _counted(trace: Trace) -> Place | None:
    """Trace a cumulative sum over the rows of a constant."""
    operation = trace.operation
    number, start = trace.other(0), trace.other(1)
    axes = [n for n, size in enumerate(operation.sizes("window_dimensions") or ()) if size != ONE]
    if len(operation.operands) != 2 or trace.part is not None or len(axes) != 1:
        return None
    (axis,) = axes
    item = None if number is None else number.item()
    window = (operation.sizes("window_dimensions") or ())[axis]
    padding = list(operation.sizes("padding") or ())
    before = padding[2 * axis : 2 * axis + 1]
    padding[2 * axis : 2 * axis + 1] = [ZERO]
    names = "window_strides", "base_dilations", "window_dilations"
    if (
        only_operation(operation.regions[0]) != "stablehlo.add"
        or start is None
        or start.item() != 0
        or item is None
        or item < 0
        or {window, operation.operand_types[0].shape[axis]} != {BATCH}
        or before != [minus(BATCH, ONE)]
        or set(padding) != {ZERO}
        or any(one != 1 for name in names for one in operation.integers(name))
    ):
        return None
    if not item:
        return known_number(trace, 0)
    rows = list(uniform(trace.shape))
    rows[axis] = (ROWS,)
    return Place(Value(uniform(trace.shape)), ranges.of_integer(item), item, tuple(rows))


def _sorted(trace: Trace) -> Place | None:
    found = trace.other(trace.result)
    return None if found is None or found.whole is None else trace.own(found.whole)


def _largest(trace: Trace) -> Place | None:
    if not trace.result:
        return _of_operand(trace)
    return trace.own(ranges.below(trace.operation.operand_types[0].shape[-1]))


RULES: TracingRules = MappingProxyType(
    {
        "stablehlo.constant": _constant,
        "stablehlo.iota": _iota,
        "stablehlo.broadcast_in_dim": _broadcast,
        "stablehlo.reshape": _reshape,
        "stablehlo.transpose": _transpose,
        "stablehlo.slice": _slice,
        "stablehlo.concatenate": _concatenated,
        "stablehlo.optimization_barrier": _kept,
        "stablehlo.reverse": _turned,
        "stablehlo.reduce_window": _counted,
        "stablehlo.gather": _gathered,
        "stablehlo.dynamic_slice": _sliced_at,
        "stablehlo.sort": _sorted,
        "chlo.top_k": _largest,
    }
)
