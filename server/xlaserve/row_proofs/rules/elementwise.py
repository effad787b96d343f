"""Operations that compute each element from the same element of their operands."""

from __future__ import annotations

from collections.abc import Sequence

from xlaserve.row_proofs import constants
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import Along, Dimensions, Value, factor, joined, uniform
from xlaserve.row_proofs.findings import Finding
from xlaserve.row_proofs.program import Operation, Shape
from xlaserve.row_proofs.rules import segments
from xlaserve.row_proofs.rules.row_numbers import compared_with_row_number, still_row_number

_STABLEHLO = """
    abs add and atan2 cbrt ceil clamp compare complex convert cosine count_leading_zeros divide
    exponential exponential_minus_one floor imag is_finite log log_plus_one logistic maximum
    minimum multiply negate not or popcnt power real reduce_precision remainder
    round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic
    shift_right_logical sign sine sqrt subtract tan tanh xor
"""
_CHLO = """
    acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc is_inf
    is_neg_inf is_pos_inf lgamma next_after polygamma sinh square tan zeta
"""
NAMES = frozenset(
    {f"stablehlo.{name}" for name in _STABLEHLO.split()}
    | {f"chlo.{name}" for name in _CHLO.split()}
)
"""Names of all elementwise operations; any other operation is not treated as one."""


def elementwise(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Join the operands' abstract values, or evaluate the operation if all are known constants."""
    shape = operation.types[0].shape
    taken = _selected(operation, operands)
    if taken is not None:
        return [taken]
    whole = segments.each(elementwise, operation, operands)
    if whole is not None:
        return [whole]
    found = _folded(operation, operands)
    if found is not None:
        return [of_constant(found, shape, operation)]
    fact = still_row_number(operation, operands)
    spread = [_spread(value, shape) for value in operands]
    result = joined(spread)
    result = _noted(operation, operands, result)
    if fact is not None:
        return [Value(result.dimensions, result.blocked, result.sized, fact)]
    return [result]


def of_constant(
    found: Constant, shape: Shape, operation: Operation, before: Finding | None = None
) -> Value:
    """Return the abstract value of a tensor with known elements."""
    item = found.is_splat or found.fixed.size == 1
    dimensions = uniform(shape) if item else _dimensions_of(found, shape)
    sized = None
    if not found.is_static:
        sized = before or Finding(
            True, operation.name, "uses the batch size as a value", operation.location()
        )
    return Value(dimensions, sized=sized, fact=found)


def _dimensions_of(found: Constant, shape: Shape) -> Dimensions:
    return tuple(
        factor(
            size,
            Along.UNIFORM
            if bool((found.fixed == found.fixed.take([0], axis)).all())
            and bool((found.per_row == found.per_row.take([0], axis)).all())
            else Along.ANY,
        )
        for axis, size in enumerate(shape)
    )


def _spread(value: Value, shape: Shape) -> Value:
    """Broadcast a scalar to a shape."""
    if value.blocked is None and len(value.dimensions) != len(shape) and not value.dimensions:
        return Value(uniform(shape), sized=value.sized)
    return value


def _selected(operation: Operation, operands: Sequence[Value]) -> Value | None:
    if operation.name != "stablehlo.select":
        return None
    predicate = operands[0].fact
    if not isinstance(predicate, Constant):
        return None
    item = predicate.item()
    return None if item is None else operands[1 if item else 2]


def _folded(operation: Operation, operands: Sequence[Value]) -> Constant | None:
    facts = [value.fact for value in operands]
    direction = direction_of(operation)
    known = [fact for fact in facts if isinstance(fact, Constant)]
    if len(known) < len(facts):
        return compared_with_row_number(direction, operands) if direction else None
    return constants.folded(operation.name, operation.types[0].dtype, known, direction)


def direction_of(operation: Operation) -> str:
    """Return the direction of a comparison (LT, LE, GT, GE, EQ, NE); empty for other operations."""
    if operation.name != "stablehlo.compare":
        return ""
    return operation.text("comparison_direction").rsplit(maxsplit=1)[-1].rstrip(">")


def _noted(operation: Operation, operands: Sequence[Value], result: Value) -> Value:
    """Blame the operation that first combines rows with a value that depends on the batch size."""
    if result.sized is None or result.blocked is not None:
        return result
    if any(value.sized is not None and value.has_rows for value in operands):
        return result
    if not any(value.has_rows for value in operands):
        return result
    finding = Finding(
        result.sized.mixed,
        operation.name,
        "computes with the batch size",
        operation.location(),
    )
    return Value(result.dimensions, sized=finding)
