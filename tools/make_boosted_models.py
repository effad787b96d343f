"""Write small XGBoost and LightGBM forests, with their answers, for the tests.

    pip install xgboost-cpu lightgbm onnxmltools scikit-learn
    python tools/make_boosted_models.py

Each file in tests/data/boosted is a model as onnxmltools writes it, stored with rows that include
missing values and the answers of the library that trained it. The tests read these files without
the packages, so they are written only once.
"""

# pyright: reportMissingImports=false

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TARGET = Path(__file__).parents[1] / "tests" / "data" / "boosted"
_ROWS, _COLUMNS, _KEPT = 300, 5, 40
_OPSET = 15


def _data() -> tuple[Any, Any, Any, Any, Any]:
    """Return rows with and without missing values, labels of two and three classes, and numbers."""
    random = np.random.default_rng(3)
    full = random.standard_normal((_ROWS, _COLUMNS)).astype(np.float32)
    full[:, 4] = random.integers(0, 6, _ROWS)
    holes = np.where(random.random(full.shape) < 0.1, np.float32("nan"), full)
    three = (full[:, 0] > 0).astype(np.int64) + (full[:, 1] > 0)
    two = (full[:, 0] + 0.3 * full[:, 2] > 0).astype(np.int64)
    return full, holes, two, three, full[:, 0] * 2 + full[:, 1] ** 2 + full[:, 4] % 3


def _models() -> Mapping[str, tuple[Callable[[], Any], Any, Any]]:
    import lightgbm
    import xgboost

    full, holes, two, three, numbers = _data()
    boosted: dict[str, Any] = {"n_estimators": 6, "max_depth": 3}
    quiet = {**boosted, "verbose": -1}
    texts = np.asarray(["low", "middle", "high"])[three]
    return {
        "xgboost-regressor": (lambda: xgboost.XGBRegressor(**boosted), holes, numbers),
        "xgboost-two-classes": (lambda: xgboost.XGBClassifier(**boosted), holes, two),
        "xgboost-three-classes": (lambda: xgboost.XGBClassifier(**boosted), holes, three),
        "lightgbm-regressor": (lambda: lightgbm.LGBMRegressor(**quiet), holes, numbers),
        "lightgbm-two-classes": (lambda: lightgbm.LGBMClassifier(**quiet), holes, two),
        "lightgbm-categories": (lambda: lightgbm.LGBMRegressor(**quiet), full, numbers),
        "lightgbm-texts": (lambda: lightgbm.LGBMClassifier(**quiet), holes, texts),
    }


def main() -> None:
    """Train and write all models."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from onnxmltools.convert import convert_lightgbm, convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    TARGET.mkdir(exist_ok=True)
    for name, (make, rows, wanted) in _models().items():
        fitted = make()
        fitted.fit(rows, wanted, **({"categorical_feature": [4]} if "categories" in name else {}))
        convert = convert_xgboost if name.startswith("xgboost") else convert_lightgbm
        types = [("x", FloatTensorType([None, _COLUMNS]))]
        made = convert(fitted, initial_types=types, target_opset=_OPSET)
        (TARGET / f"{name}.onnx").write_bytes(made.SerializeToString())
        kept = rows[:_KEPT]
        is_classifier = hasattr(fitted, "predict_proba")
        scores = fitted.predict_proba(kept) if is_classifier else fitted.predict(kept)[:, None]
        np.savez_compressed(TARGET / f"{name}.npz", rows=kept, scores=scores.astype(np.float32))


if __name__ == "__main__":
    main()
