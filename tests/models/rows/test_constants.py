"""Integers `k * b + c`, compared with their values at every batch size."""

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.constants import Constant, compared, folded
from xlaserve.row_proofs.sizes import Size, fitted, product, quotient

sizes = st.builds(Size, st.integers(0, 4), st.integers(-6, 6))
constants = st.builds(lambda size: Constant(size.offset, size.per_row), sizes)
BATCHES = range(1, 60)

DIRECTIONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def at(constant: Constant, rows: int) -> int:
    return int(constant.fixed) + rows * int(constant.per_row)


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(left=constants, right=constants)
def test_a_comparison_is_known_only_where_all_sizes_agree(
    direction: str, left: Constant, right: Constant
) -> None:
    answers = {DIRECTIONS[direction](at(left, b), at(right, b)) for b in BATCHES}

    found = compared(direction, left, right)

    if found is not None:
        assert answers == {bool(found.item())}


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("add", operator.add),
        ("subtract", operator.sub),
        ("multiply", operator.mul),
        ("maximum", max),
        ("minimum", min),
        ("divide", lambda a, b: abs(a) // abs(b) * (1 if (a >= 0) == (b > 0) else -1)),
        ("remainder", lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1)),
    ],
)
@given(left=constants, right=constants)
def test_what_is_computed_is_so_at_every_size(
    name: str, computed: Callable[[int, int], int], left: Constant, right: Constant
) -> None:
    found = folded(f"stablehlo.{name}", "i32", [left, right])

    if found is not None:
        for b in BATCHES:
            assert at(found, b) == computed(at(left, b), at(right, b))


@pytest.mark.parametrize(
    ("name", "left", "right", "expected"),
    [
        ("divide", Size(4, 2), Size(0, 2), Size(2, 1)),
        ("divide", Size(6, 0), Size(0, 3), Size(2, 0)),
        ("divide", Size(0, -7), Size(0, 2), Size(0, -3)),
        ("divide", Size(0, 7), Size(0, -2), Size(0, -3)),
        ("divide", Size(4, 1), Size(0, 2), None),
        ("divide", Size(3, 4), Size(0, 2), None),
        ("divide", Size(4, 2), Size(0, 0), None),
        ("divide", Size(4, 2), Size(1, 0), None),
        ("remainder", Size(4, 3), Size(0, 2), Size(0, 1)),
        ("remainder", Size(0, -7), Size(0, 4), Size(0, -3)),
        ("remainder", Size(3, 3), Size(0, 2), None),
        ("remainder", Size(4, -1), Size(0, 2), None),
        ("remainder", Size(4, 3), Size(0, 0), None),
        ("multiply", Size(3, 1), Size(0, -2), Size(-6, -2)),
        ("multiply", Size(0, -2), Size(3, 1), Size(-6, -2)),
        ("multiply", Size(1, 0), Size(1, 0), None),
        ("maximum", Size(1, 0), Size(0, 1), Size(1, 0)),
        ("maximum", Size(1, 0), Size(0, 2), None),
        ("minimum", Size(2, 0), Size(0, 1), Size(0, 1)),
        ("minimum", Size(1, 0), Size(0, 2), None),
    ],
)
def test_what_is_computed_is_known_where_it_grows_with_the_batch(
    name: str, left: Size, right: Size, expected: Size | None
) -> None:
    operands = [Constant(one.offset, one.per_row) for one in (left, right)]

    found = folded(f"stablehlo.{name}", "i32", operands)

    assert found == (expected and Constant(expected.offset, expected.per_row))


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (Constant([1, 2], [0, 3]), True),
        (Constant([1, 4], [0, 3]), False),
        (Constant([1, 2], [0, 4]), False),
        (Constant([1, 2]), False),
        (Constant([1, 2, 3], [0, 3, 0]), False),
        (Constant(1), False),
        (1, False),
        (None, False),
    ],
)
def test_constants_are_the_same_where_all_elements_are(other: object, is_same: bool) -> None:
    one = Constant([1, 2], [0, 3])

    assert (one == other) == is_same
    assert (other == one) == is_same


@pytest.mark.parametrize(
    ("low", "high", "is_inside"),
    [
        (Size(0, 1), Size(1, 2), True),
        (Size(0, 2), Size(1, 1), True),
        (Size(0, 0), Size(1, 2), False),
        (Size(0, 1), Size(1, 3), False),
        (Size(0, 1), Size(2, 0), False),
        (Size(-1, 1), Size(1, 2), False),
        (Size(0, 0), Size(1, 3), False),
    ],
)
def test_a_range_is_within_another_where_both_ends_are(
    low: Size, high: Size, is_inside: bool
) -> None:
    outer = ranges.Range(Size(0, 1), Size(1, 2))

    assert ranges.is_within(ranges.Range(low, high), outer) == is_inside


def test_what_wraps_around_is_not_known() -> None:
    assert folded("stablehlo.convert", "i8", [Constant(0, 1)]) is None
    assert folded("stablehlo.subtract", "ui32", [Constant(0), Constant(1)]) is None


@given(left=sizes, right=sizes)
def test_a_quotient_is_one_at_every_size(left: Size, right: Size) -> None:
    found = quotient(left, right)

    if found is not None:
        whole = product(found, right)
        assert whole == left


@given(size=sizes)
def test_two_sizes_determine_a_third(size: Size) -> None:
    assert fitted(size.at(37), size.at(41), (37, 41)) == size


@pytest.mark.parametrize("at_both", [(9, 10), (5, 1), (0, 1)])
def test_what_is_no_multiple_of_the_batch_fits_no_size(at_both: tuple[int, int]) -> None:
    assert fitted(*at_both, (37, 41)) is None
