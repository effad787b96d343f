"""XGBoost and LightGBM forests converted by onnxmltools (tools/make_boosted_models.py)."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from support.onnx_models import ours

from xlaserve.importers.onnx.importing import import_model

DATA = Path(__file__).parents[2] / "data" / "boosted"
NAMES = sorted(path.stem for path in DATA.glob("*.onnx"))


def test_there_are_models_of_both() -> None:
    assert {"xgboost", "lightgbm"} == {name.partition("-")[0] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_library_that_trained_it(name: str) -> None:
    """Missing values and categories take the same branches."""
    kept = np.load(DATA / f"{name}.npz")
    made = onnx.load(DATA / f"{name}.onnx")
    if name == "lightgbm-texts":
        del made.graph.output[0]  # its labels

    found = ours(made, {"x": kept["rows"]})[-1]

    np.testing.assert_allclose(found, kept["scores"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lightgbm-texts", "xgboost-two-classes"])
def test_a_boosted_forest_imports_with_one_command(tmp_path: Path, name: str) -> None:
    """It matches onnxruntime, and its rows are proved independent."""
    imported = import_model(DATA / f"{name}.onnx", tmp_path / "m")

    assert imported.checked is not None
    assert ("", 32) == (imported.notice, imported.manifest.max_batch_size)
    assert ("in labels.txt, one per line" in imported.labels) == (name == "lightgbm-texts")
