"""How integers are traced back: operation by operation, each by its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from xlaserve.row_proofs import invariants, ranges
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import (
    ROWS,
    Dimensions,
    RowNumber,
    Value,
    has_rows,
    joined,
    size_of,
    uniform,
)
from xlaserve.row_proofs.findings import Finding, Problem
from xlaserve.row_proofs.program import Operation, Shape
from xlaserve.row_proofs.ranges import Range
from xlaserve.row_proofs.sizes import ONE, Size
from xlaserve.row_proofs.walk import Walker

MAX_DEPTH = 48
"""Most operations, one behind the other, that an integer is traced back over."""


MAX_STEPS = 2_000
"""Most operations that are looked at for one integer."""


NOTHING = Value((), Finding(False, "", "is not a traceable integer"))


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
    is_cut: bool = False
    """Whether it is so but for multiples of 2 to the power of the bits of its datatype."""

    @property
    def whole(self) -> Range | None:
        """Return the bounds of the integer itself."""
        return None if self.is_cut else self.sum

    @property
    def sum(self) -> Range | None:
        """Return the bounds of `number of the row * stride + offset`."""
        if self.within is None or not self.stride:
            return self.within
        low, high = self.within
        return Range(low, Size(high.per_row + self.stride, high.offset - self.stride))

    def item(self) -> int | None:
        """Return the one number that all elements are at every batch size, None for any other."""
        return None if self.stride or self.within is None else self.within.item()


Assumed: TypeAlias = Mapping[int, Range]


_NO_ASSUMPTION: Assumed = MappingProxyType({})


_NO_VALUES: Mapping[int, Value] = MappingProxyType({})


_NO_OPERATIONS: Mapping[int, Operation] = MappingProxyType({})


_NO_ARGUMENTS: Mapping[int, Range | None] = MappingProxyType({})


INTEGERS = frozenset({"i1", *(f"{sign}i{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})


_OF_FLOATS = frozenset(
    f"stablehlo.{name}"
    for name in (
        "constant", "iota", "convert", "add", "subtract", "multiply", "divide", "remainder",
        "maximum", "minimum", "clamp", "select", "floor", "ceil", "round_nearest_afz",
        "round_nearest_even", "broadcast_in_dim", "reshape", "transpose",
    )
)  # fmt: skip
"""Operations whose floats are traced, where they are integers that a float holds exactly, and zero
is not the negative one. Their sums and products are exact then."""


_MODULAR = frozenset(f"stablehlo.{name}" for name in ("add", "subtract", "multiply", "convert"))
"""Operations of integers that are cut off at their bits where they do not fit in."""


def _is_modular(operation: Operation) -> bool:
    """Tell whether what does not fit in is cut off: of floats, it becomes the nearest that does."""
    return operation.name in _MODULAR and operation.operand_types[0].dtype in INTEGERS


class Tracing:
    def __init__(
        self,
        walker: Walker,
        rules: TracingRules,
        news: Mapping[int, Value] = _NO_VALUES,
        made: Mapping[int, Operation] = _NO_OPERATIONS,
        arguments: Mapping[int, Range | None] = _NO_ARGUMENTS,
    ) -> None:
        self._walker = walker
        self._rules = rules
        """Rules for the integers that an operation makes; without a rule they may be any."""
        self._news = news
        """Values that the walk has found and not kept yet."""
        self._made = made
        self._arguments = arguments
        self._steps = 0
        self._depth = 0

    def place(
        self, number: int, part: Part | None = None, assumed: Assumed = _NO_ASSUMPTION
    ) -> Place | None:
        number = self._walker.same_as(number)
        within = assumed.get(number)
        # Numbers are in order: what a value is made of has been made before it.
        assumed = {one: bounds for one, bounds in assumed.items() if one < number}
        if part is not None and not self._has_part(number, part):
            whole = _restricted(self.place(number, None, assumed), within)
            return whole and Place(NOTHING, whole.whole)
        key = number, part
        noted = self._walker.noted
        # What was noted of a region of a reduction is about arguments that were assumed.
        is_noted = not assumed and not self._arguments
        if is_noted and key in noted:
            known = noted[key]
            found = known if isinstance(known, Place) else None
        else:
            found = self._followed(number, part, assumed)
        if is_noted:
            noted[key] = found
        return _restricted(found, within)

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
            if operation is not None and operation.name in self._rules:
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

    def _followed(self, number: int, part: Part | None, assumed: Assumed) -> Place | None:
        if number in self._arguments:
            return Place(NOTHING, self._arguments[number])
        operation = self.made_by(number)
        self._steps += 1
        if operation is None or self._depth > MAX_DEPTH or self._steps > MAX_STEPS:
            return self.leaf(number, None, part)
        result = operation.results.index(number)
        kind = operation.types[result]
        if kind.dtype not in INTEGERS and not (
            kind.dtype in ranges.EXACT_BITS and operation.name in _OF_FLOATS
        ):
            return self.leaf(number, None, part)
        trace = Trace(self, operation, result, part, assumed)
        self._depth += 1
        try:
            rule = self._rules.get(operation.name)
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
        if found.within is not None and found.within.item() is not None:
            # However it was computed, there is nothing that varies.
            found = replace(found, offset=Value(uniform(trace.shape)))
        return _fitting(found, kind.dtype, is_modular=_is_modular(operation))

    def leaf(self, number: int, within: Range | None, part: Part | None) -> Place | None:
        """Return what the walk knows of a value."""
        value = self._news.get(number) or self._walker.known(number)
        if value is None:
            return None if within is None else Place(NOTHING, within)
        if part is not None:
            value = _part_of(value, *part)
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
    ) -> Tracing:
        """Return one for the region of a reduction, whose arguments have these bounds."""
        found = Tracing(self._walker, self._rules, self._news, made, arguments)
        found._steps, found._depth = self._steps, self._depth
        return found


def _part_of(value: Value, axis: int, number: int) -> Value:
    """Return the known facts about one part along a dimension."""
    fact = value.fact
    if value.blocked is not None or not value.dimensions:
        return Value(value.dimensions, value.blocked, value.sized)
    dimensions = (*value.dimensions[:axis], (), *value.dimensions[axis + 1 :])
    if isinstance(fact, Constant):
        cut = fact if fact.is_splat else fact.map(lambda a: a.take([number], axis))
        return Value(dimensions, sized=None if cut.is_static else value.sized, fact=cut)
    return Value(dimensions, sized=value.sized)


def _is_of_shape(found: Place, shape: Shape) -> bool:
    """Tell whether a place is held to what every result of a rule is held to."""
    if invariants.misfit(found.offset, shape):
        return False
    if not found.stride:
        return True
    rows = Value(found.rows)
    return found.within is not None and rows.has_rows and not invariants.misfit(rows, shape)


def _only(found: Place | None, part: Part) -> Place | None:
    """Return the known facts about a part of integers followed as a whole, or None."""
    if found is None or not found.stride or found.offset.blocked is not None:
        return None
    if has_rows(found.rows[part.axis]) or has_rows(found.offset.dimensions[part.axis]):
        return None

    def cut(dimensions: Dimensions) -> Dimensions:
        return (*dimensions[: part.axis], (), *dimensions[part.axis + 1 :])

    return moved_place(found, cut)


def _restricted(found: Place | None, within: Range | None) -> Place | None:
    """Return the known facts about integers of which it is assumed where they lie."""
    if found is None or found.whole is None or within is None:
        return found
    both = ranges.met(found.whole, within)
    if not found.stride:
        return replace(found, within=both)
    return found if both.item() is None else Place(NOTHING, both)


def _fitting(found: Place, dtype: str, *, is_modular: bool) -> Place | None:
    """Return a place without its bounds where some integers would be cut off at their bits."""
    whole = found.sum
    if whole is not None and ranges.fits(whole, dtype):
        return replace(found, is_cut=False)
    if not found.stride:
        return Place(found.offset, ranges.of_dtype(dtype))
    # Added and multiplied again, what is cut off may be whole in the end.
    is_cut = (is_modular or found.is_cut) and dtype in INTEGERS and dtype != "i1"
    return replace(found, is_cut=True) if is_cut else None


@dataclass(frozen=True, slots=True)
class Trace:
    """One result of an operation, or a part of it, that is traced back."""

    tracing: Tracing
    operation: Operation
    result: int
    part: Part | None
    assumed: Assumed

    @property
    def shape(self) -> Shape:
        """Return the shape of the result, or of the part of it."""
        return _thin(self.operation.types[self.result].shape, self.part)

    @property
    def is_float(self) -> bool:
        """Whether the result is of floats."""
        return self.operation.types[self.result].dtype in ranges.EXACT_BITS

    def operand(self, place: int, assumed: Assumed | None = None) -> Place | None:
        """Return an operand, element by element; a scalar for each element."""
        found = self.modular(place, assumed)
        return None if found is None or found.is_cut else found

    def modular(self, place: int, assumed: Assumed | None = None) -> Place | None:
        """Return the same, or what is known of an operand that may be cut off at its bits."""
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
        found = self.tracing.place(self.operation.operands[place], part)
        return None if found is None or found.is_cut else found

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


TracingRule: TypeAlias = Callable[[Trace], Place | None]
TracingRules: TypeAlias = Mapping[str, TracingRule]


def joined_offsets(trace: Trace, *places: Place) -> Value:
    """Return how something varies that is computed from offsets."""
    try:
        return joined([place.offset for place in places])
    except Problem as problem:
        operation = trace.operation
        finding = Finding(problem.mixed, operation.name, str(problem), operation.location())
        return Value((), finding)


def known_number(trace: Trace, number: int) -> Place:
    return Place(Value(uniform(trace.shape)), ranges.of_integer(number))


def moved_place(found: Place | None, move: Callable[[Dimensions], Dimensions]) -> Place | None:
    """Return a place whose elements are put elsewhere; raises what `move` does."""
    if found is None:
        return None
    offset = found.offset
    if offset.blocked is None:
        offset = Value(move(offset.dimensions), sized=offset.sized)
    return replace(found, offset=offset, rows=move(found.rows) if found.stride else ())


_GROWS = frozenset(
    {"value", "start_indices", "limit_indices", "slice_sizes", "window_dimensions", "padding"}
)
"""Attributes that these read as sizes."""
