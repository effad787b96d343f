"""Traces integers and booleans back over reductions."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.domain import Value
from xlaserve.row_proofs.program import Region
from xlaserve.row_proofs.ranges import TRUTH, Range
from xlaserve.row_proofs.rules.reduction import only_operation
from xlaserve.row_proofs.rules.tracing import (
    NOTHING,
    Part,
    Place,
    Trace,
    TracingRules,
    joined_offsets,
    known_number,
)

MAX_PARTS = 16
"""Maximum number of booleans that are traced one by one."""


def _reduced(trace: Trace) -> Place | None:
    # XLA ignores the initial value if there is only one element.
    operation = trace.operation
    name = only_operation(operation.regions[0])
    shape = operation.operand_types[0].shape
    sizes = [shape[axis] for axis in operation.integers("dimensions")]
    if name in {"stablehlo.and", "stablehlo.or"} and operation.types[0].dtype == "i1":
        return _truth_of_all(trace, int(name == "stablehlo.and"))
    wholes = [_whole(trace.other(place)) for place in range(len(operation.operands))]
    found, start = wholes[trace.result], wholes[trace.result + len(operation.types)]
    if found is None or start is None:
        return None
    if name == "stablehlo.add":
        if not all(size.is_static for size in sizes):
            return None
        count = 1
        for size in sizes:
            count *= size.fixed
        total = ranges.multiplied(found, ranges.of_integer(count))
        return total and trace.own(ranges.spanned(total, ranges.added(total, start)))
    if name in _EXTREMES and not any(size.may_be_zero for size in sizes):
        return trace.own(ranges.spanned(found, _EXTREMES[name](found, start)))
    return _of_region(trace, operation.regions[0], wholes)


_EXTREMES = {"stablehlo.maximum": ranges.larger, "stablehlo.minimum": ranges.smaller}


def _whole(found: Place | None) -> Range | None:
    return None if found is None else found.whole


def _of_region(trace: Trace, region: Region, wholes: Sequence[Range | None]) -> Place | None:
    """Return bounds that hold for the initial value and that every reduction step preserves."""
    count = len(trace.operation.types)
    spans = [
        None if one is None or start is None else ranges.spanned(one, start)
        for one, start in zip(wholes[:count], wholes[count:], strict=True)
    ]
    made = {result: one for one in region.operations for result in one.results}
    arguments = dict(zip(region.arguments, (*spans, *spans), strict=True))
    inner = trace.tracing.inside(made, arguments)
    for returned, span in zip(region.returned, spans, strict=True):
        found = _whole(inner.place(returned))
        if span is not None and (found is None or not ranges.is_within(found, span)):
            return None
    return trace.own(spans[trace.result])


def _truth_of_all(trace: Trace, neutral: int) -> Place | None:
    """Trace `all` or `any` over booleans by tracing each boolean."""
    axes = trace.operation.integers("dimensions")
    start = trace.other(1)
    if trace.part is not None or start is None or start.item() != neutral:
        return None
    found = trace.other(0)
    if found is not None and found.item() == neutral:
        return known_number(trace, neutral)
    if len(axes) != 1:
        return None
    size = trace.operation.operand_types[0].shape[axes[0]]
    if not size.is_static or not 0 < size.fixed <= MAX_PARTS:
        return None
    each = [trace.other(0, Part(axes[0], number)) for number in range(size.fixed)]
    return _truth_of_each(trace, [one or Place(NOTHING, TRUTH) for one in each], neutral)


def _truth_of_each(trace: Trace, each: Sequence[Place], neutral: int) -> Place:
    (axis,) = trace.operation.integers("dimensions")
    if any(one.item() == 1 - neutral for one in each):
        return known_number(trace, 1 - neutral)
    left = [one for one in each if one.item() is None]
    if not left:
        return known_number(trace, neutral)
    together = joined_offsets(trace, *left)
    if together.blocked is not None:
        return Place(together, TRUTH)
    dimensions = (*together.dimensions[:axis], *together.dimensions[axis + 1 :])
    return Place(Value(dimensions, sized=together.sized), TRUTH)


RULES: TracingRules = MappingProxyType(
    {
        "stablehlo.reduce": _reduced,
    }
)
