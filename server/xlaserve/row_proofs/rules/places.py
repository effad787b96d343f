"""Integers expressed by the row number: `number * stride + offset`.

A read from a batch at `arange(b)`, or from a flattened one at `arange(b) * k + i`, reads the row's
own elements. `arange(b)` itself varies from row to row regardless of the inputs, which the domain
cannot express. Therefore such indices are traced back over the operations that compute them.
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
    """Trace a value's integers, or a part of them, to the form `number * stride + offset`."""
    tracing = Tracing(walker, _RULES)
    found = tracing.place(number, part)
    if found is None or found.is_cut or (part is None and tracing.forgets(number, found)):
        return Place(NOTHING, None)
    return found


def settled(operation: Operation, values: Sequence[Value], walker: Walker) -> Sequence[Value]:
    """Return results with more precise abstract values found by tracing."""
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
    """Tell whether a value varies from row to row regardless of the inputs."""
    return not isinstance(value.fact, RowNumber) and any(
        part.along is Along.ANY and not part.size.is_static
        for dimension in value.dimensions
        for part in dimension
    )


def _better(value: Value, found: Place, kind: Tensor) -> Value | None:
    """Return a more precise abstract value according to a trace; None if it adds nothing."""
    item = found.item()
    if item is not None and abs(item) <= _LARGEST:
        # Larger constants are not folded, because differences of them would overflow.
        return Value(uniform(kind.shape), fact=fitting(Constant(item), kind.dtype))
    if found.stride or found.offset.blocked is not None:
        return None
    if value.blocked is None and (found.offset.sized is not None or _is_counted(found.offset)):
        return None
    return replace(found.offset, fact=None)


_RULES: TracingRules = MappingProxyType(
    {**traced_offsets.RULES, **traced_truths.RULES, **traced_moves.RULES, **traced_reductions.RULES}
)
"""Tracing rules by operation; without a rule an integer may have any value of its type."""
