"""Folds small integer constants, some of which depend on the batch size.

JAX surrounds every index with additions, comparisons and selections. They are evaluated here to
find out whether an index is a constant or the row number. The batch size `b` stays symbolic, so
that every result holds for all batch sizes.
"""

# NumPy's ufuncs are typed with `Any`.
# mypy: disallow-any-explicit=False

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

MAX_ELEMENTS = 256
"""Maximum number of elements of a constant that is evaluated."""

_LIMIT = 1 << 31

Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Constant:
    """Integers `per_row * b + fixed`: an array of the value's shape, or a scalar if all are equal.

    Booleans are 0 and 1.
    """

    __slots__ = ("fixed", "per_row")

    def __init__(self, fixed: object, per_row: object = 0) -> None:
        self.fixed: Integers = np.asarray(fixed, np.int64)
        self.per_row: Integers = np.broadcast_to(np.asarray(per_row, np.int64), self.fixed.shape)

    @property
    def is_static(self) -> bool:
        """Whether the integers are the same at every batch size."""
        return not self.per_row.any()

    @property
    def is_splat(self) -> bool:
        """Whether all elements are the same scalar, which is stored once."""
        return self.fixed.ndim == 0

    def item(self) -> int | None:
        """Return the integer that all elements equal at every batch size; None if there is none."""
        if not self.is_static or not self.fixed.size:
            return None
        first = int(self.fixed.flat[0])
        return first if self.is_splat or bool((self.fixed == first).all()) else None

    def map(self, change: Callable[[Integers], Integers]) -> Constant:
        """Return the constant with `change` applied to both arrays, such as a reshape."""
        return Constant(change(self.fixed), change(self.per_row))

    def __eq__(self, other: object) -> bool:
        """Tell whether all elements are equal at every batch size."""
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
    """Return the minimum and maximum of each element over all batch sizes from 1."""
    at_one = (value.fixed + value.per_row).astype(np.float64)
    return (
        np.where(value.per_row < 0, -np.inf, at_one),
        np.where(value.per_row > 0, np.inf, at_one),
    )


def compared(direction: str, left: Constant, right: Constant) -> Constant | None:
    """Return the result of a comparison, or None if it depends on the batch size."""
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
"""Functions by direction: is the comparison of a difference with 0 always true, or always false?"""


def chosen(predicate: Constant, left: Constant, right: Constant) -> Constant | None:
    """Return the elements of `left` where the predicate is true, otherwise of `right`."""
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
"""Elementwise operations on integers, by name."""

LOGIC: Mapping[str, Fold] = MappingProxyType(
    {
        "stablehlo.and": _of_static(np.logical_and),
        "stablehlo.or": _of_static(np.logical_or),
        "stablehlo.xor": _of_static(np.logical_xor),
        "stablehlo.not": _of_static(np.logical_not),
        "stablehlo.select": chosen,
    }
)
"""Elementwise operations on booleans, by name."""

_BITS = MappingProxyType({"i8": 7, "ui8": 8, "i16": 15, "ui16": 16, "i32": 31, "ui32": 32})


def folded(
    name: str, dtype: str, operands: Sequence[Constant], direction: str = ""
) -> Constant | None:
    """Evaluate an elementwise operation on constants; None if the result is unknown.

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
    """Evaluate the minimum of a constant and the largest integer of the datatype."""
    last = (1 << _BITS.get(dtype, 0)) - 1
    if name != "stablehlo.minimum" or not last:
        return None
    one, other = operands
    return other if one.item() == last else one if other.item() == last else None


def fitting(found: Constant, dtype: str) -> Constant | None:
    """Return the constant if a datatype can represent its elements, else None."""
    if dtype == "i1":
        return Constant(found.fixed != 0) if found.is_static else None
    if dtype not in _BITS and dtype not in {"i64", "ui64"}:
        return None
    # A larger number is not an index, and might overflow at some batch size.
    limit = min(_LIMIT, 1 << _BITS.get(dtype, 31))
    low = 0 if dtype.startswith("u") else -limit
    ends = (found.fixed, found.fixed + found.per_row, found.fixed + found.per_row * MOST_ROWS)
    if any(((end < low) | (end >= limit)).any() for end in ends):
        return None
    return found


MOST_ROWS = 65_536
"""Integers are checked for overflow up to this batch size; no server accepts a larger batch."""
