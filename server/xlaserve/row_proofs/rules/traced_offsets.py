"""Integers traced back through arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.ranges import TRUTH, Range
from xlaserve.row_proofs.rules.tracing import (
    INTEGERS,
    NOTHING,
    Place,
    Trace,
    TracingRules,
    joined_offsets,
    known_number,
)
from xlaserve.row_proofs.sizes import ONE, ZERO, static


def _is_of_same_rows(left: Place, right: Place) -> bool:
    return not left.stride or not right.stride or left.rows == right.rows


def _added(trace: Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None or not _is_of_same_rows(left, right):
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.added(left.within, right.within)
    stride = left.stride + right.stride
    if stride and within is None:
        return None
    return Place(joined_offsets(trace, left, right), within, stride, left.rows or right.rows)


def _subtracted(trace: Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    return left and right and _difference(trace, left, right)


def _difference(trace: Trace, left: Place, right: Place) -> Place | None:
    stride = left.stride - right.stride
    if stride < 0 or not _is_of_same_rows(left, right):
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.subtracted(left.within, right.within)
    if stride and within is None:
        return None
    return Place(joined_offsets(trace, left, right), within, stride, left.rows if stride else ())


def _multiplied(trace: Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    if left is None or right is None:
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.multiplied(left.within, right.within)
    if not left.stride and not right.stride:
        return Place(joined_offsets(trace, left, right), within)
    for one, other in ((left, right), (right, left)):
        number = other.item()
        if number is not None and one.stride and within is not None and number >= 0:
            if not number:
                return known_number(trace, 0)
            return Place(one.offset, within, one.stride * number, one.rows)
    return None


def _negated(trace: Trace) -> Place | None:
    found = trace.operand(0)
    if found is None or found.stride:
        return None
    within = found.within and ranges.subtracted(ranges.of_integer(0), found.within)
    return Place(found.offset, within)


def _chosen_larger(trace: Trace, left: Place, right: Place) -> Place | None:
    return _extreme(trace, left, right, "GE", ranges.larger)


def _chosen_smaller(trace: Trace, left: Place, right: Place) -> Place | None:
    return _extreme(trace, left, right, "LE", ranges.smaller)


def _extreme(
    trace: Trace,
    left: Place,
    right: Place,
    direction: str,
    of_both: Callable[[Range, Range], Range],
) -> Place | None:
    is_left = compared(trace, left, right, direction).item()
    if is_left is not None:
        return left if is_left else right
    if left.stride or right.stride:
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = of_both(left.within, right.within)
    return Place(joined_offsets(trace, left, right), within)


def _maximum(trace: Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    return left and right and _chosen_larger(trace, left, right)


def _minimum(trace: Trace) -> Place | None:
    left, right = trace.operand(0), trace.operand(1)
    return left and right and _chosen_smaller(trace, left, right)


def _clamped(trace: Trace) -> Place | None:
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


def _divided(trace: Trace) -> Place | None:
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


def _remainder(trace: Trace) -> Place | None:
    found, divisor = trace.operand(0), trace.operand(1)
    if found is None or divisor is None:
        return None
    number = divisor.item()
    if number is not None and found.within is not None and _is_counted_up(found, number):
        if ranges.is_at_least(static(number - 1), found.within.high):
            return Place(found.offset, found.within)
        return Place(found.offset, ranges.below(static(number)))
    return _of_both(trace, found, divisor)


def _of_both(trace: Trace, left: Place, right: Place) -> Place | None:
    if left.stride or right.stride:
        return None
    return Place(joined_offsets(trace, left, right), None)


def _sign(trace: Trace) -> Place | None:
    found = trace.operand(0)
    if found is None:
        return None
    offset = NOTHING if found.stride else found.offset
    if found.whole is None:
        return Place(offset, Range(static(-1), ONE))
    low, high = found.whole
    lowest = next((end for end in (1, 0) if ranges.is_at_least(low, static(end))), -1)
    highest = next((end for end in (-1, 0) if ranges.is_at_least(static(end), high)), 1)
    return Place(offset, Range(static(lowest), static(highest)))


def _magnitude(trace: Trace) -> Place | None:
    found = trace.operand(0)
    if found is None or found.whole is None or not ranges.is_at_least(found.whole.low, ZERO):
        return None
    return found


def _converted(trace: Trace) -> Place | None:
    before = trace.operation.operand_types[0].dtype
    after = trace.operation.types[0].dtype
    if before not in INTEGERS:
        return None
    found = trace.operand(0)
    if found is None or after != "i1":
        return found
    whole = found.whole
    if found.item() == 0:
        return known_number(trace, 0)
    if whole is not None and (
        ranges.is_at_least(whole.low, ONE) or ranges.is_at_least(static(-1), whole.high)
    ):
        return known_number(trace, 1)
    return Place(NOTHING if found.stride else found.offset, TRUTH)


def compared(trace: Trace, left: Place, right: Place, direction: str) -> Place:
    is_alike = left.stride == right.stride and _is_of_same_rows(left, right)
    ends = (left.within, right.within) if is_alike else (left.whole, right.whole)
    if ends[0] is not None and ends[1] is not None:
        found = ranges.compared(direction, ranges.subtracted(ends[0], ends[1]))
        if found is not None:
            return known_number(trace, int(found))
    return Place(joined_offsets(trace, left, right) if is_alike else NOTHING, TRUTH)


RULES: TracingRules = MappingProxyType(
    {
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
    }
)
