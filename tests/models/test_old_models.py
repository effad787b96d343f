"""Models written by every version of JAX since 0.6.2 still give the same answers."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from support.lasting import refusing, without_stablehlo

from xlaserve.artifact import artifact, computation, manifest, weights, wrapper
from xlaserve.artifact.computation import of_artifact
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

DATA = Path(__file__).parents[1] / "data" / "old_models"
VERSIONS = tuple(sorted(path.name for path in DATA.iterdir() if path.is_dir()))
TWO_ROWS = ModelConfig(max_batch_size=2)
MODELS = ("conv", "count", "mlp", "solve")
EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _answers(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tensors = dict(weights.read(directory, "answers.safetensors"))
    inputs, outputs = (
        {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(kind)}
        for kind in ("inputs/", "outputs/")
    )
    return inputs, outputs


def _check_answers(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, output in expected.items():
        assert output.dtype == found[name].dtype
        np.testing.assert_allclose(found[name], output, rtol=1e-5, atol=1e-5)


def test_versions_are_those_that_can_be_installed() -> None:
    """There is one of each minor version since 0.6; the installed JAX is not newer than these."""
    assert {(0, minor) for minor in range(6, 13)} <= {_numbers(v)[:2] for v in VERSIONS}
    assert _numbers(jax.__version__)[:2] <= max(map(_numbers, VERSIONS))[:2]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("version", VERSIONS)
def test_model_of_any_jax_answers_as_it_did(load: Load, run: Run, version: str, name: str) -> None:
    inputs, expected = _answers(DATA / version / name)
    directory = DATA / version / name / "1"

    assert version == manifest.read(directory).jax_version
    _check_answers(expected, run(load(directory), inputs))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("version", VERSIONS)
def test_artifact_is_the_computation_that_is_kept_beside_it(
    tmp_path: Path, version: str, name: str
) -> None:
    """It does not matter which of the two is loaded, and whether JAX refuses the artifact."""
    directory = DATA / version / name / "1"
    wrapped = without_stablehlo(shutil.copytree(directory, tmp_path / "1"))
    found, other = (
        of_artifact(artifact.read(path, manifest.read(path))) for path in (directory, wrapped)
    )

    assert dataclasses.replace(found, module=b"") == dataclasses.replace(other, module=b"")
    assert computation.is_same(found.module, other.module)


@pytest.mark.parametrize("version", VERSIONS)
def test_artifact_alone_answers_as_it_did(
    tmp_path: Path, load: Load, run: Run, version: str
) -> None:
    inputs, expected = _answers(DATA / version / "mlp")
    directory = without_stablehlo(shutil.copytree(DATA / version / "mlp" / "1", tmp_path / "1"))

    _check_answers(expected, run(load(directory), inputs))


@pytest.mark.parametrize("version", VERSIONS)
def test_file_of_jax_alone_answers_as_it_did_or_is_from_the_future(
    load: Load, run: Run, version: str
) -> None:
    """A single file contains StableHLO of the version of the JAX that wrote it."""
    inputs, expected = _answers(DATA / version / "mlp")
    path = DATA / version / "plain.jaxexp"
    module = wrapper.read(path.read_bytes(), path.name).computation.module
    written = _numbers(computation.stablehlo_version(module))
    if written <= _numbers(computation.newest_stablehlo()):
        _check_answers(expected, run(load(path, TWO_ROWS), inputs))
        return

    assert _numbers(jax.__version__) < _numbers(version)
    with pytest.raises(InvalidModel) as caught:
        load(path)
    for text in (
        f"plain.jaxexp was written by jax {version} ",
        f"cannot be read by the installed jax {jax.__version__}: it is StableHLO ",
        ". Run `xlaserve repo migrate` with the jax that wrote it, or a newer one; if it is"
        " damaged, export it again",
    ):
        assert text in str(caught.value)


def test_artifact_that_jax_refuses_is_read_without_it(
    load: Load, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This will be the case for any file, half a year after it was written."""
    inputs, expected = _answers(DATA / "0.10.2" / "mlp")
    path = DATA / "0.10.2" / "plain.jaxexp"
    monkeypatch.setattr(jax.export, "deserialize", refusing(path.read_bytes()))

    _check_answers(expected, run(load(path, TWO_ROWS), inputs))


@pytest.mark.parametrize("name", ["digits", "identity", "mlp", "simple"])
def test_committed_example_lasts(name: str) -> None:
    directory = EXAMPLES / name / "1"
    described = manifest.read(directory)

    assert described.durable is not None
    module = (directory / manifest.STABLEHLO).read_bytes()
    assert computation.STABLEHLO_VERSIONS[0] == computation.stablehlo_version(module)
    wrapped = artifact.deserialize(bytearray((directory / manifest.ARTIFACT).read_bytes()))
    found = of_artifact(artifact.read(directory, described))
    assert dataclasses.replace(found, module=b"") == dataclasses.replace(
        of_artifact(wrapped), module=b""
    )
    assert computation.is_same(found.module, wrapped.mlir_module_serialized)
