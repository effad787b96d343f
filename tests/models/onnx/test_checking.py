import numpy as np
import pytest

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import checking
from xlaserve.importers.onnx.allowance import allowance
from xlaserve.importers.onnx.graph import Graph, GraphInput, Node
from xlaserve.tensors import DATATYPES, TensorSpec

Y = TensorSpec("y", DATATYPES["FP32"], (-1, 2))
HALF = TensorSpec("y", DATATYPES["FP16"], (-1, 2))
LARGE = np.asarray([[100.0, -200.0]])
TOLERANCE = 1e-4
EMPTY = Graph("g", (), (), (), {})
ALLOWED = allowance(EMPTY, Y, TOLERANCE)


def test_difference_is_told_in_parts_of_the_largest_number() -> None:
    found = checking.compared(Y, LARGE, LARGE + 0.01, ALLOWED)

    assert pytest.approx(0.01) == found.absolute
    assert pytest.approx(0.01 / 200) == found.relative


@pytest.mark.parametrize(
    ("expected", "actual", "problem"),
    [
        (LARGE, LARGE + 0.03, "0.00015 of its largest value; allowed: 0.0001"),
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
        checking.compared(Y, expected, actual, ALLOWED)


def test_what_is_not_finite_may_be_equal() -> None:
    odd = np.asarray([[np.nan, -np.inf]])

    assert 0.0 == checking.compared(Y, odd, odd.copy(), ALLOWED).absolute


def test_few_bits_may_differ_by_more() -> None:
    allowed = allowance(EMPTY, HALF, TOLERANCE)

    assert checking.compared(HALF, LARGE, LARGE * 1.005, allowed).relative > TOLERANCE


def _quantised(*nodes: Node, scale: float | None = 0.5) -> Graph:
    constants = {} if scale is None else {"scale": np.asarray(scale, np.float32)}
    return Graph("g", (), ("y",), nodes, constants)


def _node(operator: str, inputs: str, output: str) -> Node:
    return Node(operator, "", "", tuple(inputs.split()), (output,), 17, {})


QUANTISE = _node("QuantizeLinear", "x scale zero", "q")
READ = _node("DequantizeLinear", "q scale zero", "d")


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (_quantised(QUANTISE, READ, _node("Reshape", "d shape", "y")), (TOLERANCE, 2.0)),
        (
            _quantised(
                _node("QLinearConv", "x xs xz w ws wz scale zero", "q"),
                _node("DequantizeLinear", "q scale zero", "y"),
            ),
            (TOLERANCE, 2.0),
        ),
        (_quantised(QUANTISE, READ, _node("MatMul", "d w", "y")), (4 / 255, 0.0)),
        (_quantised(QUANTISE, _node("Relu", "q", "y"), scale=None), (4 / 255, 0.0)),
        (_quantised(_node("DynamicQuantizeLinear", "x", "y")), (4 / 255, 0.0)),
        (_quantised(_node("QLinearAdd", "x", "q"), _node("Exp", "q", "y")), (4 / 255, 0.0)),
        (
            _quantised(_node("DequantizeLinear", "w scale", "d"), _node("MatMul", "x d", "y")),
            (TOLERANCE, 0.0),
        ),
    ],
)
def test_steps_of_a_quantised_model_are_allowed(
    graph: Graph, expected: tuple[float, float]
) -> None:
    found = allowance(graph, Y, TOLERANCE)

    assert expected == (found.relative, found.absolute)
    assert bool(found.why) == (found != ALLOWED)


def test_sigmoid_may_be_off_by_some_steps_at_one() -> None:
    """onnxruntime has 3e-08 where FP64 and we have 6e-07; a number of another maker is compared."""
    made = _node("Sigmoid", "x", "s")
    kept = _node("Reshape", "s shape", "y")
    other = _node("Add", "s s", "y")
    small = np.asarray([[6e-7, 0.0]])

    allowed = allowance(_quantised(made, kept), Y, TOLERANCE)

    assert 3e-8 == pytest.approx(checking.compared(Y, small, small + 3e-8, allowed).absolute)
    with pytest.raises(InvalidModel, match="or 4.77e-07, as a Sigmoid is"):
        checking.compared(Y, small, small + 5e-7, allowed)
    with pytest.raises(InvalidModel, match="differs from"):
        checking.compared(Y, small, small + 3e-8, allowance(_quantised(made, other), Y, TOLERANCE))


def test_answer_in_8_bits_has_steps_of_one() -> None:
    spec = TensorSpec("y", DATATYPES["INT8"], (-1, 2))
    found = allowance(_quantised(QUANTISE, _node("MatMul", "q w", "y")), spec, TOLERANCE)
    numbers = np.asarray([[1, 2]], np.int8)

    assert 4.0 == checking.compared(spec, numbers, numbers + np.int8(4), found).absolute
    with pytest.raises(InvalidModel, match="allowed: 4 steps of its quantization, of 1 each"):
        checking.compared(spec, numbers, numbers + np.int8(5), found)


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
