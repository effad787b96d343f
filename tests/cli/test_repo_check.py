"""`xlaserve repo check`: whether a server could load the models of a repository."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

from onnx import TensorProto
from support.object_server import serving_objects
from support.onnx_models import model, node, save
from support.process import command, run

from xlaserve.errors import InvalidModel
from xlaserve.files.roots import Roots
from xlaserve.model_config.mlserver_settings import read
from xlaserve.model_config.text import parse_pbtxt

FLOAT = TensorProto.FLOAT
TENSOR = {"data_type": "TYPE_FP32", "dims": [2]}

RAISES = "raise RuntimeError('it was run')"
GOOD_CODE = """
import xlaserve
class Echo(xlaserve.PythonModel):
    inputs = {"x": ("FP32", [2])}
    outputs = {"y": ("FP32", [2])}
    max_batch_size = 4
    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


def onnx(root: Path, name: str, operator: str = "Relu", config: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    save(model([node(operator, ["x"], ["y"])], {"x": (FLOAT, ("n", 2))}, ["y"]), root / name / "1")
    if config:
        (root / name / "config.pbtxt").write_text(config)


def other(root: Path, name: str, config: dict[str, Any], **files: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.json").write_text(json.dumps(config))
    for stem, text in files.items():
        (root / name / "1" / f"{stem}.py").write_text(text)


def ensemble(*steps: str) -> dict[str, Any]:
    """Return an ensemble that chains models from `x` to `y`."""
    made = []
    for number, step in enumerate(steps):
        source = "IN" if not number else f"t{number}"
        target = "OUT" if number == len(steps) - 1 else f"t{number + 1}"
        maps = {"input_map": {"x": source}, "output_map": {"y": target}}
        made.append({"model_name": step, **maps})
    return {
        "max_batch_size": 2,
        "input": [{"name": "IN", **TENSOR}],
        "output": [{"name": "OUT", **TENSOR}],
        "ensemble_scheduling": {"step": made},
    }


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two repositories with one model of each kind."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    onnx(one, "relu")
    onnx(one, "relu2", config='platform: "onnxruntime_onnx" optimization { }')
    onnx(one, "random", "Bernoulli")
    onnx(one, "shape", config='input { name: "x" data_type: TYPE_FP32 dims: 3 } max_batch_size: 2')
    onnx(one, "both")
    onnx(two, "both")
    tensors = {"input": [{"name": "x", **TENSOR}], "output": [{"name": "y", **TENSOR}]}
    batched = {"max_batch_size": 2, **tensors}
    other(two, "echo", {"backend": "identity", **batched, "metric_tags": {"a": "b"}})
    other(two, "graph", {"platform": "tensorflow_graphdef"})
    other(two, "code", {"backend": "python"}, model=GOOD_CODE)
    other(two, "bad_code", {"backend": "python", **tensors}, model=RAISES)
    other(two, "spelled", {"max_bach_size": 2})
    other(two, "chain", ensemble("relu", "echo"))
    other(two, "chains", ensemble("chain", "echo"))
    other(two, "of_code", ensemble("code", "echo"))
    other(two, "of_nothing", ensemble("nothing"))
    other(two, "of_bad", ensemble("random", "echo"))
    other(two, "of_itself", ensemble("of_circle"))
    other(two, "of_circle", ensemble("of_itself"))
    wide = ensemble("echo")
    wide["input"][0]["dims"] = [3]
    other(two, "wide", wide)
    other(two, "unread", {"backend": "identity", **batched})
    (two / "unread/model-settings.json").write_text("{")
    (two / "mlserver").mkdir()
    (two / "mlserver/model-settings.json").write_text('{"implementation": "m.M"}')
    return one, two


WORKS, NOTES, REFUSED = "works", "works, with notes", "refused"
NOT_RUN = "its code was not run"
EXPECTED = {
    "relu": ("onnx", WORKS, ""),
    "relu2": ("onnx", NOTES, "without effect: optimization"),
    "random": ("onnx", REFUSED, "Bernoulli"),
    "shape": ("onnx", REFUSED, "input 'x': expected FP32[-1,2]"),
    "both": ("", REFUSED, "it is in several repositories"),
    "echo": ("identity", NOTES, "without effect: metric_tags"),
    "graph": ("", REFUSED, "tf2onnx"),
    "code": ("python", NOTES, NOT_RUN),
    "bad_code": ("python", NOTES, NOT_RUN),
    "spelled": ("", REFUSED, "max_bach_size"),
    "chain": ("ensemble", WORKS, ""),
    "chains": ("ensemble", REFUSED, "chain"),
    "of_code": ("ensemble", NOTES, "not compared with those of 'code'"),
    "of_nothing": ("ensemble", REFUSED, "its step 'nothing' is not in the repository"),
    "of_bad": ("ensemble", REFUSED, "its step 'random' is refused: model.onnx cannot"),
    "of_itself": ("ensemble", REFUSED, "its step 'of_circle' is refused"),
    "of_circle": ("ensemble", REFUSED, "its step 'of_itself' is a step of itself"),
    "wide": ("ensemble", REFUSED, "'x'"),
    "unread": ("identity", NOTES, "model-settings.json: "),
    "mlserver": ("mlserver", REFUSED, "put its code at 1/model.py"),
}
RUN = {
    "code": ("python", WORKS, ""),
    "bad_code": ("python", REFUSED, "it was run"),
    "of_code": ("ensemble", WORKS, ""),
}


async def check(*arguments: object) -> tuple[int, str, str]:
    return await run(*command("repo", "check", *map(str, arguments)))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param((), EXPECTED, marks=pytest.mark.slow),
        (("--allow-python-models",), EXPECTED | RUN),
    ],
)
async def test_each_model_has_its_report(
    roots: tuple[Path, Path], flags: tuple[str, ...], expected: dict[str, tuple[str, str, str]]
) -> None:
    status, out, err = await check(*roots, "--json", *flags)
    rows = {row["model"]: row for row in map(json.loads, out.splitlines())}
    found = {}
    for name, (_, _, text) in expected.items():
        row = rows[name]
        said = " ".join((row["reason"], *row["notes"]))
        found[name] = (row["kind"], row["finding"], text if text in said else said)

    assert (1, bool(flags)) == (status, "it was run" in err)
    assert expected == found
    assert expected.keys() == rows.keys()
    assert ["1"] == rows["relu"]["versions"]


async def test_a_repository_that_works_is_a_table_and_a_success(tmp_path: Path) -> None:
    onnx(tmp_path, "relu")
    status, out, _ = await check(tmp_path)

    assert 0 == status
    assert ["relu", "onnx", "1", "works"] == [
        cell.strip() for cell in next(filter(_is_row, out.splitlines())).split("│")[1:5]
    ]
    assert ["1"] == [path.name for path in (tmp_path / "relu").iterdir()]


def _is_row(line: str) -> bool:
    return "relu" in line


@pytest.mark.slow
async def test_a_repository_in_a_store_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLASERVE_REMOTE_CACHE_DIRECTORY", str(tmp_path / "fetched"))
    onnx(tmp_path / "models", "relu")
    content = (tmp_path / "models" / "relu" / "1" / "model.onnx").read_bytes()
    objects = {"root/relu/1/model.onnx": content, "root/torn/config.json": b"{"}
    with serving_objects(**objects) as (url, _):
        status, out, _ = await check(url, "--json")
    found = {row["model"]: row["finding"] for row in map(json.loads, out.splitlines())}

    assert (1, {"relu": WORKS, "torn": REFUSED}) == (status, found)


@pytest.mark.slow
async def test_nothing_to_check_is_no_success(tmp_path: Path) -> None:
    empty = await check(tmp_path)
    missing = await check(tmp_path / "nowhere")

    assert (1, f"{tmp_path}: no models\n") == empty[:2]
    assert (1, "") == missing[:2]
    assert "expected a directory" in missing[2]


SETTINGS = {
    "name": "m",
    "implementation": "tokens.Tokens",
    "max_batch_size": 8,
    "max_batch_time": 0.05,
    "parallel_workers": 2,
    "cache_enabled": True,
    "inputs": [
        {
            "name": 'a"',
            "datatype": "BYTES",
            "shape": [-1, 1],
            "parameters": {"content_type": "str"},
        }
    ],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    "parameters": {"uri": "./m.bin", "extra": {"a": 1}, "content_type": "pd", "version": "3"},
}


def test_settings_of_mlserver_have_a_configuration_that_stands_for_them(tmp_path: Path) -> None:
    (tmp_path / "model-settings.json").write_text(json.dumps(SETTINGS))
    found = read(tmp_path)
    assert found is not None
    config = parse_pbtxt(found.pbtxt)

    assert ("m", "python", 8) == (config.name, config.backend, config.max_batch_size)
    assert [('a"', "BYTES", (1,)), ("y", "FP32", (4,))] == [
        (t.name, t.datatype.name, t.dims) for t in (*config.inputs, *config.outputs)
    ]
    assert 50_000 == config.dynamic_batching.max_queue_delay_microseconds
    assert config.message is not None
    assert [2] == [group.count for group in config.message.instance_group]
    assert config.message.response_cache.enable
    assert {"content_type": "pd", 'content_type.a"': "str"} == config.parameters
    assert 6 == len(found.notes)
    assert "put its code at 1/model.py" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ('{"implementation": "mlserver_sklearn.SKLearnModel"}', "skl2onnx"),
        ('{"implementation": "mlserver_xgboost.XGBoostModel"}', "from a Python model"),
        ('{"inputs": [{"name": "a", "datatype": "FP99", "shape": []}]}', "datatype 'FP99'"),
        ('{"parameters": {"version": "3"}}', "the name of the version directory"),
        ('{"parameters": {"content_type": "str"}}', "a class with decoded = True"),
        (
            '{"max_batch_size": 8, "max_batch_time": 0.1}',
            "max_batch_size: here it also limits the rows of a request",
        ),
    ],
)
def test_what_no_configuration_says_is_a_note(tmp_path: Path, text: str, note: str) -> None:
    (tmp_path / "model-settings.json").write_text(text)
    found = read(tmp_path)

    assert found is not None
    assert any(note in said for said in found.notes)
    parse_pbtxt(found.pbtxt)


@pytest.mark.parametrize("said", [{"max_batch_size": 8}, {"max_batch_time": 0.1}])
def test_without_a_size_and_a_time_nothing_is_put_together(
    tmp_path: Path, said: dict[str, float]
) -> None:
    """MLServer batches only if both are set; tensors are then unchanged."""
    tensor = {"name": "y", "datatype": "FP32", "shape": [-1, 4]}
    (tmp_path / "model-settings.json").write_text(json.dumps({**said, "outputs": [tensor]}))
    found = read(tmp_path)
    assert found is not None
    config = parse_pbtxt(found.pbtxt)

    assert 0 == config.max_batch_size
    assert [(-1, 4)] == [output.dims for output in config.outputs]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"inputs": 1}', '{"name": "\\ud800"}', "\xff"])
def test_settings_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model-settings.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidModel, match=r"^model-settings\.json: "):
        read(tmp_path)


def test_settings_outside_of_the_roots_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps(SETTINGS))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/model-settings.json").symlink_to(tmp_path / "secret")
    with pytest.raises(
        InvalidModel,
        match=r"is outside the model repository and every model_root \(--model-root\), or a link"
        " that leads outside",
    ):
        read(tmp_path / "m", Roots.of((tmp_path / "m",)))
