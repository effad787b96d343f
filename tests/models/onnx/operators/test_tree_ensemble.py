"""Forests of random trees, against onnxruntime."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from onnx import TensorProto, helper
from support.onnx_models import graph_of, largest_difference, ours, save, theirs

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.importing import import_model
from xlaserve.importers.onnx.operators import forest
from xlaserve.importers.onnx.operators.forest import LEQ, Trees, forest_of, keys_of
from xlaserve.tensors import Tensor

MODES = [f"BRANCH_{mode}" for mode in ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ")]
COLUMNS = 3
ODD = np.asarray(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, np.inf, -np.inf, np.nan, 1.0, 0.99999994, 3.4e38],
    np.float32,
)
"""Includes denormals, which XLA flushes to 0 on the CPU, and zeros of both signs."""


def _forest(random: np.random.Generator, modes: list[str], trees: int = 4) -> dict[str, Any]:
    """Return the attributes of trees that ask for odd numbers, with leaves by (tree, node)."""
    names = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    found: dict[str, Any] = {f"nodes_{name}": [] for name in names}
    found["nodes_missing_value_tracks_true"] = []

    def grow(tree: int, depth: int) -> int:
        place = len(found["nodes_nodeids"])
        number: int = found["nodes_treeids"].count(tree)
        is_leaf = depth == 0 or random.random() < 0.15
        row = (
            *(tree, number, int(random.integers(COLUMNS))),
            float(random.choice(ODD[~np.isnan(ODD)])),
            *("LEAF" if is_leaf else str(random.choice(modes)), 0, 0),
        )
        for name, value in zip(names, row, strict=True):
            found[f"nodes_{name}"].append(value)
        found["nodes_missing_value_tracks_true"].append(int(random.integers(2)))
        if not is_leaf:
            found["nodes_truenodeids"][place] = grow(tree, depth - 1)
            found["nodes_falsenodeids"][place] = grow(tree, depth - 1)
        return number

    for tree in range(trees):
        grow(tree, 4)
    return found


def _weights(
    random: np.random.Generator, found: Mapping[str, Any], kind: str, targets: int, share: str
) -> dict[str, Any]:
    """Return weights of leaves: of all targets, of one for each tree, of a random one, of one."""
    nodes = zip(found["nodes_treeids"], found["nodes_nodeids"], found["nodes_modes"], strict=True)
    entries = [
        (tree, number, target)
        for tree, number, mode in nodes
        if mode == "LEAF"
        for target in {
            "all": range(targets),
            "tree": [tree % targets],
            "random": [int(random.integers(targets))],
            "first": [0],
        }[share]
    ]
    tree, number, target = (list(column) for column in zip(*entries, strict=True))
    named = {"n_targets": targets} if kind == "target" else {}
    return named | {
        f"{kind}_treeids": tree,
        f"{kind}_nodeids": number,
        f"{kind}_ids": target,
        f"{kind}_weights": [float(w) for w in random.standard_normal(len(entries)) / 4],
    }


def _model(
    operator: str, outputs: list[str], elements: int = TensorProto.FLOAT, **attributes: Any
) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x"], outputs, domain="ai.onnx.ml", **attributes)
    kinds = {"labels": TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "forest",
        [helper.make_tensor_value_info("x", elements, ["N", COLUMNS])],
        [helper.make_tensor_value_info(o, kinds.get(o, TensorProto.FLOAT), None) for o in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _rows(random: np.random.Generator) -> Tensor:
    found = random.choice(ODD, (60, COLUMNS))
    found[50:] = random.standard_normal((10, COLUMNS))
    return found.astype(np.float32)


def _same(model: onnx.ModelProto, rows: Tensor) -> None:
    expected, actual = theirs(model, {"x": rows}), ours(model, {"x": rows})

    for want, got in zip(expected, actual, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [*MODES, "all"])
def test_a_node_compares_as_onnxruntime_does(mode: str) -> None:
    """Denormals, zeros, infinities and missing values take the same branch."""
    random = np.random.default_rng(1)
    found = _forest(random, MODES if mode == "all" else [mode], trees=8)
    found |= _weights(random, found, "target", 1, "all")

    _same(_model("TreeEnsembleRegressor", ["y"], **found), _rows(random))


@pytest.mark.parametrize(
    ("aggregate", "share"),
    [("SUM", "all"), ("SUM", "first"), ("AVERAGE", "tree"), ("MIN", "random"), ("MAX", "tree")],
)
def test_trees_are_put_together_as_onnxruntime_does(aggregate: str, share: str) -> None:
    random = np.random.default_rng(2)
    found = _forest(random, ["BRANCH_LEQ"])
    found |= _weights(random, found, "target", 3, share)
    found |= {"aggregate_function": aggregate, "base_values": [0.5, -1.0, 2.0]}

    _same(_model("TreeEnsembleRegressor", ["y"], **found), _rows(random))


@pytest.mark.parametrize(
    ("transform", "targets"),
    [
        ("SOFTMAX", 3),
        ("LOGISTIC", 3),
        ("SOFTMAX_ZERO", 3),
        ("PROBIT", 3),
        ("PROBIT", 1),
        ("LOGISTIC", 1),
    ],
)
def test_scores_of_a_regressor_are_transformed(transform: str, targets: int) -> None:
    """PROBIT applies to single scores only."""
    random = np.random.default_rng(3)
    found = _forest(random, ["BRANCH_LT"])
    found |= _weights(random, found, "target", targets, "tree")
    found["target_weights"] = [abs(weight) / 4 for weight in found["target_weights"]]
    found |= {"post_transform": transform}

    _same(_model("TreeEnsembleRegressor", ["y"], **found), _rows(random))


@pytest.mark.parametrize(
    ("base", "share", "transform"),
    [
        ([], "all", "SOFTMAX"),
        ([], "random", "NONE"),
        ([], "first", "NONE"),
        ([], "first", "LOGISTIC"),
        ([], "positive", "NONE"),
        ([], "positive", "LOGISTIC"),
        ([0.25], "first", "NONE"),
        ([0.25, -0.5], "all", "LOGISTIC"),
        ([0.25, -0.5], "random", "NONE"),
    ],
)
def test_two_classes_have_rules_of_their_own(base: list[float], share: str, transform: str) -> None:
    """A single score may stand for both; its meaning depends on the signs of all weights."""
    random = np.random.default_rng(4)
    found = _forest(random, ["BRANCH_LEQ"])
    found |= _weights(random, found, "class", 2, "first" if share == "positive" else share)
    if share == "positive":
        found["class_weights"] = [abs(weight) for weight in found["class_weights"]]
    found |= {"classlabels_int64s": [5, 9], "post_transform": transform}
    if base:
        found["base_values"] = base

    _same(_model("TreeEnsembleClassifier", ["labels", "scores"], **found), _rows(random))


@pytest.mark.parametrize("share", ["all", "tree", "random"])
@pytest.mark.parametrize("classes", [1, 4])
def test_of_several_classes_the_first_best_one_with_a_score_is_taken(
    share: str, classes: int
) -> None:
    random = np.random.default_rng(5)
    found = _forest(random, ["BRANCH_LEQ"])
    found |= _weights(random, found, "class", classes, share)
    found |= {"classlabels_int64s": [7, 3, 8, 1][:classes], "post_transform": "SOFTMAX"}

    _same(_model("TreeEnsembleClassifier", ["labels", "scores"], **found), _rows(random))


def test_doubles_are_compared_as_doubles() -> None:
    """0.1 in FP64 is below 0.1 in FP32, and thresholds are not rounded."""
    random = np.random.default_rng(6)
    found = _forest(random, MODES)
    values = random.standard_normal(len(found.pop("nodes_values")))
    values[:4] = [0.1, 0.3, float(np.float32(0.1)), 0.7]
    found |= _weights(random, found, "target", 1, "all")
    weights = np.asarray(found.pop("target_weights"))
    found["nodes_values_as_tensor"] = onnx.numpy_helper.from_array(values)
    found["target_weights_as_tensor"] = onnx.numpy_helper.from_array(weights)
    rows = random.choice(np.append(values, [np.nan, 0.1, 5e-324, -0.0]), (60, COLUMNS))

    _same(_model("TreeEnsembleRegressor", ["y"], TensorProto.DOUBLE, **found), rows)


def _ensemble(**changed: Any) -> onnx.ModelProto:
    """Return two trees of opset 5, in which one node tests membership in a set."""
    tensor = onnx.numpy_helper.from_array
    nan = np.nan
    said: dict[str, Any] = {
        "n_targets": 2,
        "tree_roots": [0, 2],
        "nodes_modes": tensor(np.asarray([0, 6, 6], np.uint8)),
        "nodes_featureids": [0, 1, 2],
        "nodes_splits": tensor(np.asarray([0.5, 0, 0], np.float32)),
        "nodes_missing_value_tracks_true": [0, 1, 0],
        "membership_values": tensor(np.asarray([1, 2, 7, nan, 3, 1e-40, nan], np.float32)),
        "nodes_truenodeids": [1, 0, 2],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [3, 1, 4],
        "nodes_falseleafs": [1, 1, 1],
        "leaf_targetids": [0, 1, 0, 1, 1],
        "leaf_weights": tensor(np.asarray([1, 2, 4, 8, 16], np.float32)),
    }
    node = helper.make_node("TreeEnsemble", ["x"], ["y"], domain="ai.onnx.ml", **(said | changed))
    graph = helper.make_graph(
        [node],
        "sets",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", COLUMNS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 5)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


NAN = np.nan


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0, 1, 0], [1, 16]),
        ([0, 7, 3], [5, 0]),
        ([0, 6, 1e-40], [4, 2]),
        ([0, NAN, NAN], [1, 16]),
        ([1, 1, 0], [0, 24]),
        ([NAN, 1, 3], [4, 8]),
    ],
)
def test_a_node_asks_for_a_set_of_values(row: list[float], expected: list[float]) -> None:
    """A missing value takes the branch the node names for it, although no set contains it."""
    (found,) = ours(_ensemble(), {"x": np.asarray([row], np.float32)})

    np.testing.assert_array_equal(found, np.asarray([expected], np.float32))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nodes_truenodeids": [0, 0, 2]}, "deeper than 1000 nodes, or its nodes form a cycle"),
        ({"nodes_truenodeids": [9, 0, 2]}, "'nodes_truenodeids': expected 0 to 2, got 9 to 9"),
        ({"nodes_featureids": [0, 1, 3]}, "its nodes read 4 columns, its input has 3"),
        ({"nodes_featureids": [0, 1]}, "'nodes_featureids': expected 3 elements, got 2"),
        ({"nodes_featureids": [0, 1, -1]}, "expected 0 to 1073741822, got -1 to 1"),
        ({"leaf_targetids": [0, 1, 0, 1, 2]}, "'leaf_targetids': expected 0 to 1, got 0 to 2"),
        ({"tree_roots": [3]}, "'tree_roots': expected 0 to 2, got 3 to 3"),
        ({"aggregate_function": 4}, "aggregate_function: expected 0 to 3, got 4"),
        ({"post_transform": -1}, "post_transform: expected 0 to 4, got -1"),
        ({"colour": 3}, "its attribute 'colour' is not implemented"),
    ],
)
def test_trees_that_are_none_are_refused_by_node(changed: dict[str, Any], said: str) -> None:
    """No index in a file leads outside of the tables."""
    with pytest.raises(InvalidModel, match="TreeEnsemble 'y'") as refused:
        ours(_ensemble(**changed), {"x": np.zeros((1, COLUMNS), np.float32)})

    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("nodes_nodeids", [0, 1, 1], "tree 0 has duplicate node 1"),
        ("nodes_truenodeids", [5, 0, 0], "'nodes_truenodeids': tree 0 has no node 5"),
        ("nodes_modes", ["BRANCH_LIKE", "LEAF", "LEAF"], "got BRANCH_LIKE"),
        ("target_nodeids", [1, 7], "'target_nodeids': tree 0 has no node 7"),
        ("target_ids", [0, 1], "'target_ids': expected 0 to 0, got 0 to 1"),
        ("base_values", [1.0, 2.0], "base_values: expected 1 or 1 numbers, got 2"),
        ("aggregate_function", "MEDIAN", "got MEDIAN"),
    ],
)
def test_listed_trees_that_are_none_are_refused(name: str, value: Any, said: str) -> None:
    known: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "n_targets": 1,
        "nodes_featureids": [0, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "target_treeids": [0, 0],
        "target_nodeids": [1, 2],
        "target_ids": [0, 0],
        "target_weights": [1.0, 2.0],
    }
    model = _model("TreeEnsembleRegressor", ["y"], **(known | {name: value}))

    with pytest.raises(InvalidModel, match=said):
        ours(model, {"x": np.zeros((1, COLUMNS), np.float32)})


def test_keys_are_in_the_order_of_floats() -> None:
    ordered = np.asarray([-np.inf, -1, -1e-40, -1e-45, 0, 1e-45, 1e-40, 1, np.inf, np.nan])

    for dtype in (np.float32, np.float64):
        keys = keys_of(ordered.astype(dtype))

        assert (np.diff(keys.astype(object)) > 0).all()
        assert keys_of(np.asarray([-0.0], dtype)) == keys_of(np.asarray([0.0], dtype))


@pytest.mark.parametrize(
    ("modes", "walk"), [(MODES, {"tests", "children"}), (["BRANCH_LEQ"], {"nodes", "leaves"})]
)
def test_tables_are_parameters_and_rows_are_proved_independent(
    modes: list[str], walk: set[str], tmp_path: Path
) -> None:
    """The program has no table in it, and requests are batched."""
    random = np.random.default_rng(7)
    found = _forest(random, modes, trees=60)
    found |= _weights(random, found, "class", 3, "tree")
    found |= {"classlabels_int64s": [0, 1, 2], "post_transform": "SOFTMAX"}
    model = _model("TreeEnsembleClassifier", ["labels", "scores"], **found)

    imported = import_model(save(model, tmp_path), tmp_path / "m")

    large = {f"labels/{name}" for name in (*walk, "weights")}
    assert large <= set(imported.manifest.parameters)
    assert ("", 32) == (imported.notice, imported.manifest.max_batch_size)


@pytest.mark.parametrize("share", ["all", "tree"])
def test_nodes_that_fit_into_64_bits_are_one_table(
    share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk over one table and one over two end in the same leaves."""
    random = np.random.default_rng(9)
    found = _forest(random, ["BRANCH_LEQ", "BRANCH_GT"], trees=9)
    found |= _weights(random, found, "target", 3, share)
    model, rows = _model("TreeEnsembleRegressor", ["y"], **found), _rows(random)

    one_names, one = set(graph_of(model).constants), ours(model, {"x": rows})
    monkeypatch.setattr(forest, "_HALF", 3)
    two_names, two = set(graph_of(model).constants), ours(model, {"x": rows})

    assert {"y/nodes", "y/leaves", "y/roots", "y/weights"} == one_names
    assert {"y/tests", "y/children", "y/roots", "y/weights"} == two_names
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_allclose(one[0], theirs(model, {"x": rows})[0], rtol=1e-4, atol=1e-5)


def _leading(true: Sequence[int], false: Sequence[int]) -> Trees:
    """Return one tree with these children, of which two are leaves."""
    nodes = len(true)
    return Trees(
        columns=np.zeros(nodes, np.int64),
        thresholds=np.arange(nodes, dtype=np.float32),
        modes=np.full(nodes, LEQ),
        sends_missing=np.zeros(nodes, np.bool_),
        true=np.asarray(true),
        false=np.asarray(false),
        sets=(),
        roots=np.asarray([0]),
        leaves=2,
        targets=1,
        entries=(np.asarray([0, 1]), np.asarray([0, 0]), np.asarray([1.0, 2.0], np.float32)),
    )


def test_nodes_that_share_what_is_below_them_stay_as_many() -> None:
    """Each of sixty nodes leads to the next two: the number of paths is exponential."""
    made = forest_of(_leading(range(1, 61), range(2, 62)), groups=True)

    assert (60, 62) == (made.depth, len(made.tables["children"]))


@pytest.mark.parametrize(
    ("true", "false"),
    [
        pytest.param([2, 3], [1, 2], id="of one and of the node below it"),
        pytest.param([1, 3, 4], [2, 4, 3], id="of two at the same depth"),
    ],
)
def test_a_leaf_of_two_nodes_lies_beside_neither(true: list[int], false: list[int]) -> None:
    made = forest_of(_leading(true, false), groups=True)

    assert {"tests", "children", "roots", "weights"} == set(made.tables)


def test_a_tree_within_a_branch_is_converted_too() -> None:
    """Its tables remain attributes."""
    random = np.random.default_rng(8)
    found = _forest(random, MODES)
    found |= _weights(random, found, "target", 1, "all")
    inner = helper.make_node("TreeEnsembleRegressor", ["x"], ["z"], domain="ai.onnx.ml", **found)
    branch = helper.make_graph(
        [inner], "b", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    )
    model = _model("TreeEnsembleRegressor", ["y"], **found)
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model.graph.node[0].CopyFrom(chosen)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(True), "c"))
    rows = _rows(random)

    assert largest_difference(theirs(model, {"x": rows}), ours(model, {"x": rows})) < 1e-5
    assert ["c"] == list(graph_of(model).constants)
