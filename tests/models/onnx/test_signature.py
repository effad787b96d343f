from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import signature
from xlaserve.importers.onnx.graph import GraphInput
from xlaserve.tensors import DATATYPES

IMAGE = GraphInput("image", DATATYPES["FP32"], ("N", 3, "height", ""))
IDS = GraphInput("ids", DATATYPES["INT64"], ("batch", "sequence"))
FIXED = GraphInput("x", DATATYPES["FP32"], (1, 4))


def _resolve(
    *inputs: GraphInput,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dimensions: Mapping[str, Sequence[int]] | None = None,
    max_batch_size: int | None = None,
) -> signature.Inputs:
    return signature.resolve(
        inputs, shapes=shapes or {}, dimensions=dimensions or {}, max_batch_size=max_batch_size
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"inputs": (IDS,), "dimensions": {"sequence": (128,)}}, ("INT64[-1,128]", 32)),
        ({"inputs": (IDS,), "shapes": {"ids": (-1, 7)}, "max_batch_size": 4}, ("INT64[-1,7]", 4)),
        ({"inputs": (IDS,), "dimensions": {"sequence": (8,), "batch": (2,)}}, ("INT64[2,8]", 0)),
        (
            {"inputs": (IDS,), "dimensions": {"sequence": (8,)}, "max_batch_size": 0},
            ("INT64[-1,8]", 0),
        ),
        ({"inputs": (FIXED,)}, ("FP32[1,4]", 0)),
        ({"inputs": (FIXED,), "shapes": {"x": (-1, 4)}}, ("FP32[-1,4]", 32)),
        ({"inputs": (IMAGE,), "shapes": {"image": (-1, 3, 8, 8)}}, ("FP32[-1,3,8,8]", 32)),
        ({"inputs": (IDS,), "dimensions": {"sequence": (16, 32)}}, ("INT64[-1,-1]", 32)),
        (
            {"inputs": (IDS,), "shapes": {"ids": (-1, "s")}, "dimensions": {"s": (7,)}},
            ("INT64[-1,7]", 32),
        ),
    ],
)
def test_first_dimension_is_the_batch_where_it_is_open(
    given: dict[str, Any], expected: tuple[str, int]
) -> None:
    found = _resolve(*given.pop("inputs"), **given)

    assert expected == (str(found.specs[0]), found.max_batch_size)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"inputs": (IDS,)}, "input 'ids': its dimension 'sequence' is dynamic"),
        ({"inputs": (IMAGE,), "dimensions": {"height": (8,)}}, "its dimension number 3 is dynamic"),
        (
            {"inputs": (IDS,), "dimensions": {"length": (8,)}},
            "no dimension 'length', it has batch, s",
        ),
        ({"inputs": (IDS,), "shapes": {"x": (1,)}}, "no input 'x', it has ids"),
        ({"inputs": (IDS,), "shapes": {"ids": (1,)}}, "input 'ids' has 2 dimensions, got 1"),
        ({"inputs": (FIXED,), "max_batch_size": 8}, "change its shape with --shape"),
        (
            {"inputs": (IDS, FIXED), "dimensions": {"sequence": (8,)}},
            "either all inputs start with -1",
        ),
        ({"inputs": (), "max_batch_size": 8}, "the model has no inputs"),
    ],
)
def test_what_is_missing_or_unknown_is_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidModel, match=problem):
        _resolve(*given.pop("inputs"), **given)


def test_the_error_says_what_to_type() -> None:
    with pytest.raises(InvalidModel, match="--dim NAME=SIZE or --shape ids=-1,SIZE"):
        _resolve(IDS)


def test_number_is_traced_beside_inputs_of_a_fixed_shape() -> None:
    """For example a frequency, which has no dimension that could be a batch."""
    number = GraphInput("fmin", DATATYPES["FP32"], ())

    traced = _resolve(FIXED, number).abstract()

    assert {"x": (1, 4), "fmin": ()} == {name: one.shape for name, one in traced.items()}


def test_inputs_without_a_batch_beside_those_with_one_name_the_flags() -> None:
    with pytest.raises(InvalidModel, match=r"--shape.*--batch-axis.*--dim.*--const"):
        _resolve(IDS, FIXED, dimensions={"sequence": (8,)})
