"""Sizes as functions of the batch: `per_row * b + offset`."""

from __future__ import annotations

from typing import NamedTuple

from xlaserve.row_proofs.findings import NoRule


class Size(NamedTuple):
    """A size of `per_row * b + offset` at batch size `b`."""

    per_row: int
    offset: int

    @property
    def is_static(self) -> bool:
        """Whether the size is the same at every batch size."""
        return not self.per_row

    @property
    def fixed(self) -> int:
        """Return a size that is the same at every batch size; raises NoRule for others."""
        if self.per_row:
            raise NoRule("uses the batch size in an unsupported way")
        return self.offset

    @property
    def may_be_zero(self) -> bool:
        """Whether the size is 0 at some batch size, such as `b - 1` for one row."""
        return self.at(1) <= 0

    def at(self, rows: int) -> int:
        """Return the size at a given batch size."""
        return self.per_row * rows + self.offset


BATCH = Size(1, 0)
ONE = Size(0, 1)
ZERO = Size(0, 0)


def static(size: int) -> Size:
    """Return a size that does not depend on the batch."""
    return Size(0, size)


def fitted(at_first: int, at_second: int, rows: tuple[int, int]) -> Size | None:
    """Return the size with these values at two batch sizes; None if there is no integer one."""
    difference, step = at_second - at_first, rows[1] - rows[0]
    if difference % step or difference < 0:
        return None
    per_row = difference // step
    return Size(per_row, at_first - per_row * rows[0])


def plus(left: Size, right: Size) -> Size:
    """Return the sum of two sizes."""
    return Size(left.per_row + right.per_row, left.offset + right.offset)


def minus(left: Size, right: Size) -> Size:
    """Return the difference of two sizes."""
    return Size(left.per_row - right.per_row, left.offset - right.offset)


def is_at_most(left: Size, right: Size) -> bool:
    """Tell whether a size is at most another at every batch size."""
    return left.per_row <= right.per_row and left.at(1) <= right.at(1)


def product(left: Size, right: Size) -> Size | None:
    """Return the product of two sizes; None if it would contain the square of the batch size."""
    if left.per_row and right.per_row:
        return None
    return Size(
        left.per_row * right.offset + right.per_row * left.offset, left.offset * right.offset
    )


def quotient(whole: Size, part: Size) -> Size | None:
    """Return the size that gives `whole` when multiplied by `part`; None if there is none."""
    if part == ONE:
        return whole
    if part.is_static:
        if not part.offset or whole.per_row % part.offset or whole.offset % part.offset:
            return None
        return Size(whole.per_row // part.offset, whole.offset // part.offset)
    if whole.per_row % part.per_row:
        return None
    times = whole.per_row // part.per_row
    return static(times) if times and times * part.offset == whole.offset else None
