"""Loops and branches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from xlaserve.models.rows.constants import Constant
from xlaserve.models.rows.domain import (
    Fact,
    Parts,
    Value,
    blocked,
    check_one_row,
    joined_dimensions,
)
from xlaserve.models.rows.equality import Labels, labelled
from xlaserve.models.rows.findings import Finding, NoRule, Problem
from xlaserve.models.rows.program import Operation, Region
from xlaserve.models.rows.rules.constant import known
from xlaserve.models.rows.rules.elementwise import direction_of
from xlaserve.models.rows.rules.indexing import ONE_BY_ONE
from xlaserve.models.rows.rules.reduction import only_operation
from xlaserve.models.rows.walk import Walker

MAX_ROUNDS = 64
"""Most rounds over a loop until nothing new is found out: a few, unless values are handed on from
one to another with every trip. A loop that needs more is not followed."""


# --- branches ----------------------------------------------------------------------------------


def case(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Compute one of several branches; the others count too where it is not known which."""
    (index,) = operands
    regions = operation.regions
    taken = index.fact.item() if isinstance(index.fact, Constant) else None
    if taken is not None:
        if operation.name == "stablehlo.if":
            taken = 0 if taken else 1
        regions = (regions[taken if 0 <= taken < len(regions) else -1],)
    found = [walker.region(region, ()) for region in regions]
    if len(found) == 1:
        return found[0]
    if index.blocked is not None and _is_masked(operation, walker):
        return found[_WHERE_ANY[operation.name]]
    if index.blocked is not None:
        reason = "takes a branch by a value of several rows"
        finding = Finding(index.blocked.mixed, operation.name, reason, operation.location())
        return [Value((), finding)] * len(operation.results)
    sized = None
    if index.sized is not None:
        reason = "takes a branch by the size of the batch"
        sized = Finding(index.sized.mixed, operation.name, reason, operation.location())
    return [_sized(_either(operation, branches), sized) for branches in zip(*found, strict=True)]


_WHERE_ANY = {"stablehlo.case": 1, "stablehlo.if": 0}
"""The branch that is taken where a predicate is true."""


def _is_masked(operation: Operation, walker: Walker) -> bool:
    """Tell whether a branch for rows of a predicate changes no other row.

    It is taken where the predicate holds for any row, and returns `select(predicate, new, old)`;
    the other branch returns `old`. Were it always taken, the result would be the same: where the
    predicate holds for no row, the `select` is `old` too.
    """
    predicate = _predicate_of(operation.operands[0], walker)
    if predicate is None or len(operation.regions) != 2:
        return False
    chosen = _WHERE_ANY[operation.name]
    taken, other = operation.regions[chosen], operation.regions[1 - chosen]
    return all(
        _is_selected(walker, new, old, predicate)
        for new, old in zip(taken.returned, other.returned, strict=True)
    )


def _is_selected(walker: Walker, new: int, old: int, predicate: int) -> bool:
    """Tell whether a value is another one wherever a predicate, in any shape, is false."""
    if new == old:
        return True
    found = walker.made_by(new)
    if found is None or found.name != "stablehlo.select" or found.operands[2] != old:
        return False
    mask = found.operands[0]
    while mask != predicate:
        spread = walker.made_by(mask)
        if spread is None or spread.name not in _SPREAD:
            return False
        mask = spread.operands[0]
    return True


def _predicate_of(index: int, walker: Walker) -> int | None:
    """Return the predicate of which the index of a branch says whether it holds anywhere."""
    made = walker.made_by(index)
    while made is not None and made.name in {"stablehlo.reshape", "stablehlo.convert"}:
        if made.operand_types[0].dtype != "i1":
            return None
        made = walker.made_by(made.operands[0])
    is_any = made is not None and _is_or(made)
    return made.operands[0] if is_any and made is not None else None


def _is_or(operation: Operation) -> bool:
    return (
        operation.name == "stablehlo.reduce"
        and len(operation.operands) == 2
        and operation.types[0].dtype == "i1"
        and only_operation(operation.regions[0]) == "stablehlo.or"
    )


def _sized(value: Value, finding: Finding | None) -> Value:
    if finding is None or value.sized is not None:
        return value
    return replace(value, sized=finding, fact=None)


def _either(operation: Operation, values: Sequence[Value]) -> Value:
    """Return what is so of a value that is one of several."""
    if any(value.blocked is not None for value in values):
        return Value((), blocked(values).blocked)
    first = values[0]
    if all(value == first for value in values[1:]):
        return first
    dimensions, sized = first.dimensions, first.sized
    try:
        for value in values[1:]:
            dimensions = joined_dimensions(dimensions, value.dimensions)
            sized = sized or value.sized
        check_one_row(dimensions)
    except Problem as problem:
        return Value((), _finding(operation, problem))
    return Value(dimensions, sized=sized)


def _finding(operation: Operation, problem: Problem) -> Finding:
    return Finding(problem.mixed, operation.name, str(problem), operation.location())


# --- loops -------------------------------------------------------------------------------------


def while_(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Repeat a body until nothing new is found out; then look at what ends the loop."""
    condition, body = operation.regions
    if not _is_counted(operation, operands, walker):
        walker.loops_follow_inputs = True
    carried = _fixpoint(operation, operands, walker)
    (going_on,) = walker.region(condition, carried)
    if going_on.blocked is None:
        # It does not depend on rows: a value without dimensions has no place for one.
        kept, sized = _unchanged(operation.regions[1]), None
        if going_on.sized is not None:
            reason = "makes as many trips as the size of the batch says"
            sized = Finding(True, operation.name, reason, operation.location())
        return [
            value if number in kept else _sized(value, sized)
            for number, value in enumerate(carried)
        ]
    walker.loops_follow_rows = True
    problem = _not_frozen(operation, carried, walker, going_on.blocked)
    if problem is not None:
        kept = _unchanged(body)
        return [
            value if number in kept else Value((), problem) for number, value in enumerate(carried)
        ]
    return carried


def _unchanged(body: Region) -> set[int]:
    """Return the numbers of the values that a loop carries as they are."""
    return {
        number
        for number, (argument, returned) in enumerate(
            zip(body.arguments, body.returned, strict=True)
        )
        if argument == returned
    }


def _fixpoint(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Return what is so of the carried values before and behind every trip."""
    body = operation.regions[1]
    kept = _unchanged(body)
    carried = [
        value if number in kept else _without_fact(value) for number, value in enumerate(operands)
    ]
    for _ in range(MAX_ROUNDS):
        returned = walker.region(body, carried)
        after = [
            before if number in kept else _either(operation, (before, _without_fact(value)))
            for number, (before, value) in enumerate(zip(carried, returned, strict=True))
        ]
        after = [_handed_on(operation, number, value) for number, value in enumerate(after)]
        if after == carried:
            return carried
        carried = after
    raise NoRule("is a loop that could not be followed to its end")


def _handed_on(operation: Operation, number: int, value: Value) -> Value:
    """Return a carried value, which mixes rows where it is made of one row after the other.

    What rows are put into one by one is not: that may be where they came from.
    """
    finding = value.blocked
    if finding is None or finding.reason != ONE_BY_ONE:
        return value
    body = operation.regions[1]
    made = {result: one for one in body.operations for result in one.results}
    last = made.get(body.returned[number])
    if last is not None and last.name in _PUT and last.operands[0] == body.arguments[number]:
        return value
    reason = "carries something on from row to row"
    return Value((), Finding(True, operation.name, reason, finding.location))


_PUT = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter"})


def _without_fact(value: Value) -> Value:
    if isinstance(value.fact, Parts) and value.blocked is not None:
        return Value((), value.blocked)
    return replace(value, fact=None) if value.fact is not None else value


# --- loops that run for as long as some row goes on --------------------------------------------


def _not_frozen(
    operation: Operation, carried: Sequence[Value], walker: Walker, ended_by: Finding
) -> Finding | None:
    """Return why other rows can be seen by how long a loop runs; None where they cannot.

    What `vmap` makes of a loop goes on while a predicate holds for any row, and carries on for each
    row what it had when its own predicate failed. Then trips beyond a row's own leave it alone.
    """
    condition, body = operation.regions
    predicate = _any_of(condition)
    value = None if predicate is None else walker.value(predicate)
    if value is None or value.blocked is not None:
        reason = "runs for as long as a value of several rows says"
        surely = ended_by.mixed and not _asks_for_any(condition)
        return Finding(surely, operation.name, reason, operation.location())
    if value.sized is not None:
        return value.sized
    labels, body_labels = _labels(operation)
    going_on = _label_of(predicate, labels)
    for number, returned in enumerate(body.returned):
        if returned == body.arguments[number]:
            continue
        if not _is_frozen(body, number, going_on, body_labels):
            return Finding(
                False,
                operation.name,
                "runs until all rows are done, and changes those that are done before",
                operation.location(),
            )
    return None


def _label_of(number: int | None, labels: Labels) -> Hashable:
    return labels.get(number, ("outside", number)) if number is not None else None


def _labels(operation: Operation) -> tuple[Labels, Labels]:
    """Label the values of condition and body alike."""
    condition, body = operation.regions
    kept = _unchanged(body)
    # What is carried as it is, is what the loop began with.
    of_arguments: list[Hashable] = [
        ("outside", operand) if number in kept else ("carried", number)
        for number, operand in enumerate(operation.operands)
    ]
    keys: dict[Hashable, int] = {}
    found = [
        labelled(region, dict(zip(region.arguments, of_arguments, strict=True)), keys)
        for region in (condition, body)
    ]
    return found[0], found[1]


def _any_of(condition: Region) -> int | None:
    """Return the predicate of which a condition asks whether it holds anywhere."""
    made = {result: one for one in condition.operations for result in one.results}
    found = made.get(condition.returned[0])
    while found is not None and found.name in {"stablehlo.reshape", "stablehlo.convert"}:
        if found.types[0].dtype != "i1" or found.operand_types[0].dtype != "i1":
            return None
        found = made.get(found.operands[0])
    # What it starts with is a constant of no row; where it is true, the loop has no end.
    return found.operands[0] if found is not None and _is_or(found) else None


def _asks_for_any(condition: Region) -> bool:
    """Tell whether a condition asks, among others, whether something holds for any row.

    Rows that are done may then be kept in a way that is not known here.
    """
    return any(
        operation.name == "stablehlo.reduce"
        and only_operation(operation.regions[0]) in {"stablehlo.or", "stablehlo.and"}
        for operation in condition.operations
    )


_SPREAD = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.reshape"})


def _is_frozen(body: Region, number: int, going_on: Hashable, labels: Labels) -> bool:
    """Tell whether a carried value stays as it is for rows whose predicate has failed."""
    made = {result: one for one in body.operations for result in one.results}
    found = made.get(body.returned[number])
    if found is None or found.name != "stablehlo.select":
        return False
    predicate, _, otherwise = found.operands
    if otherwise != body.arguments[number]:
        return False
    while labels.get(predicate, ("outside", predicate)) != going_on:
        spread = made.get(predicate)
        if spread is None or spread.name not in _SPREAD:
            return False
        predicate = spread.operands[0]
    return True


# --- trip counts -------------------------------------------------------------------------------


def _is_counted(operation: Operation, operands: Sequence[Value], walker: Walker) -> bool:
    """Tell whether a loop counts from a constant to a constant."""
    condition, body = operation.regions
    made = {result: one for one in condition.operations for result in one.results}
    comparison = made.get(condition.returned[0])
    if comparison is None or comparison.name != "stablehlo.compare":
        return False
    counter, bound = comparison.operands
    if direction_of(comparison) not in {"LT", "LE"} or counter not in condition.arguments:
        return False
    number = condition.arguments.index(counter)
    return (
        isinstance(operands[number].fact, Constant)
        and _is_constant(bound, operation, operands, made, walker)
        and _counts_up(body, number, operands, walker)
    )


def _is_constant(
    number: int,
    operation: Operation,
    operands: Sequence[Value],
    made: dict[int, Operation],
    walker: Walker,
) -> bool:
    condition, body = operation.regions
    if number in condition.arguments:
        place = condition.arguments.index(number)
        return place in _unchanged(body) and isinstance(operands[place].fact, Constant)
    if number in made:
        return made[number].name == "stablehlo.constant"
    return isinstance(walker.value(number).fact, Constant)


def _counts_up(body: Region, number: int, operands: Sequence[Value], walker: Walker) -> bool:
    made = {result: one for one in body.operations for result in one.results}
    step = made.get(body.returned[number])
    if step is None or step.name != "stablehlo.add" or body.arguments[number] not in step.operands:
        return False
    left, right = step.operands
    added = right if left == body.arguments[number] else left
    if added in made:
        value = made[added]
        fact: Fact | None = _constant_of(value)
    elif added in body.arguments:
        place = body.arguments.index(added)
        fact = operands[place].fact if place in _unchanged(body) else None
    else:
        fact = walker.value(added).fact
    item = fact.item() if isinstance(fact, Constant) else None
    return item is not None and item > 0


def _constant_of(operation: Operation) -> Constant | None:
    return known(operation) if operation.name == "stablehlo.constant" else None
