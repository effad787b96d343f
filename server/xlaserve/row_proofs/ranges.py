"""Bounds of integers at every batch size."""

from __future__ import annotations

from typing import NamedTuple

from xlaserve.row_proofs.constants import MOST_ROWS, Constant
from xlaserve.row_proofs.sizes import ONE, ZERO, Size, is_at_most, minus, plus, static

_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
EXACT_BITS = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}
"""Bits of the integers that floats hold exactly."""


class Range(NamedTuple):
    """Integers from `low` to `high`, both included, in a batch of any size from one."""

    low: Size
    high: Size

    def item(self) -> int | None:
        """Return the one integer that it has at every batch size, None for any other."""
        return self.low.fixed if self.low == self.high and self.low.is_static else None

    @property
    def is_static(self) -> bool:
        """Whether it is the same at every batch size."""
        return self.low.is_static and self.high.is_static


TRUTH = Range(ZERO, ONE)


def of_integer(number: int) -> Range:
    """Return the range of one integer."""
    return Range(static(number), static(number))


def below(size: Size) -> Range:
    """Return the range from 0 to below a size."""
    return Range(ZERO, minus(size, ONE))


def of_constant(found: Constant) -> Range | None:
    """Return the range of the elements of a constant; None where it grows unevenly."""
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
    """Return the range of all integers of a datatype, None for a datatype of others."""
    if dtype == "i1":
        return TRUTH
    bits = _BITS.get(dtype.removeprefix("u"))
    if bits is None:
        return None
    if dtype.startswith("u"):
        return Range(ZERO, static((1 << bits) - 1))
    return Range(static(-(1 << bits - 1)), static((1 << bits - 1) - 1))


def fits(found: Range, dtype: str) -> bool:
    """Tell whether all integers of a range are of a datatype, in any batch that is served.

    Those of floats are the ones that are held exactly.
    """
    exact = 1 << EXACT_BITS.get(dtype, 0)
    is_float = dtype in EXACT_BITS
    whole = Range(static(-exact), static(exact)) if is_float else of_dtype(dtype)
    return whole is not None and all(
        whole.low.fixed <= end.at(rows) <= whole.high.fixed
        for end in found
        for rows in (1, MOST_ROWS)
    )


# --- sizes that may be negative ----------------------------------------------------------------


def times(size: Size, factor: int) -> Size:
    """Return a multiple of a size."""
    return Size(size.per_row * factor, size.offset * factor)


def is_at_least(one: Size, other: Size) -> bool:
    """Tell whether a size is as large as another one at every batch size."""
    return is_at_most(other, one)


def least(one: Size, other: Size) -> Size:
    """Return a size that is at most either of two at every batch size."""
    if is_at_least(other, one):
        return one
    if is_at_least(one, other):
        return other
    return Size(min(one.per_row, other.per_row), min(one.offset, other.offset))


def most(one: Size, other: Size) -> Size:
    """Return a size that is at least either of two at every batch size."""
    if is_at_least(one, other):
        return one
    if is_at_least(other, one):
        return other
    return Size(max(one.per_row, other.per_row), max(one.offset, other.offset))


# --- arithmetic --------------------------------------------------------------------------------


def added(left: Range, right: Range) -> Range:
    """Return the range of sums."""
    return Range(plus(left.low, right.low), plus(left.high, right.high))


def subtracted(left: Range, right: Range) -> Range:
    """Return the range of differences."""
    return Range(minus(left.low, right.high), minus(left.high, right.low))


def multiplied(left: Range, right: Range) -> Range | None:
    """Return the range of products, None where one of them may be of the square of the batch."""
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
    """Return a range that has all of both."""
    return Range(least(left.low, right.low), most(left.high, right.high))


def met(one: Range, other: Range) -> Range:
    """Return a range that has all that is in both."""
    low = other.low if is_at_least(other.low, one.low) else one.low
    return Range(low, other.high if is_at_least(one.high, other.high) else one.high)


def is_within(inner: Range, outer: Range) -> bool:
    """Tell whether a range has nothing that another one has not."""
    return is_at_least(inner.low, outer.low) and is_at_least(outer.high, inner.high)


def larger(left: Range, right: Range) -> Range:
    """Return the range of the larger of two."""
    low = left.low if is_at_least(left.low, right.low) else right.low
    return Range(low, most(left.high, right.high))


def smaller(left: Range, right: Range) -> Range:
    """Return the range of the smaller of two."""
    high = left.high if is_at_least(right.high, left.high) else right.high
    return Range(least(left.low, right.low), high)


def compared(direction: str, difference: Range) -> bool | None:
    """Tell whether a difference compares with 0 in a way; None where not always alike."""
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
