"""Comparisons and bounds of row numbers: the derived facts, checked against real batches."""

import operator
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import ROWS, RowNumber, Value, uniform
from xlaserve.row_proofs.program import Operation, Tensor
from xlaserve.row_proofs.rules.row_numbers import compared_with_row_number, still_row_number
from xlaserve.row_proofs.sizes import BATCH

BATCHES = range(1, 8)
BOUNDS = [*product([-2, -1, 0, 1, 3], [0]), *product([-2, -1, 0, 1], [1]), (0, 2)]
"""Bounds as a constant part and a multiple of the batch size."""
COMPARED: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GE": operator.ge,
    "GT": operator.gt,
    "EQ": operator.eq,
    "NE": operator.ne,
}
ROW = Value(((ROWS,),), fact=RowNumber(0))
Bound = tuple[int, int]


def value(bound: Bound) -> Value:
    fixed, per_row = (np.array(part) for part in bound)
    return Value(uniform([BATCH]), fact=Constant(fixed, per_row))


def bounds(bound: Bound) -> list[tuple[int, int]]:
    """Return pairs of each row number in some batches, and the bound."""
    return [(row, bound[0] + bound[1] * batch) for batch in BATCHES for row in range(batch)]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("direction", COMPARED)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_comparison_is_known_where_it_gives_the_same_for_all_rows(
    direction: str, bound: Bound, is_first: bool
) -> None:
    given = {COMPARED[direction](*(pair if is_first else pair[::-1])) for pair in bounds(bound)}
    operands = [ROW, value(bound)] if is_first else [value(bound), ROW]

    found = compared_with_row_number(direction, operands)

    assert (None if found is None else found.item()) == (given.pop() if len(given) == 1 else None)


KEPT: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "multiply": operator.mul,
    "subtract": operator.sub,
    "maximum": max,
    "minimum": min,
}


def operation(name: str, dtype: str = "i32") -> Operation:
    integers = Tensor((BATCH,), dtype)
    return Operation(
        f"stablehlo.{name}", (), (0,), (integers,), (integers,) * 2, {}, (), (4, 8), None
    )


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_number_of_a_row_is_one_still_where_every_row_has_its_own(
    name: str, bound: Bound, is_first: bool
) -> None:
    is_kept = all(
        KEPT[name](*(pair if is_first else pair[::-1])) == pair[0] for pair in bounds(bound)
    )
    operands = [ROW, value(bound)] if is_first else [value(bound), ROW]

    found = still_row_number(operation(name), operands)

    # Bounds below 0 have no effect either, but nobody writes them, so there is no rule for them.
    assert (found == RowNumber(0)) == (is_kept and (name, bound) not in BELOW)


BELOW = [("maximum", (-2, 0)), ("maximum", (-1, 0))]


@pytest.mark.parametrize("low", BOUNDS)
@pytest.mark.parametrize("high", BOUNDS)
def test_a_number_of_a_row_that_is_clamped_to_rows_is_one_still(low: Bound, high: Bound) -> None:
    found = still_row_number(operation("clamp"), [value(low), ROW, value(high)])

    assert (found == RowNumber(0)) == (low == (0, 0) and high in [(-1, 1), (0, 1), (1, 1), (0, 2)])


@pytest.mark.parametrize(
    ("operands", "dtype"),
    [
        ([ROW, ROW], "i32"),
        ([ROW, Value(uniform([BATCH]))], "i32"),
        ([value((0, 0)), value((0, 0))], "i32"),
        ([ROW, value((0, 0))], "i8"),
        ([ROW, value((0, 0))], "f32"),
    ],
)
def test_what_is_added_to_something_else_is_no_number_of_a_row(
    operands: list[Value], dtype: str
) -> None:
    assert still_row_number(operation("add", dtype), operands) is None


def test_two_numbers_of_rows_are_not_compared() -> None:
    """They may be row numbers along different dimensions."""
    assert compared_with_row_number("EQ", [ROW, ROW]) is None
