"""Bounds of integers at every batch size."""

from __future__ import annotations

from typing import NamedTuple

from xlaserve.row_proofs.constants import MOST_ROWS, Constant
from xlaserve.row_proofs.sizes import ONE, ZERO, Size, is_at_most, minus, plus, static

_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
EXACT_BITS = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}
"""Number of bits of the integers that each float type represents exactly."""


class Range(NamedTuple):
    """The integers from `low` to `high`, inclusive, at every batch size from 1."""

    low: Size
    high: Size

    def item(self) -> int | None:
        """Return the only integer in the range; None if there are several or it is not static."""
        return self.low.fixed if self.low == self.high and self.low.is_static else None

    @property
    def is_static(self) -> bool:
        """Whether the bounds are the same at every batch size."""
        return self.low.is_static and self.high.is_static


TRUTH = Range(ZERO, ONE)


def of_integer(number: int) -> Range:
    """Return the range of a single integer."""
    return Range(static(number), static(number))


def below(size: Size) -> Range:
    """Return the range from 0 to a size, exclusive."""
    return Range(ZERO, minus(size, ONE))


def of_constant(found: Constant) -> Range | None:
    """Return the range of a constant's elements; None if they grow differently with the batch."""
    if not found.fixed.size:
        return None
    if found.is_static:
        return Range(static(int(found.fixed.min())), static(int(found.fixed.max())))
    ends = {
        Size(int(per_row), int(fixed))
        for per_row, fixed in zip(found.per_row.flat, found.fixed.flat, strict=True)
    }
    if len(ends) > 1:
        return None
    (one,) = ends
    return Range(one, one)


def of_dtype(dtype: str) -> Range | None:
    """Return the range of an integer datatype; None for other datatypes."""
    if dtype == "i1":
        return TRUTH
    bits = _BITS.get(dtype.removeprefix("u"))
    if bits is None:
        return None
    if dtype.startswith("u"):
        return Range(ZERO, static((1 << bits) - 1))
    return Range(static(-(1 << bits - 1)), static((1 << bits - 1) - 1))


def fits(found: Range, dtype: str) -> bool:
    """Tell whether a datatype represents all integers in a range, at any served batch size.

    A float datatype must represent them exactly.
    """
    exact = 1 << EXACT_BITS.get(dtype, 0)
    is_float = dtype in EXACT_BITS
    whole = Range(static(-exact), static(exact)) if is_float else of_dtype(dtype)
    return whole is not None and all(
        whole.low.fixed <= end.at(rows) <= whole.high.fixed
        for end in found
        for rows in (1, MOST_ROWS)
    )


# --- Sizes that may be negative ----------------------------------------------------------------


def times(size: Size, factor: int) -> Size:
    """Return a multiple of a size."""
    return Size(size.per_row * factor, size.offset * factor)


def is_at_least(one: Size, other: Size) -> bool:
    """Tell whether a size is at least as large as another at every batch size."""
    return is_at_most(other, one)


def least(one: Size, other: Size) -> Size:
    """Return a lower bound of both sizes at every batch size."""
    if is_at_least(other, one):
        return one
    if is_at_least(one, other):
        return other
    return Size(min(one.per_row, other.per_row), min(one.offset, other.offset))


def most(one: Size, other: Size) -> Size:
    """Return an upper bound of both sizes at every batch size."""
    if is_at_least(one, other):
        return one
    if is_at_least(other, one):
        return other
    return Size(max(one.per_row, other.per_row), max(one.offset, other.offset))


# --- Arithmetic --------------------------------------------------------------------------------


def added(left: Range, right: Range) -> Range:
    """Return the range of sums."""
    return Range(plus(left.low, right.low), plus(left.high, right.high))


def subtracted(left: Range, right: Range) -> Range:
    """Return the range of differences."""
    return Range(minus(left.low, right.high), minus(left.high, right.low))


def multiplied(left: Range, right: Range) -> Range | None:
    """Return the range of products; None if one may grow with the square of the batch size."""
    for one, other in ((left, right), (right, left)):
        number = one.item()
        if number is not None:
            ends = times(other.low, number), times(other.high, number)
            return Range(*(ends if number >= 0 else reversed(ends)))
    if not left.is_static or not right.is_static:
        return None
    products = [one.fixed * other.fixed for one in left for other in right]
    return Range(static(min(products)), static(max(products)))


def spanned(left: Range, right: Range) -> Range:
    """Return a range that contains both."""
    return Range(least(left.low, right.low), most(left.high, right.high))


def met(one: Range, other: Range) -> Range:
    """Return a range that contains the intersection of both."""
    low = other.low if is_at_least(other.low, one.low) else one.low
    return Range(low, other.high if is_at_least(one.high, other.high) else one.high)


def is_within(inner: Range, outer: Range) -> bool:
    """Tell whether a range lies within another."""
    return is_at_least(inner.low, outer.low) and is_at_least(outer.high, inner.high)


def larger(left: Range, right: Range) -> Range:
    """Return the range of the maximum of two integers."""
    low = left.low if is_at_least(left.low, right.low) else right.low
    return Range(low, most(left.high, right.high))


def smaller(left: Range, right: Range) -> Range:
    """Return the range of the minimum of two integers."""
    high = left.high if is_at_least(right.high, left.high) else right.high
    return Range(least(left.low, right.low), high)


def compared(direction: str, difference: Range) -> bool | None:
    """Compare a difference with 0; None if the result is not the same throughout the range."""
    low, high = difference
    is_below, is_above = is_at_least(static(-1), high), is_at_least(low, ONE)
    from_zero, to_zero = is_at_least(low, ZERO), is_at_least(ZERO, high)
    is_zero = from_zero and to_zero
    yes, no = {
        "LT": (is_below, from_zero),
        "LE": (to_zero, is_above),
        "GT": (is_above, to_zero),
        "GE": (from_zero, is_below),
        "EQ": (is_zero, is_below or is_above),
        "NE": (is_below or is_above, is_zero),
    }[direction]
    return True if yes else False if no else None
