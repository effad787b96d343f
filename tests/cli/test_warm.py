"""`xlaserve warm` on this machine's CPU."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from support.object_server import serving_objects
from typer.testing import CliRunner

import xlaserve
from xlaserve import cli
from xlaserve.cli.offline import warm
from xlaserve.runtime.programs.compilation_cache import CompilationCache, Entry, name_of
from xlaserve.settings import Settings


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a broken model, and an ensemble."""
    root = tmp_path_factory.mktemp("models")

    def double(params: None, x: jax.Array) -> dict[str, jax.Array]:
        return {"y": x * np.float32(2)}

    inputs = {"x": ("FP32", [-1, 4])}
    for name in ("good", "broken"):
        xlaserve.export_model(double, None, inputs, root / name / "1", max_batch_size=2)
    (root / "broken" / "1" / "model.stablehlo").write_bytes(b"no module")
    (root / "code" / "1").mkdir(parents=True)
    (root / "code" / "1" / "model.py").write_text("raise AssertionError('it ran')")
    (root / "chain").mkdir()
    (root / "chain" / "config.json").write_text(
        json.dumps(
            {
                "platform": "ensemble",
                "input": [{"name": "x", "dataType": "TYPE_FP32", "dims": [-1, 4]}],
                "output": [{"name": "y", "dataType": "TYPE_FP32", "dims": [-1, 4]}],
                "ensembleScheduling": {
                    "step": [
                        {
                            "modelName": "good",
                            "modelVersion": "-1",
                            "inputMap": {"x": "x"},
                            "outputMap": {"y": "y"},
                        }
                    ]
                },
            }
        )
    )
    return root


def run(*arguments: str | Path) -> tuple[int, str]:
    """Run the command; return its exit status and its output."""
    result = CliRunner().invoke(cli.application(), ["warm", *map(str, arguments)])
    return result.exit_code, result.output + str(result.exception or "")


def test_every_model_is_named_and_a_broken_one_is_a_failure(
    repository: Path, tmp_path: Path
) -> None:
    status, output = run(repository, "--cache", tmp_path / "cache", "--json")
    rows = {row["model"]: row for row in map(json.loads, output.splitlines()[:2])}

    assert 1 == status
    assert {"good", "broken"} == set(rows)
    assert (2, 0, "") == tuple(rows["good"][name] for name in ("compiled", "cached", "problem"))
    assert "model.stablehlo" in rows["broken"]["problem"]


def test_table_says_what_was_compiled_and_what_was_there(repository: Path, tmp_path: Path) -> None:
    run(repository, "--cache", tmp_path / "cache")
    _, output = run(repository, "--cache", tmp_path / "cache")
    (row,) = (line for line in output.splitlines() if "good" in line)

    assert ["good", "1", "0", "2"] == row.replace("│", " ").split()[:4]


def test_repository_in_a_store_is_fetched_and_compiled(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete model is named."""
    monkeypatch.setenv("XLASERVE_REMOTE_CACHE_DIRECTORY", str(tmp_path / "fetched"))
    files = [path for path in (repository / "good").rglob("*") if path.is_file()]
    objects = {f"root/{path.relative_to(repository)}": path.read_bytes() for path in files}
    objects["root/torn/config.json"] = b"{"
    with serving_objects(**objects) as (url, _):
        status, output = run(url, "--cache", tmp_path / "cache", "--json")
    torn, good = map(json.loads, output.splitlines()[:2])

    assert 1 == status
    assert ("good", 2, "") == (good["model"], good["compiled"], good["problem"])
    assert "torn" == torn["model"]
    assert "config.json" in torn["problem"]


def test_repository_without_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    status, output = run(tmp_path / "empty", "--cache", tmp_path / "cache")

    assert 1 == status
    assert "expected a directory of models" in output


def test_cache_that_others_can_use_is_refused(repository: Path, tmp_path: Path) -> None:
    run(repository, "--cache", tmp_path / "cache")
    for directory in (tmp_path / "cache").iterdir():
        directory.chmod(0o777)

    status, output = run(repository, "--cache", tmp_path / "cache")

    assert 1 == status
    assert "expected a directory only this user can access (mode 0700)" in output


def test_unknown_target_is_refused(repository: Path, tmp_path: Path) -> None:
    status, output = run(repository, "--cache", tmp_path / "cache", "--target", "h1000")

    assert 1 == status
    assert "device 'h1000' is not available: expected one of h100, " in output


def test_target_without_its_wheels_names_them(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlaserve.runtime.devices.plugins.version", lambda name: "")

    status, output = run(repository, "--cache", tmp_path / "cache", "--target", "v5e")

    assert 1 == status
    assert "device 'v5e' is not available: libtpu is not installed" in output


@pytest.mark.slow
def test_target_that_is_not_there_is_compiled_for_by_a_process_of_its_own(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's processor stands in for another kind, which it lacks."""
    monkeypatch.setattr(warm, "_is_here", lambda target: False)

    status, output = run(repository, "--target", "cpu", "--cache", tmp_path / "cache", "--json")
    rows = {row["model"]: row for row in map(json.loads, output.splitlines()[:2])}

    assert 1 == status
    assert (2, 0, "") == tuple(rows["good"][name] for name in ("compiled", "cached", "problem"))
    assert rows["broken"]["problem"]
    assert 2 == len(list((tmp_path / "cache").glob("*/*.json")))


def test_programs_of_a_directory_are_put_into_a_store(tmp_path: Path) -> None:
    """As filled by processes that compile for absent devices."""
    entries = {
        "cpu-a": Entry({"computation": "abc"}, {"jax": "1"}, b"one", is_ahead=True),
        "NVIDIA-H100": Entry({"computation": "def"}, {"jax": "2"}, b"two", is_ahead=True),
    }
    cache = CompilationCache(tmp_path / "cache", 1 << 20)
    for target, entry in entries.items():
        cache.prepare(target)
        cache.write(target, "name", entry)
    put: dict[tuple[str, str], Entry] = {}

    class Store:
        def put(self, target: str, name: str, entry: Entry) -> None:
            put[target, name] = entry

    settings = Settings(repository=tmp_path, compilation_cache_directory=str(tmp_path / "cache"))
    warm._put_all(settings, Store())  # type: ignore[arg-type]

    assert entries == {target: entry for (target, _), entry in put.items()}
    assert {name_of({"computation": "abc", "jax": "1"})} == {
        name for target, name in put if target == "cpu-a"
    }
