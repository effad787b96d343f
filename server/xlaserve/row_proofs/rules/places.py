"""Integers traced back to the number of their row: `number * stride + offset`.

What looks into a batch at `arange(b)`, or into a flattened one at `arange(b) * k + i`, sees its own
row. Such an index is made by itself of what differs from row to row, so nothing is known of it, or
of what is computed on the way, but by looking at how it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.constants import Constant, fitting
from xlaserve.row_proofs.domain import Along, RowNumber, Value, uniform
from xlaserve.row_proofs.program import Operation, Tensor
from xlaserve.row_proofs.rules import traced_moves, traced_offsets, traced_reductions, traced_truths
from xlaserve.row_proofs.rules.tracing import INTEGERS, NOTHING, Part, Place, Tracing, TracingRules
from xlaserve.row_proofs.walk import Walker

_LARGEST = (1 << 63) - 1


def place_of(walker: Walker, number: int, part: Part | None = None) -> Place:
    """Return the known facts about the integers of a value, or of a part of it."""
    tracing = Tracing(walker, _RULES)
    found = tracing.place(number, part)
    if found is None or found.is_cut or (part is None and tracing.forgets(number, found)):
        return Place(NOTHING, None)
    return found


def settled(operation: Operation, values: Sequence[Value], walker: Walker) -> Sequence[Value]:
    """Return the known facts about results, of which more is known when they are traced back."""
    dtype = operation.types[0].dtype
    if len(values) != 1 or (dtype not in INTEGERS and dtype not in ranges.EXACT_BITS):
        return values
    (value,) = values
    if value.blocked is None and value.sized is None and not _is_counted(value):
        return values
    tracing = Tracing(walker, _RULES, {operation.results[0]: value})
    found = tracing.place(operation.results[0])
    if found is None or tracing.forgets(operation.results[0], found):
        return values
    better = _better(value, found, operation.types[0])
    return values if better is None else [better]


def _is_counted(value: Value) -> bool:
    """Tell whether a value differs from row to row whatever the inputs are."""
    return not isinstance(value.fact, RowNumber) and any(
        part.along is Along.ANY and not part.size.is_static
        for dimension in value.dimensions
        for part in dimension
    )


def _better(value: Value, found: Place, kind: Tensor) -> Value | None:
    """Return what a place says of integers that is more than is known; None for nothing."""
    item = found.item()
    if item is not None and abs(item) <= _LARGEST:
        # Of larger ones nothing is computed: differences of them would overflow.
        return Value(uniform(kind.shape), fact=fitting(Constant(item), kind.dtype))
    if found.stride or found.offset.blocked is not None:
        return None
    if value.blocked is None and (found.offset.sized is not None or _is_counted(found.offset)):
        return None
    return replace(found.offset, fact=None)


_RULES: TracingRules = MappingProxyType(
    {**traced_offsets.RULES, **traced_truths.RULES, **traced_moves.RULES, **traced_reductions.RULES}
)
"""Rules for the integers that an operation makes; without a row they may be any of their type."""
