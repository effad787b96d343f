"""Data-dependent branches and loops, and sequences: as in onnxruntime, or refused by name."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper
from support.onnx_models import (
    BOOL,
    FLOAT,
    INT64,
    X,
    exported,
    graph_of,
    largest_difference,
    model,
    node,
    ours,
    planned,
    save,
    theirs,
)

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.importing import import_model
from xlaserve.tensors import Tensor

ROWS = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
GIVEN = {"x": ROWS}
WEIGHT = np.arange(16, dtype=np.float32).reshape(4, 4) / 16


def _graph(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, int],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
) -> GraphProto:
    """Return a graph for an attribute; its outputs have the type that is inferred.

    onnxruntime wants to be told that the number of a trip and a condition have no dimensions.
    """
    return helper.make_graph(
        nodes,
        "inner",
        [
            helper.make_tensor_value_info(name, said, [] if name[:1] in "ijo" else None)
            for name, said in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in (constants or {}).items()],
    )


_LOOP = {"i": INT64, "on": BOOL, "s": FLOAT}


def _same(made: ModelProto, given: Mapping[str, Tensor]) -> None:
    assert largest_difference(theirs(made, given), ours(made, given)) < 1e-6


def _refused(made: ModelProto, given: Mapping[str, Tensor]) -> str:
    with pytest.raises(InvalidModel) as caught:
        planned(made, given)
    return str(caught.value)


# --- If ----------------------------------------------------------------------------------------


def _if(then: GraphProto, otherwise: GraphProto, outputs: Sequence[str] = ("y",)) -> NodeProto:
    return node("If", ["c"], outputs, then_branch=then, else_branch=otherwise)


def _scaled(operator: str, scale: object) -> GraphProto:
    nodes = [node(operator, ["x"], ["m"]), node("Mul", ["m", "scale"], ["r"])]
    return _graph(nodes, {}, ["r"], {"scale": np.asarray(scale, np.float32)})


CONDITION = {**X, "c": (BOOL, [])}


@pytest.mark.parametrize("condition", [True, False])
def test_data_choose_a_branch(condition: bool) -> None:
    """Both branches use the same inner names, and have their own constants."""
    made = model([_if(_scaled("Relu", 2.0), _scaled("Neg", 3.0))], CONDITION, ["y"])

    _same(made, GIVEN | {"c": np.asarray(condition)})


def test_a_condition_may_have_one_element_in_several_dimensions() -> None:
    inputs = {**X, "c": (BOOL, [1])}
    made = model([_if(_scaled("Relu", 2.0), _scaled("Neg", 3.0))], inputs, ["y"])

    _same(made, GIVEN | {"c": np.asarray([False])})


def test_only_outputs_that_are_read_are_computed_by_a_branch() -> None:
    """The unread ones may have any shape, and may be impossible to convert."""
    then = _graph([node("Relu", ["x"], ["r"]), node("NonZero", ["x"], ["q"])], {}, ["r", "q"])
    otherwise = _graph([node("Neg", ["x"], ["r"]), node("Shape", ["x"], ["q"])], {}, ["r", "q"])
    made = model([_if(then, otherwise, ("y", "unread"))], CONDITION, ["y"])

    _same(made, GIVEN | {"c": np.asarray(False)})


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [(node("ReduceMax", ["x"], ["r"]), "float32[1, 1]"), (node("Shape", ["x"], ["r"]), "int64[2]")],
)
def test_branches_of_different_shapes_are_refused(otherwise: NodeProto, said: str) -> None:
    branches = _if(_scaled("Relu", 2.0), _graph([otherwise], {}, ["r"]))

    text = _refused(model([branches], CONDITION, ["y"]), GIVEN | {"c": np.asarray(True)})

    assert text == (
        "If 'the_y' (opset 17): its condition depends on data, and its output 'y' is "
        f"float32[3, 4] of one branch and {said} of the other: XLA needs equal shapes"
    )


def test_a_condition_with_a_value_for_each_row_is_refused() -> None:
    inputs = {**X, "c": (BOOL, ["N"])}
    made = model([_if(_scaled("Relu", 2.0), _scaled("Neg", 3.0))], inputs, ["y"])

    with pytest.raises(
        InvalidModel,
        match=r"its condition: expected one element for all rows of a batch, got the shape \[b\]",
    ):
        exported(made, "b", {"x": "b, 4", "c": "b"})


def test_weights_in_a_branch_are_stored_beside_the_computation() -> None:
    """Including nested ones and those of Constant nodes; equal names stay distinct."""
    constant = node("Constant", [], ["w"], value=numpy_helper.from_array(WEIGHT + 1))
    deep = _graph([constant, node("MatMul", ["x", "w"], ["q"])], {}, ["q"])
    shallow = _graph([node("MatMul", ["x", "w"], ["q"])], {}, ["q"], {"w": WEIGHT + 2})
    inner = node("If", ["d"], ["r"], then_branch=deep, else_branch=shallow)
    then = _graph([node("Not", ["c"], ["d"]), inner], {}, ["r"])
    otherwise = _graph([node("MatMul", ["x", "w"], ["r"])], {}, ["r"], {"w": WEIGHT})
    made = model([_if(then, otherwise)], CONDITION, ["y"])

    plan = planned(made, GIVEN | {"c": np.asarray(True)})

    assert 3 == len(plan.parameters)
    for condition in (True, False):
        _same(made, GIVEN | {"c": np.asarray(condition)})


def test_a_branch_that_other_rows_choose_is_not_put_together_with_them(tmp_path: Path) -> None:
    """The rows share one condition: it is imported with max_batch_size 0, giving the reason."""
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["c"]),
        _if(_scaled("Relu", 2.0), _scaled("Neg", 3.0)),
    ]
    made = model(nodes, X, ["y"], {"zero": np.asarray(0, np.float32)})

    imported = import_model(save(made, tmp_path), tmp_path / "repository" / "branches")

    assert 0 == imported.manifest.max_batch_size
    assert "branch" in imported.notice or "sum" in imported.notice
    assert imported.checked is not None


# --- Loop --------------------------------------------------------------------------------------


def _loop(body: GraphProto, inputs: Sequence[str], outputs: Sequence[str]) -> NodeProto:
    return node("Loop", inputs, outputs, body=body)


ON = node("Identity", ["on"], ["on_out"])
HALF = {"half": np.asarray(0.5, np.float32)}
STEP = (
    node("MatMul", ["s", "w"], ["p"]),
    node("Mul", ["p", "half"], ["q"]),
    node("Add", ["q", "x"], ["s_out"]),
)
"""A loop body that reads a weight and an input of the outer graph."""


def _trips(count: str, outputs: Sequence[str], *, stacks: bool) -> NodeProto:
    made = [node("ReduceMax", ["s_out"], ["row"], keepdims=0)] if stacks else []
    returned = ["on_out", "s_out", *(["row"] if stacks else [])]
    body = _graph([ON, *STEP, *made], _LOOP, returned, HALF)
    return _loop(body, [count, "", "x"], outputs)


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_a_loop_makes_as_many_trips_as_are_known_and_stacks_what_they_make(count: int) -> None:
    """Short loops are unrolled, long ones become loops of XLA; zero trips stack nothing."""
    made = model(
        [_trips("n", ["y", "rows"], stacks=True)],
        X,
        ["y", "rows"],
        {"w": WEIGHT, "n": np.asarray(count)},
    )

    _same(made, GIVEN)


def test_a_loop_of_many_trips_is_small() -> None:
    """The converted program does not grow with the trip count."""
    constants = {"w": WEIGHT, "n": np.asarray(10**9)}
    plan = planned(model([_trips("n", ["y"], stacks=False)], X, ["y"], constants), GIVEN)

    text = str(jax.make_jaxpr(plan)(plan.parameters, GIVEN))

    assert 1 == text.count("while[")
    assert 1 == text.count("dot_general")


@pytest.mark.parametrize("count", [0, 5])
def test_data_say_how_many_trips_a_loop_makes(count: int) -> None:
    inputs = {**X, "n": (INT64, [])}
    made = model([_trips("n", ["y"], stacks=False)], inputs, ["y"], {"w": WEIGHT})

    _same(made, GIVEN | {"n": np.asarray(count)})


_GROWN = (
    node("Mul", ["s", "two"], ["s_out"]),
    node("ReduceMax", ["s_out"], ["most"], keepdims=0),
    node("Less", ["most", "hundred"], ["on_out"]),
)
_NUMBERS = {"two": np.asarray(2, np.float32), "hundred": np.asarray(100, np.float32)}


@pytest.mark.parametrize("count", ["", "n"])
@pytest.mark.parametrize("begins", [True, False])
def test_a_loop_goes_on_while_a_condition_on_data_holds(count: str, begins: bool) -> None:
    """With a trip count, whichever limit comes first ends the loop."""
    body = _graph(_GROWN, _LOOP, ["on_out", "s_out"], _NUMBERS)
    inputs = {**X, "c": (BOOL, [])}
    made = model([_loop(body, [count, "c", "x"], ["y"])], inputs, ["y"], {"n": np.asarray(3)})

    _same(made, GIVEN | {"c": np.asarray(begins)})


@pytest.mark.parametrize("count", [4, 400])
def test_a_loop_ends_before_its_trip_count_by_data_from_a_known_beginning(count: int) -> None:
    body = _graph(_GROWN, _LOOP, ["on_out", "s_out"], _NUMBERS)
    constants = {"n": np.asarray(count), "c": np.asarray(True)}
    made = model([_loop(body, ["n", "c", "x"], ["y"])], X, ["y"], constants)

    _same(made, GIVEN)


def test_a_loop_that_is_left_at_once_makes_one_trip() -> None:
    """Its body ends the loop, whatever its trip count is."""
    nodes = [node("Identity", ["never"], ["on_out"]), node("Exp", ["s"], ["s_out"])]
    body = _graph(nodes, _LOOP, ["on_out", "s_out", "s_out"], {"never": np.asarray(False)})
    made = model(
        [_loop(body, ["n", "", "x"], ["y", "rows"])], X, ["y", "rows"], {"n": np.asarray(1000)}
    )

    _same(made, GIVEN)


def test_the_number_of_the_trip_is_known_in_a_loop_that_is_unrolled() -> None:
    """It processes one row per trip, and its state grows."""
    nodes = [
        ON,
        node("Gather", ["x", "i"], ["row"], axis=0),
        node("Unsqueeze", ["row", "zero"], ["part"]),
        node("Concat", ["s", "part"], ["s_out"], axis=0),
    ]
    body = _graph(nodes, _LOOP, ["on_out", "s_out"], {"zero": np.asarray([0])})
    constants = {"n": np.asarray(3), "empty": np.zeros((0, 4), np.float32)}
    made = model([_loop(body, ["n", "", "empty"], ["y"])], {"x": (FLOAT, [3, 4])}, ["y"], constants)

    _same(made, GIVEN)


def test_the_number_of_the_trip_chooses_a_branch_of_a_loop_that_is_unrolled() -> None:
    """Only the first trip takes the first branch."""
    then = _graph([node("Exp", ["s"], ["r"])], {}, ["r"])
    otherwise = _graph([node("Neg", ["s"], ["r"])], {}, ["r"])
    nodes = [
        ON,
        node("Less", ["i", "one"], ["is_first"]),
        node("If", ["is_first"], ["s_out"], then_branch=then, else_branch=otherwise),
    ]
    body = _graph(nodes, _LOOP, ["on_out", "s_out"], {"one": np.asarray(1)})
    made = model([_loop(body, ["n", "", "x"], ["y"])], X, ["y"], {"n": np.asarray(3)})

    _same(made, GIVEN)


def test_what_a_loop_hands_on_as_it_is_stays_known() -> None:
    """A shape that it carries is the same in every trip."""
    nodes = [
        ON,
        node("Identity", ["shape"], ["unused"]),
        node("Reshape", ["s", "shape"], ["m"]),
        node("Transpose", ["m"], ["t"], perm=[1, 0]),
        node("Reshape", ["t", "whole"], ["s_out"]),
    ]
    inputs = {**_LOOP, "shape": INT64}
    body = _graph(nodes, inputs, ["on_out", "s_out", "shape"], {"whole": np.asarray([3, 4])})
    constants = {"n": np.asarray(70), "four": np.asarray([4, 3])}
    made = model(
        [_loop(body, ["n", "", "x", "four"], ["y", "z"])],
        {"x": (FLOAT, [3, 4])},
        ["y", "z"],
        constants,
    )

    _same(made, GIVEN)


def test_loops_and_branches_are_nested() -> None:
    """Inner loops see the state and the trip number of the outer one."""
    inner_body = _graph(
        [
            node("Identity", ["on2"], ["on2_out"]),
            node("Cast", ["i"], ["f"], to=FLOAT),
            node("Add", ["t", "f"], ["t_out"]),
        ],
        {"j": INT64, "on2": BOOL, "t": FLOAT},
        ["on2_out", "t_out"],
    )
    nodes = [
        ON,
        _loop(inner_body, ["n", "", "s"], ["u"]),
        node("ReduceMax", ["u"], ["most"], keepdims=0),
        node("Greater", ["most", "ten"], ["is_large"]),
        node(
            "If",
            ["is_large"],
            ["s_out"],
            then_branch=_graph([node("Mul", ["u", "half"], ["v"])], {}, ["v"]),
            else_branch=_graph([node("Identity", ["u"], ["v"])], {}, ["v"]),
        ),
    ]
    body = _graph(nodes, _LOOP, ["on_out", "s_out"], {**HALF, "ten": np.asarray(10, np.float32)})
    inputs = {**X, "n": (INT64, [])}
    made = model([_loop(body, ["n", "", "x"], ["y"])], inputs, ["y"])

    _same(made, GIVEN | {"n": np.asarray(6)})


def test_loops_within_loops_are_not_unrolled_without_end() -> None:
    """A file of sixteen nodes could expand to two to the power of a hundred."""
    made: GraphProto = _graph([node("Exp", ["s0"], ["r"])], {}, ["r"])
    nodes = [node("Identity", ["on0"], ["c0"]), node("Tanh", ["s0"], ["r0"])]
    for level in range(1, 10):
        names = {f"i{level - 1}": INT64, f"on{level - 1}": BOOL, f"s{level - 1}": FLOAT}
        made = _graph(nodes, names, [f"c{level - 1}", f"r{level - 1}"])
        nodes = [
            node("Identity", [f"on{level}"], [f"c{level}"]),
            _loop(made, ["n", "", f"s{level}"], [f"r{level}"]),
        ]
    names = {"i9": INT64, "on9": BOOL, "s9": FLOAT}
    body = _graph(nodes, names, ["c9", "r9"])
    whole = model([_loop(body, ["n", "", "x"], ["y"])], X, ["y"], {"n": np.asarray(3)})

    plan = planned(whole, GIVEN)

    text = str(jax.make_jaxpr(plan)(plan.parameters, GIVEN))
    assert 1 <= text.count("tanh") <= 64


@pytest.mark.parametrize(
    ("nodes", "returned", "count", "said"),
    [
        (
            [ON, node("Concat", ["s", "s"], ["s_out"], axis=0)],
            ["on_out", "s_out"],
            10**6,
            "'s', which is loop-carried, is float32[3, 4] before an iteration and float32[6, 4]"
            " after it",
        ),
        (
            [ON, node("Cast", ["s"], ["s_out"], to=INT64)],
            ["on_out", "s_out"],
            10**6,
            "'s', which is loop-carried, is float32[3, 4] before an iteration and int64[3, 4]"
            " after it",
        ),
        ([ON, node("Exp", ["s"], ["s_out"])], ["on_out", "s_out"], None, "it has no trip count"),
        (_GROWN, ["on_out", "s_out", "s_out"], None, "its output 'rows' has one row per iteration"),
        ([ON], ["on_out"], 3, "its body has 1 outputs"),
    ],
)
def test_loops_that_xla_cannot_have_are_refused(
    nodes: Sequence[NodeProto], returned: Sequence[str], count: int | None, said: str
) -> None:
    body = _graph(nodes, _LOOP, returned, _NUMBERS)
    outputs = ["y", "rows"][: max(1, len(returned) - 1)]
    constants = {} if count is None else {"n": np.asarray(count)}
    made = model([_loop(body, ["n" if constants else "", "", "x"], outputs)], X, outputs, constants)

    text = _refused(made, GIVEN)

    assert text.startswith("Loop 'the_y' (opset 17): ")
    assert said in text


def test_a_loop_over_rows_is_not_proved_to_keep_them_apart(tmp_path: Path) -> None:
    """It ends when a sum of the whole batch says: requests are not batched."""
    body = _graph(_GROWN, _LOOP, ["on_out", "s_out"], _NUMBERS)
    made = model([_loop(body, ["n", "c", "x"], ["y"])], X, ["y"],
                 {"n": np.asarray(500), "c": np.asarray(True)})  # fmt: skip

    imported = import_model(save(made, tmp_path), tmp_path / "repository" / "loops")

    assert (0, False) == (imported.manifest.max_batch_size, not imported.notice)


def test_a_counted_loop_keeps_rows_apart(tmp_path: Path) -> None:
    """Each row depends on itself alone, also in a loop of XLA: requests share a batch."""
    constants = {"w": WEIGHT, "n": np.asarray(200)}
    made = model([_trips("n", ["y"], stacks=False)], X, ["y"], constants)

    imported = import_model(save(made, tmp_path), tmp_path / "repository" / "counted")

    assert 32 == imported.manifest.max_batch_size
    assert "" == imported.notice


# --- Scan --------------------------------------------------------------------------------------


def _scan(**attributes: object) -> NodeProto:
    nodes = [
        node("Add", ["s", "row"], ["s_out"]),
        node("Mul", ["s_out", "half"], ["made"]),
        node("Identity", ["k"], ["k_out"]),
        node("Identity", ["read"], ["again"]),
    ]
    inputs = {"s": FLOAT, "k": FLOAT, "row": FLOAT, "read": FLOAT}
    body = _graph(nodes, inputs, ["s_out", "k_out", "made", "again"], HALF)
    return node(
        "Scan", ["first", "first", "x", "x"], ["y", "k_last", "rows", "others"], body=body,
        num_scan_inputs=2, **attributes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "attributes"),
    [
        (4, {}),
        (3, {"scan_input_axes": [1, -1]}),
        (4, {"scan_input_directions": [1, 0], "scan_output_directions": [0, 1]}),
        (3, {"scan_input_axes": [1, 1], "scan_output_axes": [1, 1]}),
    ],
)
def test_a_scan_reads_rows_and_stacks_others_in_each_direction(
    size: int, attributes: dict[str, object]
) -> None:
    outputs = ["y", "k_last", "rows", "others"]
    constants = {"first": np.arange(size, dtype=np.float32)}
    made = model([_scan(**attributes)], {"x": (FLOAT, [3, 4])}, outputs, constants)

    _same(made, GIVEN)


def test_a_scan_along_time_has_an_open_batch(tmp_path: Path) -> None:
    """It carries a state with a row for each request; requests share a batch."""
    nodes = [
        node("Add", ["s", "part"], ["s_out"]),
        node("Tanh", ["s_out"], ["made"]),
    ]
    body = _graph(nodes, {"s": FLOAT, "part": FLOAT}, ["s_out", "made"])
    whole = [
        node("ReduceSum", ["x", "one"], ["first"], keepdims=0),
        node("Scan", ["first", "x"], ["last", "y"], body=body, num_scan_inputs=1,
             scan_input_axes=[1], scan_output_axes=[1]),
    ]  # fmt: skip
    made = model(whole, {"x": (FLOAT, ["N", 6, 4])}, ["y"], {"one": np.asarray([1])})

    imported = import_model(save(made, tmp_path), tmp_path / "repository" / "scan")

    assert 32 == imported.manifest.max_batch_size
    assert imported.checked is not None
    assert (1, 3) == imported.checked.batches


def test_a_scan_of_inputs_of_several_lengths_is_refused() -> None:
    constants = {"first": np.arange(4, dtype=np.float32)}
    made = model([_scan(scan_input_axes=[0, 1])], {"x": (FLOAT, [3, 4])}, ["y"], constants)

    assert "its scanned inputs have different lengths: " in _refused(made, GIVEN)


def test_a_scan_of_before_opset_9_is_refused() -> None:
    """Such a Scan has a batch dimension, and onnx's own upgrade reads another axis."""
    made = model([_scan()], {"x": (FLOAT, [4, 4])}, ["y"], {"first": np.zeros(4, np.float32)})
    made.opset_import[0].version = 8

    with pytest.raises(InvalidModel, match="a Scan of opset 8 is not implemented"):
        graph_of(made)


# --- sequences ---------------------------------------------------------------------------------


def test_sequences_are_resolved_while_a_graph_is_converted() -> None:
    nodes = [
        node("SplitToSequence", ["x", "sizes"], ["split"], axis=1),
        node("SequenceAt", ["split", "last"], ["z"]),
        node("SequenceErase", ["split", "first"], ["shorter"]),
        node("SequenceInsert", ["shorter", "z", "last"], ["longer"]),
        node("ConcatFromSequence", ["longer"], ["y"], axis=-1),
        node("SequenceLength", ["longer"], ["count"]),
        node("SequenceConstruct", ["x", "x"], ["both"]),
        node("ConcatFromSequence", ["both"], ["stacked"], axis=1, new_axis=1),
    ]
    constants = {"sizes": np.asarray([1, 3]), "first": np.asarray(0), "last": np.asarray(-1)}
    made = model(nodes, {"x": (FLOAT, [3, 4])}, ["y", "z", "count", "stacked"], constants)

    _same(made, GIVEN)


def test_a_loop_that_fills_a_sequence_is_unrolled() -> None:
    nodes = [
        ON,
        node("Gather", ["x", "i"], ["row"], axis=0),
        node("SequenceInsert", ["q", "row"], ["q_out"]),
    ]
    body = _graph(nodes, {"i": INT64, "on": BOOL}, ["on_out", "q_out"])
    given = helper.make_tensor_sequence_value_info("q", FLOAT, None)
    body.input.append(given)
    whole = [
        node("SequenceEmpty", [], ["empty"]),
        _loop(body, ["n", "", "empty"], ["filled"]),
        node("ConcatFromSequence", ["filled"], ["y"], axis=0, new_axis=1),
    ]
    many = np.arange(120, dtype=np.float32).reshape(40, 3)
    made = model(whole, {"x": (FLOAT, [40, 3])}, ["y"], {"n": np.asarray(40)})

    _same(made, {"x": many})


def test_optionals_are_resolved_while_a_graph_is_converted() -> None:
    nodes = [
        node("Optional", ["x"], ["some"]),
        node("OptionalHasElement", ["some"], ["c"]),
        node("OptionalGetElement", ["some"], ["e"]),
        _if(_graph([node("Exp", ["e"], ["r"])], {}, ["r"]), _scaled("Neg", 3.0)),
    ]
    made = model(nodes, X, ["y"], opset=18)

    np.testing.assert_allclose(np.exp(ROWS), ours(made, GIVEN)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            [node("SequenceConstruct", ["x"], ["y"])],
            "output 'y' is a sequence or an optional, but the V2 protocol has only tensors",
        ),
        (
            [node("SequenceConstruct", ["x"], ["s"]), node("Relu", ["s"], ["y"])],
            "Relu 'the_y' (opset 17): its input 0 is a sequence of 1 tensors, expected a tensor",
        ),
        (
            [node("SequenceConstruct", ["x"], ["s"]), node("SequenceAt", ["s", "one"], ["y"])],
            "SequenceAt 'the_y' (opset 17): position 1 is out of range for a sequence, "
            "expected 0 to 0",
        ),
        ([node("SequenceAt", ["x", "one"], ["y"])], "its first input is not a sequence"),
    ],
)
def test_sequences_that_cannot_be_resolved_are_refused(
    nodes: Sequence[NodeProto], said: str
) -> None:
    made = model(nodes, X, ["y"], {"one": np.asarray(1)})

    with pytest.raises(InvalidModel) as caught:
        ours(made, GIVEN)

    assert said in str(caught.value)


def test_an_input_that_is_a_sequence_is_refused() -> None:
    made = model([node("SequenceAt", ["s", "zero"], ["y"])], {}, ["y"], {"zero": np.asarray(0)})
    made.graph.input.append(helper.make_tensor_sequence_value_info("s", FLOAT, None))

    with pytest.raises(InvalidModel, match="input 's' is not a tensor but sequence: export"):
        graph_of(made)


# --- functions that a model defines ------------------------------------------------------------


def test_functions_within_functions_take_attributes() -> None:
    """One passes its attribute on to another, also within a data-dependent branch."""
    opsets = [helper.make_opsetid("", 17)]
    leaky = helper.make_node("LeakyRelu", ["a"], ["b"])
    reference = leaky.attribute.add(name="alpha", ref_attr_name="slope", type=1)
    assert "slope" == reference.ref_attr_name
    inner = helper.make_function("own", "Inner", ["a"], ["b"], [leaky], opsets, ["slope"])
    call = helper.make_node("Inner", ["a"], ["m"], domain="own")
    call.attribute.add(name="slope", ref_attr_name="steep", type=1)
    outer = helper.make_function(
        "own", "Outer", ["a"], ["b"], [call, helper.make_node("Neg", ["m"], ["b"])],
        [*opsets, helper.make_opsetid("own", 1)], ["steep"],
    )  # fmt: skip
    then = _graph([helper.make_node("Outer", ["x"], ["r"], domain="own", steep=0.25)], {}, ["r"])
    made = model([_if(then, _scaled("Neg", 3.0))], CONDITION, ["y"])
    made.functions.extend([inner, outer])
    made.opset_import.append(helper.make_opsetid("own", 1))

    for condition in (True, False):
        _same(made, GIVEN | {"c": np.asarray(condition)})


def test_a_slice_to_a_billion_rows_takes_the_whole_batch() -> None:
    """Exporters write the end of a dynamic dimension like this."""
    constants = {"from": np.asarray([0]), "to": np.asarray([10**9]), "rows": np.asarray([0])}
    nodes = [node("Slice", ["x", "from", "to", "rows"], ["m"]), node("Add", ["m", "x"], ["y"])]
    made = model(nodes, X, ["y"], constants)

    (found,) = exported(made, "b", {"x": "b, 4"})(GIVEN)

    np.testing.assert_array_equal(2 * ROWS, found)
