"""One command creates a model, a server setup and a client; completion comes from typer."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import DATA, write_tensors
from support.process import command, run, served
from typer.testing import CliRunner

import zoo_rows
from xlaserve.artifact import manifest
from xlaserve.artifact.manifest import Manifest
from xlaserve.cli import application
from xlaserve.cli.importing import packaged
from xlaserve.cli.importing.packaged_models import PACKAGED
from xlaserve.cli.init import client
from xlaserve.errors import InvalidModel, InvalidRequest
from xlaserve.tensors import DATATYPES, TensorSpec

PROGRAM = Path(__file__).parents[1] / "data" / "pt2" / "mlp.pt2"
FUNCTIONS = """
def twice(x, y):
    return x * 2 + y

def pair(x):
    return x, -x

def broken(x):
    raise ValueError("not today")

constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def made(*arguments: object) -> str:
    result = CliRunner().invoke(application(), ["init", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


async def answered(directory: Path, **variables: str) -> str:
    """Serve the created project, run its client, and return the client's output."""
    async with served(directory / "models", **variables) as server:
        client = directory / "client.py"
        client.write_text(client.read_text().replace("127.0.0.1:8001", server.url))
        status, out, err = await run(sys.executable, str(client))

    assert (0, "") == (status, err)
    return out


@pytest.mark.slow
async def test_init_makes_a_model_and_a_client_that_asks_it(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    status, out, err = await run(*command("init", str(directory)))

    assert (0, "") == (status, err)
    assert out.splitlines()[0] == f"{directory / 'models/example/1'} is the model; next:"
    assert "y [[0.9950547 0.9950547]]\n" == await answered(directory)


@pytest.mark.slow
async def test_a_plain_function_is_served(functions: Path, tmp_path: Path) -> None:
    inputs = [f"--input={name}=FP32[-1,3]" for name in "xy"]
    made(tmp_path / "mine", "--from", f"{functions}:twice", *inputs)

    assert "y [[3. 3. 3.]]\n" == await answered(tmp_path / "mine")
    assert ["client.py", "models", "xlaserve.toml"] == sorted(
        path.name for path in (tmp_path / "mine").iterdir()
    )


@pytest.mark.slow
async def test_a_program_of_pytorch_is_served(tmp_path: Path) -> None:
    made(tmp_path / "mine", "--from", PROGRAM, "--name", "net", "--", "--max-batch-size", "3")

    assert 3 == manifest.read(tmp_path / "mine/models/net/1").max_batch_size
    assert (await answered(tmp_path / "mine")).startswith("output [[")


@pytest.mark.slow
async def test_a_language_model_is_served(tmp_path: Path) -> None:
    """Its length is limited, since the cache of all slots is reserved during the load."""
    source = tmp_path / "story"
    source.mkdir()
    write_tensors(source, "llama")
    said = json.loads((DATA / "llama/config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, "max_position_embeddings": 65536}))
    made(tmp_path / "mine", "--from", source)
    config = tmp_path / "mine/models/story/config.pbtxt"

    assert 'key: "length" value { string_value: "2048" }' in config.read_text()
    assert (await answered(tmp_path / "mine")).startswith("[")


@pytest.mark.slow
async def test_a_packaged_model_is_served_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="the model lies in it")
    assert "sigmoid/1 is the model" in made(
        tmp_path / "mine", "--from", "pkg:onnxruntime/datasets/sigmoid.onnx"
    )

    assert (await answered(tmp_path / "mine")).startswith("y [[[0.731")


@pytest.mark.slow
def test_a_function_is_exported_and_its_client_is_a_program(
    functions: Path, tmp_path: Path
) -> None:
    made(tmp_path / "mine", "--from", f"{functions}:pair", "--input", "x=INT32[2]")
    described = manifest.read(tmp_path / "mine/models/pair/1")

    assert ["y.0", "y.1"] == [spec.name for spec in described.outputs]
    compile((tmp_path / "mine/client.py").read_text(), "client.py", "exec")


@pytest.mark.parametrize("name", DATATYPES)
def test_a_client_has_an_array_of_every_datatype(name: str, tmp_path: Path) -> None:
    spec = TensorSpec('a "quoted" name', DATATYPES[name], (-1, 2))
    described = Manifest((spec,), (), 0, (), 0, {}, (), "", "")
    text = client.of_model("m", described).partition("with Client")[0]
    (tmp_path / "client.py").write_text(text)
    (value,) = runpy.run_path(str(tmp_path / "client.py"))["inputs"].values()

    assert ((1, 2), DATATYPES[name].dtype) == (value.shape, value.dtype)
    assert ml_dtypes.bfloat16 == value.dtype if name == "BF16" else np.dtype(value.dtype)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["x.pt"], "'x.pt' is a pickle, which runs code when it is read: save torch.export"),
        (["x.safetensors"], "'x.safetensors' has parameters but no computation"),
        (["x.gguf"], "'x.gguf' is a llama.cpp file"),
        (["x.plan"], "'x.plan' is compiled for one kind of device"),
        (["{file}"], "names no function: expected FILE.py:NAME"),
        (["{file}:none"], "functions.py has no 'none'"),
        (["{file}:constant"], "is a int, expected"),
        (["{file}:twice"], "twice takes x, y: expected an Exportable, or a function without arg"),
        (["{file}:twice", "--input", "x=FP32[1]"], "takes x, y, but --input gives x: missing"),
        (["{file}:twice", "--input", "x=FP32"], "--input: expected NAME=DATATYPE[SIZES]"),
        (["{file}:twice", "--input", "x=FP32[a]"], "--input: expected NAME=DATATYPE[SIZES]"),
        (
            ["{file}:constant", "--input", "x=FP32[1]"],
            "is a int, but --input is only for functions",
        ),
        (["{file}:broken", "--input", "x=FP32[1]"], "functions.py:9, in broken: `raise ValueErr"),
        (
            ["{file}:pair", "--input", "x=FP32[1]", "--", "--dim"],
            "'--dim' is an option for imports",
        ),
        (["nowhere.onnx"], "no such file 'nowhere.onnx'"),
        (["{folder}"], "is a directory without config.json"),
        ([str(PROGRAM), "--input", "x=FP32[1]"], "--input is only for functions"),
        ([str(PROGRAM), "--", "--dim", "q=3"], "the model has no dimension 'q'"),
        (["words"], "expected FILE.py:NAME, an ONNX or .pt2 file"),
        (["some/model.onnx:graph"], "expected FILE.py:NAME or MODULE:NAME"),
        (["pkg:magika"], "pkg:magika: not installed: pip install magika==1.0.3"),
        (["pkg:silero"], "did you mean pkg:silero-vad?"),
        (["pkg:numpy"], "pkg:numpy: contains no model file"),
        ([str(PROGRAM), "--name", "../up"], "it contains a path separator"),
    ],
)
def test_what_cannot_be_leaves_nothing_behind(
    functions: Path, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    given = [each.format(file=functions, folder=tmp_path) for each in arguments]
    with pytest.raises((InvalidModel, InvalidRequest)) as found:
        made(tmp_path / "mine", "--from", *given)
    (tmp_path / "there").mkdir()
    with pytest.raises((InvalidModel, InvalidRequest)):
        made(tmp_path / "there", "--from", *given)

    assert problem in str(found.value)
    assert not (tmp_path / "mine").exists()
    assert [] == list((tmp_path / "there").iterdir())


def installed(folder: Path, name: str, version: str, *files: str) -> None:
    """Write the metadata that pip leaves for a package."""
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (facts / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"a model")


def test_models_are_found_in_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = PACKAGED["magika"]
    installed(tmp_path, "magika", "1.0.3", known.path, "magika/other.onnx")
    installed(tmp_path, "ddddocr", "9.9", "ddddocr/common.onnx")
    installed(tmp_path, "single", "1", "single/net.onnx", "single/net.txt")
    monkeypatch.syspath_prepend(str(tmp_path))

    found, other = packaged.find("magika"), packaged.find("ddddocr")
    assert (tmp_path / known.path, ["--tolerance", "1e-2"], "") == (
        *(found.file, found.options),
        found.notice,
    )
    assert "ddddocr 9.9 is installed, 1.6.1 was tried" == other.notice
    assert ("net", tmp_path / "single/net.onnx") == (
        packaged.find("single").name,
        packaged.find("single/net.onnx").file,
    )
    with pytest.raises(
        InvalidRequest, match=r"contains no ddddocr/common_det.onnx: pip install ddddocr==1.6.1"
    ):
        packaged.find("ddddocr-det")
    with pytest.raises(InvalidRequest, match=r"one of single/net.onnx, got 'none.onnx'"):
        packaged.find("single/none.onnx")


def test_the_zoo_tries_what_is_known_by_name() -> None:
    assert set(PACKAGED) == {row.name for row in zoo_rows.PACKAGED}


@pytest.mark.parametrize("name", ["model.py", "client.py", "xlaserve.toml", "models"])
def test_init_writes_over_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InvalidRequest, match="already exists and was not changed"):
        made(tmp_path)

    assert [name] == [path.name for path in tmp_path.iterdir()]
    assert "mine" == (tmp_path / name).read_text()


def test_a_model_of_ones_own_may_be_beside_the_rest(functions: Path, tmp_path: Path) -> None:
    """`model.py` belongs to the example alone."""
    shutil.copy(functions, tmp_path / "model.py")
    made(tmp_path, "--from", f"{tmp_path / 'model.py'}:pair", "--input", "x=FP32[-1]")

    assert (tmp_path / "models/pair/1/model.json").is_file()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_of_a_shell(shell: str) -> None:
    result = CliRunner().invoke(application(), ["completion", shell])

    assert 0 == result.exit_code
    assert f"_XLASERVE_COMPLETE=complete_{shell}" in result.output
