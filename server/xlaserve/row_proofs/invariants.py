"""Assertions on the results of every rule.

A rule that overlooks a case then fails a proof, instead of yielding a wrong one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import Along, Dimensions, RowNumber, Segments, Value, size_of
from xlaserve.row_proofs.program import Operation, Pair, Shape
from xlaserve.row_proofs.sizes import BATCH, ZERO, static


def unread(operation: Operation, grows: Collection[str]) -> str:
    """Return an error if an attribute depends on the batch size and its rule does not expect it.

    `grows` names the attributes that the rule reads as sizes. Empty if there is no error.
    """
    for name, attribute in operation.attributes.items():
        if isinstance(attribute, Pair) and name not in grows:
            return f"uses the batch size for its '{name}', which has no rule"
    return ""


def broken(
    operation: Operation,
    operands: Sequence[Value],
    results: Sequence[Value],
    ignored: Collection[int] = (),
) -> str:
    """Return why the results of a rule cannot be right, in a clause; empty if they can.

    `ignored` has the positions of operands on which the results need not depend.
    """
    if len(results) != len(operation.types):
        return "has a different number of results than its rule"
    counted = [
        one
        for number, (one, kind) in enumerate(zip(operands, operation.operand_types, strict=False))
        # An operand without elements has no effect.
        if number not in ignored and ZERO not in kind.shape
    ]
    for value, kind in zip(results, operation.types, strict=True):
        reason = misfit(value, kind.shape) or _forgotten(counted, value, kind.shape)
        if reason:
            return reason
    return ""


def misfit(value: Value, shape: Shape) -> str:
    """Return why a value does not fit a shape, in a clause; empty if it fits."""
    if isinstance(value.fact, Segments):
        reason = _parts_misfit(value.fact, shape)
        if reason:
            return reason
    if value.blocked is not None:
        return ""
    if len(value.dimensions) != len(shape):
        return "has a different rank than its rule"
    if any(
        size_of(dimension) != size for dimension, size in zip(value.dimensions, shape, strict=True)
    ):
        return "has different dimension sizes than its rule"
    return _rows_misfit(value.dimensions) or _fact_misfit(value.fact, shape)


def _rows_misfit(dimensions: Dimensions) -> str:
    rows = [factor for dimension in dimensions for factor in dimension if factor.along is Along.ROW]
    if len(rows) > 1:
        return "computes something for every pair of rows"
    return "has rows other than the batch's" if rows and rows[0].size != BATCH else ""


def _fact_misfit(fact: object, shape: Shape) -> str:
    reason = "has a different element shape than its rule"
    if isinstance(fact, RowNumber):
        is_of_rows = fact.dimension < len(shape) and shape[fact.dimension] == BATCH
        return "" if is_of_rows else reason
    if isinstance(fact, Constant) and not fact.is_splat:
        return "" if tuple(map(static, fact.fixed.shape)) == tuple(shape) else reason
    return ""


def _parts_misfit(fact: Segments, shape: Shape) -> str:
    sizes, axis = fact.sizes, fact.dimension
    if axis >= len(shape) or _summed(sizes) != shape[axis] or len(sizes) != len(fact.values):
        return "has parts of different sizes than its rule"
    for value, size in zip(fact.values, sizes, strict=True):
        reason = misfit(value, (*shape[:axis], size, *shape[axis + 1 :]))
        if reason:
            return reason
    return ""


def _summed(sizes: Shape) -> tuple[int, int]:
    return sum(size.per_row for size in sizes), sum(size.offset for size in sizes)


def _forgotten(counted: Sequence[Value], result: Value, shape: Shape) -> str:
    """Return which dependency of the operands is missing from a result, in a clause."""
    is_known = isinstance(result.fact, Constant) and result.fact.is_static
    if result.blocked is not None or is_known or ZERO in shape:
        return ""
    if any(one.has_rows for one in counted) and not result.has_rows:
        return "depends on rows, contrary to its rule"
    if any(one.sized for one in counted) and result.sized is None:
        return "depends on the batch size, contrary to its rule"
    if any(one.blocked and not isinstance(one.fact, Segments) for one in counted):
        return "depends on unknown values, contrary to its rule"
    return ""
