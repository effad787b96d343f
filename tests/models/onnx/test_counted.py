"""Data-dependent row counts: padded to a bound, counted, and kept apart from other rows."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import ModelProto, NodeProto, helper
from support.onnx_models import (
    BOOL,
    FLOAT,
    Inputs,
    X,
    model,
    node,
    planned,
    save,
    theirs,
)

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import counted
from xlaserve.importers.onnx.importing import Options, import_model
from xlaserve.tensors import Tensor

BATCHES, CLASSES, BOXES, EACH = 2, 3, 12, 5

DETECTOR: Inputs = {
    "boxes": (FLOAT, [BATCHES, BOXES, 4]),
    "scores": (FLOAT, [BATCHES, CLASSES, BOXES]),
    "overlap": (FLOAT, [1]),
    "least": (FLOAT, [1]),
}
ROWS: Inputs = {"x": (FLOAT, [3, 4])}
CONSTANTS: Mapping[str, Tensor] = {
    "0": np.asarray([0]),
    "1": np.asarray([1]),
    "-1": np.asarray([-1]),
    "2": np.asarray([2]),
    "both": np.asarray([[2, 1], [0, 2]]),
    "most": np.asarray([EACH]),
    "table": np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4),
}


def _detector(*after: NodeProto, output: str = "found", is_centred: int = 0) -> ModelProto:
    suppression = node(
        "NonMaxSuppression",
        ["boxes", "scores", "most", "overlap", "least"],
        ["found"],
        center_point_box=is_centred,
    )
    return model([suppression, *after], DETECTOR, [output], CONSTANTS)


def _detections(random: np.random.Generator) -> dict[str, Tensor]:
    """Return boxes that often touch, and scores that are often equal."""
    boxes = random.integers(0, 5, (BATCHES, BOXES, 4)) * np.float32(0.1)
    scores = random.integers(-2, 3, (BATCHES, CLASSES, BOXES)) / np.float32(3)
    return {
        "boxes": boxes.astype(np.float32),
        "scores": scores.astype(np.float32),
        "overlap": np.asarray([random.choice([0, 0.25, 1 / 3, 0.5])], np.float32),
        "least": np.asarray([random.choice([-1, 0, 1 / 3])], np.float32),
    }


def _rows(random: np.random.Generator) -> dict[str, Tensor]:
    return {"x": random.integers(-3, 4, (3, 4)).astype(np.float32)}


def _agrees(made: ModelProto, given: Sequence[Mapping[str, Tensor]]) -> None:
    """Compare with onnxruntime; exactly the rows beyond the count are -1."""
    plan = planned(made, given[0])
    run = jax.jit(plan)
    counts = set()
    for inputs in given:
        results = run(plan.parameters, dict(inputs))
        padded = {name: np.asarray(results[name]) for name in plan.outputs}
        found = counted.cut(padded, plan.counted)
        for name, expected in zip(found, theirs(made, inputs), strict=True):
            assert expected.dtype == found[name].dtype
            np.testing.assert_array_equal(expected, found[name], strict=True)
        for name, axis in plan.counted.items():
            count = padded[counted.count_name(name)]
            assert ((1,), np.dtype(np.int64)) == (count.shape, count.dtype)
            beyond = np.moveaxis(padded[name], axis, 0)[count.item() :]
            assert np.all(beyond == (0 if beyond.dtype == np.bool_ else -1))
            counts.add(count.item())
    assert len(counts) > 1


def _given(make: Callable[[np.random.Generator], dict[str, Tensor]], count: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [make(random) for _ in range(count)]


# --- the operators -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_centred", [0, 1])
def test_boxes_are_those_of_onnxruntime_in_its_order(is_centred: int) -> None:
    """With equal scores, touching boxes, and overlaps exactly at the threshold."""
    _agrees(_detector(is_centred=is_centred), _given(_detections, 20))


@pytest.mark.parametrize("is_sorted", [0, 1])
@pytest.mark.parametrize("axis", [None, 1])
def test_what_is_unique_is_that_of_onnxruntime(is_sorted: int, axis: int | None) -> None:
    attributes = {"sorted": is_sorted} if axis is None else {"sorted": is_sorted, "axis": axis}
    outputs = ["found", "first", "inverse", "counts"]
    unique = node("Unique", ["x"], outputs, **attributes)

    made = model([unique], ROWS, outputs)
    _agrees(made, _given(_rows, 6))
    assert "inverse" not in planned(made, _given(_rows, 1)[0]).counted


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_elements_that_data_choose_are_those_of_onnxruntime(axis: int | None) -> None:
    """Elements without a condition are left out, and conditions without an element ignored."""
    size = {None: 3, 0: 2, 1: 5}[axis]
    inputs: Inputs = {**ROWS, "kept": (BOOL, [size])}
    attributes = {} if axis is None else {"axis": axis}
    made = model([node("Compress", ["x", "kept"], ["y"], **attributes)], inputs, ["y"])

    def make(random: np.random.Generator) -> dict[str, Tensor]:
        # No element equals -1, the padding.
        x = random.integers(1, 9, (3, 4)).astype(np.float32)
        return {"x": x, "kept": random.integers(0, 2, size).astype(np.bool_)}

    _agrees(made, _given(make, 6))


# --- what rows pass through --------------------------------------------------------------------


PASSING = [
    node("Cast", ["found"], ["cast"], to=FLOAT),
    node("CastLike", ["found", "table"], ["like"]),
    node("Gather", ["found", "2"], ["column"], axis=-1),
    node("Gather", ["found", "both"], ["moved"], axis=1),
    node("Squeeze", ["column", "1"], ["index"]),
    node("Slice", ["found", "0", "2", "1"], ["place"]),
    node("Identity", ["place"], ["same"]),
    node("Transpose", ["found"], ["turned"]),
    node("Gather", ["turned", "both"], ["deep"], axis=0),
    node("Unsqueeze", ["found", "0"], ["first"]),
    node("Transpose", ["first"], ["far"]),
    node("Squeeze", ["first", "0"], ["back"]),
    node("GatherND", ["scores", "place"], ["scored"]),
    node("Gather", ["found", "0"], ["batch"], axis=1),
    node("Squeeze", ["batch", "-1"], ["number"]),
    node("Gather", ["table", "number"], ["looked"], axis=0),
    node("Gather", ["table", "number"], ["across"], axis=1),
]
"""Operators that compute each row from itself alone."""


def test_rows_pass_through_what_computes_each_from_itself() -> None:
    suppression = _detector().graph.node[0]
    outputs = [after.output[0] for after in PASSING]

    made = model([suppression, *PASSING], DETECTOR, outputs, CONSTANTS)
    given = _given(_detections, 5)
    _agrees(made, given)
    axes = dict(planned(made, given[0]).counted)
    assert {"turned": 1, "deep": 2, "first": 1, "far": 1, "across": 1} == {
        name: axis for name, axis in axes.items() if axis
    }
    assert set(outputs) == set(axes)


def test_places_pass_through_a_transpose() -> None:
    made = [node("NonZero", ["x"], ["found"]), node("Transpose", ["found"], ["y"], perm=[1, 0])]

    _agrees(model(made, ROWS, ["found", "y"]), _given(_rows, 6))


@pytest.mark.parametrize(
    "after",
    [
        node("ReduceMax", ["found"], ["y"], keepdims=0),
        node("Gather", ["found", "0"], ["y"], axis=0),
        node("Slice", ["found", "0", "1"], ["y"]),
        node("Slice", ["found", "0", "1", "0"], ["y"]),
        node("Squeeze", ["found"], ["y"]),
        node("Squeeze", ["found", "0"], ["y"]),
        node("Shape", ["found"], ["y"]),
        node("Concat", ["found", "found"], ["y"], axis=1),
        node("Gather", ["found", "found"], ["y"], axis=1),
        node("Reshape", ["found", "-1"], ["y"]),
        node("Add", ["found", "0"], ["y"]),
        node("GatherND", ["found", "0"], ["y"]),
        node("CastLike", ["table", "found"], ["y"]),
        node("SequenceConstruct", ["found"], ["y"]),
    ],
    ids=lambda after: f"{after.op_type}-{'-'.join(after.input)}",
)
def test_what_would_count_the_padding_is_refused_by_name(after: NodeProto) -> None:
    said = f"{after.op_type} 'the_y' (opset 17): it computes over all rows of its input, whose"

    with pytest.raises(InvalidModel, match=re.escape(said)):
        planned(_detector(after, output="y"), _given(_detections, 1)[0])


def test_a_place_in_a_line_of_places_is_no_row() -> None:
    """GatherND would read the [1,N] positions of a vector's NonZero as one position."""
    made = [node("NonZero", ["x"], ["found"]), node("GatherND", ["x", "found"], ["y"])]
    with pytest.raises(
        InvalidModel,
        match="GatherND 'the_y'.*it computes over all rows of its input, whose count depends on"
        " data, and would include padding; end the graph before it and compute the rest from"
        " the counted rows",
    ):
        planned(model(made, ROWS, ["y"]), _given(_rows, 1)[0])


def test_a_branch_that_data_choose_has_no_counted_rows() -> None:
    branches = {
        name: helper.make_graph(
            [node(operator, ["x"], ["b"])], name, [], [helper.make_empty_tensor_value_info("b")]
        )
        for name, operator in (("then_branch", "NonZero"), ("else_branch", "NonZero"))
    }
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Cast", ["m"], ["c"], to=BOOL),
        node("If", ["c"], ["y"], **branches),
    ]
    with pytest.raises(
        InvalidModel,
        match="If 'the_y'.* has a data-dependent number of rows and would be used with its"
        " padding; end the graph before it",
    ):
        planned(model(nodes, ROWS, ["y"]), _given(_rows, 1)[0])


@pytest.mark.slow
def test_rows_of_constants_are_known_and_have_no_padding() -> None:
    constants: dict[str, Tensor] = {
        "c": np.asarray([3, 1, 3], np.float32),
        "flags": np.asarray([True, False, True]),
    }
    nodes = [
        node("Unique", ["c"], ["u"]),
        node("Compress", ["c", "flags"], ["k"]),
        node("Concat", ["u", "k"], ["four"], axis=0),
        node("Add", ["x", "four"], ["y"]),
    ]
    plan = planned(model(nodes, X, ["y"], constants), _given(_rows, 1)[0])

    assert ["Add"] == [item.operator for item in plan.nodes]
    assert [1, 3, 3, 3] == plan.parameters["four"].tolist()


def test_a_large_constant_still_chooses_elements_of_data() -> None:
    """Large constants become parameters, whose values are unknown while tracing."""
    kept = np.arange(4000) % 2 == 0
    nodes = [node("Compress", ["x", "kept"], ["k"]), node("ReduceSum", ["k"], ["y"], keepdims=0)]
    made = model(nodes, {"x": (FLOAT, [4000])}, ["y"], {"kept": kept})

    assert {} == planned(made, {"x": np.ones(4000, np.float32)}).counted


# --- imports -----------------------------------------------------------------------------------


def test_an_import_has_the_count_as_an_output_and_no_batch(tmp_path: Path) -> None:
    after = [node("Gather", ["found", "2"], ["c"], axis=1), node("Squeeze", ["c", "1"], ["y"])]
    path = save(_detector(*after, output="y"), tmp_path)

    options = Options(constants={"overlap": ("0.25",), "least": ("0",)})
    imported = import_model(path, tmp_path / "m", options)

    assert ["y INT64[30]", "y.count INT64[1]"] == [
        f"{spec.name} {spec}" for spec in imported.manifest.outputs
    ]
    assert 0 == imported.manifest.max_batch_size
    assert imported.checked is not None
    assert 0 == imported.checked.worst.absolute


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            {"x": (FLOAT, ["N", 4])},
            "NonZero 'the_y' .* its number of output rows depends on data, and their maximum on a"
            " dynamic dimension of its input: set its size with --shape or --dim",
        ),
        (
            {"x": (FLOAT, ["N", 4]), "z": (FLOAT, ["N", 4])},
            "its number of output rows depends on data, and their maximum on a dynamic dimension of"
            " its input: set its size with --shape or --dim",
        ),
    ],
)
def test_an_open_dimension_is_to_be_closed(tmp_path: Path, inputs: Inputs, text: str) -> None:
    path = save(model([node("NonZero", ["x"], ["y"])], inputs, ["y"]), tmp_path)

    with pytest.raises(InvalidModel, match=text):
        import_model(path, tmp_path / "m")
    if len(inputs) == 1:
        closed = import_model(path, tmp_path / "m", Options(dimensions={"N": (2,)}))
        assert ["INT64[2,8]", "INT64[1]"] == list(map(str, closed.manifest.outputs))


def test_rows_that_are_counted_over_a_batch_are_refused(tmp_path: Path) -> None:
    nodes = [node("ReduceMax", ["x"], ["m"], axes=[0]), node("NonZero", ["m"], ["y"])]
    path = save(model(nodes, X, ["y"]), tmp_path)

    with pytest.raises(InvalidModel, match="'y' has a data-dependent number of rows"):
        import_model(path, tmp_path / "m")


def test_an_output_with_the_name_of_a_count_is_named() -> None:
    nodes = [node("NonZero", ["x"], ["y"]), node("Relu", ["x"], ["y.count"])]

    with pytest.raises(InvalidModel, match="output 'y' has a row count 'y.count'"):
        planned(model(nodes, ROWS, ["y", "y.count"]), _given(_rows, 1)[0])
