"""Loops and branches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import Fact, Value, blocked, check_one_row, joined_dimensions
from xlaserve.row_proofs.equality import Labels, labelled
from xlaserve.row_proofs.findings import Finding, NoRule, Problem
from xlaserve.row_proofs.program import Operation, Region
from xlaserve.row_proofs.rules.carried import Loop, stays_done, writes_nothing_new
from xlaserve.row_proofs.rules.constant import known
from xlaserve.row_proofs.rules.elementwise import direction_of
from xlaserve.row_proofs.rules.frozen import DoneRow, Term, all_of, made_in, question_of, terms_of
from xlaserve.row_proofs.rules.indexing import ONE_BY_ONE
from xlaserve.row_proofs.walk import Walker

MAX_ROUNDS = 64
"""Maximum number of rounds over a loop until a fixpoint. A few suffice, unless values are passed
from one carried variable to the next. A loop that needs more rounds is not analysed."""


# --- Branches ----------------------------------------------------------------------------------


def case(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Evaluate a conditional; unless the index is known, its branches are joined."""
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
    if index.blocked is not None:
        return _chosen_by_rows(operation, index.blocked, found, walker)
    sized = None
    if index.sized is not None:
        reason = "selects a branch by the batch size"
        sized = Finding(index.sized.mixed, operation.name, reason, operation.location())
    return [_sized(_either(operation, branches), sized) for branches in zip(*found, strict=True)]


_WHERE_TRUE = {"stablehlo.case": 1, "stablehlo.if": 0}
"""The branch taken if the predicate is true."""


def _chosen_by_rows(
    operation: Operation, ended_by: Finding, found: Sequence[list[Value]], walker: Walker
) -> list[Value]:
    """Return the results of a conditional whose index depends on several rows.

    A result that is equal in all branches does not depend on the index. If one branch is taken
    because any row requests it, a result is independent of other rows if both branches give the
    same for rows that do not request it. The conditional is then treated as if that branch were
    always taken, which gives the same result even if no row requests it.
    """
    reason = "selects a branch by a value of several rows"
    finding = Finding(ended_by.mixed, operation.name, reason, operation.location())
    condition = _branch_condition(operation, walker)
    keys: dict[Hashable, int] = {}
    labels: Labels = {}
    for region in operation.regions:
        labels |= labelled(region, {}, keys)
    row = DoneRow(walker, walker.made_by, labels)
    if condition is not None:
        row.assume(condition.term)
    results = []
    by_place = zip(*(region.returned for region in operation.regions), strict=True)
    for (first, *others), values in zip(by_place, zip(*found, strict=True), strict=True):
        if not all(row.is_same(first, one) or row.is_same(one, first) for one in others):
            results.append(Value((), finding))
        elif condition is not None and condition.is_more:
            results.append(_either(operation, values))
        else:
            results.append(values[0 if condition is None else condition.taken])
    return results


class _BranchCondition(NamedTuple):
    """A conditional whose branch is taken if some row requests it."""

    term: Term
    taken: int
    is_more: bool
    """Whether the index has further conditions."""


def _branch_condition(operation: Operation, walker: Walker) -> _BranchCondition | None:
    """Return which question about the rows decides the branch; None if something else does."""
    if len(operation.regions) != 2:
        return None
    where_true = _WHERE_TRUE[operation.name]
    index = _truth_of(operation.operands[0], walker)
    of_all = all_of(index, walker.made_by)
    if of_all is not None:
        return (
            _BranchCondition(of_all, 1 - where_true, False)
            if _is_followed(of_all, walker)
            else None
        )
    terms = terms_of(index, walker.made_by)
    asking = [one for one in terms if walker.value(one).blocked is not None]
    if len(asking) != 1 or any(walker.value(one).sized for one in terms):
        return None
    term = question_of(asking[0], walker.made_by)
    if term is None or not _is_followed(term, walker):
        return None
    return _BranchCondition(term, where_true, len(terms) > 1)


def _is_followed(term: Term, walker: Walker) -> bool:
    """Tell whether the values asked about keep rows apart and do not depend on the batch size."""
    values = [walker.value(n) for n in (term.predicate, term.above) if n is not None]
    return all(value.blocked is None and value.sized is None for value in values)


def _truth_of(index: int, walker: Walker) -> int:
    """Return the boolean from which a branch index is computed."""
    made = walker.made_by(index)
    if made is not None and made.name == "stablehlo.clamp":
        bounds = [walker.value(made.operands[place]).fact for place in (0, 2)]
        if all(isinstance(one, Constant) and one.item() == n for n, one in enumerate(bounds)):
            made = walker.made_by(made.operands[1])
    is_number = made is not None and made.name == "stablehlo.convert"
    if made is not None and is_number and made.operand_types[0].dtype == "i1":
        return made.operands[0]
    return index


def _sized(value: Value, finding: Finding | None) -> Value:
    if finding is None or value.sized is not None:
        return value
    return replace(value, sized=finding, fact=None)


def _either(operation: Operation, values: Sequence[Value]) -> Value:
    """Return the abstract value of a result that may be any of these values."""
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


# --- Loops -------------------------------------------------------------------------------------


def while_(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Analyse the body of a loop to a fixpoint, then its condition."""
    condition = operation.regions[0]
    if not _is_counted(operation, operands, walker):
        walker.loops_follow_inputs = True
    carried = _fixpoint(operation, operands, walker)
    (going_on,) = walker.region(condition, carried)
    if going_on.blocked is None:
        # The condition is a scalar, so it cannot have rows: it does not depend on the inputs.
        kept, sized = _unchanged(operation.regions[1]), None
        if going_on.sized is not None:
            reason = "iterates as often as the batch size"
            sized = Finding(True, operation.name, reason, operation.location())
        return [
            value if number in kept else _sized(value, sized)
            for number, value in enumerate(carried)
        ]
    walker.loops_follow_rows = True
    return _until_all_are_done(operation, carried, walker, going_on.blocked)


def _unchanged(body: Region) -> set[int]:
    """Return the positions of loop-invariant carried values."""
    return {
        number
        for number, (argument, returned) in enumerate(
            zip(body.arguments, body.returned, strict=True)
        )
        if argument == returned
    }


def _fixpoint(operation: Operation, operands: Sequence[Value], walker: Walker) -> list[Value]:
    """Return abstract values of the carried values that hold before and after every iteration."""
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
    raise NoRule("is a loop that could not be analysed completely")


def _handed_on(operation: Operation, number: int, value: Value) -> Value:
    """Return a carried value, blocked if it accumulates one row after another.

    Writing to rows one at a time is not accumulation: each may be written back where it was read.
    """
    finding = value.blocked
    if finding is None or finding.reason != ONE_BY_ONE:
        return value
    body = operation.regions[1]
    made = {result: one for one in body.operations for result in one.results}
    last = made.get(body.returned[number])
    if last is not None and last.name in _PUT and last.operands[0] == body.arguments[number]:
        return value
    reason = "carries state from row to row"
    return Value((), Finding(True, operation.name, reason, finding.location))


_PUT = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter"})


def _without_fact(value: Value) -> Value:
    return replace(value, fact=None) if value.fact is not None else value


# --- Loops that run until all rows are done ----------------------------------------------------


def _until_all_are_done(
    operation: Operation, carried: list[Value], walker: Walker, ended_by: Finding
) -> list[Value]:
    """Return the carried values after a loop that runs while any row is active.

    Other rows decide how many iterations follow after a row is done. Carried values that these
    iterations leave unchanged in a done row are proved; the others depend on all rows.
    """
    kept = _unchanged(operation.regions[1])
    condition = _loop_condition(operation, walker, ended_by)
    if isinstance(condition, Finding):
        return [
            value if number in kept else Value((), condition)
            for number, value in enumerate(carried)
        ]
    changes = Finding(
        False,
        operation.name,
        "runs until all rows are done, and changes finished rows",
        operation.location(),
    )
    same = _same_when_done(operation, walker, condition)
    return [
        value if number in kept or number in same or value.blocked else Value((), changes)
        for number, value in enumerate(carried)
    ]


def _loop_condition(operation: Operation, walker: Walker, ended_by: Finding) -> Term | Finding:
    """Return the question that the condition asks about rows, or why the loop mixes rows."""
    (returned,) = operation.regions[0].returned
    terms = terms_of(returned, walker.made_by)
    asking = [one for one in terms if walker.value(one).blocked is not None]
    term = question_of(asking[0], walker.made_by) if len(asking) == 1 else None
    if term is None or not _is_apart(term, walker):
        reason = "runs until a condition over several rows holds"
        return Finding(ended_by.mixed, operation.name, reason, operation.location())
    numbers = [*terms, term.predicate, *(() if term.above is None else (term.above,))]
    sized = [found for one in numbers if (found := walker.value(one).sized) is not None]
    return sized[0] if sized else term


def _is_apart(term: Term, walker: Walker) -> bool:
    numbers = [term.predicate, *(() if term.above is None else (term.above,))]
    return all(walker.value(one).blocked is None for one in numbers)


def _same_when_done(operation: Operation, walker: Walker, term: Term) -> frozenset[int]:
    """Return the positions of carried values that stay unchanged in a done row."""
    body = operation.regions[1]
    made = made_in(body)
    loop = Loop(operation, walker)
    writes = writes_nothing_new(loop, term, made)
    row = DoneRow(walker, walker.made_by, _labels(operation), writes=writes)
    row.assume(term)
    same = frozenset(
        number
        for number, (argument, returned) in enumerate(
            zip(body.arguments, body.returned, strict=True)
        )
        if row.is_same(returned, argument)
    )
    return same if stays_done(loop, term, same, made) else frozenset()


def _labels(operation: Operation) -> Labels:
    """Label the values of condition and body consistently."""
    condition, body = operation.regions
    kept = _unchanged(body)
    # A loop-invariant value equals its initial value.
    of_arguments: list[Hashable] = [
        ("outside", operand) if number in kept else ("carried", number)
        for number, operand in enumerate(operation.operands)
    ]
    keys: dict[Hashable, int] = {}
    found = [
        labelled(region, dict(zip(region.arguments, of_arguments, strict=True)), keys)
        for region in (condition, body)
    ]
    return found[0] | found[1]


# --- Trip counts -------------------------------------------------------------------------------


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
