"""`xlaserve repo list`, as a user runs it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.object_server import serving_objects
from typer.testing import CliRunner, Result

from xlaserve.cli.repo.group import repo


def _list(*arguments: object) -> Result:
    return CliRunner().invoke(repo(), ["list", *map(str, arguments)], env={"COLUMNS": "200"})


def _entries(*arguments: object) -> dict[str, Any]:
    found = _list(*arguments, "--json")
    assert 0 == found.exit_code, found.output
    return {row["name"]: row for row in map(json.loads, found.stdout.splitlines())}


def _size(version: Path) -> int:
    return sum(path.stat().st_size for path in version.iterdir())


@pytest.fixture
def models(example_models: Path, tmp_path: Path) -> Path:
    """Models of several kinds, and some that cannot be loaded."""
    root = shutil.copytree(example_models, tmp_path / "models")
    for name, file in (("onnx", "model.onnx"), ("code", "model.py"), ("empty", "nothing.txt")):
        (root / name / "7").mkdir(parents=True)
        (root / name / "7" / file).write_text("x")
    shutil.copytree(root / "digits" / "1", root / "digits" / "2")
    (root / "onnx/config.pbtxt").write_text('platform: "onnxruntime_onnx" optimization { }')
    (root / "torn/1").mkdir(parents=True)
    (root / "torn/1/model.py").write_text("x")
    (root / "torn/config.json").write_text("{")
    (root / "two").mkdir()
    (root / "two/config.json").write_text("{}")
    (root / "two/config.pbtxt").write_text("")
    return root


def test_each_model_has_its_versions_formats_sizes_and_configuration(models: Path) -> None:
    entries = _entries(models)
    digits = entries["digits"]

    assert [(1, False), (2, True)] == [(v["number"], v["served"]) for v in digits["versions"]]
    assert _size(models / "digits/1") == digits["versions"][0]["size_bytes"]
    assert ("config.json", "", str(models)) == tuple(
        digits[key] for key in ("configuration", "problem", "repository")
    )
    assert ["optimization"] == entries["onnx"]["without_effect"]
    kinds = {name: [v["kind"] for v in entry["versions"]] for name, entry in entries.items()}
    assert {
        **{name: ["jax_export"] for name in ("identity", "mlp", "simple")},
        **{"digits": ["jax_export"] * 2, "onnx": ["onnx"], "code": ["python"]},
        **{"empty": [""], "torn": ["python"], "two": []},
    } == kinds


def test_what_is_wrong_is_said_beside_the_model(models: Path) -> None:
    entries = _entries(models)

    assert "model.json is missing" in entries["empty"]["versions"][0]["problem"]
    assert "config.json: line 1" in entries["torn"]["problem"]
    assert "config.json and config.pbtxt" == entries["two"]["configuration"]
    assert "got both" in entries["two"]["problem"]


def test_a_link_out_of_the_repository_is_a_problem_of_its_version(models: Path) -> None:
    secret = models.parent / "secret"
    secret.write_text("x")
    (models / "mlp/1/link").symlink_to(secret)

    assert (
        "is outside the model repository and every model_root (--model-root), or a link that"
        " leads outside" in _entries(models)["mlp"]["versions"][0]["problem"]
    )


def test_the_table_is_of_printable_text(tmp_path: Path) -> None:
    (tmp_path / "m\u202e" / "1").mkdir(parents=True)
    os.mkfifo(tmp_path / "m\u202e" / "1" / "model.json")
    found = _list(tmp_path)

    assert 0 == found.exit_code
    assert "m\\u202e" in found.stdout


def test_a_model_in_place_of_a_repository_is_pointed_out(example_models: Path) -> None:
    assert "serve its parent" in _list(example_models / "digits").stderr


def test_an_empty_repository_says_so(tmp_path: Path) -> None:
    found = _list(tmp_path)

    assert (0, f"{tmp_path}: no models\n") == (found.exit_code, found.stdout)


def test_a_root_that_is_none_is_an_error(tmp_path: Path) -> None:
    found = _list(tmp_path / "nowhere")

    assert 1 == found.exit_code
    assert "expected a directory" in str(found.exception)


def test_a_store_is_listed_without_its_models_being_fetched(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLASERVE_REMOTE_CACHE_DIRECTORY", str(tmp_path / "fetched"))
    objects = {
        f"root/{path.relative_to(models)}": path.read_bytes()
        for path in models.rglob("*")
        if path.is_file()
    }
    with serving_objects(**objects) as (url, shelves):
        entries = _entries(url)
        asked = [(path, part) for method, path, part in shelves.asked if method == "GET"]

    local = _entries(models)
    assert url == entries["digits"]["repository"]
    assert {name: entry["versions"] for name, entry in local.items() if name != "empty"} == {
        name: entry["versions"] for name, entry in entries.items() if name != "empty"
    }
    assert "config.json: line 1" in entries["torn"]["problem"]
    assert not [path for path, part in asked if path.endswith(".jaxexp")]
    assert all(part for path, part in asked if path.endswith(".safetensors"))
