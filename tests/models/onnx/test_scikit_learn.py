from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
skl2onnx = pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")

from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Binarizer, MinMaxScaler, Normalizer, StandardScaler
from sklearn.svm import SVC, SVR, OneClassSVM
from support.onnx_models import largest_difference, ours, theirs

RANDOM = np.random.default_rng(3)
ROWS = RANDOM.standard_normal((60, 5)).astype(np.float32)
LABELS = (ROWS[:, 0] > 0).astype(np.int64) + (ROWS[:, 1] > 0)
GIVEN = {"x": ROWS[:7]}
PROBABILITY: dict[str, Any] = {"probability": True, "random_state": 0}
"""Typed so because the stubs of scikit-learn take the first for a text."""


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
    "forest": (lambda: RandomForestClassifier(5), LABELS),
    "forest of two classes": (lambda: RandomForestClassifier(5), LABELS > 0),
    "boosting": (lambda: GradientBoostingClassifier(n_estimators=4), LABELS),
    "boosting of two classes": (lambda: HistGradientBoostingClassifier(max_iter=4), LABELS > 0),
    "support vectors": (lambda: SVC(**PROBABILITY), LABELS),
    "neighbours": (lambda: KNeighborsClassifier(3), LABELS),
    "naive Bayes": (GaussianNB, LABELS),
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
    "forest": lambda: RandomForestRegressor(5),
    "isolation forest": lambda: IsolationForest(n_estimators=5),
    "boosting": lambda: HistGradientBoostingRegressor(max_iter=4),
    "support vectors": SVR,
    "one class": OneClassSVM,
    "neighbours": lambda: KNeighborsRegressor(3),
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
