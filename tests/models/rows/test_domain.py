"""How dimensions are joined and regrouped: complete tables, in a notation for factors.

`R` is the rows, `4` a uniform factor, `4*` one along which elements differ, and `2b` twice the
batch; adjacent factors belong to one dimension, and commas separate dimensions.
"""

import re
from collections.abc import Callable, Sequence

import pytest
from support.row_claims import dimension_text as written

from xlaserve.row_proofs import domain
from xlaserve.row_proofs.domain import ROWS, Along, Dimension, Factor
from xlaserve.row_proofs.findings import Mixes, NoRule
from xlaserve.row_proofs.sizes import Size, static


def size(text: str) -> Size:
    count, batch = re.fullmatch(r"(\d*)(b?)", text).groups()  # type: ignore[union-attr]
    return Size(int(count or 1), 0) if batch else static(int(count))


def read(text: str) -> Dimension:
    return tuple(
        ROWS
        if one == "R"
        else Factor(size(one.removesuffix("*")), Along.ANY if one.endswith("*") else Along.UNIFORM)
        for one in text.split()
    )


JOINED: Sequence[tuple[str, str, str]] = [
    ("6", "6", "6"),
    ("6", "6*", "6*"),
    ("6", "2 3", "2 3"),
    ("6", "2* 3", "2* 3"),
    ("6", "2 3*", "2 3*"),
    ("6", "2* 3*", "2* 3*"),
    ("6", "3* 2", "3* 2"),
    ("6*", "6*", "6*"),
    ("6*", "2 3", "6*"),
    ("6*", "2* 3", "6*"),
    ("6*", "2 3*", "6*"),
    ("6*", "2* 3*", "6*"),
    ("6*", "3* 2", "6*"),
    ("2 3", "2 3", "2 3"),
    ("2 3", "2* 3", "2* 3"),
    ("2 3", "2 3*", "2 3*"),
    ("2 3", "2* 3*", "2* 3*"),
    ("2 3", "3* 2", "3* 2"),
    ("2* 3", "2* 3", "2* 3"),
    ("2* 3", "2 3*", "2* 3*"),
    ("2* 3", "2* 3*", "2* 3*"),
    ("2* 3", "3* 2", "6*"),
    ("2 3*", "2 3*", "2 3*"),
    ("2 3*", "2* 3*", "2* 3*"),
    ("2 3*", "3* 2", "6*"),
    ("2* 3*", "2* 3*", "2* 3*"),
    ("2* 3*", "3* 2", "6*"),
    ("3* 2", "3* 2", "3* 2"),
    ("R", "R", "R"),
    ("R", "b", "R"),
    ("R", "b*", "mixes"),
    ("b", "b", "b"),
    ("b", "b*", "b*"),
    ("b*", "b*", "b*"),
    ("4b", "4b", "4b"),
    ("4b", "4b*", "4b*"),
    ("4b", "R 4", "R 4"),
    ("4b", "R 4*", "R 4*"),
    ("4b", "4 R", "4 R"),
    ("4b", "4* R", "4* R"),
    ("4b", "b 4*", "b 4*"),
    ("4b", "b* 4", "b* 4"),
    ("4b", "4* b", "4* b"),
    ("4b", "2 2b", "2 2b"),
    ("4b", "2* 2b", "2* 2b"),
    ("4b", "2 2b*", "2 2b*"),
    ("4b", "2* R 2*", "2* R 2*"),
    ("4b", "2 R 2*", "2 R 2*"),
    ("4b*", "4b*", "4b*"),
    ("4b*", "R 4", "mixes"),
    ("4b*", "R 4*", "mixes"),
    ("4b*", "4 R", "mixes"),
    ("4b*", "4* R", "mixes"),
    ("4b*", "b 4*", "no rule"),
    ("4b*", "b* 4", "no rule"),
    ("4b*", "4* b", "no rule"),
    ("4b*", "2 2b", "4b*"),
    ("4b*", "2* 2b", "no rule"),
    ("4b*", "2 2b*", "no rule"),
    ("4b*", "2* R 2*", "mixes"),
    ("4b*", "2 R 2*", "mixes"),
    ("R 4", "R 4", "R 4"),
    ("R 4", "R 4*", "R 4*"),
    ("R 4", "4 R", "mixes"),
    ("R 4", "4* R", "mixes"),
    ("R 4", "b 4*", "R 4*"),
    ("R 4", "b* 4", "mixes"),
    ("R 4", "4* b", "mixes"),
    ("R 4", "2 2b", "R 4"),
    ("R 4", "2* 2b", "mixes"),
    ("R 4", "2 2b*", "mixes"),
    ("R 4", "2* R 2*", "mixes"),
    ("R 4", "2 R 2*", "mixes"),
    ("R 4*", "R 4*", "R 4*"),
    ("R 4*", "4 R", "mixes"),
    ("R 4*", "4* R", "mixes"),
    ("R 4*", "b 4*", "R 4*"),
    ("R 4*", "b* 4", "mixes"),
    ("R 4*", "4* b", "mixes"),
    ("R 4*", "2 2b", "R 4*"),
    ("R 4*", "2* 2b", "mixes"),
    ("R 4*", "2 2b*", "mixes"),
    ("R 4*", "2* R 2*", "mixes"),
    ("R 4*", "2 R 2*", "mixes"),
    ("4 R", "4 R", "4 R"),
    ("4 R", "4* R", "4* R"),
    ("4 R", "b 4*", "mixes"),
    ("4 R", "b* 4", "mixes"),
    ("4 R", "4* b", "4* R"),
    ("4 R", "2 2b", "4 R"),
    ("4 R", "2* 2b", "mixes"),
    ("4 R", "2 2b*", "mixes"),
    ("4 R", "2* R 2*", "mixes"),
    ("4 R", "2 R 2*", "mixes"),
    ("4* R", "4* R", "4* R"),
    ("4* R", "b 4*", "mixes"),
    ("4* R", "b* 4", "mixes"),
    ("4* R", "4* b", "4* R"),
    ("4* R", "2 2b", "4* R"),
    ("4* R", "2* 2b", "mixes"),
    ("4* R", "2 2b*", "mixes"),
    ("4* R", "2* R 2*", "mixes"),
    ("4* R", "2 R 2*", "mixes"),
    ("b 4*", "b 4*", "b 4*"),
    ("b 4*", "b* 4", "b* 4*"),
    ("b 4*", "4* b", "no rule"),
    ("b 4*", "2 2b", "b 4*"),
    ("b 4*", "2* 2b", "no rule"),
    ("b 4*", "2 2b*", "no rule"),
    ("b 4*", "2* R 2*", "mixes"),
    ("b 4*", "2 R 2*", "mixes"),
    ("b* 4", "b* 4", "b* 4"),
    ("b* 4", "4* b", "no rule"),
    ("b* 4", "2 2b", "b* 4"),
    ("b* 4", "2* 2b", "no rule"),
    ("b* 4", "2 2b*", "no rule"),
    ("b* 4", "2* R 2*", "mixes"),
    ("b* 4", "2 R 2*", "mixes"),
    ("4* b", "4* b", "4* b"),
    ("4* b", "2 2b", "4* b"),
    ("4* b", "2* 2b", "no rule"),
    ("4* b", "2 2b*", "no rule"),
    ("4* b", "2* R 2*", "mixes"),
    ("4* b", "2 R 2*", "mixes"),
    ("2 2b", "2 2b", "2 2b"),
    ("2 2b", "2* 2b", "2* 2b"),
    ("2 2b", "2 2b*", "2 2b*"),
    ("2 2b", "2* R 2*", "2* R 2*"),
    ("2 2b", "2 R 2*", "2 R 2*"),
    ("2* 2b", "2* 2b", "2* 2b"),
    ("2* 2b", "2 2b*", "2* 2b*"),
    ("2* 2b", "2* R 2*", "2* R 2*"),
    ("2* 2b", "2 R 2*", "2* R 2*"),
    ("2 2b*", "2 2b*", "2 2b*"),
    ("2 2b*", "2* R 2*", "mixes"),
    ("2 2b*", "2 R 2*", "mixes"),
    ("2* R 2*", "2* R 2*", "2* R 2*"),
    ("2* R 2*", "2 R 2*", "2* R 2*"),
    ("2 R 2*", "2 R 2*", "2 R 2*"),
    ("4", "R", "no rule"),
    ("2 b", "2b 3", "no rule"),
]
"""Two dimensions, and the dimension of a value that depends on both."""

REGROUPED: Sequence[tuple[str, str, str]] = [
    ("6*", "2, 3", "2*, 3*"),
    ("6", "2, 3", "2, 3"),
    ("2, 3*", "6", "2 3*"),
    ("2*, 3", "6", "2* 3"),
    ("2*, 3", "2, 1, 3", "2*, , 3"),
    ("R, 4*", "4b", "R 4*"),
    ("R, 4*", "b, 4", "R, 4*"),
    ("R 4*", "b, 2, 2", "R, 2*, 2*"),
    ("R 4*", "2b, 2", "R 2*, 2*"),
    ("R 4*", "2, 2b", "no rule"),
    ("4* R", "4, b", "4*, R"),
    ("4* R", "2, 2b", "2*, 2* R"),
    ("4* R", "2b, 2", "no rule"),
    ("4b*", "4, b", "no rule"),
    ("4b*", "b, 4", "b*, 4*"),
    ("4b", "4, b", "4, b"),
    ("4b", "b, 4", "b, 4"),
    ("b 4*", "4, b", "no rule"),
    ("b 4*", "4b", "b 4*"),
    ("b* 4", "4, b", "no rule"),
    ("b* 4*", "4b", "b* 4*"),
    ("6, 4", "8, 3", "8, 3"),
    ("6*, 4*", "8, 3", "8*, 3*"),
    ("6*, 4*", "3, 8", "3*, 2* 4*"),
    ("6*, 4", "4, 6", "4*, 6*"),
    ("4*, 6", "2, 12", "2*, 2* 6"),
    ("6, 4*", "4, 3, 2", "4*, 3*, 2*"),
    ("2*, 3, 5", "3, 10", "3*, 2* 5"),
    ("2*, 3, 5", "5, 6", "5*, 6*"),
    ("2, R, 3*", "2b, 3", "2 R, 3*"),
    ("2, R, 3*", "2, 3b", "2, R 3*"),
    ("2, R, 3*", "b, 6", "no rule"),
    ("3, R", "b, 3", "no rule"),
    ("6*", "0, 6", "0, 6"),
    ("R, 4*", "4, 4", "no rule"),
    ("6*", "4", "no rule"),
    ("6*", "2, 2", "no rule"),
    ("4*", "2, 2, 2", "no rule"),
    ("6*, 4*", "12, 3", "no rule"),
    ("R", "2, b", "no rule"),
    ("3* 4*, 2", "8, 3", "8*, 3*"),
    ("6*, b", "4, b", "no rule"),
    ("9*, 4*", "6, 6", "6*, 6*"),
    ("9*, 4*", "6, 3, 2", "6*, 3*, 2*"),
    ("9, 4*", "6, 6", "6*, 6*"),
    ("9*, b", "6b", "no rule"),
    ("2*, 9*, b*", "6, 3b", "2* 3*, 3* b*"),
    ("3*, 4*, b*", "6, 2b", "3* 2*, 2* b*"),
    ("4*, 3*, b", "6, 2b", "6*, 2* b"),
]
"""Dimensions, a new shape, and the dimensions after regrouping."""

MERGED: Sequence[tuple[str, str]] = [
    ("6*", "6*"),
    ("2 3", "6"),
    ("2* 3", "6*"),
    ("2 3*", "6*"),
    ("b 4*", "no rule"),
    ("b 4", "4b"),
    ("4* b", "no rule"),
    ("b* b", "no rule"),
    ("R 4", "no rule"),
    ("R", "R"),
    ("4 R", "no rule"),
    ("2 R 2", "no rule"),
    ("b* 1", "no rule"),
]
"""Factors, and the factor that results from merging them."""


def said(function: Callable[[], str]) -> str:
    try:
        return function()
    except Mixes:
        return "mixes"
    except NoRule:
        return "no rule"


def joined(left: str, right: str) -> str:
    return said(lambda: written(domain.joined_dimension(read(left), read(right))))


def regrouped(before: str, shape: str) -> str:
    dimensions = tuple(read(one) for one in before.split(","))
    sizes = [size(one.strip()) for one in shape.split(",")]
    return said(lambda: ", ".join(written(one) for one in domain.reshaped(dimensions, sizes)))


def merged(parts: str) -> str:
    return said(lambda: written(domain.merged(read(parts))))


@pytest.mark.parametrize(("left", "right", "expected"), JOINED)
def test_what_depends_on_two_varies_as_both_do(left: str, right: str, expected: str) -> None:
    assert [expected, expected] == [joined(left, right), joined(right, left)]


@pytest.mark.parametrize(("before", "shape", "expected"), REGROUPED)
def test_factors_are_grouped_anew(before: str, shape: str, expected: str) -> None:
    assert expected == regrouped(before, shape)


@pytest.mark.parametrize(("parts", "expected"), MERGED)
def test_factors_become_one(parts: str, expected: str) -> None:
    assert expected == merged(parts)


def test_values_of_other_ranks_are_not_joined() -> None:
    with pytest.raises(NoRule, match="different ranks"):
        domain.joined_dimensions((read("4"),), (read("4"), read("R")))
