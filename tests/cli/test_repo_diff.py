"""`xlaserve repo diff`, as a user runs it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.object_server import serving_objects
from typer.testing import CliRunner, Result

from xlaserve.artifact import weights
from xlaserve.cli.repo.group import repo

Row = tuple[str, str, str, str, str]


def _diff(*arguments: object) -> Result:
    return CliRunner().invoke(repo(), ["diff", *map(str, arguments)])


def _rows(*arguments: object) -> tuple[int, dict[tuple[str, str, str], tuple[str, str]]]:
    """Return the exit status, and the texts before and after by place, kind and name."""
    found = _diff(*arguments, "--json")
    rows = map(json.loads, found.stdout.splitlines())
    return found.exit_code, {
        (row["at"], row["kind"], row["name"]): (
            "-" if row["before"] is None else row["before"]["text"],
            "-" if row["after"] is None else row["after"]["text"],
        )
        for row in rows
    }


@pytest.fixture
def pair(example_models: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two identical repositories."""
    one, two = (shutil.copytree(example_models, tmp_path / name) for name in ("one", "two"))
    return one, two


def _changed_parameter(version: Path, name: str) -> None:
    """Change one element of a parameter."""
    tensors = {key: np.array(value) for key, value in weights.read(version, "params.safetensors")}
    tensors[name].reshape(-1)[0] += 1
    weights.write(version / "params.safetensors", tensors)


def test_the_same_contents_are_no_difference(pair: tuple[Path, Path]) -> None:
    one, two = pair
    for below in ("", "digits", "digits/1", "digits/1/model.jaxexp"):
        assert (0, {}) == _rows(one / below, two / below)
    assert "" == _diff(one, two).stdout


def test_what_version_2_changed_is_said(pair: tuple[Path, Path]) -> None:
    """It names the changed parameter and its file, and no others."""
    first = pair[0] / "mlp" / "1"
    second = shutil.copytree(first, pair[0] / "mlp" / "2")
    _changed_parameter(second, "w2")
    status, rows = _rows(first, second)
    table = _diff(first, second)

    assert 1 == status
    assert {("", "parameter", "w2"), ("", "file", "params.safetensors")} == rows.keys()
    assert ("float32[512,10]",) * 2 == rows["", "parameter", "w2"]
    assert 1 == table.exit_code
    assert "parameter w2" in table.stdout


def test_tensors_platforms_and_batches_are_compared(pair: tuple[Path, Path]) -> None:
    described = pair[1] / "digits/1/model.json"
    text = described.read_text()
    document = json.loads(text)
    document["inputs"][0]["name"] = "pixels"
    document["platforms"] = ["cpu", "tpu"]
    document["max_batch_size"] = 7
    described.write_text(json.dumps(document))
    status, rows = _rows(*pair)

    assert 1 == status
    assert ("FP32[-1,8,8]", "-") == rows["digits/1", "input", "image"]
    assert ("-", "FP32[-1,8,8]") == rows["digits/1", "input", "pixels"]
    assert "cpu, tpu" == rows["digits/1", "fact", "platforms"][1]
    assert "7" == rows["digits/1", "fact", "max_batch_size"][1]


def test_configurations_are_compared_by_field_however_they_are_written(
    pair: tuple[Path, Path],
) -> None:
    one, two = (root / "simple" for root in pair)
    for home in (one, two):
        (home / "config.pbtxt").unlink()
    tensor = 'name: "x" data_type: TYPE_FP32 dims: [ 16, 2 ]'
    (one / "config.pbtxt").write_text(f'max_batch_size: 8 input {{ {tensor} }} name: "simple"')
    shown = {"name": "x", "data_type": "TYPE_FP32", "dims": [16, 2]}
    written = {"name": "simple", "max_batch_size": 8, "input": [shown]}
    (two / "config.json").write_text(json.dumps(written))
    same = _rows(one, two)
    written |= {"max_batch_size": 0, "dynamic_batching": {"max_queue_delay_microseconds": 5}}
    shown["dims"] = [16, 3]
    (two / "config.json").write_text(json.dumps(written))
    other = _rows(one, two)

    assert (0, {}) == same
    assert (
        1,
        {
            ("", "configuration", "max_batch_size"): ("8", "0"),
            ("", "configuration", "input['x'].dims"): ("16, 2", "16, 3"),
            ("", "configuration", "dynamic_batching.max_queue_delay_microseconds"): ("-", "5"),
        },
    ) == other


def test_models_versions_and_files_of_one_side_are_said(pair: tuple[Path, Path]) -> None:
    one, two = pair
    shutil.rmtree(one / "identity")
    shutil.copytree(two / "mlp/1", two / "mlp/2")
    (two / "simple/labels.txt").write_text("a\n")
    status, rows = _rows(one, two)

    assert 1 == status
    assert {
        ("", "model", "identity"): ("-", ""),
        ("mlp", "version", "2"): ("-", ""),
        ("simple", "file", "labels.txt"): ("-", "2 bytes"),
    } == rows
    assert [("mlp", "version", "2")] == list(_rows(one, two, "--model", "mlp")[1])


def test_a_configuration_that_is_refused_is_compared_as_a_file(pair: tuple[Path, Path]) -> None:
    (pair[1] / "digits/config.json").write_text("{")
    found = _diff(*pair, "--json")

    assert 1 == found.exit_code
    assert '"kind": "file", "name": "config.json"' in found.stdout
    assert "note: " in found.stderr
    assert "line 1" in found.stderr


@pytest.mark.parametrize(
    ("before", "after", "more", "text"),
    [
        ("digits", "", (), "got a model and a repository"),
        ("digits/1", "digits", (), "got a version and a model"),
        ("nothing", "", (), "nothing"),
        ("", "", ("--model", "nothing"), "model 'nothing': not found in"),
        ("digits", "digits", ("--model", "digits"), "expected two repositories"),
    ],
)
def test_what_cannot_be_compared_is_trouble(
    pair: tuple[Path, Path], before: str, after: str, more: tuple[str, ...], text: str
) -> None:
    """Exit status as in diff: 0 for equal, 1 for different, 2 for trouble."""
    found = _diff(pair[0] / before, pair[1] / after, *more)

    assert 2 == found.exit_code
    assert text in found.stderr


def test_a_file_that_is_none_is_trouble(pair: tuple[Path, Path]) -> None:
    (pair[1] / "mlp/1/pipe").symlink_to("/dev/zero")

    assert 2 == _diff(*pair).exit_code


@pytest.mark.slow
def test_onnx_models_are_compared_by_tensor(tmp_path: Path) -> None:
    onnx_models = pytest.importorskip("support.onnx_models", reason="onnx is not installed")
    for number, value in (("1", 1.0), ("2", 2.0)):
        (tmp_path / "m" / number).mkdir(parents=True)
        made = onnx_models.model(
            [
                onnx_models.node("Add", ["x", "c"], ["y"]),
                onnx_models.node("Add", ["y", "d"], ["z"]),
            ],
            onnx_models.X,
            ["z"],
            {"c": np.full(4, value, np.float32), "d": np.ones(4, np.float32)},
        )
        (tmp_path / "m" / number / "model.onnx").write_bytes(made.SerializeToString())
    status, rows = _rows(tmp_path / "m/1", tmp_path / "m/2")

    assert 1 == status
    assert {("", "parameter", "c"), ("", "file", "model.onnx")} == rows.keys()


def test_versions_in_a_store_are_compared_with_those_of_the_disk(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLASERVE_REMOTE_CACHE_DIRECTORY", str(tmp_path / "fetched"))
    one, two = pair
    shutil.copytree(two / "identity/1", two / "identity/2")
    objects = {
        f"root/{path.relative_to(two)}": path.read_bytes()
        for path in two.rglob("*")
        if path.is_file()
    }
    with serving_objects(**objects) as (url, shelves):
        older = _rows(one / "identity/1", f"{url}/identity/1")
        fetched = {path.split("/")[1] for path in shelves.gets()}
        all_versions = _rows(one, url, "--model", "identity")
        missing = _diff(one / "identity/1", f"{url}/identity/9")

    assert (0, {}) == older
    assert {"identity"} == fetched
    assert (1, {("identity", "version", "2"): ("-", "")}) == all_versions
    assert 2 == missing.exit_code
    assert f"no version found at {url}/identity/9" in missing.stderr.replace("\n", "")
