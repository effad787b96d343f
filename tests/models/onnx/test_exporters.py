"""Models written by various exporters (tools/make_exporter_models.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from support.onnx_models import ours

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.importing import Options, import_model
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.tensors import Tensor

DATA = Path(__file__).parents[2] / "data" / "exporters"
NAMES = sorted(path.stem for path in DATA.glob("*.onnx"))
REFUSED = {
    "tf2onnx-15-steps": "has one row per iteration, and their number depends on data, but XLA"
    " needs fixed shapes: use a constant trip count and condition, or select other outputs with"
    " --output"
}
"""Those that an import refuses, and why: a GRU of Keras is a Loop there that its condition ends."""

UNCHECKED = {"skl2onnx-21-columns"}
"""Models that onnxruntime cannot run on random inputs: their categories would be unknown."""

CONVERTED = [name for name in NAMES if name not in REFUSED]
EXPORTERS = {"dynamo", "lightgbm", "paddle2onnx", "skl2onnx", "tf2onnx", "torchscript", "xgboost"}
MOST_BYTES = 1_000_000


def _kept(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs, and onnxruntime's outputs by name."""
    with np.load(DATA / f"{name}.npz") as stored:
        inputs, outputs = (
            {key.removeprefix(side): stored[key] for key in stored if key.startswith(side)}
            for side in ("in.", "out.")
        )
    return inputs, outputs


def _assert_close(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected
    for name, want in expected.items():
        assert (want.shape, want.dtype) == (found[name].shape, found[name].dtype)
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5 * scale)


def test_there_are_models_of_every_exporter_and_it_is_known_what_wrote_each() -> None:
    """They are small, to keep clones small."""
    written = json.loads((DATA / "written.json").read_text())

    assert {name.partition("-")[0] for name in NAMES} == EXPORTERS
    assert sorted(written) == NAMES
    assert all(line["by"] and len(line["with"]) > 1 for line in written.values())
    assert sum(path.stat().st_size for path in DATA.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("name", CONVERTED)
def test_answers_are_those_of_onnxruntime(name: str) -> None:
    made, (inputs, expected) = onnx.load(DATA / f"{name}.onnx"), _kept(name)

    found = dict(
        zip((output.name for output in made.graph.output), ours(made, inputs), strict=True)
    )

    _assert_close(expected, found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(InvalidModel, match=REFUSED[name]):
        ours(onnx.load(DATA / f"{name}.onnx"), _kept(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTED)
def test_each_imports_with_one_command_and_is_served_with_an_open_batch(
    name: str, tmp_path: Path
) -> None:
    """It matches onnxruntime, and a row's answer does not depend on its batch."""
    inputs, expected = _kept(name)
    imported = import_model(
        DATA / f"{name}.onnx", tmp_path / "m", Options(check=name not in UNCHECKED)
    )
    context = LoadContext("m", "1", ModelConfig(), compilation=Compilation())
    model = loaders.load(imported.path, context)
    try:
        found = model.execute(inputs)
        alone = model.execute({key: value[:1] for key, value in inputs.items()})
    finally:
        model.close()

    assert (imported.checked is None) == (name in UNCHECKED)
    assert ("", 32) == (imported.notice, imported.manifest.max_batch_size)
    _assert_close(expected, {key: np.asarray(value) for key, value in found.items()})
    first = {key: value[:1] for key, value in expected.items()}
    _assert_close(first, {key: np.asarray(value) for key, value in alone.items()})
