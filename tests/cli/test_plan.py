"""`xlaserve plan`, as a user runs it; the CPU is a target on every machine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.object_server import serving_objects
from typer.testing import CliRunner, Result

from xlaserve.cli import application
from xlaserve.errors import DeviceUnavailable, InvalidSettings
from xlaserve.runtime.devices import plugins


def _plan(*arguments: object) -> Result:
    return CliRunner().invoke(application(), ["plan", *map(str, arguments)], terminal_width=200)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an example with few batch sizes, a broken model, and a directory without a model."""
    examples = Path(__file__).resolve().parents[2] / "examples" / "models"
    path = tmp_path_factory.mktemp("models")
    for name in ("mlp", "simple"):
        shutil.copytree(examples / name, path / name)
    sizes = {"parameters": {"batch_sizes": {"string_value": "1,64"}}}
    (path / "mlp" / "config.json").write_text(json.dumps(sizes))
    (path / "simple" / "1" / "model.stablehlo").write_bytes(b"")
    (path / "empty").mkdir()
    return path


@pytest.fixture(scope="module")
def planned(repository: Path) -> Result:
    return _plan(repository, "--target", "cpu", "--json", "--jobs", 1)


@pytest.mark.slow
def test_plan_as_json_has_every_program_and_what_is_reserved(planned: Result) -> None:
    document: dict[str, Any] = json.loads(planned.stdout)
    models = {one["name"]: one for one in document["models"]}
    mlp = models["mlp"]

    assert 1 == planned.exit_code  # for the broken models
    assert ("cpu", 1) == (document["target"], document["count"])
    assert [1, 64] == [program["rows"] for program in mlp["programs"]]
    assert 64 * 784 * 4 <= mlp["programs"][1]["scratch_bytes"]
    assert mlp["reserved_bytes"] == mlp["reserved"]["per_device"]["cpu:0"]
    assert mlp["predicted_bytes"] > 784 * 512 * 4
    assert "model.stablehlo has 0 bytes" in models["simple"]["problem"]["reason"]
    assert "no version directory" in document["unreadable"]["empty"]
    assert ["mlp/1"] == document["eviction_order"]
    assert 0 < document["mesh"]["capacity_bytes"] < document["capacity_bytes"]


def test_plan_of_a_store_names_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLASERVE_REMOTE_CACHE_DIRECTORY", str(tmp_path))
    with serving_objects(**{"root/torn/config.json": b"{"}) as (url, _):
        result = _plan(url, "--target", "cpu", "--json")

    assert 1 == result.exit_code
    assert "config.json" in json.loads(result.stdout)["unreadable"]["torn"]


@pytest.mark.slow
def test_plan_for_two_devices_reserves_on_both(repository: Path, tmp_path: Path) -> None:
    """For a model with a replica on each."""
    shutil.copytree(repository / "mlp", tmp_path / "mlp")
    asked = {"batch_sizes": "1", "devices": "all"}
    parameters = {name: {"string_value": value} for name, value in asked.items()}
    (tmp_path / "mlp" / "config.json").write_text(json.dumps({"parameters": parameters}))
    planned = _plan(tmp_path, "--target", "cpu", "--count", 2, "--json", "--jobs", 1)
    document = json.loads(planned.stdout)
    (mlp,) = document["models"]
    reserved = mlp["reserved"]["per_device"]

    assert (0, 2) == (planned.exit_code, document["count"])
    assert ["cpu:0", "cpu:1"] == sorted(reserved)
    assert min(reserved.values()) > 784 * 512 * 4


def test_plan_for_what_is_not_known_or_not_there_says_so(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "version", lambda name: "")
    unknown, missing = (_plan(repository, "--target", name) for name in ("h900", "h100"))
    nowhere = _plan(repository / "none", "--target", "cpu")

    assert isinstance(unknown.exception, DeviceUnavailable)
    assert "expected one of h100," in str(unknown.exception)
    assert isinstance(missing.exception, DeviceUnavailable)
    assert "pip install 'xlaserve[cuda12]'" in str(missing.exception)
    assert isinstance(nowhere.exception, InvalidSettings)
