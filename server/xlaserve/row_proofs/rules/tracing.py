"""Traces integers back, operation by operation, with one rule per operation."""

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
"""Maximum number of chained operations over which an integer is traced."""


MAX_STEPS = 2_000
"""Maximum number of operations visited for one integer."""


NOTHING = Value((), Finding(False, "", "is not a traceable integer"))


class Part(NamedTuple):
    """The elements of a value at one index along one dimension."""

    axis: int
    number: int


@dataclass(frozen=True, slots=True)
class Place:
    """Integers of the form `row number * stride + offset`."""

    offset: Value
    """The abstract value of the offset; blocked if only its bounds are known."""
    within: Range | None
    """Bounds of the offset; always known if `stride` is not 0."""
    stride: int = 0
    rows: Dimensions = ()
    """Dimensions of the rows, if `stride` is not 0: all factors are UNIFORM except one ROW
    factor."""
    is_cut: bool = False
    """Whether the form holds only modulo 2**bits of the datatype, because of overflow."""

    @property
    def whole(self) -> Range | None:
        """Return the bounds of the integers themselves."""
        return None if self.is_cut else self.sum

    @property
    def sum(self) -> Range | None:
        """Return the bounds of `row number * stride + offset`, before overflow."""
        if self.within is None or not self.stride:
            return self.within
        low, high = self.within
        return Range(low, Size(high.per_row + self.stride, high.offset - self.stride))

    def item(self) -> int | None:
        """Return the integer that all elements equal at every batch size; None if there is none."""
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
"""Float operations that are traced, for values that are exact integers and not -0.0. Their sums and
products are exact then."""


_MODULAR = frozenset(f"stablehlo.{name}" for name in ("add", "subtract", "multiply", "convert"))
"""Integer operations that wrap around on overflow."""


def _is_modular(operation: Operation) -> bool:
    """Tell whether overflow wraps around; a float converted to an integer saturates instead."""
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
        """Rules by operation; without a rule an integer may have any value of its type."""
        self._news = news
        """Abstract values that the walk has computed but not stored yet."""
        self._made = made
        self._arguments = arguments
        self._steps = 0
        self._depth = 0

    def place(
        self, number: int, part: Part | None = None, assumed: Assumed = _NO_ASSUMPTION
    ) -> Place | None:
        number = self._walker.same_as(number)
        within = assumed.get(number)
        # Numbers are in order of computation: only earlier values affect this one.
        assumed = {one: bounds for one, bounds in assumed.items() if one < number}
        if part is not None and not self._has_part(number, part):
            whole = _restricted(self.place(number, None, assumed), within)
            return whole and Place(NOTHING, whole.whole)
        key = number, part
        noted = self._walker.noted
        # Results that depend on assumptions must not be cached.
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
        """Tell whether a trace lost a dependency of integers on the inputs.

        A single number is determined by its bounds, however it is computed. A form with a stride is
        exempt, because it may be one of several indices that were concatenated and sliced again.
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
        """Tell whether a part lies along a dimension of the same size in every batch.

        In other dimensions there may be rows, and an index may mean another element.
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
            # A single possible value means that nothing varies.
            found = replace(found, offset=Value(uniform(trace.shape)))
        return _fitting(found, kind.dtype, is_modular=_is_modular(operation))

    def leaf(self, number: int, within: Range | None, part: Part | None) -> Place | None:
        """Return the trace of a value that is not followed further, from its abstract value."""
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
        """Return a tracing for the region of a reduction, with bounds of its arguments."""
        found = Tracing(self._walker, self._rules, self._news, made, arguments)
        found._steps, found._depth = self._steps, self._depth
        return found


def _part_of(value: Value, axis: int, number: int) -> Value:
    """Return the abstract value at one index along a dimension."""
    fact = value.fact
    if value.blocked is not None or not value.dimensions:
        return Value(value.dimensions, value.blocked, value.sized)
    dimensions = (*value.dimensions[:axis], (), *value.dimensions[axis + 1 :])
    if isinstance(fact, Constant):
        cut = fact if fact.is_splat else fact.map(lambda a: a.take([number], axis))
        return Value(dimensions, sized=None if cut.is_static else value.sized, fact=cut)
    return Value(dimensions, sized=value.sized)


def _is_of_shape(found: Place, shape: Shape) -> bool:
    """Tell whether a trace passes the assertions on results of rules."""
    if invariants.misfit(found.offset, shape):
        return False
    if not found.stride:
        return True
    rows = Value(found.rows)
    return found.within is not None and rows.has_rows and not invariants.misfit(rows, shape)


def _only(found: Place | None, part: Part) -> Place | None:
    """Return one part of integers that were traced as a whole; None if that is not possible."""
    if found is None or not found.stride or found.offset.blocked is not None:
        return None
    if has_rows(found.rows[part.axis]) or has_rows(found.offset.dimensions[part.axis]):
        return None

    def cut(dimensions: Dimensions) -> Dimensions:
        return (*dimensions[: part.axis], (), *dimensions[part.axis + 1 :])

    return moved_place(found, cut)


def _restricted(found: Place | None, within: Range | None) -> Place | None:
    """Narrow a trace by assumed bounds."""
    if found is None or found.whole is None or within is None:
        return found
    both = ranges.met(found.whole, within)
    if not found.stride:
        return replace(found, within=both)
    return found if both.item() is None else Place(NOTHING, both)


def _fitting(found: Place, dtype: str, *, is_modular: bool) -> Place | None:
    """Account for overflow: mark the trace as cut, or widen its bounds to the datatype's.

    Returns None if neither is possible.
    """
    whole = found.sum
    if whole is not None and ranges.fits(whole, dtype):
        return replace(found, is_cut=False)
    if not found.stride:
        return Place(found.offset, ranges.of_dtype(dtype))
    # Further additions and multiplications may bring an overflowed integer back into range.
    is_cut = (is_modular or found.is_cut) and dtype in INTEGERS and dtype != "i1"
    return replace(found, is_cut=True) if is_cut else None


@dataclass(frozen=True, slots=True)
class Trace:
    """A result of an operation, or a part of it, that is being traced."""

    tracing: Tracing
    operation: Operation
    result: int
    part: Part | None
    assumed: Assumed

    @property
    def shape(self) -> Shape:
        """Return the shape of the result or part."""
        return _thin(self.operation.types[self.result].shape, self.part)

    @property
    def is_float(self) -> bool:
        """Whether the result has floats."""
        return self.operation.types[self.result].dtype in ranges.EXACT_BITS

    def operand(self, place: int, assumed: Assumed | None = None) -> Place | None:
        """Trace an operand elementwise; a scalar is broadcast.

        Returns None if nothing is known about the operand, or if it may have overflowed.
        """
        found = self.modular(place, assumed)
        return None if found is None or found.is_cut else found

    def modular(self, place: int, assumed: Assumed | None = None) -> Place | None:
        """Trace an operand elementwise, allowing for overflow."""
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
        """Trace an operand whose elements do not correspond one-to-one to the result's."""
        found = self.tracing.place(self.operation.operands[place], part)
        return None if found is None or found.is_cut else found

    def own(self, within: Range | None) -> Place | None:
        """Return the result's abstract value as a trace with the given bounds."""
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
    """Return the abstract value of a combination of offsets."""
    try:
        return joined([place.offset for place in places])
    except Problem as problem:
        operation = trace.operation
        finding = Finding(problem.mixed, operation.name, str(problem), operation.location())
        return Value((), finding)


def known_number(trace: Trace, number: int) -> Place:
    return Place(Value(uniform(trace.shape)), ranges.of_integer(number))


def moved_place(found: Place | None, move: Callable[[Dimensions], Dimensions]) -> Place | None:
    """Return a trace whose elements are moved; raises the exceptions of `move`."""
    if found is None:
        return None
    offset = found.offset
    if offset.blocked is None:
        offset = Value(move(offset.dimensions), sized=offset.sized)
    return replace(found, offset=offset, rows=move(found.rows) if found.stride else ())


_GROWS = frozenset(
    {"value", "start_indices", "limit_indices", "slice_sizes", "window_dimensions", "padding"}
)
"""Attributes that tracing rules read as sizes."""
