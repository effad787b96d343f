"""Every kind of model before and after `xlaserve repo migrate`."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import jax
import jax.export
import numpy as np
import pytest
from support import python_models, tiny_embedding, tiny_language
from support.lasting import without_stablehlo
from support.server import RunningServer, Serve

from xlaserve import export_model
from xlaserve.artifact import artifact, computation, replaced
from xlaserve.artifact.computation import STABLEHLO_VERSIONS
from xlaserve.authoring import read_back
from xlaserve.authoring.migration import Result, migrate
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.generation import exporting

X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
BODY: dict[str, Any] = {
    "exported": {"inputs": [X]},
    "solved": {"inputs": [X]},
    "plain": {"inputs": [X]},
    "python": {"inputs": [{**X, "shape": [2]}]},
    "ensemble": {"inputs": [{**X, "name": "a"}]},
}


def _plain(path: Path) -> None:
    spec = jax.ShapeDtypeStruct((1, 2), np.float32)
    path.parent.mkdir(parents=True)
    exported = jax.export.export(jax.jit(lambda x: {"y": x * np.float32(3)}))(spec)
    path.write_bytes(exported.serialize())


def _model(path: Path, fn: Any) -> None:
    export_model(fn, None, {"x": ("FP32", [1, 2])}, path, platforms=["cpu"])


def _ensemble(model: Path) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [1, 2]}
    step = {"model_name": "exported", "model_version": -1, "input_map": {"x": "a"}}
    (model / "1").mkdir(parents=True)
    said = {
        "platform": "ensemble",
        "input": [tensor | {"name": "a"}],
        "output": [tensor | {"name": "b"}],
        "ensemble_scheduling": {"step": [step | {"output_map": {"y": "b"}}]},
    }
    (model / "config.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as older versions wrote them."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        # As jax.export writes them, in the current version of StableHLO.
        patch.setattr(exporting, "lasting", computation.of_artifact)
        tiny_language.export(root / "generator" / "1")
    parameters = {"slots": "1", "windows": "16", "chunk": "8"}
    written = {name: {"string_value": value} for name, value in parameters.items()}
    (root / "generator" / "config.json").write_text(json.dumps({"parameters": written}))
    tiny_embedding.export(root / "encoder")
    _model(root / "exported" / "1", lambda p, x: {"y": x * 2})
    _model(root / "solved" / "1", lambda p, x: {"y": jax.numpy.linalg.eigvalsh(x.T @ x)[None]})
    for name in ("encoder", "exported", "solved"):
        without_stablehlo(root / name / "1")
    _plain(root / "plain" / "1" / "model.jaxexp")
    (root / "plain" / "1" / "names.json").write_text('{"inputs": ["x"], "outputs": ["y"]}')
    version = python_models.write_function(root, "python", "return {'y': x * np.float32(2)}")
    shutil.copy(root / "plain" / "1" / "model.jaxexp", version / "own.jaxexp")
    _ensemble(root / "ensemble")
    return root


@pytest.fixture
def models(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "models")


async def _asked(server: RunningServer) -> dict[str, Any]:
    """Return the answer of every model."""
    base = f"http://{server.http}"
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(base) as session:
        for name, body in BODY.items():
            async with session.post(f"/v2/models/{name}/infer", json=body) as answer:
                assert 200 == answer.status, (name, await answer.text())
                found[name] = (await answer.json())["outputs"]
        body = {"model": "encoder", "input": "ab"}
        async with session.post("/v1/embeddings", json=body) as answer:
            assert 200 == answer.status, await answer.text()
            found["encoder"] = (await answer.json())["data"]
        body = {"tokens": [1, 2, 3], "max_tokens": 8}
        async with session.post("/v2/models/generator/generate_stream", json=body) as answer:
            text = await answer.text()
            lines = [line[6:] for line in text.splitlines() if '"token"' in line]
            found["generator"] = [json.loads(line)["token"] for line in lines]
            assert found["generator"], text
    return found


def _versions(root: Path) -> dict[str, set[str]]:
    """Return the StableHLO versions in the files of each model."""
    found: dict[str, set[str]] = {}
    for path in (*root.rglob("*.jaxexp"), *root.rglob("model.stablehlo")):
        data = path.read_bytes()
        module = (
            data
            if path.suffix == ".stablehlo"
            else artifact.deserialize(bytearray(data)).mlir_module_serialized
        )
        versions = found.setdefault(path.relative_to(root).parts[0], set())
        versions.add(computation.stablehlo_version(module))
    return found


def _contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


async def test_every_kind_answers_as_before(models: Path, serve: Serve) -> None:
    """Migrated files have a durable StableHLO version; all other files are unchanged."""
    settings = {"http_endpoint": "port:0", "allow_python_models": True, "load_model": ("*",)}
    async with serve(models, **settings) as server:
        expected = await _asked(server)
    code = (models / "python" / "1" / "own.jaxexp").read_bytes()

    results = {
        outcome.path.relative_to(models).parts[0]: outcome.result for outcome in migrate(models)
    }
    again = {outcome.result for outcome in migrate(models)}
    kept = {path.parent.name for path in models.rglob(replaced.DIRECTORY)}
    async with serve(models, **settings) as server:
        found = await _asked(server)

    skipped = dict.fromkeys(("ensemble", "python"), Result.SKIPPED)
    renewed = ("encoder", "exported", "generator", "plain", "solved")
    assert dict.fromkeys(renewed, Result.MIGRATED) | skipped == results
    assert {Result.CURRENT, Result.SKIPPED} == again
    assert expected == found
    assert set(renewed) == kept
    assert not list(models.rglob(replaced.DIRECTORY))
    assert code == (models / "python" / "1" / "own.jaxexp").read_bytes()
    versions = _versions(models)
    assert all(versions[name] <= set(STABLEHLO_VERSIONS) for name in renewed), versions


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
