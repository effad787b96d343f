"""Rows for which a predicate is false ("done" rows), and the values that stay unchanged in them.

A loop that runs until all rows are done keeps rows apart if it changes nothing in done rows. So
does a branch taken if any row requests it, if it changes nothing in the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.equality import Labels
from xlaserve.row_proofs.program import Operation, Region
from xlaserve.row_proofs.rules.constant import known
from xlaserve.row_proofs.rules.elementwise import direction_of
from xlaserve.row_proofs.rules.reduction import only_operation
from xlaserve.row_proofs.walk import Walker

SPREAD = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.reshape"})
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_NEGATED = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "EQ": "NE", "NE": "EQ"}
_LARGER = {"stablehlo.maximum": "GT", "stablehlo.minimum": "LT"}
"""The comparison that holds between the operand that `maximum` or `minimum` returns and the
other."""
_UNANIMOUS = {True: "stablehlo.and", False: "stablehlo.or"}
"""The operation that yields a boolean only if all of its operands have that value."""
MAX_DEPTH = 64
"""Maximum number of chained operations that are followed."""


@dataclass(frozen=True, slots=True)
class Term:
    """A question about all rows: whether a predicate is true for any row, or false for any row."""

    predicate: int
    """Number of the value that is asked about."""
    going: bool
    """The predicate's value for an active row."""
    above: int | None = None
    """The scalar, if the question is whether a scalar is less than the maximum of `predicate`."""


def made_in(region: Region) -> dict[int, Operation]:
    """Return the operations of a region by the numbers of their results."""
    return {result: one for one in region.operations for result in one.results}


def _is_identity(operation: Operation) -> bool:
    return operation.name == "stablehlo.convert" and operation.types == operation.operand_types


def is_spread(operation: Operation) -> bool:
    """Tell whether an operation only repeats or reshapes the elements of its operand."""
    return operation.name in SPREAD or _is_identity(operation)


def terms_of(number: int, made: Callable[[int], Operation | None]) -> list[int]:
    """Return the terms of a conjunction."""
    found: list[int] = []
    left = [number]
    while left and len(found) <= MAX_DEPTH:
        one = plain(left.pop(), made)
        operation = made(one)
        if operation is not None and operation.name == "stablehlo.and":
            left.extend(operation.operands)
        else:
            found.append(one)
    # Operands not split because of the depth limit are terms too.
    return [*found, *left]


def plain(number: int, made: Callable[[int], Operation | None]) -> int:
    """Return the boolean that a value is a copy of."""
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
    """Return which question about the rows a boolean answers; None if it is not recognized."""
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
    """Return the term for `all(predicate)`, asking for rows where the predicate is false."""
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


def _is_by_value(operation: Operation) -> bool:
    """Tell whether a comparison is numeric; in total order, -0.0 is less than 0.0."""
    return "TOTALORDER" not in operation.text("compare_type")


@dataclass(slots=True)
class DoneRow:
    """Known facts about the values of a row that is done."""

    walker: Walker
    made: Callable[[int], Operation | None]
    labels: Labels
    truths: dict[Hashable, bool] = field(default_factory=dict)
    """Booleans that are equal in all elements of the row, by label."""
    relations: dict[tuple[str, Hashable, Hashable], bool] = field(default_factory=dict)
    """Results of comparisons with a scalar, by direction and labels."""
    writes: Callable[[int, int, DoneRow], bool] = lambda returned, argument, row: False
    """Tells whether a value equals another, apart from writes that change nothing in this row."""
    _found_truths: dict[int, bool | None] = field(default_factory=dict)
    _found_same: dict[tuple[int, int], bool] = field(default_factory=dict)
    """A cache, since many values are computed from the same ones."""

    def label(self, number: int) -> Hashable:
        """Return the label of a value; values that are computed in the same way share it."""
        return self.labels.get(number, ("outside", number))

    # --- Consequences of the predicate

    def assume(self, term: Term) -> None:
        """Assume that the row is done."""
        if term.above is not None:
            self._relate("LT", term.above, term.predicate, holds=False)
            return
        self._derive(term.predicate, not term.going, 0)

    def _derive(self, number: int, truth: bool, depth: int) -> None:
        label = self.label(number)
        if self.truths.get(label) is truth:
            return
        self.truths[label] = truth
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
            if _is_by_value(operation):
                self._relate(direction_of(operation), *operation.operands, holds=truth)
        elif self.is_apart(number) and _reduces(operation, _UNANIMOUS[truth]):
            self._derive(operation.operands[0], truth, depth + 1)

    def _is_copy(self, operation: Operation) -> bool:
        if operation.types[0].dtype != "i1" or operation.operand_types[:1] == ():
            return False
        if operation.operand_types[0].dtype != "i1":
            return False
        copies = operation.name in SPREAD or operation.name in {
            "stablehlo.convert",
            "stablehlo.transpose",
        }
        return copies or _is_not_false(operation, self.made)

    def _relate(self, direction: str, left: int, right: int, *, holds: bool) -> None:
        both = self._sides(left, right)
        if both is not None:
            one, other = map(self.label, both)
            self.relations[direction, one, other] = holds
            self.relations[MIRRORED[direction], other, one] = holds
            # Not valid for floats, because of NaN.
            if self._is_integer(left):
                self.relations[_NEGATED[direction], one, other] = not holds
                self.relations[_NEGATED[MIRRORED[direction]], other, one] = not holds

    def _is_integer(self, number: int) -> bool:
        operation = self.made(number)
        return operation is not None and operation.types[0].dtype[:1] in {"i", "u"}

    def _sides(self, left: int, right: int) -> tuple[int, int] | None:
        """Return both sides before broadcasting; None if neither is a scalar."""
        both = self._spread_from(left), self._spread_from(right)
        return both if any(map(self._is_scalar, both)) else None

    def _is_scalar(self, number: int) -> bool:
        value = self.walker.value(number)
        return value.blocked is None and not any(value.dimensions)

    def _spread_from(self, number: int) -> int:
        for _ in range(MAX_DEPTH):
            operation = self.made(number)
            if operation is None or not is_spread(operation):
                break
            number = operation.operands[0]
        return number

    # --- Facts about other values

    def is_apart(self, number: int) -> bool:
        """Tell whether each row of a value is proved to depend only on the same row."""
        return self.walker.value(number).blocked is None

    def truth(self, number: int, depth: int = 0) -> bool | None:
        """Return the boolean that all elements of the row equal; None if it is unknown."""
        found = self.truths.get(self.label(number))
        if found is not None:
            return found
        if number not in self._found_truths:
            operation = self.made(number)
            is_known = operation is not None and depth <= MAX_DEPTH and self.is_apart(number)
            found = None
            if operation is not None and is_known and operation.types[0].dtype == "i1":
                found = self._computed(operation, depth + 1)
            self._found_truths[number] = found
        return self._found_truths[number]

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
        if both is None or not _is_by_value(operation):
            return None
        left, right = map(self.label, both)
        return self.relations.get((direction_of(operation), left, right))

    def _reduced(self, operation: Operation, depth: int) -> bool | None:
        """Reduce booleans that are equal throughout the row, together with the initial value.

        XLA ignores the initial value if there is only one element.
        """
        if not _reduces(operation, "stablehlo.or") and not _reduces(operation, "stablehlo.and"):
            return None
        if any(size.may_be_zero for size in operation.operand_types[0].shape):
            return None
        both = [self.truth(one, depth) for one in operation.operands]
        decisive = _reduces(operation, "stablehlo.or")
        if both[0] is decisive:
            return decisive
        return not decisive if both == [not decisive, not decisive] else None

    # --- Unchanged values

    def is_same(self, number: int, other: int, depth: int = 0) -> bool:
        """Tell whether two values of a region are equal in this row."""
        both = self.settled(number), self.settled(other)
        if both not in self._found_same:
            self._found_same[both] = self._is_same(*both, depth)
        return self._found_same[both]

    def _is_same(self, number: int, other: int, depth: int) -> bool:
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
        """Tell whether an operation leaves its operand unchanged, such as adding zero."""
        left, right = (*operation.operands, 0, 0)[:2]
        if operation.name in _LARGER:
            return self._is_beyond(operation, other, depth)
        if operation.name not in {"stablehlo.add", "stablehlo.or", "stablehlo.subtract"}:
            return False
        is_integer = operation.types[0].dtype[:1] in {"i", "u"}
        if operation.name == "stablehlo.add" and not is_integer:
            # -0.0 + 0.0 is 0.0, and a later division would show the difference.
            return False
        if self._is_nothing(right) and self.is_same(left, other, depth + 1):
            return True
        is_either = operation.name != "stablehlo.subtract"
        return is_either and self._is_nothing(left) and self.is_same(right, other, depth + 1)

    def _is_beyond(self, operation: Operation, other: int, depth: int) -> bool:
        """Tell whether `maximum` or `minimum` is certain to return the given operand.

        The comparison must be strict, since equal operands may be zeros of different sign.
        """
        for one, bound in (operation.operands, operation.operands[::-1]):
            both = self._sides(one, bound)
            if both is None or not self.is_same(one, other, depth + 1):
                continue
            left, right = map(self.label, both)
            if self.relations.get((_LARGER[operation.name], left, right)):
                return True
        return False

    def settled(self, number: int) -> int:
        """Return the operand that the row selects, through nested selects."""
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
        """Return the integer that all elements of the row equal; None if it is unknown."""
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
            if operation.name not in SPREAD and operation.name != "stablehlo.constant":
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
"""How to evaluate a boolean from known booleans, by operation."""
