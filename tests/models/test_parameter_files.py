"""Parameters from files of other programs, matched by the paths of their leaves."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xlaserve.artifact import manifest, parameter_files, weights
from xlaserve.cli.export import export
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext

W = np.arange(8, dtype=np.float32).reshape(4, 2)
B = np.ones(2, ml_dtypes.bfloat16)
EXPECTED = {
    "layers": [{"w": jax.ShapeDtypeStruct((4, 2), np.float32)}],
    "b": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
}


def _npz(directory: Path, arrays: Mapping[str, Any]) -> str:
    np.savez(directory / "p.npz", **arrays)
    return f"npz:{directory / 'p.npz'}"


def _safetensors(directory: Path, arrays: Mapping[str, Any]) -> str:
    weights.write(directory / "p.safetensors", arrays)
    return f"safetensors:{directory / 'p.safetensors'}"


def _orbax(directory: Path, tree: Any) -> str:
    orbax = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory / "checkpoint", tree)
    return f"orbax:{directory / 'checkpoint'}"


@pytest.mark.parametrize("separator", ["/", "."])
def test_leaves_are_found_by_their_paths(tmp_path: Path, separator: str) -> None:
    source = _safetensors(tmp_path, {f"layers{separator}0{separator}w": W, "b": B})
    found: Any = parameter_files.filled(EXPECTED, source)

    np.testing.assert_array_equal(W, found["layers"][0]["w"])
    assert B.tolist() == found["b"].tolist()


def test_npz_may_have_bfloat16_but_no_other_dtype_without_a_name(tmp_path: Path) -> None:
    """numpy stores both as unnamed bytes; one byte per element could be any kind of float8."""
    source = _npz(tmp_path, {"layers/0/w": W, "b": B})
    found: Any = parameter_files.filled(EXPECTED, source)
    eights = {"e": jax.ShapeDtypeStruct((2,), jnp.float8_e4m3fn)}

    assert (B.dtype, B.tolist()) == (found["b"].dtype, found["b"].tolist())
    with pytest.raises(InvalidModel, match=r"'e': expected float8_e4m3fn\[2\], got void8\[2\]"):
        parameter_files.filled(eights, _npz(tmp_path, {"e": B.astype(jnp.float8_e4m3fn)}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_checkpoint_of_orbax_is_restored_whole(tmp_path: Path) -> None:
    """It is restored from two devices to arrays on the host."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    source = _orbax(tmp_path, {"layers": [{"w": jax.device_put(W, sharding)}], "b": jnp.asarray(B)})
    found: Any = parameter_files.filled(EXPECTED, source)

    assert isinstance(found["layers"][0]["w"], np.ndarray)
    np.testing.assert_array_equal(W, found["layers"][0]["w"])
    assert B.dtype == found["b"].dtype


def test_tied_leaves_and_those_that_are_no_arrays_stay(tmp_path: Path) -> None:
    tied = np.zeros(2, np.float32)
    source = _npz(tmp_path, {"a": np.ones(2, np.float32)})
    found: Any = parameter_files.filled({"a": tied, "b": tied, "rate": 0.5, "name": None}, source)

    assert found["a"] is found["b"]
    assert (0.5, None, [1, 1]) == (found["rate"], found["name"], found["b"].tolist())


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"b": B}, "parameter 'layers/0/w' (float32[4,2]) is missing from SOURCE, which has "),
        (
            {"layers/0/w": W.T, "b": B},
            "parameter 'layers/0/w': expected float32[4,2], got float32[2,4] from SOURCE",
        ),
        (
            {"layers/0/w": W.astype(np.float16), "b": B},
            "parameter 'layers/0/w': expected float32[4,2], got float16[4,2] from SOURCE",
        ),
        (
            {"layers/0/w": W, "b": B, "more": W},
            "--params: SOURCE has 'more', which are not parameters of the model",
        ),
        (
            {"layers/0/w": W, "layers.0.w": W, "b": B},
            "--params: SOURCE has two arrays with the path 'layers/0/w'",
        ),
    ],
)
def test_mismatch_names_the_leaf(tmp_path: Path, arrays: dict[str, Any], expected: str) -> None:
    source = _safetensors(tmp_path, arrays)
    with pytest.raises(InvalidModel) as caught:
        parameter_files.filled(EXPECTED, source)

    assert str(caught.value).startswith(expected.replace("SOURCE", source))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("weights.bin", "expected one of npz:FILE, safetensors:FILE, orbax:DIR, got 'weights.bin'"),
        ("npz:", "expected one of npz:FILE"),
        ("npz:no.npz", "'no.npz' is missing"),
        ("npz:text", "'text' is not an .npz file of arrays"),
        (
            "npz:objects.npz",
            "'objects.npz' is not an .npz file of arrays: Object arrays cannot be loaded",
        ),
        ("safetensors:text", "text is truncated|text is not a safetensors file"),
        (
            "orbax:empty",
            "'empty' is not a checkpoint that orbax can restore .expected the directory",
        ),
    ],
)
def test_source_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no arrays")
    (tmp_path / "empty").mkdir()
    np.savez("objects.npz", a=np.asarray([{}], object))
    with pytest.raises(InvalidModel, match=expected):
        parameter_files.filled(EXPECTED, source)


# --- the command -------------------------------------------------------------------------------

SOURCE = """\
import jax
import numpy as np
from xlaserve import Exportable
shape = jax.ShapeDtypeStruct((4, 2), np.float32)
model = Exportable(
    lambda p, x: x @ p["w"], {"w": shape}, {"x": ("FP32", [-1, 4])}, outputs=["y"]
)
"""


def test_command_takes_them_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "author.py").write_text(SOURCE)
    export(f"{tmp_path}/author.py:model", tmp_path / "m", params=_npz(tmp_path, {"w": W}))
    model = loaders.load(tmp_path / "m" / "1", LoadContext("m", "1", ModelConfig(max_batch_size=1)))
    x = np.ones((1, 4), np.float32)
    found = model.execute({"x": x})["y"]
    model.close()

    assert (x @ W).tolist() == np.asarray(found).tolist()
    assert ("w",) == manifest.read(tmp_path / "m" / "1").parameters


def test_shapes_alone_are_no_parameters(tmp_path: Path) -> None:
    (tmp_path / "author.py").write_text(SOURCE)
    with pytest.raises(InvalidModel, match="parameter 'w' has a shape but no values: read"):
        export(f"{tmp_path}/author.py:model", tmp_path / "m")
