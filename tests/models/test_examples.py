"""The committed example models, and the scripts that create them."""

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from xlaserve.artifact import manifest
from xlaserve.authoring.export import load_exportable
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = EXAMPLES / "models"
COMMITTED = ("digits", "simple", "identity", "mlp")
SCRIPTS = (*COMMITTED, "plain_jax", "flax_nnx", "equinox_mlp", "recurrent")


@pytest.fixture(autouse=True)
def _usual_promotion() -> Iterator[None]:
    """Restore JAX's default promotion rules, for which the examples are written."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_writes_a_model_that_loads(
    tmp_path: Path, load: Load, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "digits":
        pytest.importorskip("sklearn", reason="the images come with scikit-learn")
    path = tmp_path / name / "1"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(path)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    with jax.enable_x64(True):
        model = load(path)
        ones = {s.name: np.ones((2, *s.shape[1:]), s.datatype.dtype) for s in model.info.inputs}
        found = run(model, ones)

    assert {spec.name for spec in model.info.outputs} == found.keys()
    assert all(np.isfinite(output).all() for output in found.values())


@pytest.mark.parametrize("name", ["plain_jax", "flax_nnx", "equinox_mlp", "recurrent"])
def test_script_is_one_for_the_command_line(name: str) -> None:
    assert load_exportable(f"{EXAMPLES / name}.py:model").inputs


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_model_was_written_by_the_oldest_jax(name: str) -> None:
    """Newer versions of JAX read the files of older ones, but not vice versa."""
    (wanted,) = {
        line.split(">=")[1].split('"')[0]
        for line in (EXAMPLES.parent / "pyproject.toml").read_text().splitlines()
        if line.startswith('    "jax>=')
    }

    assert wanted == manifest.read(MODELS / name / "1").jax_version


@pytest.fixture
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("_x64")
def test_simple_adds_and_subtracts(load: Load, run: Run) -> None:
    model = load(MODELS / "simple" / "1", read_config(MODELS / "simple"))
    left, right = np.arange(32, dtype=np.int32).reshape(2, 16), np.ones((2, 16), np.int32)

    found = run(model, {"INPUT0": left, "INPUT1": right})

    assert 8 == model.info.max_batch_size
    assert np.array_equal(left + 1, found["OUTPUT0"])
    assert np.array_equal(left - 1, found["OUTPUT1"])


@pytest.mark.usefixtures("_x64")
def test_identity_gives_back_what_it_gets(load: Load, run: Run) -> None:
    model = load(MODELS / "identity" / "1")
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)

    assert 64 == model.info.max_batch_size
    assert np.array_equal(x, run(model, {"x": x})["y"])


@pytest.mark.usefixtures("_x64")
def test_mlp_gives_what_numpy_gives(load: Load, run: Run) -> None:
    model = load(MODELS / "mlp" / "1")
    random = np.random.RandomState(7)
    w1, b1, w2, b2 = (
        (random.standard_normal(shape) * 0.05).astype(np.float32)
        for shape in ((784, 512), (512,), (512, 10), (10,))
    )
    x = np.random.default_rng(0).standard_normal((3, 784)).astype(np.float32)

    found = run(model, {"x": x})["y"]

    assert np.allclose(np.maximum(x @ w1 + b1, 0) @ w2 + b2, found, atol=1e-4)


@pytest.fixture(scope="module")
def digits() -> Iterator[LoadedModel]:
    """The model of two tests, because compiling it takes three seconds of a core."""
    with jax.enable_x64(True):
        model = loaders.load(MODELS / "digits" / "1", LoadContext("m", "1", ModelConfig()))
    yield model
    model.close()


@pytest.mark.usefixtures("_x64")
def test_digits_recognises_images_held_out(digits: LoadedModel, run: Run) -> None:
    pytest.importorskip("sklearn", reason="the images come with scikit-learn")
    _, held_out = runpy.run_path(str(EXAMPLES / "digits.py"))["split"]()
    batches = np.array_split(held_out.pixels, 8)
    scores = [run(digits, {"image": batch})["probabilities"] for batch in batches]

    assert np.mean(np.argmax(np.concatenate(scores), axis=1) == held_out.digits) >= 0.97


@pytest.mark.usefixtures("_x64")
def test_seven_is_a_seven(digits: LoadedModel, run: Run) -> None:
    with Image.open(EXAMPLES / "data" / "seven.png") as image:
        shown = image.size
        small = np.asarray(image.resize((8, 8), Image.Resampling.BOX), np.float32)

    found = run(digits, {"image": small[None] / 255})["probabilities"]

    assert (160, 160) == shown
    assert 7 == np.argmax(found)
    assert 1 == pytest.approx(found.sum(), abs=1e-5)
