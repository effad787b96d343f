"""Loop-carried values: counters, and values that stay constant in a row that is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from jax.extend.mlir.dialects import stablehlo

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.program import Operation, Region
from xlaserve.row_proofs.ranges import Range
from xlaserve.row_proofs.rules.elementwise import direction_of
from xlaserve.row_proofs.rules.frozen import (
    MAX_DEPTH,
    MIRRORED,
    SPREAD,
    DoneRow,
    Term,
    is_spread,
    made_in,
    terms_of,
)
from xlaserve.row_proofs.rules.places import place_of
from xlaserve.row_proofs.sizes import ONE, ZERO, Size, static
from xlaserve.row_proofs.walk import Walker

COUNTER_BITS = 32
"""Narrower counters are ignored, because they may overflow."""
MAX_OFFSET = 1 << 20
"""Maximum constant added to a counter to form an index."""
MAX_TRIPS = 1 << 28
"""Assumed limit on the iterations of an unbounded loop: more would take hours."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop under analysis."""

    operation: Operation
    walker: Walker

    @property
    def body(self) -> Region:
        """Return the region executed in each iteration."""
        return self.operation.regions[1]

    def step_of(self, number: int, made: Mapping[int, Operation]) -> int:
        """Return the constant that each iteration adds to a loop-carried integer; 0 if unknown.

        Also returns 0 for a counter that might overflow, since it would wrap around.
        """
        step = self._added(number, made)
        return step if step and self._stays_in_bits(number, step, made) else 0

    def _added(self, number: int, made: Mapping[int, Operation]) -> int:
        """Return the positive constant that each iteration adds to a loop-carried integer.

        Returns 0 if it adds no such constant.
        """
        operation = made.get(self.body.returned[number])
        argument = self.body.arguments[number]
        if operation is None or operation.name != "stablehlo.add":
            return 0
        if _bits(operation.types[0].dtype) < COUNTER_BITS:
            return 0
        if argument not in operation.operands:
            return 0
        left, right = operation.operands
        fact = self.walker.value(right if left == argument else left).fact
        item = fact.item() if isinstance(fact, Constant) else None
        return item if item is not None and item > 0 else 0

    def _stays_in_bits(self, number: int, step: int, made: Mapping[int, Operation]) -> bool:
        kind = self.operation.types[number]
        first = place_of(self.walker, self.operation.operands[number]).whole
        if first is None:
            return False
        end = Size(first.high.per_row, first.high.offset + step * self._most_trips(made))
        return ranges.fits(Range(first.low, end), kind.dtype)

    def _most_trips(self, made: Mapping[int, Operation]) -> int:
        """Return the maximum number of iterations, using counters that bound the loop."""
        found = [MAX_TRIPS]
        for number, kind in enumerate(self.operation.types):
            step, last, first = self._added(number, made), self.last_of(number), None
            if step and last is not None:
                first = self.first_of(number)
            if first is None or last is None:
                continue
            if ranges.fits(Range(static(first), static(max(first, last + step))), kind.dtype):
                found.append(max(0, (last - first) // step + 1))
        return min(found)

    def first_of(self, number: int) -> int | None:
        """Return the constant initial value of a carried integer; None if it is unknown."""
        fact = self.walker.value(self.operation.operands[number]).fact
        return fact.item() if isinstance(fact, Constant) else None

    def last_of(self, number: int) -> int | None:
        """Return the largest integer that a carried value has in any iteration; None if unknown."""
        (going_on,) = self.operation.regions[0].returned
        counter = self.operation.regions[0].arguments[number]
        found = [
            last
            for term in terms_of(going_on, self.walker.made_by)
            if (last := self._last_by(term, counter)) is not None
        ]
        return min(found, default=None)

    def _last_by(self, term: int, counter: int) -> int | None:
        """Return the largest counter for which a term of the condition is true."""
        test = self.walker.made_by(term)
        if test is None or test.name != "stablehlo.compare":
            return None
        direction, (left, right) = direction_of(test), test.operands
        if right == counter:
            direction, left, right = MIRRORED[direction], right, left
        fact = self.walker.value(right).fact
        bound = fact.item() if isinstance(fact, Constant) else None
        if left != counter or bound is None or direction not in {"LT", "LE"}:
            return None
        return bound - (direction == "LT")

    def nobody_is_done(self, term: Term) -> bool:
        """Tell whether no row is done before the first iteration."""
        number, going = term.predicate, term.going
        for _ in range(MAX_DEPTH):
            arguments = self.operation.regions[0].arguments
            if number in arguments:
                first = self.first_of(arguments.index(number))
                return term.above is None and first is not None and bool(first) == going
            operation = self.walker.made_by(number)
            if operation is None or operation.types[0].dtype != "i1":
                return False
            if operation.name == "stablehlo.not":
                going = not going
            elif not is_spread(operation):
                return False
            number = operation.operands[0]
        return False


def _bits(dtype: str) -> int:
    """Return the width of an integer datatype; 0 for other datatypes."""
    width = dtype.lstrip("uis")
    return int(width) if dtype[:1] in "uis" and width.isdigit() else 0


def writes_nothing_new(
    loop: Loop, term: Term, made: Mapping[int, Operation]
) -> Callable[..., bool]:
    """Return a predicate: does a write in a done row store the element that is already there?

    Each iteration writes at an index that no earlier one wrote to, because the index is a counter.
    The carried value still has its initial element at this index, since active rows have not
    written there either.
    """

    def writes(number: int, argument: int, row: DoneRow) -> bool:
        operation = made.get(number)
        if operation is None or argument not in loop.body.arguments:
            return False
        put = _put(operation)
        carried = loop.body.arguments.index(argument)
        if put is None or operation.operands[0] != argument:
            return False
        # Assume nothing about the row: earlier iterations wrote to it before it was done.
        any_row = DoneRow(row.walker, row.made, row.labels)
        counter = _counter(put.place, loop, made, any_row)
        item = row.item(put.update)
        if counter is None or item is None:
            return False
        last = loop.last_of(counter.number)
        if put.most is not None and (last is None or last + counter.offset > put.most):
            return False
        first = loop.first_of(counter.number)
        if first is None:
            return False
        first += counter.offset
        if loop.nobody_is_done(term):
            # In the first iteration no row is done.
            first += loop.step_of(counter.number, made)
        at = put.axis, counter
        return _is_put_up_to(at, carried, loop, made, any_row) and _begins_with(
            loop, loop.operation.operands[carried], (put.axis, first), item
        )

    return writes


def _is_put_up_to(
    at: tuple[int, _Counter],
    carried: int,
    loop: Loop,
    made: Mapping[int, Operation],
    any_row: DoneRow,
) -> bool:
    """Tell whether an iteration leaves elements after an index unchanged, in every row."""
    axis, last = at
    left = [loop.body.returned[carried]]
    for _ in range(MAX_DEPTH):
        if not left:
            return True
        number = left.pop()
        if number == loop.body.arguments[carried]:
            continue
        operation = made.get(number)
        if operation is None:
            return False
        if operation.name == "stablehlo.select":
            left.extend(operation.operands[1:])
            continue
        put = _put(operation)
        counter = None if put is None else _counter(put.place, loop, made, any_row)
        if put is None or counter is None or put.axis != axis:
            return False
        if counter.number != last.number or counter.offset > last.offset:
            return False
        left.append(operation.operands[0])
    return False


class _Put(NamedTuple):
    """A write of one element along a dimension."""

    axis: int
    place: int
    update: int
    most: int | None
    """The last valid index, to which larger ones are clamped. None if a write beyond it is
    dropped."""


def _put(operation: Operation) -> _Put | None:
    """Return the dimension, index and value of a one-element write; None for other operations."""
    if operation.name == "stablehlo.dynamic_update_slice":
        return _put_slice(operation)
    if operation.name != "stablehlo.scatter" or len(operation.operands) != 3:
        return None
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    targets = tuple(numbers.scattered_dims_to_operand_dims)
    shape, index_shape, update_shape = (kind.shape for kind in operation.operand_types)
    inner = operation.regions[0]
    if (
        len(targets) != 1
        or tuple(numbers.inserted_window_dims) != targets
        or len(numbers.input_batching_dims)
        or index_shape != (ONE,)
        or tuple(numbers.update_window_dims) != tuple(range(len(update_shape)))
        or update_shape != (*shape[: targets[0]], *shape[targets[0] + 1 :])
        or inner.returned != inner.arguments[1:]
    ):
        return None
    return _Put(targets[0], operation.operands[1], operation.operands[2], None)


def _put_slice(operation: Operation) -> _Put | None:
    """Like `_put`, for a slice update with size 1 in one dimension and full size in all others."""
    shape, update_shape = (kind.shape for kind in operation.operand_types[:2])
    axes = [axis for axis, size in enumerate(update_shape) if size != shape[axis]]
    if len(axes) != 1 or update_shape[axes[0]] != ONE or not shape[axes[0]].is_static:
        return None
    axis = axes[0]
    places = operation.operands[2:]
    return _Put(axis, places[axis], operation.operands[1], shape[axis].fixed - 1)


class _Counter(NamedTuple):
    """A carried value that counts iterations, and the offset added to it."""

    number: int
    offset: int


def _counter(
    place: int, loop: Loop, made: Mapping[int, Operation], row: DoneRow
) -> _Counter | None:
    """Return the loop counter from which an index is computed; None if there is none."""
    offset = 0
    for _ in range(MAX_DEPTH):
        if place in loop.body.arguments:
            number = loop.body.arguments.index(place)
            first = loop.first_of(number)
            counts = first is not None and first >= 0 and first + offset >= 0
            return _Counter(number, offset) if counts and loop.step_of(number, made) else None
        operation = made.get(place)
        before = None if operation is None else _before(operation, offset, made, row)
        if before is None:
            return None
        place, added = before
        offset += added
    return None


def _before(
    operation: Operation, offset: int, made: Mapping[int, Operation], row: DoneRow
) -> tuple[int, int] | None:
    """Return the operand from which an operation computes an integer, and the amount it adds."""
    name = operation.name
    if name in SPREAD or name == "stablehlo.convert":
        is_wide = _bits(operation.types[0].dtype) >= COUNTER_BITS
        return (operation.operands[0], 0) if is_wide else None
    if name in {"stablehlo.add", "stablehlo.subtract"}:
        number, added = operation.operands
        item = row.item(added)
        if item is None and name == "stablehlo.add":
            number, item = added, row.item(number)
        if item is None or not 0 <= item < MAX_OFFSET:
            return None
        return number, item if name == "stablehlo.add" else -item
    # An offset added after the selection would be mistaken for part of the selected value.
    return _not_below_zero(operation, made, row) if not offset else None


def _not_below_zero(
    operation: Operation, made: Mapping[int, Operation], row: DoneRow
) -> tuple[int, int] | None:
    """Return `i` of `i < 0 ? i + n : i`, which equals `i` if `i` is not negative."""
    test = made.get(operation.operands[0]) if operation.name == "stablehlo.select" else None
    if test is None or test.name != "stablehlo.compare" or direction_of(test) != "LT":
        return None
    if row.item(test.operands[1]) != 0 or test.operands[0] != operation.operands[2]:
        return None
    return operation.operands[2], 0


def _begins_with(loop: Loop, number: int, at: tuple[int, int], item: int) -> bool:
    """Tell whether all elements along a dimension, from an index on, equal an integer."""
    fact = loop.walker.value(number).fact
    if isinstance(fact, Constant):
        return fact.item() == item
    operation = loop.walker.made_by(number)
    look = None if operation is None else _BEGINS.get(operation.name)
    return operation is not None and look is not None and look(loop, operation, at, item)


def _converted(loop: Loop, operation: Operation, at: tuple[int, int], item: int) -> bool:
    alike = operation.types[0] == operation.operand_types[0]
    return alike and _begins_with(loop, operation.operands[0], at, item)


def _padded(loop: Loop, operation: Operation, at: tuple[int, int], item: int) -> bool:
    axis, first = at
    filler = loop.walker.value(operation.operands[1]).fact
    low = (operation.sizes("edge_padding_low") or ())[axis]
    before = operation.operand_types[0].shape[axis]
    return (
        isinstance(filler, Constant)
        and filler.item() == item
        and low == ZERO
        and before.is_static
        and before.fixed <= first
        and not operation.integers("interior_padding")[axis]
    )


def _put_before(loop: Loop, operation: Operation, at: tuple[int, int], item: int) -> bool:
    """Tell whether `_begins_with` holds after a slice update that ends before the index."""
    axis, first = at
    size = operation.operand_types[1].shape[axis]
    fact = loop.walker.value(operation.operands[2 + axis]).fact
    start = fact.item() if isinstance(fact, Constant) else None
    # A start that is too large is clamped to a smaller one.
    is_before = start is not None and size.is_static and max(start, 0) + size.fixed <= first
    return is_before and _begins_with(loop, operation.operands[0], at, item)


def _follows(loop: Loop, operation: Operation, at: tuple[int, int], item: int) -> bool:
    axis, first = at
    if operation.integer("dimension") != axis:
        return False
    end = 0
    for one, kind in zip(operation.operands, operation.operand_types, strict=True):
        if not kind.shape[axis].is_static:
            return False
        end += kind.shape[axis].fixed
        fact = loop.walker.value(one).fact
        if end > first and not (isinstance(fact, Constant) and fact.item() == item):
            return False
    return True


_BEGINS: Mapping[str, Callable[[Loop, Operation, tuple[int, int], int], bool]] = MappingProxyType(
    {
        "stablehlo.convert": _converted,
        "stablehlo.pad": _padded,
        "stablehlo.concatenate": _follows,
        "stablehlo.dynamic_update_slice": _put_before,
    }
)
"""Predicates by operation: are all elements from an index on equal to one integer?"""


def stays_done(loop: Loop, term: Term, same: frozenset[int], made: Mapping[int, Operation]) -> bool:
    """Tell whether a row that is done stays done.

    `same` has the carried values that do not change in a done row; `made` has the operations of the
    body.
    """
    look = _Lasting(loop, same, made)
    if term.above is not None:
        return look.lasts(term.predicate) and look.grows(term.above)
    return look.stays(term.predicate, not term.going)


@dataclass(frozen=True, slots=True)
class _Lasting:
    loop: Loop
    same: frozenset[int]
    made: Mapping[int, Operation]
    _found: dict[tuple[int, bool], bool] = field(default_factory=dict)

    def stays(self, number: int, truth: bool, depth: int = 0) -> bool:
        """Tell whether a done row's boolean, once `truth`, has this value in later iterations."""
        if (number, truth) not in self._found:
            self._found[number, truth] = self._stays(number, truth, depth)
        return self._found[number, truth]

    def _stays(self, number: int, truth: bool, depth: int) -> bool:
        if self.lasts(number):
            return True
        operation = self.loop.walker.made_by(number)
        if operation is None or depth > MAX_DEPTH or number in self._arguments():
            return False
        name, operands = operation.name, operation.operands
        if name == "stablehlo.compare":
            return self._compared(operation, truth)
        if name == "stablehlo.not":
            return self.stays(operands[0], not truth, depth + 1)
        if name in SPREAD or name in {"stablehlo.and", "stablehlo.or", "stablehlo.convert"}:
            return all(self.stays(one, truth, depth + 1) for one in operands)
        return False

    def _compared(self, operation: Operation, truth: bool) -> bool:
        left, right = operation.operands
        direction = direction_of(operation)
        is_above = (direction in {"GT", "GE"}) == truth
        if direction not in {"LT", "LE", "GT", "GE"}:
            return False
        larger, smaller = (left, right) if is_above else (right, left)
        return self.grows(larger) and self.lasts(smaller)

    def grows(self, number: int) -> bool:
        """Tell whether a value never decreases."""
        if self.lasts(number):
            return True
        for _ in range(MAX_DEPTH):
            condition = self._arguments()
            if number in condition:
                return self.loop.step_of(condition.index(number), self.made) > 0
            operation = self.loop.walker.made_by(number)
            if operation is None or not is_spread(operation):
                return False
            number = operation.operands[0]
        return False

    def _arguments(self) -> tuple[int, ...]:
        return self.loop.operation.regions[0].arguments

    def lasts(self, number: int) -> bool:
        """Tell whether a value in the condition depends only on values that do not change."""
        arguments = self._arguments()
        inside = made_in(self.loop.operation.regions[0])
        left, seen = [number], set[int]()
        while left:
            one = left.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in arguments:
                if arguments.index(one) not in self.same:
                    return False
            elif one in inside:
                left.extend(_used_by(inside[one]))
        return True


def _used_by(operation: Operation) -> list[int]:
    """Return an operation's operands, including values that its regions capture."""
    used = list(operation.operands)
    for region in operation.regions:
        for inner in region.operations:
            used.extend(_used_by(inner))
        used.extend(region.returned)
    return used
