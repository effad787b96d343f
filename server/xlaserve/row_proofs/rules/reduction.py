"""Operations that combine several elements along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import Along, Dimension, Value, factor, has_rows, is_uniform, joined
from xlaserve.row_proofs.findings import Finding, Mixes, NoRule, Problem
from xlaserve.row_proofs.program import Operation, Region
from xlaserve.row_proofs.rules import elementwise as elements
from xlaserve.row_proofs.rules.elementwise import of_constant
from xlaserve.row_proofs.rules.shape import depends_on_size
from xlaserve.row_proofs.sizes import ONE
from xlaserve.row_proofs.walk import Walker

_IDEMPOTENT = frozenset({"stablehlo.and", "stablehlo.or", "stablehlo.maximum", "stablehlo.minimum"})
_BY_NAME = {
    "stablehlo.and": np.logical_and.reduce,
    "stablehlo.or": np.logical_or.reduce,
}


def check_pure(walker: Walker, region: Region) -> Finding | None:
    """Check that a region is elementwise in its arguments and constants.

    Returns the finding if it depends on the batch size. Raises NoRule.
    """
    arguments = [Value(()) for _ in region.arguments]
    for operation in region.operations:
        if operation.name not in elements.NAMES and operation.name != "stablehlo.constant":
            raise NoRule(f"contains {operation.name}, which is not supported in its region")
    returned = walker.region(region, arguments)
    for value in returned:
        if value.blocked is not None:
            raise Mixes("computes with a value of several rows")
    return next((value.sized for value in returned if value.sized), None)


def only_operation(region: Region) -> str:
    """Return the name of a region's only operation if it uses all arguments; else empty."""
    if len(region.operations) != 1:
        return ""
    (operation,) = region.operations
    is_of_all = set(operation.operands) == set(region.arguments)
    return operation.name if is_of_all and region.returned == operation.results else ""


def reduce(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Reduce elements along some dimensions."""
    count = len(operands) // 2
    axes = operation.integers("dimensions")
    values, starts = operands[:count], operands[count:]
    name = only_operation(operation.regions[0])
    if count == 1:
        known = _known(operation, values[0], starts[0], axes, name)
        if known is not None:
            return [known]
    for axis in axes:
        if any(value.dimensions and has_rows(value.dimensions[axis]) for value in values):
            raise Mixes("reduces over the rows")
    together = joined(values)
    sized = together.sized or _starts_sized(starts)
    sized = sized or check_pure(walker, operation.regions[0])
    shape = operation.operand_types[0].shape
    idempotent = count == 1 and name in _IDEMPOTENT and _begins_with_nothing(operation, walker)
    if any(
        not shape[axis].is_static
        # A reduction of no elements returns the initial value.
        and (shape[axis].may_be_zero or not (idempotent and is_uniform(together.dimensions[axis])))
        for axis in axes
    ):
        sized = sized or depends_on_size(operation, "reduces over as many elements as rows")
    left = tuple(one for axis, one in enumerate(together.dimensions) if axis not in axes)
    return [Value(left, sized=sized)] * count


def _begins_with_nothing(operation: Operation, walker: Walker) -> bool:
    """Tell whether the initial value of a reduction is the operation's neutral element.

    XLA ignores any other initial value if there is one element, and uses it if there are more.
    """
    name, dtype = only_operation(operation.regions[0]), operation.types[0].dtype
    start = walker.made_by(walker.same_as(operation.operands[-1]))
    value = None if start is None else start.attributes.get("value")
    if not isinstance(value, ir.DenseElementsAttr) or not value.is_splat:
        return False
    number: Any = value.get_splat_value()
    return isinstance(number, _NUMBERS) and bool(number.value == _neutral(name, dtype))


_NUMBERS = (ir.BoolAttr, ir.IntegerAttr, ir.FloatAttr)


def _neutral(name: str, dtype: str) -> float:
    """Return the neutral element of an idempotent reduction."""
    whole = ranges.of_dtype(dtype)
    least, most = (-np.inf, np.inf) if whole is None else (end.fixed for end in whole)
    if name == "stablehlo.maximum":
        return least
    if name == "stablehlo.or":
        return 0
    return most if name == "stablehlo.minimum" or least == 0 else -1


def _starts_sized(starts: Sequence[Value]) -> Finding | None:
    return next((start.sized for start in starts if start.sized), None)


def _known(
    operation: Operation, value: Value, start: Value, axes: Sequence[int], name: str
) -> Value | None:
    """Reduce a constant of booleans."""
    fact, first = value.fact, start.fact
    if not isinstance(fact, Constant) or not isinstance(first, Constant) or name not in _BY_NAME:
        return None
    if not fact.is_static or operation.types[0].dtype != "i1":
        return None
    if first.item() != (name == "stablehlo.and"):
        # Whether XLA uses such an initial value depends on the number of elements.
        return None
    shape = operation.types[0].shape
    if any(size.may_be_zero for size in operation.operand_types[0].shape):
        return None
    found = fact.fixed if fact.is_splat else _BY_NAME[name](fact.fixed, axis=tuple(axes))
    return of_constant(Constant(found), shape, operation)


# --- Windows -----------------------------------------------------------------------------------


def _windowed(
    operation: Operation, value: Value, names: Sequence[str], reason: str
) -> tuple[list[Dimension], Finding | None]:
    """Return the dimensions of a result computed over sliding windows."""
    windows = operation.sizes("window_dimensions") or ()
    rank = len(value.dimensions)
    for dimension, window in zip(value.dimensions, windows, strict=True):
        if window != ONE and has_rows(dimension):
            raise Mixes(reason)
    kept = _unwindowed(operation, rank, names)
    found: list[Dimension] = []
    sized = value.sized
    for axis, dimension in enumerate(value.dimensions):
        if axis in kept:
            found.append(dimension)
            continue
        if has_rows(dimension):
            raise Mixes(reason)
        size = operation.types[0].shape[axis]
        if not size.is_static or not operation.operand_types[0].shape[axis].is_static:
            raise NoRule("moves windows over a dimension whose size is the batch size")
        found.append(factor(size, Along.ANY))
    return found, sized


def _unwindowed(operation: Operation, rank: int, names: Sequence[str]) -> frozenset[int]:
    """Return the dimensions along which every window is the single element at its index."""
    sizes = operation.integers("window_dimensions")
    ones = [operation.integers(name) or (1,) * rank for name in names]
    padding = operation.integers("padding") or (0,) * (2 * rank)
    return frozenset(
        axis
        for axis in range(rank)
        if sizes[axis] == 1
        and not any(padding[2 * axis : 2 * axis + 2])
        and all(one[axis] == 1 for one in ones)
    )


def reduce_window(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Reduce over sliding windows."""
    count = len(operands) // 2
    together = joined(operands[:count])
    finding = _starts_sized(operands[count:]) or check_pure(walker, operation.regions[0])
    names = ("window_strides", "base_dilations", "window_dilations")
    found, sized = _windowed(operation, together, names, "moves windows over the rows")
    return [Value(tuple(found), sized=sized or finding) for _ in range(count)]


def select_and_scatter(
    operation: Operation, operands: Sequence[Value], walker: Walker
) -> list[Value]:
    """Scatter each source element to the maximum of its window: the gradient of pooling."""
    operand, source, start = operands
    finding = _starts_sized([start])
    for region in operation.regions:
        finding = finding or check_pure(walker, region)
    names, reason = ("window_strides",), "moves windows over the rows"
    found, sized = _windowed(operation, operand, names, reason)
    if source.has_rows:
        _windowed(operation, source, names, reason)
    kept = _unwindowed(operation, len(found), names)
    moved = tuple(
        dimension if axis in kept else factor(size, Along.ANY)
        for axis, (dimension, size) in enumerate(
            zip(source.dimensions, operation.types[0].shape, strict=True)
        )
    )
    return [joined([Value(tuple(found), sized=sized or finding), Value(moved, sized=source.sized)])]


# --- Sorting -----------------------------------------------------------------------------------


def _reordered(operation: Operation, together: Value, axis: int, reason: str) -> Value:
    """Return the abstract value after reordering elements along a dimension."""
    dimension = together.dimensions[axis]
    if has_rows(dimension):
        raise Mixes(reason)
    size = operation.operand_types[0].shape[axis]
    sized = together.sized
    if not size.is_static and not is_uniform(dimension):
        sized = sized or depends_on_size(operation, "sorts as many elements as rows", surely=False)
    along = factor(operation.types[0].shape[axis], Along.ANY)
    if operation.types[0].shape[axis] == ONE:
        along = ()
    return Value(
        (*together.dimensions[:axis], along, *together.dimensions[axis + 1 :]), sized=sized
    )


def sort(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Sort along a dimension; only the keys decide the order."""
    finding = check_pure(walker, operation.regions[0])
    axis = operation.integer("dimension")
    axis += len(operation.types[0].shape) if axis < 0 else 0
    keys = [operands[place] for place in _keys(operation)]
    return [_sorted(operation, [value, *keys], axis, finding) for value in operands]


def _keys(operation: Operation) -> Sequence[int]:
    """Return the positions of the operands that are compared; all if none is."""
    (region,) = operation.regions
    used = {number for one in region.operations for number in one.operands} | set(region.returned)
    count = len(operation.operands)
    pairs = zip(region.arguments[::2], region.arguments[1::2], strict=True)
    found = [place for place, pair in enumerate(pairs) if not used.isdisjoint(pair)]
    return found or range(count)


def _sorted(
    operation: Operation, values: Sequence[Value], axis: int, finding: Finding | None
) -> Value:
    """Return the abstract value of the first value, sorted by the others."""
    try:
        together = joined(values)
        if together.blocked is not None:
            return together
        found = _reordered(operation, together, axis, "sorts the rows")
    except Problem as problem:
        return Value((), Finding(problem.mixed, operation.name, str(problem), operation.location()))
    return Value(found.dimensions, sized=found.sized or finding)


def top_k(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Return the largest elements of the last dimension."""
    operation.integer("k")
    (value,) = operands
    found = _reordered(operation, value, len(value.dimensions) - 1, "takes the largest of the rows")
    return [found] * len(operation.results)
