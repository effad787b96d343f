import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import FLOAT, INT64, Inputs, X, model, node, save

from xlaserve.errors import InvalidModel
from xlaserve.models import manifest
from xlaserve.models.loaded import Stage
from xlaserve.models.onnx import checking
from xlaserve.models.onnx.importing import Options, import_model

WEIGHT = np.linspace(-1, 1, 4 * 300, dtype=np.float32).reshape(4, 300)


def _linear(directory: Path, inputs: Inputs = X) -> Path:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Relu", ["m"], ["y"])]
    return save(model(nodes, inputs, ["y"], {"w": WEIGHT}), directory)


def test_import_writes_a_version_with_its_weights_as_arguments(tmp_path: Path) -> None:
    imported = import_model(_linear(tmp_path), tmp_path / "models" / "m")

    assert tmp_path / "models/m/1" == imported.path
    described = manifest.read(imported.path)
    assert ["FP32[-1,4]"] == [str(spec) for spec in described.inputs]
    assert ["FP32[-1,300]"] == [str(spec) for spec in described.outputs]
    assert (32, ("w",), WEIGHT.nbytes) == (
        described.max_batch_size,
        described.parameters,
        described.parameters_bytes,
    )
    assert ("cpu", "cuda", "tpu") == described.platforms


def test_import_is_compared_for_two_batch_sizes(tmp_path: Path) -> None:
    checked = import_model(_linear(tmp_path), tmp_path / "m").checked

    assert checked is not None
    assert (1, 3) == checked.batches
    assert checked.worst.relative < 1e-6


def test_model_for_one_row_is_compared_row_by_row_once_its_batch_is_open(tmp_path: Path) -> None:
    path = _linear(tmp_path, {"x": (FLOAT, [1, 4])})

    fixed = import_model(path, tmp_path / "fixed")
    free = import_model(path, tmp_path / "free", Options(shapes={"x": (-1, 4)}))

    assert fixed.checked is not None
    assert free.checked is not None
    assert ((0,), 0) == (fixed.checked.batches, fixed.manifest.max_batch_size)
    assert ((1, 3), 32) == (free.checked.batches, free.manifest.max_batch_size)


def test_reshape_that_was_written_for_one_row_keeps_the_open_batch(tmp_path: Path) -> None:
    """Exporters that know no open batch write Reshape to [1, 8]."""
    nodes = [node("Reshape", ["x", "shape"], ["flat"]), node("Softmax", ["flat"], ["y"])]
    made = model(nodes, {"x": (FLOAT, [1, 4, 2])}, ["y"], {"shape": np.asarray([1, 8])})

    options = Options(shapes={"x": (-1, 4, 2)})
    imported = import_model(save(made, tmp_path), tmp_path / "m", options)

    assert ["FP32[-1,8]"] == [str(spec) for spec in imported.manifest.outputs]
    assert imported.checked is not None


def test_next_version_is_written_and_none_is_overwritten(tmp_path: Path) -> None:
    path, options = _linear(tmp_path), Options(check=False)

    versions = [import_model(path, tmp_path / "m", options).path.name for _ in range(2)]

    assert ["1", "2"] == versions
    with pytest.raises(FileExistsError, match="overwrites nothing"):
        import_model(path, tmp_path / "m", Options(version=2))


def test_what_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it: no model, no version, no temporary directory."""
    real = checking.compared
    monkeypatch.setattr(
        checking, "compared", lambda spec, want, have, limit: real(spec, want, have + 1, limit)
    )
    repository = tmp_path / "models"

    with pytest.raises(InvalidModel, match="output 'y' differs from what onnxruntime gives by 1"):
        import_model(_linear(tmp_path), repository / "m")

    assert [] == list(repository.iterdir())


def test_stages_are_told_in_order(tmp_path: Path) -> None:
    seen: list[Stage] = []

    import_model(_linear(tmp_path), tmp_path / "m", on_stage=seen.append)

    assert [
        *("reading", "converting 1 of 2", "converting 2 of 2"),
        *("exporting", "checking 1 of 2", "checking 2 of 2"),
    ] == [str(stage) for stage in seen]


def test_rows_that_depend_on_one_another_are_imported_by_themselves(tmp_path: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])]
    path = save(model(nodes, X, ["y"]), tmp_path)

    imported = import_model(path, tmp_path / "m")

    assert imported.manifest.verdict is not None
    assert ("mixed", 0) == (
        imported.manifest.verdict.independence,
        imported.manifest.max_batch_size,
    )
    assert imported.notice.endswith("max_batch_size is 0 instead of 32")
    assert imported.checked is not None
    assert (1, 3) == imported.checked.batches


def test_rows_that_depend_on_one_another_are_not_declared_away(tmp_path: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])]
    path = save(model(nodes, X, ["y"]), tmp_path)

    with pytest.raises(InvalidModel, match="declared independent, but they are not"):
        import_model(path, tmp_path / "m", Options(batch_independent=True))
    assert [path] == list(tmp_path.iterdir())


def test_outputs_may_be_left_out(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("ReduceSum", ["x"], ["total"])]
    path = save(model(nodes, X, ["total", "y"]), tmp_path)

    imported = import_model(path, tmp_path / "m", Options(outputs=["y"]))

    assert ["y"] == [spec.name for spec in imported.manifest.outputs]


def test_integers_keep_64_bits(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "large"], ["y"])]
    made = model(nodes, {"x": (INT64, ["N", 1])}, ["y"], {"large": np.asarray([2**40])})

    imported = import_model(save(made, tmp_path), tmp_path / "m")

    assert ["INT64[-1,1]"] == [str(spec) for spec in imported.manifest.outputs]


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_packages_are_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Without onnx the error says what to install; without onnxruntime nothing is compared."""
    path = _linear(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "xlaserve.models.onnx.reading", raising=False)
    monkeypatch.delattr("xlaserve.models.onnx.reading", raising=False)

    if missing == "onnx":
        with pytest.raises(InvalidModel, match=r"pip install 'xlaserve\[onnx\]'"):
            import_model(path, tmp_path / "m")
    else:
        assert import_model(path, tmp_path / "m").checked is None
