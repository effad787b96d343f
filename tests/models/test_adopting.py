"""A file of `jax.export` as a version directory: names, proof, sizes, and what is refused."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlaserve.artifact import manifest
from xlaserve.artifact.plain_artifact import Names
from xlaserve.authoring import adopting
from xlaserve.authoring.adopting import Options
from xlaserve.cli.adopt import adopt
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs.verdict import Independence
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

W = np.arange(12, dtype=np.float32).reshape(4, 3)


def _struct(shape: str, dtype: Any = np.float32, scope: Any = None) -> jax.ShapeDtypeStruct:
    scope = scope or jax.export.SymbolicScope()
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype)


def _file(directory: Path, fn: Callable[..., object], *arguments: Any, **options: Any) -> Path:
    path = directory / "f.jaxexp"
    function: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    path.write_bytes(jax.export.export(function, **options)(*arguments).serialize())
    return path


def test_trees_open_dimensions_and_rows_are_what_they_were(
    tmp_path: Path, load: Load, run: Run
) -> None:
    scope = jax.export.SymbolicScope()
    tree = {"x": _struct("rows, 4", scope=scope), "n": [_struct("rows, s", scope=scope)]}
    file = _file(tmp_path, lambda d: {"y": (d["x"] @ W, d["n"][0] * 2)}, tree)
    model = adopting.read(file, Options(compiled_shapes={"s": [2, 5]}, max_batch_size=3))
    path = model.write(tmp_path / "m" / "1")
    described = manifest.read(path)
    loaded = load(path, ModelConfig())
    x, n = np.ones((2, 4), np.float32), np.ones((2, 5), np.float32)
    found = run(loaded, {"x": x, "n.0": n})

    assert described.verdict is not None
    assert Independence.PROVED is described.verdict.independence
    assert 3 == described.max_batch_size
    assert ("cpu",) == described.platforms
    assert np.allclose(x @ W, found["y.0"])
    assert np.allclose(n * 2, found["y.1"])


def test_rows_that_see_one_another_are_never_put_together(tmp_path: Path) -> None:
    file = _file(tmp_path, lambda x: x - x.mean(0, keepdims=True), _struct("b, 4"))
    notices: list[str] = []
    path = adopting.read(file, Options()).write(tmp_path / "m" / "1", on_notice=notices.append)

    assert 0 == manifest.read(path).max_batch_size
    assert "rows are mixed" in notices[0]


def test_donated_arguments_stay_as_they_are(tmp_path: Path, load: Load, run: Run) -> None:
    """What a function may overwrite is a request's here, and others may still read it."""
    fn = jax.jit(lambda x: x + 1, donate_argnums=0)
    path = adopting.read(_file(tmp_path, fn, _struct("b, 4")), Options()).write(
        tmp_path / "m" / "1"
    )
    model = load(path, ModelConfig(max_batch_size=1))
    x = np.zeros((1, 4), np.float32)
    found = [run(model, {"input_0": x})["output_0"].tolist() for _ in range(2)]

    assert [[[1.0] * 4]] * 2 == found
    assert not x.any()


def test_64_bit_numbers_stay_what_they_are(tmp_path: Path, load: Load, run: Run) -> None:
    with jax.enable_x64(True):
        file = _file(tmp_path, lambda x: x * 2, _struct("3", np.int64))
    path = adopting.read(file, Options()).write(tmp_path / "m" / "1")
    large = np.full(3, 2**40, np.int64)

    assert (large * 2).tolist() == run(load(path), {"input_0": large})["output_0"].tolist()


def _sharded() -> Any:
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    return jax.jit(lambda x: x + 1, in_shardings=sharding)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda d: _file(d, lambda x: x, _struct("4"), platforms=["cuda"]),
            r"f\.jaxexp was exported for cuda, this server runs on cpu: export it with platforms=",
        ),
        (
            lambda d: _file(d, _sharded(), _struct("4")),
            r"f\.jaxexp was exported for 2 devices, expected 1: export it without shardings",
        ),
        (
            lambda d: _file(
                d,
                lambda x: jax.ffi.ffi_call("evil", x)(x),
                _struct("4"),
                disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("evil")],
            ),
            r"f\.jaxexp calls 'evil', which models may not call",
        ),
        (
            lambda d: _file(d, lambda x: x, _struct("4", np.complex64)),
            "input 'input_0' has dtype complex64, which the V2 protocol does not have: give its"
            " real and",
        ),
        (
            lambda d: _file(d, lambda x: jax.lax.complex(x, x), _struct("4")),
            "output 'output_0' has dtype complex64, which the V2 protocol does not have",
        ),
        (lambda d: d / "no.jaxexp", r"no\.jaxexp': expected a \*\.jaxexp file written by jax"),
        (lambda d: d, r"expected a \*\.jaxexp file written by jax\.export"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], expected: str
) -> None:
    with pytest.raises(InvalidModel, match=expected):
        adopting.read(make(tmp_path), Options()).write(tmp_path / "m" / "1")
    assert not (tmp_path / "m").exists()


def test_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    file = _file(tmp_path, lambda x: x, _struct("4"))
    file.write_bytes(file.read_bytes()[:-200])

    with pytest.raises(
        InvalidModel,
        match=r"^f\.jaxexp cannot be read by the installed jax .*\. Run `xlaserve repo migrate`"
        r" with the jax that wrote it, or a newer one; if it is damaged, export it again",
    ):
        adopting.read(file, Options())


# --- the command -------------------------------------------------------------------------------


def test_command_gives_names_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _file(tmp_path, lambda x: (x, x * 2), _struct("b, s"))
    adopt(file, tmp_path / "m", inputs=["image"], outputs=["p", "q"], dim=["s=4,8"])
    described = manifest.read(tmp_path / "m" / "1")
    said = capsys.readouterr().out

    assert {"s": (4, 8)} == dict(described.compiled_shapes)
    assert ["image"] == [spec.name for spec in described.inputs]
    assert "input image FP32[-1,-1]\noutput p FP32[-1,-1]\noutput q" in said
    assert "rows are proved" in said
    with pytest.raises(
        InvalidModel,
        match="already exists: choose another version number, or replace it with --overwrite$",
    ):
        adopt(file, tmp_path / "m")
    adopt(file, tmp_path / "m", overwrite=True)
    assert "it loads only with sizes for s: export it with compiled_shapes=" in (
        capsys.readouterr().out
    )


def test_names_of_another_number_are_refused(tmp_path: Path) -> None:
    file = _file(tmp_path, lambda x: x, _struct("3"))
    with pytest.raises(
        InvalidModel, match="expected the names of 1 outputs, output_0 in this order, got p, q"
    ):
        adopting.read(file, Options(names=Names(outputs=["p", "q"])))
