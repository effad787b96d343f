"""The abstract domain: which dimensions of a value hold the rows, and where it varies."""

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
    """How a value varies along one factor of a dimension."""

    UNIFORM = 0
    """All elements along the factor are equal."""
    ANY = 1
    """Elements vary, in the same way for all rows."""
    ROW = 2
    """The elements along the factor are the rows of the batch, in order."""


class Factor(NamedTuple):
    """A factor of a dimension: `[6]` may be `[2][3]`, with index `i` at `[i // 3][i % 3]`."""

    size: Size
    along: Along


Dimension: TypeAlias = tuple[Factor, ...]
"""The factors, major first; empty for a dimension of size 1. A ROW factor has the batch size."""

Dimensions: TypeAlias = tuple[Dimension, ...]

ROWS = Factor(BATCH, Along.ROW)


@dataclass(frozen=True, slots=True)
class RowNumber:
    """Each element equals the index of its row; the rows lie along `dimension`."""

    dimension: int


@dataclass(frozen=True, slots=True)
class Segments:
    """The value is a concatenation of blocks of any sizes along one dimension.

    If the blocks have different numbers of elements per row, the whole has no known structure.
    Slicing it at the block boundaries recovers the blocks.
    """

    dimension: int
    sizes: tuple[Size, ...]
    values: tuple[Value, ...]


Fact: TypeAlias = Constant | RowNumber | Segments
"""Additional knowledge about a value's elements."""


@dataclass(frozen=True, slots=True)
class Value:
    """The abstract value of a tensor: what is known about how it depends on the rows.

    Without a ROW factor it does not depend on the inputs. With a ROW factor, its elements at row
    `i` depend only on row `i` of the inputs. There is at most one ROW factor.
    """

    dimensions: Dimensions
    blocked: Finding | None = None
    """Why nothing is known about the value; `dimensions` is meaningless then."""
    sized: Finding | None = None
    """Why the value depends on the batch size (an element at a given index differs); else None."""
    fact: Fact | None = None
    """Additional knowledge about the elements, if any."""

    @property
    def has_rows(self) -> bool:
        """Whether the value depends on the inputs."""
        return any(has_rows(dimension) for dimension in self.dimensions)


def has_rows(dimension: Dimension) -> bool:
    """Tell whether the rows lie along a dimension."""
    return any(factor.along is Along.ROW for factor in dimension)


def is_uniform(dimension: Dimension) -> bool:
    """Tell whether a value does not vary along a dimension."""
    return all(factor.along is Along.UNIFORM for factor in dimension)


def moves(dimension: Dimension) -> bool:
    """Tell whether an index along a dimension means another element when the batch size changes.

    For example, index `i` of `[3][b]` is at `i % b` of the minor factor.
    """
    return any(not part.size.is_static for part in dimension[1:])


def factor(size: Size, along: Along) -> Dimension:
    """Return a dimension with a single factor."""
    return () if size == ONE else (Factor(size, along),)


def uniform(shape: Iterable[Size]) -> Dimensions:
    """Return the dimensions of a value whose elements are all equal."""
    return tuple(factor(size, Along.UNIFORM) for size in shape)


def varying(shape: Iterable[Size]) -> Dimensions:
    """Return the dimensions of a value that varies everywhere, in the same way for all rows."""
    return tuple(factor(size, Along.ANY) for size in shape)


def size_of(dimension: Dimension) -> Size | None:
    """Return the product of the factors."""
    whole: Size | None = ONE
    for part in dimension:
        whole = whole and sizes.product(whole, part.size)
    return whole


def merged(parts: Sequence[Factor]) -> Dimension:
    """Merge factors into one; raises NoRule if indices would depend on the batch size.

    Index `i` of the merged factor is `(i // minor, i % minor)` of two factors.
    """
    size = size_of(tuple(parts))
    along = max(part.along for part in parts)
    if size is None or (len(parts) > 1 and along and not size.is_static):
        raise NoRule("has a shape that could not be analysed")
    return factor(size, along)


# --- joins -------------------------------------------------------------------------------------


def joined(values: Sequence[Value]) -> Value:
    """Return the abstract value of an elementwise combination of values.

    Raises Mixes if a row would be combined with anything but the same row.
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
    """Return the abstract value of a result computed from several values, some of them blocked."""
    findings = [value.blocked for value in values if value.blocked is not None]
    mixed = [finding for finding in findings if finding.mixed]
    return Value((), blocked=(mixed or findings)[0])


def joined_dimensions(left: Dimensions, right: Dimensions) -> Dimensions:
    """Return how an elementwise combination of two values varies; raises Mixes."""
    if len(left) != len(right):
        raise NoRule("has operands of different ranks")
    return tuple(joined_dimension(one, other) for one, other in zip(left, right, strict=True))


def joined_dimension(left: Dimension, right: Dimension) -> Dimension:
    """Return how an elementwise combination of two values varies along one dimension.

    Raises Mixes, or NoRule for dimensions of different sizes.
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
    """Split both dimensions into the shortest runs of factors with equal products."""
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
    """Raise Mixes if two factors are ROW: each element would depend on a pair of rows."""
    found = sum(part.along is Along.ROW for dimension in dimensions for part in dimension)
    if found > 1:
        raise Mixes("computes something for every pair of rows")


def with_finding(value: Value, finding: Finding) -> Value:
    """Mark a value as dependent on the batch size."""
    return value if value.sized else replace(value, sized=finding)


# --- reshape -----------------------------------------------------------------------------------


def reshaped(dimensions: Dimensions, shape: Sequence[Size]) -> Dimensions:
    """Regroup the factors of the dimensions for another shape; raises Mixes or NoRule."""
    if ZERO in shape:
        return uniform(shape)
    rest = [part for dimension in dimensions for part in dimension]
    rest.reverse()
    found = tuple(_take_factors(rest, size) for size in shape)
    if rest:
        raise NoRule("has a shape that could not be analysed")
    return found


def _take_factors(rest: list[Factor], wanted: Size) -> Dimension:
    """Take the factors for one new dimension, splitting the last one if it is too large."""
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
    """Raise NoRule if splitting a factor would make indices depend on the batch size."""
    if along and not minor.is_static:
        raise NoRule("has a shape that could not be analysed")


def _taken_whole(part: Factor, rest: list[Factor], wanted: Size) -> Dimension:
    """Merge factors until their size equals the wanted size or is a multiple of it."""
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
