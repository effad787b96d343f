import numpy as np
import pytest

from xlaserve.errors import InvalidModel
from xlaserve.models.onnx import checking
from xlaserve.models.onnx.graph import Graph, GraphInput, Node
from xlaserve.tensors import DATATYPES, TensorSpec

Y = TensorSpec("y", DATATYPES["FP32"], (-1, 2))
HALF = TensorSpec("y", DATATYPES["FP16"], (-1, 2))
LARGE = np.asarray([[100.0, -200.0]])
TOLERANCE = 1e-4


def test_difference_is_told_in_parts_of_the_largest_number() -> None:
    found = checking.compared(Y, LARGE, LARGE + 0.01, TOLERANCE)

    assert pytest.approx(0.01) == found.absolute
    assert pytest.approx(0.01 / 200) == found.relative


@pytest.mark.parametrize(
    ("expected", "actual", "problem"),
    [
        (LARGE, LARGE + 0.03, "0.00015 of its largest number; allowed is 0.0001"),
        (LARGE, LARGE[0], "expected the shape"),
        (LARGE, LARGE * np.nan, "by inf"),
        (LARGE * np.inf, LARGE, "by inf"),
        (np.asarray([[1, 2]]), np.asarray([[1, 3]]), "by 1, which is 0.5"),
    ],
)
def test_what_differs_by_more_than_the_tolerance_is_refused(
    expected: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
    actual: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
    problem: str,
) -> None:
    with pytest.raises(InvalidModel, match=problem):
        checking.compared(Y, expected, actual, TOLERANCE)


def test_what_is_not_finite_may_be_equal() -> None:
    odd = np.asarray([[np.nan, -np.inf]])

    assert 0.0 == checking.compared(Y, odd, odd.copy(), TOLERANCE).absolute


def test_few_bits_may_differ_by_more() -> None:
    assert checking.compared(HALF, LARGE, LARGE * 1.005, TOLERANCE).relative > TOLERANCE


def test_integers_stay_below_the_rows_of_the_tables_that_they_are_looked_up_in() -> None:
    ids = GraphInput("ids", DATATYPES["INT64"], ("b", 50))
    mask = GraphInput("mask", DATATYPES["INT64"], ("b", 50))
    nodes = (
        Node("Cast", "", "", ("ids",), ("narrow",), 17, {}),
        Node("Gather", "", "", ("table", "narrow"), ("found",), 17, {}),
    )
    graph = Graph("g", (ids, mask), ("found",), nodes, {"table": np.zeros((30, 4))})
    specs = [TensorSpec(item.name, item.datatype, (-1, 50)) for item in graph.inputs]

    found = checking.random_inputs(graph, specs, 10)

    assert (10, 50) == found["ids"].shape
    assert 8 < found["ids"].max() < 30
    assert {0, 1} == set(found["mask"].flat)
