"""Tracks values that equal the row number, such as the index in `x[arange(b), i]`."""

from __future__ import annotations

from collections.abc import Sequence

from xlaserve.row_proofs import constants
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import RowNumber, Value
from xlaserve.row_proofs.program import Operation

WIDE = frozenset({"i32", "i64", "ui32", "ui64"})
"""Integer types that can hold the row number in any batch."""


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


def still_row_number(operation: Operation, operands: Sequence[Value]) -> RowNumber | None:
    """Return the RowNumber fact if the operation leaves the row number unchanged, else None."""
    numbers = [value.fact for value in operands if isinstance(value.fact, RowNumber)]
    if len(numbers) != 1 or operation.types[0].dtype not in WIDE:
        return None
    bounds = [value.fact for value in operands if not isinstance(value.fact, RowNumber)]
    items = [fact.item() if isinstance(fact, Constant) else None for fact in bounds]
    first = isinstance(operands[0].fact, RowNumber)
    unchanged = {
        "stablehlo.convert": True,
        "stablehlo.add": items == [0],
        "stablehlo.multiply": items == [1],
        "stablehlo.subtract": items == [0] and first,
        "stablehlo.maximum": items == [0],
        "stablehlo.minimum": len(bounds) == 1 and _is_last(bounds[0]),
        "stablehlo.clamp": len(bounds) == 2
        and isinstance(operands[1].fact, RowNumber)
        and items[0] == 0
        and _is_last(bounds[1]),
    }
    return numbers[0] if unchanged.get(operation.name) else None


def _is_last(fact: object) -> bool:
    """Tell whether a bound is at least the number of the last row."""
    if not isinstance(fact, Constant):
        return False
    return bool(((fact.per_row >= 1) & (fact.fixed >= -1)).all()) and bool(fact.fixed.size)


def _compared_row_number(direction: str, bound: Constant) -> Constant | None:
    """Compare the row number with a bound; None if the result is not the same for all rows."""
    below = constants.compared("LT", bound, Constant(0))
    from_first = constants.compared("LE", bound, Constant(0))
    last = _is_last(bound)
    beyond = bool(((bound.per_row >= 1) & (bound.fixed >= 0)).all()) and bool(bound.fixed.size)
    is_below = below is not None and below.item() == 1
    is_from_first = from_first is not None and from_first.item() == 1
    answers = {
        "LT": (beyond, is_from_first),
        "LE": (last, is_below),
        "GE": (is_from_first, beyond),
        "GT": (is_below, last),
        "EQ": (False, is_below or beyond),
        "NE": (is_below or beyond, False),
    }
    yes, no = answers[direction]
    return Constant(1) if yes else Constant(0) if no else None


def compared_with_row_number(direction: str, operands: Sequence[Value]) -> Constant | None:
    """Evaluate a comparison with the row number; None if it is not the same for all rows."""
    left, right = (value.fact for value in operands)
    if isinstance(left, RowNumber) and isinstance(right, Constant):
        return _compared_row_number(direction, right)
    if isinstance(right, RowNumber) and isinstance(left, Constant):
        return _compared_row_number(_MIRRORED[direction], left)
    return None
