"""Small known integers, and the integers computed from them.

Indexing in JAX is written with sums, comparisons and selections around every index. They have to
be computed here to see that an index is what it is. The size of the batch is among them, and stays
open: what is found out is so at every batch size.
"""

# An ufunc of numpy has no types that say what it takes.
# mypy: disallow-any-explicit=False

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

MAX_ELEMENTS = 256
"""Most elements of a constant that is looked at."""

_LIMIT = 1 << 31

Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Constant:
    """Integers `per_row * b + fixed`, of the shape of their value or of none where all are alike.

    Truth values are 0 and 1.
    """

    __slots__ = ("fixed", "per_row")

    def __init__(self, fixed: object, per_row: object = 0) -> None:
        self.fixed: Integers = np.asarray(fixed, np.int64)
        self.per_row: Integers = np.broadcast_to(np.asarray(per_row, np.int64), self.fixed.shape)

    @property
    def is_static(self) -> bool:
        """Whether it is the same at every batch size."""
        return not self.per_row.any()

    @property
    def is_splat(self) -> bool:
        """Whether all elements are alike."""
        return self.fixed.ndim == 0

    def item(self) -> int | None:
        """Return the one number that all elements are at every batch size, None for any other."""
        if not self.is_static or not self.fixed.size:
            return None
        first = int(self.fixed.flat[0])
        return first if self.is_splat or bool((self.fixed == first).all()) else None

    def map(self, change: Callable[[Integers], Integers]) -> Constant:
        """Return it with both arrays in another shape or order."""
        return Constant(change(self.fixed), change(self.per_row))

    def __eq__(self, other: object) -> bool:
        """Tell whether the elements are the same."""
        return (
            isinstance(other, Constant)
            and np.array_equal(self.per_row, other.per_row)
            and np.array_equal(self.fixed, other.fixed)
        )

    __hash__ = None  # type: ignore[assignment]


Fold: TypeAlias = Callable[..., "Constant | None"]


def _added(left: Constant, right: Constant) -> Constant:
    return Constant(left.fixed + right.fixed, left.per_row + right.per_row)


def _subtracted(left: Constant, right: Constant) -> Constant:
    return Constant(left.fixed - right.fixed, left.per_row - right.per_row)


def _multiplied(left: Constant, right: Constant) -> Constant | None:
    if not left.is_static and not right.is_static:
        return None
    per_row = left.per_row * right.fixed + right.per_row * left.fixed
    return Constant(left.fixed * right.fixed, per_row)


def _range(value: Constant) -> tuple[Any, Any]:
    """Return the least and the greatest of each element over all batches of one row or more."""
    at_one = (value.fixed + value.per_row).astype(np.float64)
    return (
        np.where(value.per_row < 0, -np.inf, at_one),
        np.where(value.per_row > 0, np.inf, at_one),
    )


def compared(direction: str, left: Constant, right: Constant) -> Constant | None:
    """Return the result of a comparison, None where it is not the same at all batch sizes."""
    yes, no = _COMPARISONS[direction](*_range(_subtracted(left, right)))
    return Constant(yes) if bool((yes | no).all()) else None


_COMPARISONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "LT": lambda least, most: (most < 0, least >= 0),
        "LE": lambda least, most: (most <= 0, least > 0),
        "GT": lambda least, most: (least > 0, most <= 0),
        "GE": lambda least, most: (least >= 0, most < 0),
        "EQ": lambda least, most: ((least == 0) & (most == 0), (least > 0) | (most < 0)),
        "NE": lambda least, most: ((least > 0) | (most < 0), (least == 0) & (most == 0)),
    }
)
"""Whether a comparison of a difference with 0 holds always, and whether it never does."""


def chosen(predicate: Constant, left: Constant, right: Constant) -> Constant | None:
    """Return the elements of the left where the predicate holds, else of the right."""
    if not predicate.is_static:
        return None
    where = predicate.fixed != 0
    return Constant(
        np.where(where, left.fixed, right.fixed), np.where(where, left.per_row, right.per_row)
    )


def _larger(left: Constant, right: Constant) -> Constant | None:
    is_left = compared("GE", left, right)
    return is_left and chosen(is_left, left, right)


def _smaller(left: Constant, right: Constant) -> Constant | None:
    is_left = compared("LE", left, right)
    return is_left and chosen(is_left, left, right)


def _clamped(low: Constant, value: Constant, high: Constant) -> Constant | None:
    above = _larger(low, value)
    return above and _smaller(above, high)


def _of_static(compute: Callable[..., Any]) -> Fold:
    def fold(*operands: Constant) -> Constant | None:
        if not all(operand.is_static for operand in operands):
            return None
        return Constant(compute(*(operand.fixed for operand in operands)))

    return fold


def _divided(left: Constant, right: Constant) -> Constant | None:
    divisor = right.item()
    if not divisor:
        return None
    if (left.per_row % divisor).any() or (left.fixed % divisor).any():
        if not left.is_static:
            return None
        quotient = np.abs(left.fixed) // abs(divisor)
        return Constant(quotient * np.sign(left.fixed) * np.sign(divisor))
    return Constant(left.fixed // divisor, left.per_row // divisor)


def _remainder(left: Constant, right: Constant) -> Constant | None:
    divisor = right.item()
    if not divisor or (left.per_row % divisor).any():
        return None
    if not left.is_static and ((left.fixed < 0) | (left.per_row < 0)).any():
        return None
    return Constant(np.fmod(left.fixed, divisor))


def _sign(value: Constant) -> Constant | None:
    least, most = _range(value)
    signs = np.sign(least)
    return Constant(signs.astype(np.int64)) if bool((signs == np.sign(most)).all()) else None


FOLDS: Mapping[str, Fold] = MappingProxyType(
    {
        "stablehlo.add": _added,
        "stablehlo.subtract": _subtracted,
        "stablehlo.multiply": _multiplied,
        "stablehlo.negate": lambda value: Constant(-value.fixed, -value.per_row),
        "stablehlo.maximum": _larger,
        "stablehlo.minimum": _smaller,
        "stablehlo.clamp": _clamped,
        "stablehlo.select": chosen,
        "stablehlo.divide": _divided,
        "stablehlo.remainder": _remainder,
        "stablehlo.sign": _sign,
    }
)
"""Operations on integers, by name; all elementwise."""

LOGIC: Mapping[str, Fold] = MappingProxyType(
    {
        "stablehlo.and": _of_static(np.logical_and),
        "stablehlo.or": _of_static(np.logical_or),
        "stablehlo.xor": _of_static(np.logical_xor),
        "stablehlo.not": _of_static(np.logical_not),
        "stablehlo.select": chosen,
    }
)
"""Operations on truth values."""

_BITS = MappingProxyType({"i8": 7, "ui8": 8, "i16": 15, "ui16": 16, "i32": 31, "ui32": 32})


def folded(
    name: str, dtype: str, operands: Sequence[Constant], direction: str = ""
) -> Constant | None:
    """Return the result of an elementwise operation of constants, None where it is not known.

    `dtype` is that of the result; `direction` that of a comparison.
    """
    if name == "stablehlo.compare":
        return compared(direction, *operands)
    if dtype == "i1":
        fold = LOGIC.get(name)
        return fold and fold(*operands)
    if name == "stablehlo.convert":
        return fitting(operands[0], dtype)
    fold = FOLDS.get(name)
    found = _within_bits(name, dtype, operands) or (fold and fold(*operands))
    return found and fitting(found, dtype)


def _within_bits(name: str, dtype: str, operands: Sequence[Constant]) -> Constant | None:
    """Return the smaller of a constant and the largest integer of its datatype."""
    last = (1 << _BITS.get(dtype, 0)) - 1
    if name != "stablehlo.minimum" or not last:
        return None
    one, other = operands
    return other if one.item() == last else one if other.item() == last else None


def fitting(found: Constant, dtype: str) -> Constant | None:
    """Return a constant where its elements are integers of a datatype, else None."""
    if dtype == "i1":
        return Constant(found.fixed != 0) if found.is_static else None
    if dtype not in _BITS and dtype not in {"i64", "ui64"}:
        return None
    # What is as large as this is no index, and could be cut off at some batch size.
    limit = min(_LIMIT, 1 << _BITS.get(dtype, 31))
    low = 0 if dtype.startswith("u") else -limit
    ends = (found.fixed, found.fixed + found.per_row, found.fixed + found.per_row * MOST_ROWS)
    if any(((end < low) | (end >= limit)).any() for end in ends):
        return None
    return found


MOST_ROWS = 65_536
"""The largest batch for which integers are known not to overflow; no server takes a larger."""
