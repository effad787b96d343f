"""The abstract domain: where in a value's dimensions the rows lie, and what varies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from xlaserve.row_proofs import sizes
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.findings import Finding, Mixes, NoRule
from xlaserve.row_proofs.sizes import BATCH, ONE, ZERO, Size


class Along(IntEnum):
    """The variation of a value along a factor of a dimension."""

    UNIFORM = 0
    """Not at all."""
    ANY = 1
    """In any way, and the same for all rows."""
    ROW = 2
    """Its elements are the rows of the batch, in their order."""


class Factor(NamedTuple):
    """A part of a dimension: the element `i` of `[6]` is `[i // 3][i % 3]` of `[2][3]`."""

    size: Size
    along: Along


Dimension: TypeAlias = tuple[Factor, ...]
"""Factors, the major first; none for a dimension of size 1. A row factor is exactly the batch."""

Dimensions: TypeAlias = tuple[Dimension, ...]

ROWS = Factor(BATCH, Along.ROW)


@dataclass(frozen=True, slots=True)
class RowNumber:
    """Each element is the number of its row, which lies along a dimension."""

    dimension: int


@dataclass(frozen=True, slots=True)
class Segments:
    """A value was put together along a dimension from blocks of any sizes.

    Blocks of rows that are not equally long are nothing as a whole, and are themselves again where
    they are cut apart.
    """

    dimension: int
    sizes: tuple[Size, ...]
    values: tuple[Value, ...]


Fact: TypeAlias = Constant | RowNumber | Segments
"""A fact about the elements of a value."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value, as far as it is known.

    Without a row factor it does not depend on the inputs, with one its element at row `i` depends
    on the inputs at row `i` alone. There is never more than one.
    """

    dimensions: Dimensions
    blocked: Finding | None = None
    """Why nothing of this is known; its dimensions mean nothing then."""
    sized: Finding | None = None
    """Cause of its dependence on the size of the batch: its elements are not the same, at the same
    place, in batches of all sizes."""
    fact: Fact | None = None
    """A further fact about its elements."""

    @property
    def has_rows(self) -> bool:
        """Whether it depends on the inputs."""
        return any(has_rows(dimension) for dimension in self.dimensions)


def has_rows(dimension: Dimension) -> bool:
    """Tell whether rows lie along a dimension."""
    return any(factor.along is Along.ROW for factor in dimension)


def is_uniform(dimension: Dimension) -> bool:
    """Tell whether a value does not vary along a dimension."""
    return all(factor.along is Along.UNIFORM for factor in dimension)


def moves(dimension: Dimension) -> bool:
    """Tell whether the element at a place is another one in batches of other sizes.

    The element `i` of `[3][b]` as one dimension is that at `i % b` of the minor.
    """
    return any(not part.size.is_static for part in dimension[1:])


def factor(size: Size, along: Along) -> Dimension:
    """Return a dimension of one factor."""
    return () if size == ONE else (Factor(size, along),)


def uniform(shape: Iterable[Size]) -> Dimensions:
    """Return the dimensions of a value whose elements are all the same."""
    return tuple(factor(size, Along.UNIFORM) for size in shape)


def varying(shape: Iterable[Size]) -> Dimensions:
    """Return the dimensions of a value whose elements are any, and the same for all rows."""
    return tuple(factor(size, Along.ANY) for size in shape)


def size_of(dimension: Dimension) -> Size | None:
    """Return the product of the factors."""
    whole: Size | None = ONE
    for part in dimension:
        whole = whole and sizes.product(whole, part.size)
    return whole


def merged(parts: Sequence[Factor]) -> Dimension:
    """Return several factors as one; raises NoRule where its elements would move with the batch.

    The element `i` of two factors as one is that at `(i // minor, i % minor)` of both.
    """
    size = size_of(tuple(parts))
    along = max(part.along for part in parts)
    if size is None or (len(parts) > 1 and along and not size.is_static):
        raise NoRule("has a shape that could not be analysed")
    return factor(size, along)


# --- joins -------------------------------------------------------------------------------------


def joined(values: Sequence[Value]) -> Value:
    """Return the known facts about an element that is computed from the same element of all values.

    Raises Mixes where that would put a row together with what is not the same row.
    """
    for value in values:
        if value.blocked is not None:
            return blocked(values)
    dimensions = values[0].dimensions
    sized = values[0].sized
    for value in values[1:]:
        if value.dimensions != dimensions:
            dimensions = joined_dimensions(dimensions, value.dimensions)
        sized = sized or value.sized
    check_one_row(dimensions)
    return Value(dimensions, sized=sized)


def blocked(values: Iterable[Value]) -> Value:
    """Return the known facts about what is computed from values of which something is not known."""
    findings = [value.blocked for value in values if value.blocked is not None]
    mixed = [finding for finding in findings if finding.mixed]
    return Value((), blocked=(mixed or findings)[0])


def joined_dimensions(left: Dimensions, right: Dimensions) -> Dimensions:
    """Return how something varies that depends on two values; raises Mixes."""
    if len(left) != len(right):
        raise NoRule("has operands of different ranks")
    return tuple(joined_dimension(one, other) for one, other in zip(left, right, strict=True))


def joined_dimension(left: Dimension, right: Dimension) -> Dimension:
    """Return how something varies along a dimension that depends on two values.

    Raises Mixes, and NoRule for dimensions of different sizes.
    """
    if left == right:
        return left
    size = size_of(left)
    if size is None or size != size_of(right):
        raise NoRule("combines dimensions of different sizes")
    found: list[Factor] = []
    for one, other in _runs(left, right):
        found.extend(_joined_run(one, other))
    return tuple(found)


def _runs(left: Dimension, right: Dimension) -> list[tuple[Dimension, Dimension]]:
    """Cut both into the shortest pieces that are of the same size."""
    runs: list[tuple[Dimension, Dimension]] = []
    rest, other_rest = list(left), list(right)
    while rest or other_rest:
        one, other = [rest.pop(0)] if rest else [], [other_rest.pop(0)] if other_rest else []
        size, other_size = size_of(tuple(one)), size_of(tuple(other))
        while size != other_size:
            if size is None or other_size is None or not (rest or other_rest):
                one, other = [*one, *rest], [*other, *other_rest]
                rest, other_rest = [], []
                break
            if other_rest and (not rest or _is_larger(size, other_size)):
                other.append(other_rest.pop(0))
                other_size = size_of(tuple(other))
            else:
                one.append(rest.pop(0))
                size = size_of(tuple(one))
        runs.append((tuple(one), tuple(other)))
    return runs


def _is_larger(one: Size, other: Size) -> bool:
    return one > other


def _joined_run(one: Dimension, other: Dimension) -> Dimension:
    if is_uniform(one) and (len(other) >= len(one) or not is_uniform(other)):
        return other
    if is_uniform(other):
        return one
    if len(one) == len(other) == 1:
        along = {one[0].along, other[0].along}
        if along == {Along.ROW, Along.ANY}:
            raise Mixes("combines rows with values that depend on the batch index")
        return (Factor(one[0].size, max(along)),)
    if has_rows(one) or has_rows(other):
        raise Mixes("combines rows with values of other rows")
    return merged([Factor(part.size, Along.ANY) for part in max(one, other, key=len)])


def check_one_row(dimensions: Dimensions) -> None:
    """Raise Mixes where rows lie in two places: each element would be of a pair of rows."""
    found = sum(part.along is Along.ROW for dimension in dimensions for part in dimension)
    if found > 1:
        raise Mixes("computes something for every pair of rows")


def with_finding(value: Value, finding: Finding) -> Value:
    """Return a value that depends on the size of the batch."""
    return value if value.sized else replace(value, sized=finding)


# --- reshape -----------------------------------------------------------------------------------


def reshaped(dimensions: Dimensions, shape: Sequence[Size]) -> Dimensions:
    """Return the dimensions with their factors grouped for another shape; raises Mixes, NoRule."""
    if ZERO in shape:
        return uniform(shape)
    rest = [part for dimension in dimensions for part in dimension]
    rest.reverse()
    found = tuple(_taken(rest, size) for size in shape)
    if rest:
        raise NoRule("has a shape that could not be analysed")
    return found


def _taken(rest: list[Factor], wanted: Size) -> Dimension:
    """Take the factors of one dimension, cutting the last where it is too large."""
    found: list[Factor] = []
    while wanted != ONE:
        if not rest:
            raise NoRule("has a shape that could not be analysed")
        part = rest.pop()
        left = sizes.quotient(wanted, part.size)
        if left is not None:
            found.append(part)
            wanted = left
            continue
        beyond = sizes.quotient(part.size, wanted)
        if beyond is None:
            found.extend(_taken_whole(part, rest, wanted))
            break
        if part.along is Along.ROW:
            raise NoRule("splits the batch")
        _check_cut(part.along, beyond)
        found.append(Factor(wanted, part.along))
        rest.append(Factor(beyond, part.along))
        wanted = ONE
    return tuple(found)


def _check_cut(along: Along, minor: Size) -> None:
    """Raise NoRule where the elements of the two halves of a factor would move with the batch."""
    if along and not minor.is_static:
        raise NoRule("has a shape that could not be analysed")


def _taken_whole(part: Factor, rest: list[Factor], wanted: Size) -> Dimension:
    """Merge factors until they are of the wanted size, or a multiple of it."""
    pieces = [part]
    size: Size | None = part.size
    while size is not None and rest and sizes.quotient(size, wanted) is None:
        pieces.append(rest.pop())
        size = sizes.product(size, pieces[-1].size)
    if any(one.along is Along.ROW for one in pieces):
        raise NoRule("splits the batch")
    beyond = None if size is None else sizes.quotient(size, wanted)
    if beyond is None:
        raise NoRule("has a shape that could not be analysed")
    (whole,) = merged(pieces)
    if beyond != ONE:
        _check_cut(whole.along, beyond)
        rest.append(Factor(beyond, whole.along))
    return (Factor(wanted, whole.along),)
