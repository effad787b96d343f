"""Indices of rows that are concatenated with others and sliced out at a constant position."""

from collections.abc import Mapping

import pytest
from support.row_texts import verdict_of

from xlaserve.row_proofs import Independence

INPUTS = "%x: tensor<Bx4xf32>, %i: tensor<Bxi32>"
INDICES = """
%four = stablehlo.constant dense<4> : tensor<Bxi32>
%last = stablehlo.constant dense<3> : tensor<Bxi32>
%row = stablehlo.iota dim = 0 : tensor<Bxi32>
%first = stablehlo.multiply %row, %four : tensor<Bxi32>
%within = stablehlo.and %i, %last : tensor<Bxi32>
%inside = stablehlo.add %first, %within : tensor<Bxi32>
%a = stablehlo.reshape %first : (tensor<Bxi32>) -> tensor<Bx1xi32>
%b = stablehlo.reshape %inside : (tensor<Bxi32>) -> tensor<Bx1xi32>
%c = stablehlo.reshape %i : (tensor<Bxi32>) -> tensor<Bx1xi32>
%all = stablehlo.concatenate %a, %b, %c, dim = 1
  : (tensor<Bx1xi32>, tensor<Bx1xi32>, tensor<Bx1xi32>) -> tensor<Bx3xi32>
%zero = stablehlo.constant dense<0> : tensor<i32>
"""
"""Columns of indices into the flat batch: two of the row itself, and one sent by a client."""

LOOKED_UP = """
%flat = stablehlo.reshape %x : (tensor<Bx4xf32>) -> tensor<4Bxf32>
%y = "stablehlo.gather"(%flat, %at) {
  dimension_numbers = #stablehlo.gather<
    collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
  slice_sizes = array<i64: 1>
} : (tensor<4Bxf32>, tensor<Bx1xi32>) -> tensor<Bxf32>
"""

AT: Mapping[int, bool] = {-7: True, -1: True, 0: True, 1: True, 2: False, 3: False, 9: False}
"""Position -> whether the column there is one of the row's own; out-of-range positions are
clamped."""


def verdict_at(taken: str) -> Independence:
    return verdict_of(INDICES + taken + LOOKED_UP, "%y : tensor<Bxf32>", INPUTS).independence


@pytest.mark.parametrize("place", AT)
def test_a_slice_at_a_constant_place_is_followed(place: int) -> None:
    taken = f"""
%place = stablehlo.constant dense<{place}> : tensor<i32>
%at = stablehlo.dynamic_slice %all, %zero, %place, sizes = [B, 1]
  : (tensor<Bx3xi32>, tensor<i32>, tensor<i32>) -> tensor<Bx1xi32>"""

    assert (verdict_at(taken) is Independence.PROVED) == AT[place]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_constant_slice_is_followed(place: int) -> None:
    taken = f"""
%at = stablehlo.slice %all [0:B, {place}:{place + 1}] : (tensor<Bx3xi32>) -> tensor<Bx1xi32>"""

    assert (verdict_at(taken) is Independence.PROVED) == AT[place]


def test_a_slice_at_a_place_that_is_not_known_is_not_followed() -> None:
    taken = """
%m = stablehlo.constant dense<[0, 1]> : tensor<2xi32>
%s = stablehlo.reduce(%m init: %zero) applies stablehlo.add across dimensions = [0]
  : (tensor<2xi32>, tensor<i32>) -> tensor<i32>
%at = stablehlo.dynamic_slice %all, %zero, %s, sizes = [B, 1]
  : (tensor<Bx3xi32>, tensor<i32>, tensor<i32>) -> tensor<Bx1xi32>"""

    assert verdict_at(taken) is Independence.UNKNOWN


def test_a_slice_in_two_dimensions_is_not_followed() -> None:
    taken = """
%one = stablehlo.dynamic_slice %all, %zero, %zero, sizes = [1, 1]
  : (tensor<Bx3xi32>, tensor<i32>, tensor<i32>) -> tensor<1x1xi32>
%at = stablehlo.broadcast_in_dim %one, dims = [0, 1]
  : (tensor<1x1xi32>) -> tensor<Bx1xi32>"""

    # All rows use the first row's index.
    assert verdict_at(taken) is Independence.UNKNOWN
