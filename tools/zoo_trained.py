"""Models of the zoo that are trained here, and exported with their libraries' converters."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Data sets and converters return different types, depending on their arguments.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

_OPSET = 17
_ML_OPSET = 3
_SEED = 3


@dataclass(frozen=True, slots=True)
class Trained:
    """The model, data and exporter of one row."""

    libraries: tuple[str, ...]
    """Distributions whose versions and licences are recorded."""
    make: Callable[[], Any]
    """Returns the untrained model."""
    data: Callable[[], tuple[Any, Any]]
    """Returns rows and their labels."""
    write: Callable[[Any, Any], bytes]
    """Writes the trained model as an ONNX file; also takes sample rows."""


def train(name: str, path: Path) -> None:
    """Train a model and write its file."""
    made = TRAINED[name]
    rows, targets = made.data()
    path.write_bytes(made.write(made.make().fit(rows, targets), rows))


def _with_skl2onnx(model: Any, rows: Any) -> bytes:
    from skl2onnx import to_onnx

    opsets = {"": _OPSET, "ai.onnx.ml": _ML_OPSET}
    return bytes(to_onnx(model, rows[:1], target_opset=opsets).SerializeToString())


def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    rows, targets = load_digits(return_X_y=True)
    return rows.astype(np.float32), targets


def _diabetes() -> tuple[Any, Any]:
    from sklearn.datasets import load_diabetes

    rows, targets = load_diabetes(return_X_y=True)
    return rows.astype(np.float32), targets


def _iris() -> tuple[Any, Any]:
    from sklearn.datasets import load_iris

    found = load_iris()
    return found.data.astype(np.float32), found.target_names[found.target].astype(str)


def _forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(n_estimators=100, random_state=_SEED)


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))


def _support_vectors() -> Any:
    from sklearn.svm import SVC

    return SVC()


def _neighbours() -> Any:
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier()


def _perceptron() -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier((64,), random_state=_SEED)


def _xgboost() -> Any:
    import xgboost

    return xgboost.XGBClassifier(n_estimators=20, random_state=_SEED)


def _lightgbm() -> Any:
    import lightgbm

    return lightgbm.LGBMClassifier(n_estimators=20, random_state=_SEED, verbose=-1)


def _with_onnxmltools(model: Any, rows: Any) -> bytes:
    from onnxmltools import convert_lightgbm, convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    convert = convert_xgboost if type(model).__name__ == "XGBClassifier" else convert_lightgbm
    said = [("input", FloatTensorType([None, rows.shape[1]]))]
    return bytes(convert(model, initial_types=said, target_opset=15).SerializeToString())


def _boosted() -> Any:
    from sklearn.ensemble import GradientBoostingRegressor

    return GradientBoostingRegressor(random_state=_SEED)


def boosted_numbers() -> bytes:
    """Return a forest of 100 trees with 31 leaves (LightGBM's default) on 30 random columns."""
    # Below 10,000 rows, early stopping is off by default.
    from sklearn.ensemble import HistGradientBoostingRegressor

    random = np.random.default_rng(_SEED)
    rows = random.standard_normal((4000, 30)).astype(np.float32)
    targets = rows[:, 0] * rows[:, 1] + np.sin(3 * rows[:, 2]) + rows[:, 3:].sum(1) / 9
    made = HistGradientBoostingRegressor(max_iter=100, max_leaf_nodes=31)
    return _with_skl2onnx(made.fit(rows, targets), rows)


_SCIKIT = ("scikit-learn", "skl2onnx")

TRAINED: Mapping[str, Trained] = MappingProxyType(
    {
        "lightgbm": Trained(("lightgbm", "onnxmltools"), _lightgbm, _digits, _with_onnxmltools),
        "neighbours": Trained(_SCIKIT, _neighbours, _digits, _with_skl2onnx),
        "perceptron": Trained(_SCIKIT, _perceptron, _digits, _with_skl2onnx),
        "support-vectors": Trained(_SCIKIT, _support_vectors, _digits, _with_skl2onnx),
        "xgboost": Trained(("xgboost-cpu", "onnxmltools"), _xgboost, _digits, _with_onnxmltools),
        "gradient-boosting": Trained(_SCIKIT, _boosted, _diabetes, _with_skl2onnx),
        "iris": Trained(_SCIKIT, _logistic, _iris, _with_skl2onnx),
        "logistic": Trained(_SCIKIT, _logistic, _digits, _with_skl2onnx),
        "random-forest": Trained(_SCIKIT, _forest, _digits, _with_skl2onnx),
    }
)
