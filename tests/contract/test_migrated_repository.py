"""Every kind of model before and after `xlaserve repo migrate`."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import kinds
from support.lasting import without_stablehlo, written_by_jax_alone
from support.server import RunningServer, Serve

from xlaserve.artifact import replaced
from xlaserve.artifact.computation import STABLEHLO_VERSIONS, stablehlo_version
from xlaserve.artifact.manifest import STABLEHLO
from xlaserve.authoring import read_back
from xlaserve.authoring.migration import Result, migrate, undo
from xlaserve.errors import InvalidModel
from xlaserve.files import files

SKIPPED = ("ensemble", "python", "served_onnx", "served_pt2")
"""Kinds without a program of their own."""
QUICK = ("exported", "eigvalsh", "plain", "generator", "embedding", "python", "ensemble")
"""Has each kind of manifest and each loader of programs; the other kinds are `slow`."""
SETTINGS = {"http_endpoint": "port:0", "allow_python_models": True, "load_model": ("*",)}


def _write(root: Path, names: Iterable[str]) -> Path:
    """Write models as older versions did."""
    with written_by_jax_alone():
        kinds.write(root, iter(names))
    for described in list(root.rglob(STABLEHLO)):
        without_stablehlo(described.parent)
    shutil.copy(root / "plain" / "1" / "model.jaxexp", root / "python" / "1" / "own.jaxexp")
    return root


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("models"), QUICK)


@pytest.fixture
def models(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "models")


async def _asked(server: RunningServer, names: Iterable[str]) -> dict[str, list[float]]:
    """Return the answer of every model."""
    found: dict[str, list[float]] = {}
    async with aiohttp.ClientSession(f"http://{server.http}") as session:
        for name in names:
            path, body = kinds.request(name)
            async with session.post(path, json=body) as answer:
                text = await answer.text()
                assert 200 == answer.status, (name, text)
                found[name] = kinds.numbers(text)
                assert found[name], (name, text)
    return found


def _migrated(root: Path) -> dict[str, Result]:
    return {outcome.path.relative_to(root).parts[0]: outcome.result for outcome in migrate(root)}


def _contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([*kinds.KINDS], id="all", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
async def test_every_kind_can_be_migrated_back_and_again(
    names: Sequence[str], written: Path, tmp_path: Path, serve: Serve
) -> None:
    """Answers are as before, and programs are in a StableHLO that every supported JAX reads."""
    models = tmp_path / "models"
    if names is QUICK:
        shutil.copytree(written, models)
    else:
        _write(models, names)
    async with serve(models, **SETTINGS) as server:
        expected = await _asked(server, names)
    before = _contents(models)

    first = _migrated(models)
    undone = {outcome.result for outcome in undo(models)}
    back = _contents(models)
    second = _migrated(models)
    again = set(_migrated(models).values())
    kept = {path.parent.name for path in models.rglob(replaced.DIRECTORY)}
    async with serve(models, **SETTINGS) as server:
        found = await _asked(server, names)

    renewed = set(names) - set(SKIPPED)
    assert first == second
    assert renewed == {name for name, result in first.items() if result is Result.MIGRATED}
    assert {Result.SKIPPED} == {first[name] for name in first.keys() - renewed}
    assert {Result.CURRENT, Result.SKIPPED} == again
    assert {Result.RESTORED} == undone
    assert before == back
    assert expected == found
    assert renewed == kept
    assert not list(models.rglob(replaced.DIRECTORY))
    own = "python/1/own.jaxexp"
    assert before[own] == (models / own).read_bytes()
    versions = {
        (name, file): stablehlo_version(data)
        for name, file, data in kinds.programs(models)
        if name in renewed
    }
    assert renewed == {name for name, _ in versions}
    assert set(versions.values()) <= set(STABLEHLO_VERSIONS), versions


def test_what_cannot_be_read_back_is_not_put_there(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a migrated file fails verification, no model is changed."""
    write = files.write_atomically
    before = _contents(models)

    def damaging(path: Path, parts: list[Any]) -> files.FileRecord:
        record = write(path, parts)
        if path.suffix in (".jaxexp", ".stablehlo"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            path.write_bytes(data)
        return record

    monkeypatch.setattr(files, "write_atomically", damaging)
    results = [outcome.result for outcome in migrate(models)]

    assert 5 == results.count(Result.FAILED), results
    assert before == _contents(models)


def test_a_file_with_a_checksum_is_left_alone(models: Path) -> None:
    """Triton's checksum agent would reject a changed file."""
    config = """
        model_repository_agents { agents { name: "checksum" parameters
          { key: "MD5:1/model.jaxexp" value: "0123456789abcdef0123456789abcdef" } } }
    """
    (models / "plain" / "config.pbtxt").write_text(config)
    before = _contents(models / "plain")

    (outcome,) = migrate(models / "plain")

    assert Result.FAILED is outcome.result
    assert "has the MD5 of 1/model.jaxexp (model_repository_agents)" in outcome.detail
    assert before == _contents(models / "plain")


def test_a_version_without_a_manifest_is_not_read_back(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="expected one of model.json, generator.json"):
        read_back.check(tmp_path)


def test_a_copy_shares_its_files_with_what_it_is_of(models: Path, tmp_path: Path) -> None:
    """Gigabytes of parameters are not copied."""
    target = tmp_path / "copy"
    replaced.copy(models / "generator" / "1", target)

    name = "params.safetensors"
    assert (models / "generator" / "1" / name).samefile(target / name)
