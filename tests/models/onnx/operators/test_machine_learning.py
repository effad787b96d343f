"""Operators of ai.onnx.ml without a case in onnx's suite, compared with onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import ours, theirs

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

NAN = float("nan")
FLOATS = np.asarray([[0, 0, 0], [2, NAN, 0.5], [-3, -1, -2], [1, 2, -1]], np.float32)
WHOLE = np.asarray([[0, 0, 0], [2, 7, 5], [-3, -1, -2], [1, 2, -1]], np.int64)


def _model(operator: str, x: Tensor, outputs: list[str], **said: Any) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x"], outputs, domain="ai.onnx.ml", **said)
    element = int(helper.np_dtype_to_tensor_dtype(x.dtype))
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", element, ["N", x.shape[1]])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 4)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    for output in made.graph.output:
        output.ClearField("type")
    return onnx.shape_inference.infer_shapes(made)


CASES: list[tuple[str, Tensor, dict[str, Any]]] = [
    ("Normalizer", FLOATS, {"norm": "MAX"}),
    ("Normalizer", WHOLE, {"norm": "L1"}),
    ("Normalizer", WHOLE.astype(np.float64), {"norm": "L2"}),
    ("Scaler", WHOLE, {"offset": [1.0, 2.0, 3.0], "scale": [2.0, 1.0, 0.5]}),
    ("OneHotEncoder", FLOATS, {"cats_int64s": [0, 2, -1]}),
    ("OneHotEncoder", WHOLE, {"cats_int64s": [0, 2, -1], "zeros": 1}),
    ("Imputer", FLOATS, {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": NAN}),
    ("Imputer", FLOATS, {"imputed_value_floats": [7.0, 8.0], "replaced_value_float": 0.0}),
    ("Imputer", WHOLE, {"imputed_value_int64s": [7], "replaced_value_int64": 2}),
    ("LabelEncoder", WHOLE, {"keys_int64s": [1, 2, 1], "values_floats": [0.5, 2, 9]}),
    ("LabelEncoder", FLOATS, {"keys_floats": [0.0, NAN], "values_int64s": [5, 6]}),
    (
        "LabelEncoder",
        WHOLE.astype(np.float64),
        {
            "keys_tensor": numpy_helper.from_array(np.asarray([1.0, 7.0])),
            "values_tensor": numpy_helper.from_array(np.asarray([3.0, 4.0])),
            "default_tensor": numpy_helper.from_array(np.asarray([-1.0])),
        },
    ),
    ("LinearRegressor", WHOLE.astype(np.float32), {"coefficients": [1.0, 0.5, 0.25]}),
]


@pytest.mark.parametrize(("operator", "x", "said"), CASES)
def test_operator_gives_what_onnxruntime_gives(
    operator: str, x: Tensor, said: dict[str, Any]
) -> None:
    """The inputs include missing values, rows of zeros, too few values and repeated keys."""
    said = said | ({"targets": 1, "post_transform": "LOGISTIC"} if "coefficients" in said else {})
    model = _model(operator, x, ["y"], **said)
    (want,), (got,) = theirs(model, {"x": x}), ours(model, {"x": x})

    assert (want.shape, want.dtype) == (got.shape, got.dtype)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_one_score_of_a_linear_classifier_is_that_of_the_second_class(transform: str) -> None:
    x = np.nan_to_num(FLOATS)
    said: dict[str, Any] = {
        "coefficients": [0.5, -1.0, 0.25],
        "intercepts": [0.1],
        "classlabels_ints": [5, 9],
        "post_transform": transform,
    }
    model = _model("LinearClassifier", x, ["labels", "scores"], **said)

    for want, got in zip(theirs(model, {"x": x}), ours(model, {"x": x}), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


COEFFICIENTS = [0.5, -1.0, 0.25, 2.0, 0.75, -0.5, 1.5, -0.25]


@pytest.mark.parametrize("features", [2, 4])
@pytest.mark.parametrize("datatype", [np.float32, np.float64, np.int64])
def test_coefficients_beyond_the_features_are_not_read(features: int, datatype: type) -> None:
    """Rows are stored without gaps, as onnxruntime reads them."""
    x: Tensor = WHOLE[:, [0, 1, 2, 0]][:, :features].astype(datatype)
    said: dict[str, Any] = {"coefficients": COEFFICIENTS, "intercepts": [0.25, -0.5]}
    classifier = _model("LinearClassifier", x, ["l", "s"], classlabels_ints=[5, 9], **said)
    regressor = _model("LinearRegressor", x, ["y"], targets=2, **said)
    # onnxruntime has regressors for FP32 only.
    models = (classifier, regressor) if datatype is np.float32 else (classifier,)

    for model in models:
        for want, got in zip(theirs(model, {"x": x}), ours(model, {"x": x}), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_example_of_irises_that_onnxruntime_has_is_read_as_it_does() -> None:
    """It has 12 coefficients, for three classes and an input of two features."""
    model = onnx.load(Path(onnxruntime.__file__).parent / "datasets" / "logreg_iris.onnx")
    del model.graph.output[:]
    for name in ("label", "probability_tensor_normalized"):
        model.graph.output.append(helper.make_empty_tensor_value_info(name))
    x = {"float_input": FLOATS[1:, [0, 2]]}

    for want, got in zip(theirs(model, x), ours(model, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("operator", "said", "advice"),
    [
        ("CastMap", {}, "export the model with this node's output as its input"),
        ("CategoryMapper", {}, "send the number of the category instead"),
        ("DictVectorizer", {}, "send the resulting vector instead"),
        (
            "LinearRegressor",
            {"coefficients": COEFFICIENTS, "targets": 3},
            "coefficients: expected 3 rows of 3 features, got 8",
        ),
        ("Normalizer", {"norm": "L7"}, "norm: expected L1, L2, MAX, got L7"),
        (
            "LabelEncoder",
            {"keys_strings": ["a"], "values_int64s": [1]},
            "encode them before the request",
        ),
    ],
)
def test_what_is_refused_says_what_to_do(operator: str, said: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidModel, match=f"{operator} 'y'") as refused:
        ours(_model(operator, FLOATS, ["y"], **said), {"x": FLOATS})

    assert advice in str(refused.value)
