"""Exported and imported models can be read by every JAX version that a server supports."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from structlog.testing import capture_logs
from support import kinds, tiny_language
from support.written_programs import may_be_newer

from xlaserve import export_model
from xlaserve.artifact import artifact, computation
from xlaserve.artifact.computation import READ_FROM, STABLEHLO_VERSIONS, stablehlo_version
from xlaserve.authoring import migration, read_back
from xlaserve.errors import InvalidModel
from xlaserve.generation import exporting
from xlaserve.runtime import loaders

ROOT = Path(__file__).parents[2]
SLOW = ("solve", "encoder", "language", "random", "det", "fft", "svd", "counter")
"""Kinds whose export takes seconds: `tox run -e lasts` and `slow` include them."""
LINEAR_ALGEBRA = ("eigvalsh", "qr", "cholesky", "solve", "svd", "det", "fft")
OF_JAX = ("plain",)
"""Written by jax.export in its own StableHLO version; `repo migrate` makes it portable."""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in kinds.KINDS
        if name not in OF_JAX
    ],
)
def test_every_program_is_read_by_the_oldest_jax(name: str, tmp_path: Path) -> None:
    kinds.KINDS[name].write(tmp_path / name)

    found = {file: stablehlo_version(data) for _, file, data in kinds.programs(tmp_path)}
    assert set(found.values()) <= set(STABLEHLO_VERSIONS), found


def test_every_program_that_a_test_writes_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "lasting", computation.of_artifact)

    with pytest.raises(AssertionError, match=r"no longer read by the oldest JAX: .*chunk\.jaxexp"):
        tiny_language.export(tmp_path / "m/1")


def test_the_oldest_jax_that_is_named_reads_what_lasts() -> None:
    """The table of which JAX reads which StableHLO is checked for the oldest supported JAX."""
    (oldest,) = re.findall(r'^    "jax>=([\d.]+)",$', (ROOT / "pyproject.toml").read_text(), re.M)
    read = [version for version, jax in READ_FROM.items() if _numbers(jax) <= _numbers(oldest)]

    assert list(STABLEHLO_VERSIONS) == read


def test_every_way_to_write_a_model_is_a_kind() -> None:
    """A loader, a manifest or an importer without a row fails here."""
    package = ROOT / "server/xlaserve"
    writes = re.compile(r"^def (export_\w+|import_\w+)\(", re.M)
    folders = [package / name for name in ("authoring", "generation", "importers")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    found = {name for path in paths for name in writes.findall(path.read_text())}

    assert kinds.WRITERS.keys() == found | {"read"}
    named = {kind for those in kinds.WRITERS.values() for kind in those}
    assert named <= kinds.KINDS.keys()
    assert {row.module for row in loaders.LOADERS} == kinds.LOADERS.keys()
    assert set(kinds.LOADERS.values()) - {""} <= kinds.KINDS.keys()
    assert set(migration.KINDS) <= set(read_back.READERS)


@pytest.mark.parametrize("reduction", [jnp.cumsum, jax.lax.cumsum])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_cumulative_sum_is_a_window_on_every_platform(
    axis: int, reduction: Callable[..., jax.Array]
) -> None:
    """From jax 0.12 on, GPUs have an operation for it that older StableHLO versions lack."""
    x = jax.ShapeDtypeStruct((4, 8), np.float32)
    exported = jax.export.export(
        jax.jit(lambda x: reduction(x, axis=axis)), platforms=["cpu", "cuda", "tpu"]
    )(x)
    module = computation.portable(exported.mlir_module_serialized)
    back = computation.to_artifact(computation.lasting(exported))

    assert STABLEHLO_VERSIONS[0] == stablehlo_version(module)
    assert "scan" not in computation.text_of(module)
    assert computation.is_same(exported.mlir_module_serialized, module)
    data = np.arange(32, dtype=np.float32).reshape(4, 8)
    assert np.array_equal(np.cumsum(data, axis), jax.jit(back.call)(data))


def _gelu(x: jax.Array, y: jax.Array) -> jax.Array:
    """Use erfc, which is a composite, with two different dynamic shapes."""
    found = jax.nn.gelu(x, approximate=False).sum(axis=1, keepdims=True)
    return found + jax.nn.gelu(y, approximate=False)[..., :1]


def test_a_composite_of_open_shapes_is_a_call() -> None:
    """JAX before 0.12 cannot refine such a composite, so it could not load the exported model."""
    b, s = jax.export.symbolic_shape("b, s")
    x, y = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((b, s), (b, 4)))
    platforms = ["cpu", "cuda", "tpu"]
    exported = jax.export.export(jax.jit(_gelu), platforms=platforms)(x, y)
    kept = computation.lasting(exported)
    back = computation.to_artifact(kept)

    assert "stablehlo.composite" not in computation.text_of(kept.module)
    assert kept.module == computation.portable(kept.module)
    assert computation.is_same(exported.mlir_module_serialized, kept.module)
    left, right = np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3), np.ones((2, 4), np.float32)
    expected = _gelu(jnp.asarray(left), jnp.asarray(right))
    np.testing.assert_allclose(expected, jax.jit(back.call)(left, right), rtol=1e-5)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(LINEAR_ALGEBRA[:3], id="quick"),
        pytest.param(LINEAR_ALGEBRA[3:], id="slow", marks=pytest.mark.slow),
    ],
)
def test_an_export_of_linear_algebra_prints_no_errors(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """A version of StableHLO that cannot express it is tried, on which MLIR would report."""
    code = (
        "import pathlib, sys; from support import kinds; "
        "kinds.write(pathlib.Path(sys.argv[1]), iter(sys.argv[2:]))"
    )
    paths = [str(ROOT / "tests"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "models"), *names],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "" == done.stderr
    assert set(names) == {path.name for path in (tmp_path / "models").iterdir()}


@pytest.fixture
def _older(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate an operation so new that no StableHLO version readable by all JAXs has it."""
    monkeypatch.setattr(computation, "STABLEHLO_VERSIONS", ("1.0.0",))
    monkeypatch.setattr(computation, "READ_FROM", {"1.0.0": "0.5.0", "1.14.0": "0.9.2"})
    with may_be_newer():
        yield


SAID = (
    r"it is StableHLO 1\.14\.0, which jax 0\.9\.2 and newer read, and not 1\.0\.0, which is read "
    r"from 0\.5\.0 on: .+"
)


@pytest.mark.usefixtures("_older")
def test_an_export_says_from_which_jax_on_it_is_read(tmp_path: Path) -> None:
    with capture_logs() as logs:
        export_model(
            lambda p, x: {"y": x.astype(jnp.float8_e4m3).astype(jnp.float32)},
            None,
            {"x": ("FP32", [2])},
            tmp_path / "m/1",
            platforms=["cpu"],
        )

    (said,) = [record["reason"] for record in logs if record["log_level"] == "warning"]
    assert re.fullmatch(SAID, said), said


@pytest.mark.usefixtures("_older")
def test_the_export_of_a_generator_says_it_of_each_program(tmp_path: Path) -> None:
    with capture_logs() as logs:
        tiny_language.export(tmp_path / "m/1")

    said = [record["reason"] for record in logs if record["log_level"] == "warning"]
    assert said
    assert {"decode.jaxexp", "chunk.jaxexp"} >= {text.partition(": ")[0] for text in said}
    assert all(re.fullmatch(SAID, text.partition(": ")[2]) for text in said), said


def test_a_refusal_names_the_jax_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (ROOT / "tests/data/old_models/0.12.0.1/plain.jaxexp").read_bytes()
    monkeypatch.setattr(computation, "newest_stablehlo", lambda: "1.17.0")
    monkeypatch.setattr(artifact, "_module", _fails)
    with pytest.raises(InvalidModel) as caught:
        artifact.deserialize(bytearray(data))

    text = "StableHLO 1.18.0, 1.17.0 is the newest supported: serve it with jax 0.11.2 or newer"
    assert text in str(caught.value)


def _fails(exported: object) -> None:
    raise ValueError("unknown version")
