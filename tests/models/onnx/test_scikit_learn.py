from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
skl2onnx = pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")

from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Binarizer, MinMaxScaler, Normalizer, StandardScaler
from support.onnx_models import largest_difference, ours, save, theirs

from xlaserve.errors import InvalidModel
from xlaserve.models.onnx.importing import Options, import_model

RANDOM = np.random.default_rng(3)
ROWS = RANDOM.standard_normal((60, 5)).astype(np.float32)
LABELS = (ROWS[:, 0] > 0).astype(np.int64) + (ROWS[:, 1] > 0)
GIVEN = {"x": ROWS[:7]}


def _converted(estimator: Any, **options: bool) -> Any:
    types = [("x", skl2onnx.common.data_types.FloatTensorType([None, 5]))]
    return skl2onnx.convert_sklearn(
        estimator,
        initial_types=types,
        target_opset={"": 17, "ai.onnx.ml": 3},
        options={id(estimator): options} if options else None,
    )


ESTIMATORS = {
    "logistic regression": (LogisticRegression, LABELS),
    "logistic regression of two classes": (LogisticRegression, LABELS > 0),
    "scaled": (lambda: make_pipeline(StandardScaler(), LogisticRegression()), LABELS),
    "normalised": (lambda: make_pipeline(Normalizer(), LogisticRegression()), LABELS),
    "perceptron": (lambda: MLPClassifier(hidden_layer_sizes=(8,), max_iter=20), LABELS),
}


@pytest.mark.filterwarnings("ignore")  # too few iterations to converge
@pytest.mark.parametrize("name", ESTIMATORS)
def test_classifier_gives_labels_and_a_tensor_of_probabilities(name: str) -> None:
    """ZipMap, which makes a list of maps of them, is left out."""
    make, labels = ESTIMATORS[name]
    estimator = make().fit(ROWS, labels.astype(np.int64))
    mapped, plain = _converted(estimator), _converted(estimator, zipmap=False)

    expected, actual = theirs(plain, GIVEN), ours(mapped, GIVEN)

    np.testing.assert_array_equal(expected[0], actual[0])
    assert largest_difference(expected, actual) < 1e-5


NUMBERS = {
    "linear regression": LinearRegression,
    "perceptron": lambda: MLPRegressor(hidden_layer_sizes=(8,), max_iter=20),
    "min-max scaler": MinMaxScaler,
    "standard scaler": StandardScaler,
    "normalizer of L1": lambda: Normalizer("l1"),
    "binarizer": lambda: Binarizer(threshold=0.1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NUMBERS)
def test_estimator_gives_what_onnxruntime_gives(name: str) -> None:
    made = _converted(NUMBERS[name]().fit(ROWS, ROWS[:, 0] * 2 + ROWS[:, 1]))

    assert largest_difference(theirs(made, GIVEN), ours(made, GIVEN)) < 1e-5


def test_labels_of_text_can_be_left_out(tmp_path: Path) -> None:
    """JAX has no tensors of text; the probabilities are enough to tell the class."""
    texts = np.asarray(["low", "middle", "high"])[LABELS]
    path = save(_converted(LogisticRegression().fit(ROWS, texts)), tmp_path)

    with pytest.raises(InvalidModel, match="its labels are texts"):
        import_model(path, tmp_path / "m")
    imported = import_model(path, tmp_path / "m", Options(outputs=["output_probability"]))

    assert ["FP32[-1,3]"] == [str(spec) for spec in imported.manifest.outputs]
    assert imported.checked is not None
