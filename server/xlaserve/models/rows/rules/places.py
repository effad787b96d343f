"""Integers traced back to the number of their row: `number * stride + offset`.

What looks into a batch at `arange(b)`, or into a flattened one at `arange(b) * k + i`, sees its own
row. Such an index is made by itself of what differs from row to row, so nothing is known of it, or
of what is computed on the way, but by looking at how it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from xlaserve.models.rows import invariants, ranges
from xlaserve.models.rows.constants import Constant
from xlaserve.models.rows.domain import (
    ROWS,
    Along,
    Dimensions,
    Factor,
    Parts,
    RowNumber,
    Value,
    factor,
    has_rows,
    is_uniform,
    joined,
    reshaped,
    size_of,
    uniform,
)
from xlaserve.models.rows.findings import Finding, Problem
from xlaserve.models.rows.program import Operation, Region, Shape
from xlaserve.models.rows.ranges import TRUTH, Range
from xlaserve.models.rows.rules import parts
from xlaserve.models.rows.rules.elementwise import direction_of
from xlaserve.models.rows.rules.reduction import only_operation
from xlaserve.models.rows.rules.shape import ones_moved
from xlaserve.models.rows.sizes import BATCH, ONE, ZERO, Size, static
from xlaserve.models.rows.walk import Walker

MAX_DEPTH = 48
"""Most operations, one behind the other, that an integer is traced back over."""
MAX_STEPS = 2_000
"""Most operations that are looked at for one integer."""
MAX_ASSUMED = 2
"""Most predicates inside of one another that are taken for true or false."""

_LARGEST = (1 << 63) - 1
_NOTHING = Value((), Finding(False, "", "is no integer that could be traced back"))


class Part(NamedTuple):
    """Those elements of a value that have a number along one of its dimensions."""

    axis: int
    number: int


@dataclass(frozen=True, slots=True)
class Place:
    """Integers that are `number of the row * stride + offset`."""

    offset: Value
    """How the offset varies; blocked where only its bounds are known."""
    within: Range | None
    """Bounds of the offset, which are known wherever there is a stride."""
    stride: int = 0
    rows: Dimensions = ()
    """Where the rows lie whose number it is: uniform but for one row factor, where there is a
    stride."""

    @property
    def whole(self) -> Range | None:
        """Return the bounds of the integer itself."""
        if self.within is None or not self.stride:
            return self.within
        low, high = self.within
        return Range(low, Size(high.per_row + self.stride, high.offset - self.stride))

    def item(self) -> int | None:
        """Return the one number that all elements are at every batch size, None for any other."""
        return None if self.stride or self.within is None else self.within.item()


_Assumed: TypeAlias = Mapping[int, Range]
_NO_ASSUMPTION: _Assumed = MappingProxyType({})
_NO_VALUES: Mapping[int, Value] = MappingProxyType({})
_NO_OPERATIONS: Mapping[int, Operation] = MappingProxyType({})
_NO_ARGUMENTS: Mapping[int, Range | None] = MappingProxyType({})


def place_of(walker: Walker, number: int, part: Part | None = None) -> Place:
    """Return what is known of the integers of a value, or of a part of it."""
    tracing = _Tracing(walker)
    found = tracing.place(number, part)
    if found is None or (part is None and tracing.forgets(number, found)):
        return Place(_NOTHING, None)
    return found


def settled(operation: Operation, values: Sequence[Value], walker: Walker) -> Sequence[Value]:
    """Return what is known of results, of which more is known when they are traced back."""
    if len(values) != 1 or operation.types[0].dtype not in _INTEGERS:
        return values
    (value,) = values
    if value.blocked is None and value.sized is None:
        return values
    tracing = _Tracing(walker, {operation.results[0]: value})
    found = tracing.place(operation.results[0])
    if found is None or tracing.forgets(operation.results[0], found):
        return values
    better = _better(value, found, operation.types[0].shape)
    return values if better is None else [better]


def _better(value: Value, found: Place, shape: Shape) -> Value | None:
    """Return what a place says of integers that is more than is known; None for nothing."""
    item = found.item()
    if item is not None and abs(item) <= _LARGEST:
        return Value(uniform(shape), fact=Constant(item))
    if found.stride or found.offset.blocked is not None:
        return None
    if value.blocked is None and found.offset.sized is not None:
        return None
    return replace(found.offset, fact=value.fact if isinstance(value.fact, Parts) else None)


_INTEGERS = frozenset({"i1", *(f"{sign}i{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})


# --- tracing back ------------------------------------------------------------------------------


class _Tracing:
    def __init__(
        self,
        walker: Walker,
        news: Mapping[int, Value] = _NO_VALUES,
        made: Mapping[int, Operation] = _NO_OPERATIONS,
        arguments: Mapping[int, Range | None] = _NO_ARGUMENTS,
    ) -> None:
        self._walker = walker
        self._news = news
        """Values that the walk has found and not kept yet."""
        self._made = made
        self._arguments = arguments
        self._steps = 0
        self._depth = 0

    def place(
        self, number: int, part: Part | None = None, assumed: _Assumed = _NO_ASSUMPTION
    ) -> Place | None:
        number = self._walker.same_as(number)
        if part is not None and not self._has_part(number, part):
            whole = self.place(number, None, assumed)
            return whole and Place(_NOTHING, whole.whole)
        key = number, part
        noted = self._walker.noted
        # What was noted of a region of a reduction is about arguments that were assumed.
        is_noted = not assumed and not self._arguments
        if is_noted and key in noted:
            known = noted[key]
            return known if isinstance(known, Place) else None
        found = self._followed(number, part, assumed)
        if is_noted:
            noted[key] = found
        within = assumed.get(number)
        return found if within is None else _restricted(found, within)

    def forgets(self, number: int, found: Place) -> bool:
        """Tell whether integers are said not to depend on the inputs, though they are made of them.

        One number that all of them are is so by its bounds, whatever it is made of. What has the
        number of the row may be one of several indices that were put together and cut apart.
        """
        offset = found.offset
        if found.stride or offset.blocked or offset.has_rows or found.item() is not None:
            return False
        left, seen = [number], set[int]()
        while left:
            one = self.same(left.pop())
            operation = self.made_by(one)
            if one in seen:
                continue
            seen.add(one)
            if len(seen) > MAX_STEPS:
                return True
            if operation is not None and operation.name in _RULES:
                left.extend(operation.operands)
                continue
            value = self._walker.known(one)
            if value is None or value.blocked is not None or value.has_rows:
                return True
        return False

    def _has_part(self, number: int, part: Part) -> bool:
        """Tell whether a part is one of a dimension that has the same size in every batch.

        Along others rows may lie, and elements move.
        """
        operation = self.made_by(number)
        if operation is not None:
            return operation.types[operation.results.index(number)].shape[part.axis].is_static
        value = self._walker.known(number)
        if value is None or value.blocked is not None:
            return False
        size = size_of(value.dimensions[part.axis])
        return size is not None and size.is_static

    def made_by(self, number: int) -> Operation | None:
        return self._made.get(number) or self._walker.made_by(number)

    def same(self, number: int) -> int:
        return self._walker.same_as(number)

    def _followed(self, number: int, part: Part | None, assumed: _Assumed) -> Place | None:
        if number in self._arguments:
            return Place(_NOTHING, self._arguments[number])
        operation = self.made_by(number)
        self._steps += 1
        if operation is None or self._depth > MAX_DEPTH or self._steps > MAX_STEPS:
            return self.leaf(number, None, part)
        result = operation.results.index(number)
        kind = operation.types[result]
        if kind.dtype not in _INTEGERS:
            return self.leaf(number, None, part)
        trace = _Trace(self, operation, result, part, assumed)
        self._depth += 1
        try:
            rule = _RULES.get(operation.name)
            is_read = rule is not None and not invariants.unread(operation, _GROWS)
            found = rule(trace) if rule is not None and is_read else None
        except Problem:
            found = None
        finally:
            self._depth -= 1
        if found is None and part is not None:
            found = _only(self.place(number), part)
        if found is None or not _is_of_shape(found, trace.shape):
            return self.leaf(number, ranges.of_dtype(kind.dtype), part)
        return _fitting(found, kind.dtype)

    def leaf(self, number: int, within: Range | None, part: Part | None) -> Place | None:
        """Return what the walk knows of a value."""
        value = self._news.get(number) or self._walker.known(number)
        if value is None:
            return None if within is None else Place(_NOTHING, within)
        if part is not None:
            value = parts.part_of(value, *part)
        if isinstance(value.fact, Constant):
            within = ranges.of_constant(value.fact) or within
        plain = Value(value.dimensions, value.blocked, value.sized)
        if isinstance(value.fact, RowNumber) and value.blocked is None:
            sizes = [size_of(dimension) for dimension in value.dimensions]
            shape = [size for size in sizes if size is not None]
            rows = list(uniform(shape))
            rows[value.fact.dimension] = (ROWS,)
            return Place(Value(uniform(shape)), ranges.of_integer(0), 1, tuple(rows))
        return Place(plain, within)

    def inside(
        self, made: Mapping[int, Operation], arguments: Mapping[int, Range | None]
    ) -> _Tracing:
        """Return one for the region of a reduction, whose arguments have these bounds."""
        found = _Tracing(self._walker, self._news, made, arguments)
        found._steps, found._depth = self._steps, self._depth
        return found


def _is_of_shape(found: Place, shape: Shape) -> bool:
    """Tell whether a place is held to what every result of a rule is held to."""
    if invariants.misfit(found.offset, shape):
        return False
    if not found.stride:
        return True
    rows = Value(found.rows)
    return found.within is not None and rows.has_rows and not invariants.misfit(rows, shape)


def _only(found: Place | None, part: Part) -> Place | None:
    """Return what is known of a part of integers that are followed as a whole; None for nothing."""
    if found is None or not found.stride or found.offset.blocked is not None:
        return None
    if has_rows(found.rows[part.axis]) or has_rows(found.offset.dimensions[part.axis]):
        return None

    def cut(dimensions: Dimensions) -> Dimensions:
        return (*dimensions[: part.axis], (), *dimensions[part.axis + 1 :])

    return _moved(found, cut)


def _restricted(found: Place | None, within: Range) -> Place | None:
    """Return what is known of integers of which it is assumed where they lie."""
    if found is None or found.whole is None:
        return found
    low, high = found.whole
    low = within.low if ranges.is_at_least(within.low, low) else low
    high = within.high if ranges.is_at_least(high, within.high) else high
    if not found.stride:
        return replace(found, within=Range(low, high))
    return found if Range(low, high).item() is None else Place(_NOTHING, Range(low, high))


def _fitting(found: Place, dtype: str) -> Place | None:
    """Return a place without its bounds where some integers would be cut off at their bits."""
    whole = found.whole
    if whole is not None and ranges.fits(whole, dtype):
        return found
    if found.stride:
        return None
    return Place(found.offset, ranges.of_dtype(dtype))


@dataclass(frozen=True, slots=True)
class _Trace:
    """One result of an operation, or a part of it, that is traced back."""

    tracing: _Tracing
    operation: Operation
    result: int
    part: Part | None
    assumed: _Assumed

    @property
    def shape(self) -> Shape:
        """Return the shape of the result, or of the part of it."""
        return _thin(self.operation.types[self.result].shape, self.part)

    def operand(self, place: int, assumed: _Assumed | None = None) -> Place | None:
        """Return an operand, element by element; a scalar for each element."""
        shape = self.operation.operand_types[place].shape
        number = self.operation.operands[place]
        if shape or not self.shape:
            return self.tracing.place(
                number, self.part, self.assumed if assumed is None else assumed
            )
        found = self.tracing.place(number)
        if found is None or found.stride:
            return None
        return replace(found, offset=_spread(found.offset, self.shape))

    def other(self, place: int, part: Part | None = None) -> Place | None:
        """Return an operand whose elements are not those of the result, one by one."""
        return self.tracing.place(self.operation.operands[place], part)

    def own(self, within: Range | None) -> Place | None:
        """Return what the walk knows of the result, with bounds."""
        return self.tracing.leaf(self.operation.results[self.result], within, self.part)


def _thin(shape: Shape, part: Part | None) -> Shape:
    if part is None:
        return shape
    return (*shape[: part.axis], ONE, *shape[part.axis + 1 :])


def _spread(value: Value, shape: Shape) -> Value:
    if value.blocked is not None:
        return value
    return Value(uniform(shape), sized=value.sized)


_Rule: TypeAlias = Callable[[_Trace], Place | None]


# --- what is computed of offsets ---------------------------------------------------------------


def _together(trace: _Trace, *places: Place) -> Value:
    """Return how something varies that is computed from offsets."""
    try:
        return joined([place.offset for place in places])
    except Problem as problem:
        operation = trace.operation
        finding = Finding(problem.mixed, operation.name, str(problem), operation.location())
        return Value((), finding)


def _known(trace: _Trace, number: int) -> Place:
    return Place(Value(uniform(trace.shape)), ranges.of_integer(number))


def _is_of_same_rows(left: Place, right: Place) -> bool:
    return not left.stride or not right.stride or left.rows == right.rows


def _added(trace: _Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None or not _is_of_same_rows(left, right):
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.added(left.within, right.within)
    stride = left.stride + right.stride
    if stride and within is None:
        return None
    return Place(_together(trace, left, right), within, stride, left.rows or right.rows)


def _subtracted(trace: _Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    return left and right and _difference(trace, left, right)


def _difference(trace: _Trace, left: Place, right: Place) -> Place | None:
    stride = left.stride - right.stride
    if stride < 0 or not _is_of_same_rows(left, right):
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.subtracted(left.within, right.within)
    if stride and within is None:
        return None
    return Place(_together(trace, left, right), within, stride, left.rows if stride else ())


def _multiplied(trace: _Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None:
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.multiplied(left.within, right.within)
    if not left.stride and not right.stride:
        return Place(_together(trace, left, right), within)
    for one, other in ((left, right), (right, left)):
        number = other.item()
        if number is not None and one.stride and within is not None and number >= 0:
            if not number:
                return _known(trace, 0)
            return Place(one.offset, within, one.stride * number, one.rows)
    return None


def _negated(trace: _Trace) -> Place | None:
    found = trace.operand(0)
    if found is None or found.stride:
        return None
    within = found.within and ranges.subtracted(ranges.of_integer(0), found.within)
    return Place(found.offset, within)


def _chosen_larger(trace: _Trace, left: Place, right: Place) -> Place | None:
    return _extreme(trace, left, right, "GE", ranges.larger)


def _chosen_smaller(trace: _Trace, left: Place, right: Place) -> Place | None:
    return _extreme(trace, left, right, "LE", ranges.smaller)


def _extreme(
    trace: _Trace,
    left: Place,
    right: Place,
    direction: str,
    of_both: Callable[[Range, Range], Range],
) -> Place | None:
    is_left = _compared(trace, left, right, direction).item()
    if is_left is not None:
        return left if is_left else right
    if left.stride or right.stride:
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = of_both(left.within, right.within)
    return Place(_together(trace, left, right), within)


def _maximum(trace: _Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    return left and right and _chosen_larger(trace, left, right)


def _minimum(trace: _Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    return left and right and _chosen_smaller(trace, left, right)


def _clamped(trace: _Trace) -> Place | None:
    low, found, high = (trace.operand(place) for place in range(3))
    if low is None or found is None or high is None:
        return None
    above = _chosen_larger(trace, low, found)
    return above and _chosen_smaller(trace, above, high)


def _is_counted_up(found: Place, divisor: int) -> bool:
    """Tell whether an integer from zero on can be divided: its offset, and its rows."""
    within = found.within
    return (
        within is not None
        and divisor > 0
        and ranges.is_at_least(within.low, ZERO)
        and not found.stride % divisor
    )


def _divided(trace: _Trace) -> Place | None:
    found, divisor = trace.operand(0), trace.operand(1)
    if found is None or divisor is None:
        return None
    number = divisor.item()
    if number is not None and found.within is not None and _is_counted_up(found, number):
        within = None
        if found.within.is_static:
            low, high = (static(end.fixed // number) for end in found.within)
            within = Range(low, high)
        if found.stride and within is None:
            return None
        return Place(found.offset, within, found.stride // number, found.rows)
    return _of_both(trace, found, divisor)


def _remainder(trace: _Trace) -> Place | None:
    found, divisor = trace.operand(0), trace.operand(1)
    if found is None or divisor is None:
        return None
    number = divisor.item()
    if number is not None and found.within is not None and _is_counted_up(found, number):
        if ranges.is_at_least(static(number - 1), found.within.high):
            return Place(found.offset, found.within)
        return Place(found.offset, ranges.below(static(number)))
    return _of_both(trace, found, divisor)


def _of_both(trace: _Trace, left: Place, right: Place) -> Place | None:
    if left.stride or right.stride:
        return None
    return Place(_together(trace, left, right), None)


def _sign(trace: _Trace) -> Place | None:
    found = trace.operand(0)
    if found is None:
        return None
    offset = _NOTHING if found.stride else found.offset
    if found.whole is None:
        return Place(offset, Range(static(-1), ONE))
    low, high = found.whole
    lowest = next((end for end in (1, 0) if ranges.is_at_least(low, static(end))), -1)
    highest = next((end for end in (-1, 0) if ranges.is_at_least(static(end), high)), 1)
    return Place(offset, Range(static(lowest), static(highest)))


def _magnitude(trace: _Trace) -> Place | None:
    found = trace.operand(0)
    if found is None or found.whole is None or not ranges.is_at_least(found.whole.low, ZERO):
        return None
    return found


def _converted(trace: _Trace) -> Place | None:
    before = trace.operation.operand_types[0].dtype
    after = trace.operation.types[0].dtype
    if before not in _INTEGERS:
        return None
    found = trace.operand(0)
    if found is None or after != "i1":
        return found
    whole = found.whole
    if found.item() == 0:
        return _known(trace, 0)
    if whole is not None and (
        ranges.is_at_least(whole.low, ONE) or ranges.is_at_least(static(-1), whole.high)
    ):
        return _known(trace, 1)
    return Place(_NOTHING if found.stride else found.offset, TRUTH)


# --- truth values ------------------------------------------------------------------------------


def _compare(trace: _Trace) -> Place | None:
    if trace.operation.operand_types[0].dtype not in _INTEGERS:
        return None
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None:
        return Place(_NOTHING, TRUTH)
    return _compared(trace, left, right, direction_of(trace.operation))


def _compared(trace: _Trace, left: Place, right: Place, direction: str) -> Place:
    is_alike = left.stride == right.stride and _is_of_same_rows(left, right)
    ends = (left.within, right.within) if is_alike else (left.whole, right.whole)
    if ends[0] is not None and ends[1] is not None:
        found = ranges.compared(direction, ranges.subtracted(ends[0], ends[1]))
        if found is not None:
            return _known(trace, int(found))
    return Place(_together(trace, left, right) if is_alike else _NOTHING, TRUTH)


def _logical(trace: _Trace, neutral: int) -> Place | None:
    """Return what `and` or `or` makes; where one is not known, the other may follow from it."""
    if trace.operation.types[0].dtype != "i1":
        return _bits(trace, neutral)
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None:
        return Place(_NOTHING, TRUTH)
    if 1 - neutral in (left.item(), right.item()):
        return _known(trace, 1 - neutral)
    for one, other in ((left, right), (right, left)):
        if one.item() == neutral:
            return other
    for first, second in ((0, 1), (1, 0)):
        assumed = _assuming(trace, trace.operation.operands[first], is_true=bool(neutral))
        if assumed is not None:
            follows = trace.operand(second, assumed)
            if follows is not None and follows.item() == 1 - neutral:
                return _known(trace, 1 - neutral)
    return Place(_together(trace, left, right), TRUTH)


def _bits(trace: _Trace, neutral: int) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None or left.stride or right.stride:
        return None
    numbers = [number for number in (left.item(), right.item()) if number is not None]
    within = None
    if neutral and numbers and numbers[0] >= 0:
        within = ranges.below(static(numbers[0] + 1))
    return Place(_together(trace, left, right), within)


def _and(trace: _Trace) -> Place | None:
    return _logical(trace, 1)


def _or(trace: _Trace) -> Place | None:
    return _logical(trace, 0)


def _not(trace: _Trace) -> Place | None:
    found = trace.operand(0)
    if found is None or trace.operation.types[0].dtype != "i1":
        return None
    item = found.item()
    return Place(found.offset, TRUTH) if item is None else _known(trace, 1 - item)


def _xor(trace: _Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None or trace.operation.types[0].dtype != "i1":
        return None
    items = left.item(), right.item()
    if items[0] is not None and items[1] is not None:
        return _known(trace, items[0] ^ items[1])
    return Place(_together(trace, left, right), TRUTH)


def _selected(trace: _Trace) -> Place | None:
    predicate = trace.operand(0)
    item = None if predicate is None else predicate.item()
    if item is not None:
        return trace.operand(1 if item else 2)
    left, right = (
        trace.operand(place, _assuming(trace, trace.operation.operands[0], is_true=is_true))
        for place, is_true in ((1, True), (2, False))
    )
    if left is None or right is None or left.stride != right.stride or left.rows != right.rows:
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.spanned(left.within, right.within)
    if left.stride and within is None:
        return None
    offset = _NOTHING if predicate is None else _together(trace, predicate, left, right)
    return Place(offset, within, left.stride, left.rows)


def _assuming(trace: _Trace, predicate: int, *, is_true: bool) -> _Assumed | None:
    """Return what is assumed where a comparison with a number holds, or does not."""
    tracing = trace.tracing
    made = tracing.made_by(tracing.same(predicate))
    if made is None or made.name != "stablehlo.compare" or len(trace.assumed) >= MAX_ASSUMED:
        return None
    # Of the same elements; what is assumed of a scalar says nothing of any of them.
    is_of_same = made.types[0].shape == trace.operation.types[trace.result].shape
    if not is_of_same or made.operand_types[0].dtype not in _INTEGERS:
        return None
    comparison = _Trace(tracing, made, 0, trace.part, trace.assumed)
    direction = direction_of(made)
    for place, says in ((0, direction), (1, _MIRRORED[direction])):
        bound, subject = comparison.operand(1 - place), comparison.operand(place)
        number = None if bound is None else bound.item()
        if number is None or subject is None or subject.whole is None:
            continue
        within = _bounded(says if is_true else _OPPOSITE[says], number, subject.whole)
        if within is not None:
            name = _subject(tracing, tracing.same(made.operands[place]), within)
            return {**trace.assumed, name: within}
    return None


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_OPPOSITE = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "EQ": "NE", "NE": "EQ"}


def _subject(tracing: _Tracing, number: int, within: Range) -> int:
    """Return the integer that is within bounds where another is: it is 0 where its sign is."""
    made = tracing.made_by(number)
    if made is not None and made.name == "stablehlo.sign" and within.item() == 0:
        return tracing.same(made.operands[0])
    return number


def _bounded(direction: str, number: int, whole: Range) -> Range | None:
    """Return what is left of a range where its integers compare so with a number."""
    low, high = whole
    if direction == "NE":
        if low == static(number):
            return Range(static(number + 1), high)
        return Range(low, static(number - 1)) if high == static(number) else None
    lowest = {"GT": number + 1, "GE": number, "EQ": number}.get(direction)
    highest = {"LT": number - 1, "LE": number, "EQ": number}.get(direction)
    if lowest is not None and ranges.is_at_least(static(lowest), low):
        low = static(lowest)
    if highest is not None and ranges.is_at_least(high, static(highest)):
        high = static(highest)
    return Range(low, high)


# --- what is counted, and moved ----------------------------------------------------------------


def _constant(trace: _Trace) -> Place | None:
    value = trace.operation.attributes["value"]
    if isinstance(value, ir.DenseIntElementsAttr) and value.is_splat:
        number = value.get_splat_value()
        if isinstance(number, ir.IntegerAttr) and trace.operation.types[0].dtype != "i1":
            return _known(trace, int(number.value))
    return None


def _iota(trace: _Trace) -> Place | None:
    axis = trace.operation.integer("iota_dimension")
    size = trace.operation.types[0].shape[axis]
    if trace.part is not None and trace.part.axis == axis:
        return _known(trace, trace.part.number)
    counted = list(uniform(trace.shape))
    if size.is_static:
        counted[axis] = factor(size, Along.ANY)
        return Place(Value(tuple(counted)), ranges.below(size))
    if size.offset:
        return None
    # The element `i` of `[b * k]` is `[i // k][i % k]` of `[b][k]`.
    inner, rows = static(size.per_row), list(counted)
    rows[axis] = (ROWS, *factor(inner, Along.UNIFORM))
    counted[axis] = (Factor(BATCH, Along.UNIFORM), *factor(inner, Along.ANY))
    return Place(Value(tuple(counted)), ranges.below(inner), size.per_row, tuple(rows))


def _moved(found: Place | None, move: Callable[[Dimensions], Dimensions]) -> Place | None:
    """Return a place whose elements are put elsewhere; raises what `move` does."""
    if found is None:
        return None
    offset = found.offset
    if offset.blocked is None:
        offset = Value(move(offset.dimensions), sized=offset.sized)
    return replace(found, offset=offset, rows=move(found.rows) if found.stride else ())


def _broadcast(trace: _Trace) -> Place | None:
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

    return _moved(trace.other(0, part), move)


def _reshape(trace: _Trace) -> Place | None:
    before, after = trace.operation.operand_types[0].shape, trace.operation.types[0].shape
    part = None
    if trace.part is not None and after[trace.part.axis] != ONE:
        moved = ones_moved(after, before)
        if moved is None:
            return None
        part = Part(moved[trace.part.axis], trace.part.number)
    return _moved(trace.other(0, part), lambda dimensions: reshaped(dimensions, trace.shape))


def _transpose(trace: _Trace) -> Place | None:
    order = trace.operation.integers("permutation")
    part = trace.part and Part(order[trace.part.axis], trace.part.number)
    return _moved(trace.other(0, part), lambda found: tuple(found[place] for place in order))


def _slice(trace: _Trace) -> Place | None:
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
            stays = is_static and (len(dimension) == 1 or before[axis].is_static)
            if has_rows(dimension) or not (is_uniform(dimension) or stays):
                raise Problem
            along = Along.UNIFORM if is_uniform(dimension) else Along.ANY
            left[axis] = factor(shape[axis], along)
        return tuple(left)

    return _moved(trace.other(0, part), move)


def _sliced_at(trace: _Trace) -> Place | None:
    """Return what a slice takes that has one element of one dimension, at a constant place."""
    shape, before = trace.operation.types[0].shape, trace.operation.operand_types[0].shape
    cut = [axis for axis, size in enumerate(shape) if size != before[axis]]
    if len(cut) != 1 or trace.part is not None or shape[cut[0]] != ONE:
        return _of_operand(trace)
    (axis,), start = cut, trace.other(1 + cut[0])
    number = None if start is None else start.item()
    if number is None or not before[axis].is_static:
        return _of_operand(trace)
    return trace.other(0, Part(axis, min(max(number, 0), before[axis].fixed - 1)))


def _concatenated(trace: _Trace) -> Place | None:
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


def _of_any_operand(trace: _Trace) -> Place | None:
    found: Range | None = None
    for place in range(len(trace.operation.operands)):
        one = trace.other(place)
        if one is None or one.whole is None:
            return None
        found = one.whole if found is None else ranges.spanned(found, one.whole)
    return trace.own(found)


def _kept(trace: _Trace) -> Place | None:
    return trace.other(trace.result, trace.part)


def _of_operand(trace: _Trace) -> Place | None:
    """Return what is known of elements that are some of those of the operand."""
    found = trace.other(0)
    return None if found is None or found.whole is None else trace.own(found.whole)


def _gathered(trace: _Trace) -> Place | None:
    """Return what is taken at a constant index along one dimension, as `x[..., 1]` is written."""
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
    return _moved(found, lambda whole: (*whole[:axis], *whole[axis + 1 :]))


def _sorted(trace: _Trace) -> Place | None:
    found = trace.other(trace.result)
    return None if found is None or found.whole is None else trace.own(found.whole)


def _largest(trace: _Trace) -> Place | None:
    if not trace.result:
        return _of_operand(trace)
    return trace.own(ranges.below(trace.operation.operand_types[0].shape[-1]))


# --- reductions --------------------------------------------------------------------------------


def _reduced(trace: _Trace) -> Place | None:
    operation = trace.operation
    name = only_operation(operation.regions[0])
    shape = operation.operand_types[0].shape
    sizes = [shape[axis] for axis in operation.integers("dimensions")]
    if name in {"stablehlo.and", "stablehlo.or"} and operation.types[0].dtype == "i1":
        return _truth_of_all(trace, int(name == "stablehlo.and"))
    wholes = [_whole(trace.other(place)) for place in range(len(operation.operands))]
    found, start = wholes[trace.result], wholes[trace.result + len(operation.types)]
    if found is None or start is None:
        return None
    if name == "stablehlo.add":
        if not all(size.is_static for size in sizes):
            return None
        count = 1
        for size in sizes:
            count *= size.fixed
        total = ranges.multiplied(found, ranges.of_integer(count))
        return total and trace.own(ranges.added(total, start))
    if name in _EXTREMES and ZERO not in sizes:
        return trace.own(_EXTREMES[name](found, start))
    return _of_region(trace, operation.regions[0], wholes)


_EXTREMES = {"stablehlo.maximum": ranges.larger, "stablehlo.minimum": ranges.smaller}


def _whole(found: Place | None) -> Range | None:
    return None if found is None else found.whole


def _of_region(trace: _Trace, region: Region, wholes: Sequence[Range | None]) -> Place | None:
    """Return bounds that hold for what a reduction begins with, and are kept by each step."""
    count = len(trace.operation.types)
    spans = [
        None if one is None or start is None else ranges.spanned(one, start)
        for one, start in zip(wholes[:count], wholes[count:], strict=True)
    ]
    made = {result: one for one in region.operations for result in one.results}
    arguments = dict(zip(region.arguments, (*spans, *spans), strict=True))
    inner = trace.tracing.inside(made, arguments)
    for returned, span in zip(region.returned, spans, strict=True):
        found = _whole(inner.place(returned))
        if span is not None and (found is None or not ranges.is_within(found, span)):
            return None
    return trace.own(spans[trace.result])


def _truth_of_all(trace: _Trace, neutral: int) -> Place | None:
    """Return whether all of some truth values hold, or any, where each can be looked at."""
    axes = trace.operation.integers("dimensions")
    start = trace.other(1)
    if trace.part is not None or start is None or start.item() != neutral:
        return None
    found = trace.other(0)
    if found is not None and found.item() == neutral:
        return _known(trace, neutral)
    size = trace.operation.operand_types[0].shape[axes[0]]
    if len(axes) != 1 or not size.is_static or not 0 < size.fixed <= parts.MAX_PARTS:
        return None
    each = [trace.other(0, Part(axes[0], number)) for number in range(size.fixed)]
    return _truth_of_each(trace, [one or Place(_NOTHING, TRUTH) for one in each], neutral)


def _truth_of_each(trace: _Trace, each: Sequence[Place], neutral: int) -> Place:
    (axis,) = trace.operation.integers("dimensions")
    if any(one.item() == 1 - neutral for one in each):
        return _known(trace, 1 - neutral)
    left = [one for one in each if one.item() is None]
    if not left:
        return _known(trace, neutral)
    together = _together(trace, *left)
    if together.blocked is not None:
        return Place(together, TRUTH)
    dimensions = (*together.dimensions[:axis], *together.dimensions[axis + 1 :])
    return Place(Value(dimensions, sized=together.sized), TRUTH)


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "stablehlo.constant": _constant,
        "stablehlo.iota": _iota,
        "stablehlo.add": _added,
        "stablehlo.subtract": _subtracted,
        "stablehlo.multiply": _multiplied,
        "stablehlo.negate": _negated,
        "stablehlo.divide": _divided,
        "stablehlo.remainder": _remainder,
        "stablehlo.sign": _sign,
        "stablehlo.abs": _magnitude,
        "stablehlo.maximum": _maximum,
        "stablehlo.minimum": _minimum,
        "stablehlo.clamp": _clamped,
        "stablehlo.convert": _converted,
        "stablehlo.compare": _compare,
        "stablehlo.and": _and,
        "stablehlo.or": _or,
        "stablehlo.xor": _xor,
        "stablehlo.not": _not,
        "stablehlo.select": _selected,
        "stablehlo.broadcast_in_dim": _broadcast,
        "stablehlo.reshape": _reshape,
        "stablehlo.transpose": _transpose,
        "stablehlo.slice": _slice,
        "stablehlo.concatenate": _concatenated,
        "stablehlo.optimization_barrier": _kept,
        "stablehlo.reverse": _of_operand,
        "stablehlo.gather": _gathered,
        "stablehlo.dynamic_slice": _sliced_at,
        "stablehlo.sort": _sorted,
        "chlo.top_k": _largest,
        "stablehlo.reduce": _reduced,
    }
)
"""What is known of the integers that an operation makes. What has no row may be any of its type."""

_GROWS = frozenset({"value", "start_indices", "limit_indices", "slice_sizes"})
"""Attributes that these read as sizes."""
