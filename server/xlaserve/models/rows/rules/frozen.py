"""Rows for which a predicate has failed, and what is then known to stay as it is in them.

A loop that runs until all rows are done, and a branch that is taken where any row asks for it, keep
rows apart where nothing changes for the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jax.extend.mlir.dialects import stablehlo

from xlaserve.models.rows.constants import Constant
from xlaserve.models.rows.equality import Labels
from xlaserve.models.rows.program import Operation, Region
from xlaserve.models.rows.rules.constant import known
from xlaserve.models.rows.rules.elementwise import direction_of
from xlaserve.models.rows.rules.reduction import only_operation
from xlaserve.models.rows.sizes import ONE, ZERO
from xlaserve.models.rows.walk import Walker

_SPREAD = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.reshape"})
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_NEGATED = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "EQ": "NE", "NE": "EQ"}
_UNANIMOUS = {True: "stablehlo.and", False: "stablehlo.or"}
"""What gives a truth value only where all of its operands are of that value."""
MAX_DEPTH = 64
"""Most operations that are looked at behind one another."""


@dataclass(frozen=True, slots=True)
class Term:
    """A question about all rows: whether a value holds for any of them, or fails for any."""

    predicate: int
    """Number of the value that is asked about."""
    going: bool
    """What it is for a row that goes on."""
    above: int | None = None
    """Where the question is whether a scalar is below the largest of `predicate`, that scalar."""


def made_in(region: Region) -> dict[int, Operation]:
    """Return the operations of a region by their results."""
    return {result: one for one in region.operations for result in one.results}


def _is_identity(operation: Operation) -> bool:
    return operation.name == "stablehlo.convert" and operation.types == operation.operand_types


def _is_spread(operation: Operation) -> bool:
    """Tell whether the elements of a result are those of an operand, some of them repeated."""
    return operation.name in _SPREAD or _is_identity(operation)


def terms_of(number: int, made: Callable[[int], Operation | None]) -> list[int]:
    """Return the values all of which have to be true for one to be."""
    found: list[int] = []
    left = [number]
    while left and len(found) <= MAX_DEPTH:
        one = plain(left.pop(), made)
        operation = made(one)
        if operation is not None and operation.name == "stablehlo.and":
            left.extend(operation.operands)
        else:
            found.append(one)
    return found


def plain(number: int, made: Callable[[int], Operation | None]) -> int:
    """Return the truth value that another one is a copy of."""
    for _ in range(MAX_DEPTH):
        operation = made(number)
        if operation is None or operation.operand_types[:1] == ():
            return number
        if operation.operand_types[0].dtype != "i1":
            return number
        is_copy = operation.name in {"stablehlo.reshape", "stablehlo.convert"}
        if not is_copy and not _is_not_false(operation, made):
            return number
        number = operation.operands[0]
    return number


def _is_not_false(operation: Operation, made: Callable[[int], Operation | None]) -> bool:
    """Tell whether an operation is `value != false`."""
    if operation.name != "stablehlo.compare" or direction_of(operation) != "NE":
        return False
    other = made(operation.operands[1])
    fact = known(other) if other is not None and other.name == "stablehlo.constant" else None
    return fact is not None and fact.item() == 0


def question_of(number: int, made: Callable[[int], Operation | None]) -> Term | None:
    """Return what a truth value asks about the rows; None where it asks nothing known."""
    number = plain(number, made)
    operation = made(number)
    if operation is None:
        return None
    if operation.name == "stablehlo.not":
        inner = made(plain(operation.operands[0], made))
        if inner is not None and _reduces(inner, "stablehlo.and"):
            return Term(inner.operands[0], going=False)
        return None
    if _reduces(operation, "stablehlo.or"):
        return Term(operation.operands[0], going=True)
    if operation.name == "stablehlo.compare" and direction_of(operation) in {"LT", "GT"}:
        scalar, whole = operation.operands[:: 1 if direction_of(operation) == "LT" else -1]
        largest = made(whole)
        if largest is not None and _reduces(largest, "stablehlo.maximum"):
            return Term(largest.operands[0], going=True, above=scalar)
    return None


def all_of(number: int, made: Callable[[int], Operation | None]) -> Term | None:
    """Return the question whether something holds for all rows, as of those for which it fails."""
    operation = made(plain(number, made))
    if operation is not None and _reduces(operation, "stablehlo.and"):
        return Term(operation.operands[0], going=False)
    return None


def _reduces(operation: Operation, name: str) -> bool:
    is_truth = operation.name == "stablehlo.reduce" and operation.types[0].dtype == "i1"
    is_number = operation.name == "stablehlo.reduce" and operation.types[0].dtype[:1] in "iu"
    return (
        (is_truth if name != "stablehlo.maximum" else is_number and not is_truth)
        and len(operation.operands) == 2
        and only_operation(operation.regions[0]) == name
    )


@dataclass(slots=True)
class DoneRow:
    """What is known of the values of a row that does not go on."""

    walker: Walker
    made: Callable[[int], Operation | None]
    labels: Labels
    truths: dict[Hashable, bool] = field(default_factory=dict)
    """Truth values, all elements of the row alike, by label."""
    relations: dict[tuple[str, Hashable, Hashable], bool] = field(default_factory=dict)
    """Comparisons of a scalar with something, by direction and labels."""
    writes: Callable[[int, int, DoneRow], bool] = lambda returned, argument, row: False
    """Tells whether a value is another one, with something put where it was before."""

    def label(self, number: int) -> Hashable:
        """Return what two values have in common that are computed in the same way."""
        return self.labels.get(number, ("outside", number))

    # --- what follows from the predicate

    def assume(self, term: Term) -> None:
        """Take up that a row is done."""
        if term.above is not None:
            self._relate("LT", term.above, term.predicate, holds=False)
            return
        self._derive(term.predicate, not term.going, 0)

    def _derive(self, number: int, truth: bool, depth: int) -> None:
        self.truths[self.label(number)] = truth
        operation = self.made(number)
        if operation is None or depth > MAX_DEPTH:
            return
        name = operation.name
        if name == "stablehlo.not":
            self._derive(operation.operands[0], not truth, depth + 1)
        elif name == _UNANIMOUS[truth] or self._is_copy(operation):
            copied = operation.operands[:1] if self._is_copy(operation) else operation.operands
            for one in copied:
                self._derive(one, truth, depth + 1)
        elif name == "stablehlo.compare":
            self._relate(direction_of(operation), *operation.operands, holds=truth)
        elif self.is_apart(number) and _reduces(operation, _UNANIMOUS[truth]):
            self._derive(operation.operands[0], truth, depth + 1)

    def _is_copy(self, operation: Operation) -> bool:
        if operation.types[0].dtype != "i1" or operation.operand_types[:1] == ():
            return False
        if operation.operand_types[0].dtype != "i1":
            return False
        copies = operation.name in _SPREAD or operation.name in {
            "stablehlo.convert",
            "stablehlo.transpose",
        }
        return copies or _is_not_false(operation, self.made)

    def _relate(self, direction: str, left: int, right: int, *, holds: bool) -> None:
        both = self._sides(left, right)
        if both is not None:
            one, other = map(self.label, both)
            self.relations[direction, one, other] = holds
            self.relations[_MIRRORED[direction], other, one] = holds
            # Not so of numbers that are none.
            if self._is_integer(left):
                self.relations[_NEGATED[direction], one, other] = not holds
                self.relations[_NEGATED[_MIRRORED[direction]], other, one] = not holds

    def _is_integer(self, number: int) -> bool:
        operation = self.made(number)
        return operation is not None and operation.types[0].dtype[:1] in {"i", "u"}

    def _sides(self, left: int, right: int) -> tuple[int, int] | None:
        """Return what is compared, before it was spread; None where neither is a scalar."""
        both = self._spread_from(left), self._spread_from(right)
        return both if any(map(self._is_scalar, both)) else None

    def _is_scalar(self, number: int) -> bool:
        value = self.walker.value(number)
        return value.blocked is None and not any(value.dimensions)

    def _spread_from(self, number: int) -> int:
        for _ in range(MAX_DEPTH):
            operation = self.made(number)
            if operation is None or not _is_spread(operation):
                break
            number = operation.operands[0]
        return number

    # --- what is known of other values

    def is_apart(self, number: int) -> bool:
        """Tell whether a value keeps rows apart, as far as it was followed."""
        return self.walker.value(number).blocked is None

    def truth(self, number: int, depth: int = 0) -> bool | None:
        """Return the truth value that all elements of the row have; None for what is not known."""
        found = self.truths.get(self.label(number))
        if found is not None:
            return found
        operation = self.made(number)
        if operation is None or depth > MAX_DEPTH or not self.is_apart(number):
            return None
        if operation.types[0].dtype != "i1":
            return None
        return self._computed(operation, depth + 1)

    def _computed(self, operation: Operation, depth: int) -> bool | None:
        if self._is_copy(operation):
            return self.truth(operation.operands[0], depth)
        compute = _COMPUTED.get(operation.name)
        return compute(self, operation, depth) if compute else None

    def _constant(self, operation: Operation, depth: int) -> bool | None:
        del depth
        fact = known(operation)
        item = None if fact is None else fact.item()
        return None if item is None else bool(item)

    def _negated(self, operation: Operation, depth: int) -> bool | None:
        inner = self.truth(operation.operands[0], depth)
        return None if inner is None else not inner

    def _both(self, operation: Operation, depth: int) -> bool | None:
        decisive = operation.name == "stablehlo.or"
        both = [self.truth(one, depth) for one in operation.operands]
        if decisive in both:
            return decisive
        return None if None in both else not decisive

    def _chosen(self, operation: Operation, depth: int) -> bool | None:
        chosen = self.truth(operation.operands[0], depth)
        return None if chosen is None else self.truth(operation.operands[1 if chosen else 2], depth)

    def _compared(self, operation: Operation, depth: int) -> bool | None:
        del depth
        both = self._sides(*operation.operands)
        if both is None:
            return None
        left, right = map(self.label, both)
        return self.relations.get((direction_of(operation), left, right))

    def _reduced(self, operation: Operation, depth: int) -> bool | None:
        """Reduce truth values of one row, which are all alike, and the start with them."""
        if not _reduces(operation, "stablehlo.or") and not _reduces(operation, "stablehlo.and"):
            return None
        if ZERO in operation.operand_types[0].shape:
            return None
        both = [self.truth(one, depth) for one in operation.operands]
        decisive = _reduces(operation, "stablehlo.or")
        if both[0] is decisive or both[1] is decisive:
            return decisive
        return None if None in both else not decisive

    # --- what stays as it is

    def is_same(self, number: int, other: int, depth: int = 0) -> bool:
        """Tell whether a value of a region is another one, in this row."""
        number, other = self.settled(number), self.settled(other)
        if self.label(number) == self.label(other):
            return True
        if depth > MAX_DEPTH:
            return False
        truth = self.truth(number)
        if truth is not None and truth == self.truth(other):
            return True
        operation = self.made(number)
        if operation is None:
            return False
        if operation.name == "stablehlo.select":
            return all(self.is_same(one, other, depth + 1) for one in operation.operands[1:])
        return self._is_kept(operation, other, depth) or self.writes(number, other, self)

    def _is_kept(self, operation: Operation, other: int, depth: int) -> bool:
        """Tell whether an operation adds nothing to another value, or takes nothing from it."""
        left, right = (*operation.operands, 0, 0)[:2]
        if operation.name not in {"stablehlo.add", "stablehlo.or", "stablehlo.subtract"}:
            return False
        if self._is_nothing(right) and self.is_same(left, other, depth + 1):
            return True
        is_either = operation.name != "stablehlo.subtract"
        return is_either and self._is_nothing(left) and self.is_same(right, other, depth + 1)

    def settled(self, number: int) -> int:
        """Return the side of a selection that a row takes, through several of them."""
        for _ in range(MAX_DEPTH):
            operation = self.made(number)
            if operation is None:
                break
            if operation.name == "stablehlo.select":
                chosen = self.truth(operation.operands[0])
                if chosen is None:
                    break
                number = operation.operands[1 if chosen else 2]
            elif _is_identity(operation):
                number = operation.operands[0]
            else:
                break
        return number

    def item(self, number: int) -> int | None:
        """Return the integer that all elements of the row are; None for what is not known."""
        for _ in range(MAX_DEPTH):
            number = self.settled(number)
            fact = self.walker.value(number).fact
            if isinstance(fact, Constant) and fact.item() is not None:
                return fact.item()
            operation = self.made(number)
            if operation is None:
                return None
            if operation.name == "stablehlo.convert" and operation.operand_types[0].dtype == "i1":
                truth = self.truth(operation.operands[0])
                return None if truth is None else int(truth)
            if operation.name not in _SPREAD and operation.name != "stablehlo.constant":
                return None
            if operation.name == "stablehlo.constant":
                constant = known(operation)
                return None if constant is None else constant.item()
            number = operation.operands[0]
        return None

    def _is_nothing(self, number: int) -> bool:
        return self.truth(number) is False or self.item(number) == 0


_COMPUTED: Mapping[str, Callable[[DoneRow, Operation, int], bool | None]] = MappingProxyType(
    {
        "stablehlo.constant": DoneRow._constant,
        "stablehlo.not": DoneRow._negated,
        "stablehlo.and": DoneRow._both,
        "stablehlo.or": DoneRow._both,
        "stablehlo.select": DoneRow._chosen,
        "stablehlo.compare": DoneRow._compared,
        "stablehlo.reduce": DoneRow._reduced,
    }
)
"""What a truth value is where those that it is computed from are known, by operation."""


# --- carried values ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, of which it was found out what is carried as it is."""

    operation: Operation
    walker: Walker
    kept: frozenset[int]
    """Numbers of the carried values that no trip changes."""

    @property
    def body(self) -> Region:
        """Return what is computed in each trip."""
        return self.operation.regions[1]

    def step_of(self, number: int, made: Mapping[int, Operation]) -> int:
        """Return by how much a carried integer grows with each trip; 0 where that is not known."""
        operation = made.get(self.body.returned[number])
        argument = self.body.arguments[number]
        if operation is None or operation.name != "stablehlo.add":
            return 0
        if argument not in operation.operands:
            return 0
        left, right = operation.operands
        fact = self.walker.value(right if left == argument else left).fact
        item = fact.item() if isinstance(fact, Constant) else None
        return item if item is not None and item > 0 else 0

    def first_of(self, number: int) -> int | None:
        """Return the integer that a carried value begins with."""
        fact = self.walker.value(self.operation.operands[number]).fact
        return fact.item() if isinstance(fact, Constant) else None


def writes_nothing_new(loop: Loop, made: Mapping[int, Operation]) -> Callable[..., bool]:
    """Return what tells that something is put where the same is already, in a row that is done.

    Every trip puts something at a place that no trip before has come to, since the place is a
    counter. There the carried value still is what it began with.
    """

    def writes(number: int, argument: int, row: DoneRow) -> bool:
        operation = made.get(number)
        if operation is None or argument not in loop.body.arguments:
            return False
        put = _put(operation, row)
        carried = loop.body.arguments.index(argument)
        if put is None or operation.operands[0] != argument:
            return False
        axis, place, update = put
        counter = _counter(place, loop, made, row)
        if counter is None:
            return False
        first, item = loop.first_of(counter), row.item(update)
        if first is None or item is None:
            return False
        return _begins_with(loop, loop.operation.operands[carried], (axis, first), item)

    return writes


def _put(operation: Operation, row: DoneRow) -> tuple[int, int, int] | None:
    """Return along which dimension one element is put, at which place, and what."""
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
    return targets[0], operation.operands[1], operation.operands[2]


def _counter(place: int, loop: Loop, made: Mapping[int, Operation], row: DoneRow) -> int | None:
    """Return the carried value that counts trips which a place is; None where it is none."""
    for _ in range(MAX_DEPTH):
        if place in loop.body.arguments:
            number = loop.body.arguments.index(place)
            first = loop.first_of(number)
            return (
                number if first is not None and first >= 0 and loop.step_of(number, made) else None
            )
        operation = made.get(place)
        if operation is None:
            return None
        if operation.name in _SPREAD or operation.name == "stablehlo.convert":
            place = operation.operands[0]
        elif operation.name == "stablehlo.select":
            # `i < 0 ? i + n : i`, of a counter that is not below 0.
            test = made.get(operation.operands[0])
            if test is None or direction_of(test) != "LT" or row.item(test.operands[1]) != 0:
                return None
            if test.operands[0] != operation.operands[2]:
                return None
            place = operation.operands[2]
        else:
            return None
    return None


def _begins_with(loop: Loop, number: int, at: tuple[int, int], item: int) -> bool:
    """Tell whether a value is an integer at all places of a dimension from one on."""
    axis, first = at
    fact = loop.walker.value(number).fact
    if isinstance(fact, Constant):
        return fact.item() == item
    operation = loop.walker.made_by(number)
    if operation is None:
        return False
    if operation.name == "stablehlo.convert":
        alike = operation.types[0] == operation.operand_types[0]
        return alike and _begins_with(loop, operation.operands[0], at, item)
    if operation.name == "stablehlo.pad":
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
    if operation.name == "stablehlo.concatenate" and operation.integer("dimension") == axis:
        return _follows(loop, operation, at, item)
    return False


def _follows(loop: Loop, operation: Operation, at: tuple[int, int], item: int) -> bool:
    axis, first = at
    end = 0
    for one, kind in zip(operation.operands, operation.operand_types, strict=True):
        if not kind.shape[axis].is_static:
            return False
        end += kind.shape[axis].fixed
        fact = loop.walker.value(one).fact
        if end > first and not (isinstance(fact, Constant) and fact.item() == item):
            return False
    return True


def stays_done(loop: Loop, term: Term, same: frozenset[int], made: Mapping[int, Operation]) -> bool:
    """Tell whether a row that is done is so ever after.

    `same` are the carried values that do not change in a row that is done; `made` has the
    operations of the body.
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

    def stays(self, number: int, truth: bool, depth: int = 0) -> bool:
        """Tell whether a truth value of a row that is done stays what it is."""
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
        if name in _SPREAD or name in {"stablehlo.and", "stablehlo.or", "stablehlo.convert"}:
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
        """Tell whether a value stays what it is, or becomes larger."""
        if self.lasts(number):
            return True
        for _ in range(MAX_DEPTH):
            condition = self._arguments()
            if number in condition:
                return self.loop.step_of(condition.index(number), self.made) > 0
            operation = self.loop.walker.made_by(number)
            if operation is None or not _is_spread(operation):
                return False
            number = operation.operands[0]
        return False

    def _arguments(self) -> tuple[int, ...]:
        return self.loop.operation.regions[0].arguments

    def lasts(self, number: int) -> bool:
        """Tell whether a value of the condition is computed from what does not change."""
        arguments = self._arguments()
        inside = made_in(self.loop.operation.regions[0])
        left, seen = [number], set[int]()
        while left:
            one = left.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in arguments:
                place = arguments.index(one)
                if place not in self.same and place not in self.loop.kept:
                    return False
            elif one in inside:
                left.extend(_used_by(inside[one]))
        return True


def _used_by(operation: Operation) -> list[int]:
    """Return all values that an operation takes, those that its regions capture among them."""
    used = list(operation.operands)
    for region in operation.regions:
        for inner in region.operations:
            used.extend(_used_by(inner))
        used.extend(region.returned)
    return used
