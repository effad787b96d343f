from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import FLOAT, model, node, save

import onnx_speed


def test_row_for_each_batch_and_the_mean_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with an open image, run once or more by both."""
    weights = {"w": np.ones((4, 1, 3, 3), np.float32)}
    convolution = node("Conv", ["x", "w"], ["y"], group=4)
    made = model([convolution], {"x": (FLOAT, ["N", 4, "H", "W"])}, ["y"], weights)
    path = save(made, tmp_path, "tiny.onnx")

    onnx_speed.main([f"{path}:x=4,8,8", "--batch", "1,2", "--seconds", "0.01"])

    *rows, _, mean = capsys.readouterr().out.splitlines()
    assert ["| tiny | 1", "| tiny | 2"] == [row[:10] for row in rows[2:]]
    assert all(float(row.split("|")[5]) > 0 for row in rows[2:])
    assert mean.startswith("geometric mean ")


def test_answers_that_differ_end_the_comparison() -> None:
    right = [np.ones(3, np.float32)]

    onnx_speed.check_alike([right[0] * 1.0001], right)
    for wrong in (1.01, np.nan):
        with pytest.raises(SystemExit, match="answers differ by"):
            onnx_speed.check_alike([right[0] * wrong], right)


def test_mean_is_geometric() -> None:
    assert 1.0 == pytest.approx(onnx_speed.geometric_mean([4.0, 0.25]))
