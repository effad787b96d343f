"""Traces integers back over arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from xlaserve.row_proofs.sizes import ONE, ZERO, minus, plus, static


def _is_of_same_rows(left: Place, right: Place) -> bool:
    return not left.stride or not right.stride or left.rows == right.rows


def _added(trace: Trace) -> Place | None:
    left, right = trace.modular(0), trace.modular(1)
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
    one, other = map(trace.tracing.same, trace.operation.operands)
    # Not for floats: `inf - inf` and `nan - nan` are NaN.
    if one == other and not trace.is_float:
        return known_number(trace, 0)
    left, right = trace.modular(0), trace.modular(1)
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
    left, right = trace.modular(0), trace.modular(1)
    if not trace.is_float and any(one is not None and one.item() == 0 for one in (left, right)):
        return known_number(trace, 0)
    if left is None or right is None:
        return None
    within = None
    if left.within is not None and right.within is not None:
        within = ranges.multiplied(left.within, right.within)
    if trace.is_float and not all(map(_is_from_zero, (left, right))):
        # A negative number times 0 is -0.0.
        within = None
    if not left.stride and not right.stride:
        return Place(joined_offsets(trace, left, right), within)
    for one, other in ((left, right), (right, left)):
        number = other.item()
        if number is not None and one.stride and within is not None and number >= 0:
            if not number:
                return known_number(trace, 0)
            return Place(one.offset, within, one.stride * number, one.rows)
    return None


def _is_from_zero(found: Place) -> bool:
    return found.whole is not None and ranges.is_at_least(found.whole.low, ZERO)


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
    if compared(trace, left, right, direction).item() == 1:
        return left
    if compared(trace, right, left, direction).item() == 1:
        return right
    within = None
    if left.whole is not None and right.whole is not None:
        within = of_both(left.whole, right.whole)
    if left.stride or right.stride:
        return None if within is None else trace.own(within)
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
    """Tell whether the offset and stride of a nonnegative integer can be divided separately."""
    within = found.within
    return (
        within is not None
        and divisor > 0
        and ranges.is_at_least(within.low, ZERO)
        and not found.stride % divisor
    )


def _divided(trace: Trace) -> Place | None:
    found, divisor = trace.modular(0), trace.operand(1)
    if found is None or divisor is None:
        return None
    number = divisor.item()
    if number == 1:
        return found
    if _is_one_number(found, divisor):
        return known_number(trace, 1)
    if found.is_cut or trace.is_float:
        return None
    if number is None or found.within is None or not _is_counted_up(found, number):
        return _of_both(trace, found, divisor)
    within = None
    if found.within.is_static:
        low, high = (static(end.fixed // number) for end in found.within)
        within = Range(low, high)
    is_known = within is not None or not found.stride
    return Place(found.offset, within, found.stride // number, found.rows) if is_known else None


def _is_one_number(left: Place, right: Place) -> bool:
    """Tell whether both are the same positive number, which may depend on the batch size."""
    whole = left.whole
    if whole is None or whole.low != whole.high or whole != right.whole:
        return False
    return ranges.is_at_least(whole.low, ONE)


def _remainder(trace: Trace) -> Place | None:
    found, divisor = trace.operand(0), trace.operand(1)
    number = None if divisor is None else divisor.item()
    if number == 1 and not trace.is_float:
        return known_number(trace, 0)
    if found is None or divisor is None:
        return None
    kept = _rest_of_size(found, divisor)
    if kept is not None:
        return kept
    if number is not None and found.within is not None and _is_counted_up(found, number):
        return Place(found.offset, ranges.below(static(number)))
    if found.stride or not number or trace.is_float:
        return _of_both(trace, found, divisor)
    # The remainder has the sign of the dividend.
    most, whole = static(abs(number) - 1), found.whole
    low = ZERO if whole and ranges.is_at_least(whole.low, ZERO) else ranges.times(most, -1)
    high = ZERO if whole and ranges.is_at_least(ZERO, whole.high) else most
    return Place(found.offset, Range(low, high))


def _rest_of_size(found: Place, divisor: Place) -> Place | None:
    """Return the remainder if the divisor is known to fit at most once; None otherwise.

    Either number may depend on the batch size.
    """
    whole, by = found.whole, divisor.whole
    if whole is None or found.within is None or by is None or by.low != by.high:
        return None
    if not ranges.is_at_least(by.low, ONE):
        return None
    for taken in (ZERO, by.low):
        end = minus(plus(taken, by.low), ONE)
        if ranges.is_within(whole, Range(taken, end)):
            left = ranges.subtracted(found.within, Range(taken, taken))
            return replace(found, within=left)
    return None


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


def _rounded(trace: Trace) -> Place | None:
    """Return the operand, which is an integer already; None if it has no known bounds."""
    found = trace.operand(0)
    return found if found is not None and found.whole is not None else None


def _converted(trace: Trace) -> Place | None:
    before = trace.operation.operand_types[0].dtype
    after = trace.operation.types[0].dtype
    if before not in INTEGERS and before not in ranges.EXACT_BITS:
        return None
    found = trace.modular(0)
    if found is not None and found.is_cut and not _is_narrower(after, before):
        return None
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


def _is_narrower(after: str, before: str) -> bool:
    """Tell whether a conversion gives the same result whether or not its operand overflowed."""
    whole, of = ranges.of_dtype(after), ranges.of_dtype(before)
    if whole is None or of is None or after == "i1":
        return False
    width, wider = (one.high.fixed - one.low.fixed for one in (whole, of))
    return width <= wider


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
        "stablehlo.floor": _rounded,
        "stablehlo.ceil": _rounded,
        "stablehlo.round_nearest_afz": _rounded,
        "stablehlo.round_nearest_even": _rounded,
        "stablehlo.sign": _sign,
        "stablehlo.abs": _magnitude,
        "stablehlo.maximum": _maximum,
        "stablehlo.minimum": _minimum,
        "stablehlo.clamp": _clamped,
        "stablehlo.convert": _converted,
    }
)
