# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper
from support.onnx_models import (
    FLOAT,
    INT64,
    X,
    graph_of,
    largest_difference,
    model,
    node,
    ours,
    planned,
    single,
    theirs,
)

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import planning
from xlaserve.tensors import Tensor

ROWS = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
GIVEN = {"x": ROWS}
WEIGHT = np.arange(16, dtype=np.float32).reshape(4, 4)


def _refused(made: ModelProto, given: Mapping[str, Tensor] | None = None) -> str:
    with pytest.raises(InvalidModel) as caught:
        planned(made, given or GIVEN)
    return str(caught.value)


# # --- constants ---------------------------------------------------------------------------------


def test_weights_are_parameters_and_shapes_are_constants() -> None:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Reshape", ["m", "shape"], ["y"])]
    constants: dict[str, np.ndarray[Any, Any]] = {"w": WEIGHT, "shape": np.asarray([-1, 2, 2])}

    plan = planned(model(nodes, X, ["y"], constants), GIVEN)

    assert (["w"], ["shape"]) == (list(plan.parameters), list(plan.constants))


def test_what_is_known_is_computed_once_and_stored() -> None:
    """A transposed weight becomes the parameter, and the original is dropped."""
    nodes = [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])]

    plan = planned(model(nodes, X, ["y"], {"w": WEIGHT}), GIVEN)

    assert ["MatMul"] == [item.operator for item in plan.nodes]
    np.testing.assert_array_equal(WEIGHT.T, plan.parameters["t"])
    assert ["t"] == list(plan.parameters)


def test_a_small_file_cannot_ask_for_much_memory() -> None:
    """A constant expression with a large result remains an operator."""
    nodes = [
        node("ConstantOfShape", ["shape"], ["large"]),
        node("ReduceSum", ["large"], ["sum"], keepdims=0),
        node("Add", ["x", "sum"], ["y"]),
    ]
    plan = planned(model(nodes, X, ["y"], {"shape": np.asarray([1_000_000, 1_000_000])}), GIVEN)

    assert "ConstantOfShape" in [item.operator for item in plan.nodes]
    assert {} == plan.parameters


@pytest.mark.parametrize(
    ("operator", "constants"),
    [
        ("Expand", {"c": np.ones(1, np.float32), "shape": np.asarray([2**20, 2**20])}),
        ("Tile", {"c": np.ones(8, np.float32), "repeats": np.asarray([2**40])}),
        (
            "Range",
            {
                name: np.asarray(value, np.float32)
                for name, value in (("a", 0), ("b", 1e12), ("c", 1))
            },
        ),
        ("Range", {name: np.asarray(value) for name, value in (("a", 0), ("b", 10**12), ("c", 1))}),
        (
            "Resize",
            {
                "c": np.ones((1, 1, 2, 2), np.float32),
                "roi": np.zeros(0, np.float32),
                "scales": np.zeros(0, np.float32),
                "sizes": np.asarray([1, 1, 2**40, 2]),
            },
        ),
    ],
)
def test_no_operator_computes_much_while_it_is_converted(
    operator: str, constants: dict[str, Tensor]
) -> None:
    """It is refused or left in the program: memory of that size is never allocated."""
    nodes = [
        node(operator, list(constants), ["large"]),
        node("ReduceMax", ["large"], ["m"]),
        node("Cast", ["m"], ["f"], to=FLOAT),
        node("Mul", ["x", "f"], ["y"]),
    ]
    graph = graph_of(model(nodes, X, ["y"], constants))
    try:
        plan = planning.plan(graph, {"x": jax.ShapeDtypeStruct((3, 4), np.float32)})
    except InvalidModel as error:
        assert operator in str(error)
        return
    assert operator in [item.operator for item in plan.nodes]


def test_only_what_the_wanted_outputs_need_is_converted() -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Bernoulli", ["x"], ["z"])]
    made = model(nodes, X, ["y", "z"])
    arguments = {"x": jax.ShapeDtypeStruct((3, 4), np.float32)}

    plan = planning.plan(graph_of(made), arguments, ["y"])

    assert ["Relu"] == [item.operator for item in plan.nodes]
    with pytest.raises(InvalidModel, match="unknown output 'w', the model has y, z"):
        planning.plan(graph_of(made), arguments, ["w"])


def test_progress_counts_every_node() -> None:
    seen: list[tuple[int, int]] = []
    made = model([node("Relu", ["x"], ["m"]), node("Neg", ["m"], ["y"])], X, ["y"])
    arguments = {"x": jax.ShapeDtypeStruct((3, 4), np.float32)}

    planning.plan(graph_of(made), arguments, on_node=lambda step, steps: seen.append((step, steps)))

    assert [(1, 2), (2, 2)] == seen


# # --- refusals ----------------------------------------------------------------------------------


def test_an_unknown_operator_is_named_with_its_node_and_neighbours() -> None:
    made = single("Relu", GIVEN)
    made.graph.node[0].op_type = "LeakyReLU"

    text = _refused(made)

    assert text.startswith("LeakyReLU 'the_y' (opset 17) is not one of the")
    assert "LeakyRelu" in text


def test_an_operator_that_cannot_be_converted_says_why() -> None:
    made = model([node("Relu", ["x"], ["y"])], X, ["y"])
    made.graph.node[0].op_type = "Bernoulli"

    assert "Bernoulli 'the_y' (opset 17) cannot be converted: it draws random numbers" in _refused(
        made
    )


def test_an_attribute_that_is_not_obeyed_is_refused() -> None:
    made = single("Relu", GIVEN)
    made.graph.node[0].attribute.append(helper.make_attribute("slope", 2.0))

    assert "Relu 'the_y' (opset 17): its attribute 'slope' is not implemented" == _refused(made)


def test_a_shape_that_depends_on_the_data_is_refused() -> None:
    inputs = {"x": (FLOAT, [3, 4]), "shape": (INT64, [2])}
    made = model([node("Reshape", ["x", "shape"], ["y"])], inputs, ["y"])

    text = _refused(made, GIVEN | {"shape": np.asarray([4, 3])})

    assert "Reshape 'the_y' (opset 17): its input 1 must not depend on data" == text


def test_tensors_that_do_not_fit_are_refused_with_their_node() -> None:
    made = model([node("MatMul", ["x", "w"], ["y"])], X, ["y"], {"w": WEIGHT})

    assert "MatMul 'the_y'" in _refused(made, {"x": np.ones((3, 5), np.float32)})


# --- branches ----------------------------------------------------------------------------------


def _branch(operator: str, name: str, scale: float) -> GraphProto:
    nodes = [
        node(operator, ["x"], ["inner"]),
        node("Mul", ["inner", "scale"], [name]),
    ]
    output = helper.make_tensor_value_info(name, FLOAT, None)
    constant = numpy_helper.from_array(np.asarray(scale, np.float32), "scale")
    return helper.make_graph(nodes, name, [], [output], [constant])


def _branches(condition: str, result: str) -> NodeProto:
    return node(
        "If", [condition], [result],
        then_branch=_branch("Relu", "a", 2.0), else_branch=_branch("Neg", "b", 3.0),
    )  # fmt: skip


@pytest.mark.parametrize("condition", [True, False])
def test_the_branch_of_a_known_condition_is_taken(condition: bool) -> None:
    made = model([_branches("c", "y")], X, ["y"], {"c": np.asarray(condition)})

    assert 0 == largest_difference(theirs(made, GIVEN), ours(made, GIVEN))


def test_branches_may_use_the_same_names_and_conditions_may_be_shapes() -> None:
    """Exporters guard a squeeze like this: if the size of the axis is 1."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "last"], ["size"]),
        node("Equal", ["size", "four"], ["is_four"]),
        node("Not", ["is_four"], ["is_not"]),
        _branches("is_four", "p"),
        _branches("is_not", "q"),
        node("Add", ["p", "q"], ["y"]),
    ]
    constants = {"last": np.asarray(1), "four": np.asarray(4)}
    made = model(nodes, X, ["y"], constants)

    assert 0 == largest_difference(theirs(made, GIVEN), ours(made, GIVEN))
