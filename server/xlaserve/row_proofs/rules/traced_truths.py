"""Traces booleans, and selects using the bounds that their predicate implies."""

from __future__ import annotations

from types import MappingProxyType

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.ranges import TRUTH, Range
from xlaserve.row_proofs.rules.elementwise import direction_of
from xlaserve.row_proofs.rules.traced_offsets import compared
from xlaserve.row_proofs.rules.tracing import (
    INTEGERS,
    NOTHING,
    Assumed,
    Place,
    Trace,
    Tracing,
    TracingRules,
    joined_offsets,
    known_number,
)
from xlaserve.row_proofs.sizes import static

MAX_ASSUMED = 2
"""Maximum number of nested predicates that are assumed true or false."""


def _compare(trace: Trace) -> Place | None:
    dtype = trace.operation.operand_types[0].dtype
    if dtype not in INTEGERS and dtype not in ranges.EXACT_BITS:
        return None
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None:
        return Place(NOTHING, TRUTH)
    return compared(trace, left, right, direction_of(trace.operation))


def _logical(trace: Trace, neutral: int) -> Place | None:
    """Trace `and` or `or`. If neither operand is known, one may still imply the other."""
    if trace.operation.types[0].dtype != "i1":
        return _bits(trace, neutral)
    left, right = (trace.operand(place) or Place(NOTHING, TRUTH) for place in (0, 1))
    if 1 - neutral in (left.item(), right.item()):
        return known_number(trace, 1 - neutral)
    for one, other in ((left, right), (right, left)):
        if one.item() == neutral:
            return other
    for first, second in ((0, 1), (1, 0)):
        assumed = _assuming(trace, trace.operation.operands[first], is_true=bool(neutral))
        if assumed is not None:
            follows = trace.operand(second, assumed)
            if follows is not None and follows.item() == 1 - neutral:
                return known_number(trace, 1 - neutral)
    return Place(joined_offsets(trace, left, right), TRUTH)


def _bits(trace: Trace, neutral: int) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None or left.stride or right.stride:
        return None
    numbers = [number for number in (left.item(), right.item()) if number is not None]
    within = None
    if neutral and numbers and numbers[0] >= 0:
        within = ranges.below(static(numbers[0] + 1))
    return Place(joined_offsets(trace, left, right), within)


def _and(trace: Trace) -> Place | None:
    return _logical(trace, 1)


def _or(trace: Trace) -> Place | None:
    return _logical(trace, 0)


def _not(trace: Trace) -> Place | None:
    found = trace.operand(0)
    if found is None or trace.operation.types[0].dtype != "i1":
        return None
    item = found.item()
    return Place(found.offset, TRUTH) if item is None else known_number(trace, 1 - item)


def _xor(trace: Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None or trace.operation.types[0].dtype != "i1":
        return None
    items = left.item(), right.item()
    if items[0] is not None and items[1] is not None:
        return known_number(trace, items[0] ^ items[1])
    return Place(joined_offsets(trace, left, right), TRUTH)


def _selected(trace: Trace) -> Place | None:
    predicate = trace.operand(0)
    item = None if predicate is None else predicate.item()
    one, other = map(trace.tracing.same, trace.operation.operands[1:])
    if item is not None or one == other:
        return trace.modular(2 if item == 0 else 1)
    left, right = (
        trace.operand(place, _assuming(trace, trace.operation.operands[0], is_true=is_true))
        for place, is_true in ((1, True), (2, False))
    )
    if left is None or right is None or left.stride != right.stride or left.rows != right.rows:
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.spanned(left.within, right.within)
    offset = NOTHING if predicate is None else joined_offsets(trace, predicate, left, right)
    return Place(offset, within, left.stride, left.rows)


def _assuming(trace: Trace, predicate: int, *, is_true: bool) -> Assumed | None:
    """Return the assumptions if a predicate is true (or false); None if there are no new ones."""
    if len(trace.assumed) >= MAX_ASSUMED:
        return None
    found = _implied(trace, predicate, is_true=is_true)
    return {**trace.assumed, **found} if found else None


def _implied(trace: Trace, predicate: int, *, is_true: bool, depth: int = 0) -> Assumed:
    """Return the bounds of integers that follow if a predicate is true (or false)."""
    made = trace.tracing.made_by(trace.tracing.same(predicate))
    # Shapes must match: a bound on a scalar is not one on every element.
    shape = trace.operation.types[trace.result].shape
    if made is None or made.types[0].shape != shape or depth > MAX_ASSUMED:
        return {}
    if made.name == "stablehlo.not":
        return _implied(trace, made.operands[0], is_true=not is_true, depth=depth + 1)
    if made.name in _UNANIMOUS and made.types[0].dtype == "i1":
        both = [_implied(trace, one, is_true=is_true, depth=depth + 1) for one in made.operands]
        return _of_both(*both, hold=_UNANIMOUS[made.name] == is_true)
    if made.name != "stablehlo.compare":
        return {}
    comparison = Trace(trace.tracing, made, 0, trace.part, trace.assumed)
    if made.operand_types[0].dtype == "i1":
        return _implied_by_truth(trace, comparison, is_true=is_true, depth=depth)
    return _compared_with(comparison, is_true=is_true)


_UNANIMOUS = {"stablehlo.and": True, "stablehlo.or": False}
"""The result that implies the same value of both operands: `and` is true only if both are."""


def _of_both(one: Assumed, other: Assumed, *, hold: bool) -> Assumed:
    """Combine the implications of two predicates if both hold, or if at least one does."""
    if hold:
        met = {n: ranges.met(within, other[n]) for n, within in one.items() if n in other}
        return {**one, **other, **met}
    return {
        number: ranges.spanned(within, other[number])
        for number, within in one.items()
        if number in other
    }


def _implied_by_truth(trace: Trace, comparison: Trace, *, is_true: bool, depth: int) -> Assumed:
    """Return the assumptions that follow from comparing a boolean with a known one."""
    direction = direction_of(comparison.operation)
    known = comparison.operand(1)
    truth = None if known is None else known.item()
    if truth is None or direction not in {"EQ", "NE"}:
        return {}
    inner = comparison.operation.operands[0]
    holds = bool(truth) == ((direction == "EQ") == is_true)
    return _implied(trace, inner, is_true=holds, depth=depth + 1)


def _compared_with(comparison: Trace, *, is_true: bool) -> Assumed:
    """Return the assumptions that follow from comparing an integer with a number."""
    operation, tracing = comparison.operation, comparison.tracing
    direction = direction_of(operation)
    if operation.operand_types[0].dtype not in INTEGERS:
        return {}
    for place, says in ((0, direction), (1, _MIRRORED[direction])):
        bound, subject = comparison.operand(1 - place), comparison.operand(place)
        number = None if bound is None else bound.item()
        if number is None or subject is None or subject.whole is None:
            continue
        within = _bounded(says if is_true else _OPPOSITE[says], number, subject.whole)
        if within is not None:
            return {_subject(tracing, tracing.same(operation.operands[place]), within): within}
    return {}


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


_OPPOSITE = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "EQ": "NE", "NE": "EQ"}


def _subject(tracing: Tracing, number: int, within: Range) -> int:
    """Return the integer to which the bounds apply: the operand of `sign`, if the result is 0."""
    made = tracing.made_by(number)
    if made is not None and made.name == "stablehlo.sign" and within.item() == 0:
        return tracing.same(made.operands[0])
    return number


def _bounded(direction: str, number: int, whole: Range) -> Range | None:
    """Narrow a range by a comparison of its integers with a number."""
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


RULES: TracingRules = MappingProxyType(
    {
        "stablehlo.compare": _compare,
        "stablehlo.and": _and,
        "stablehlo.or": _or,
        "stablehlo.xor": _xor,
        "stablehlo.not": _not,
        "stablehlo.select": _selected,
    }
)
