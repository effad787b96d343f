"""Support vector machines with random coefficients, compared with onnxruntime."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from onnx import TensorProto, helper
from support.onnx_models import ours, save, theirs

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.importing import import_model

COLUMNS = 3
ROWS = np.random.default_rng(1).standard_normal((20, COLUMNS)).astype(np.float32)


def _model(operator: str, said: Mapping[str, Any], elements: int = TensorProto.FLOAT) -> Any:
    outputs = ["labels", "scores"] if operator.endswith("Classifier") else ["scores"]
    node = helper.make_node(operator, ["x"], outputs, domain="ai.onnx.ml", **said)
    kinds = {"labels": TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "machine",
        [helper.make_tensor_value_info("x", elements, ["N", COLUMNS])],
        [helper.make_tensor_value_info(o, kinds.get(o, TensorProto.FLOAT), None) for o in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _same(model: onnx.ModelProto) -> None:
    expected, actual = theirs(model, {"x": ROWS}), ours(model, {"x": ROWS})

    for want, got in zip(expected, actual, strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def _numbers(random: np.random.Generator, count: int) -> list[float]:
    return [float(value) for value in random.standard_normal(count)]


def _machine(kernel: str, classes: int, **said: Any) -> dict[str, Any]:
    random = np.random.default_rng(2)
    sizes = [2, 1, 3, 2][:classes]
    vectors, pairs = sum(sizes), classes * (classes - 1) // 2
    made: dict[str, Any] = {
        "kernel_type": kernel,
        "kernel_params": [0.3, 0.5, 4.0 if classes == 2 else 3.0],
        "classlabels_ints": [10, 20, 30, 40][:classes],
        "vectors_per_class": sizes,
        "support_vectors": _numbers(random, vectors * COLUMNS),
        "coefficients": _numbers(random, vectors * (classes - 1)),
        "rho": _numbers(random, pairs),
    }
    if said.pop("probabilities", False):
        made |= {"prob_a": [-1.5] * pairs, "prob_b": _numbers(random, pairs)}
    return made | said


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_classes_are_voted_for_and_have_probabilities(kernel: str, probabilities: bool) -> None:
    """Probabilities of four classes are fitted to those of their pairs."""
    _same(_model("SVMClassifier", _machine(kernel, 4, probabilities=probabilities)))


@pytest.mark.parametrize(
    ("transform", "probabilities"),
    [("NONE", False), ("LOGISTIC", False), ("SOFTMAX", False), ("NONE", True)],
)
def test_two_classes_have_a_score_each(transform: str, probabilities: bool) -> None:
    said = _machine("POLY", 2, probabilities=probabilities, post_transform=transform)

    _same(_model("SVMClassifier", said))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("sign", [1, -1])
def test_without_vectors_it_is_linear(classes: int, sign: int) -> None:
    """If no coefficient is negative, two classes are separated at 0.5."""
    random = np.random.default_rng(3)
    said = {
        "classlabels_ints": [10, 20, 30][:classes],
        "coefficients": [sign * abs(value) for value in _numbers(random, classes * COLUMNS)],
        "rho": [-0.25],
        "kernel_params": [0.3, 0.5, 2.0],
    }

    _same(_model("SVMClassifier", said))


@pytest.mark.parametrize(
    ("kernel", "vectors", "one_class"), [("RBF", 5, 0), ("SIGMOID", 5, 1), ("LINEAR", 0, 0)]
)
def test_a_regressor_adds_up_its_kernels(kernel: str, vectors: int, one_class: int) -> None:
    random = np.random.default_rng(4)
    said = {
        "kernel_type": kernel,
        "kernel_params": [0.3, 0.5, 2.0],
        "n_supports": vectors,
        "coefficients": _numbers(random, vectors or COLUMNS),
        "rho": [0.1],
        "one_class": one_class,
    }
    if vectors:
        said["support_vectors"] = _numbers(random, vectors * COLUMNS)

    _same(_model("SVMRegressor", said))


def test_vectors_are_parameters_and_rows_are_proved_independent(tmp_path: Path) -> None:
    """The probability loop runs on for one row without changing another."""
    path = save(_model("SVMClassifier", _machine("RBF", 3, probabilities=True)), tmp_path)

    imported = import_model(path, tmp_path / "m")

    assert ["labels/coefficients", "labels/vectors"] == sorted(imported.manifest.parameters)
    assert ("", 32) == (imported.notice, imported.manifest.max_batch_size)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kernel_type": "LAPLACE"}, "expected LINEAR, POLY, RBF, SIGMOID, got LAPLACE"),
        ({"kernel_params": [1.0]}, "expected gamma, coef0 and degree, got [1.0]"),
        ({"vectors_per_class": [2, 4]}, "vectors_per_class: expected 3 numbers, got [2, 4]"),
        ({"coefficients": [1.0]}, "coefficients: expected 12 numbers, got 1"),
        ({"support_vectors": [1.0] * 7}, "expected 6 vectors"),
        ({"support_vectors": [1.0] * 6}, "expected rows of 1 columns, got the shape [20, 3]"),
        ({"rho": [1.0]}, "rho: expected 3 numbers, got 1"),
        ({"prob_a": [1.0]}, "prob_a, prob_b: expected 3 numbers, got 1"),
        ({"colour": 1}, "its attribute 'colour' is not implemented"),
    ],
)
def test_machines_that_are_none_are_refused(changed: dict[str, Any], said: str) -> None:
    model = _model("SVMClassifier", _machine("RBF", 3) | changed)

    with pytest.raises(InvalidModel) as refused:
        ours(model, {"x": ROWS})

    assert said in str(refused.value)
    assert "SVMClassifier 'labels'" in str(refused.value)
