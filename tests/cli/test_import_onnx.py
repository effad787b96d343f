import re
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import FLOAT, Inputs, model, node, save
from support.process import command, run, served

from xlaserve.artifact import manifest

AXIS = {"axis": np.asarray(0)}
WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """Write x [N,rows,4] @ w [4,3]."""
    inputs: Inputs = {"x": (FLOAT, ["N", "rows", 4])}
    return save(model([node("MatMul", ["x", "w"], ["y"])], inputs, ["y"], {"w": WEIGHT}), tmp_path)


async def test_import_writes_a_model_that_is_served(linear: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "linear"
    arguments = ("--dim", "rows=2", "--max-batch-size", "2", "--target", "cpu")
    status, out, err = await run(*command("import", str(linear), str(target), *arguments))

    assert (0, "") == (status, err)
    assert "FP32[-1,2,4]" in out
    assert f"{target}/1: opset 17, 1 operators, 1 parameters of" in out
    assert "checked against onnxruntime" in out
    sizes = manifest.read(target / "1").sizes
    assert ["cpu"] == list(sizes)
    assert re.search(r"^cpu: [0-9.]+ (Ki|Mi)?B$", out, re.MULTILINE)

    async with served(target.parent) as server:
        assert 1 == server.event("started")["ready"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "its dimension 'rows' is dynamic"),
        (("--dim", "rows=two"), "--dim: expected NAME=SIZE, got 'rows=two'"),
        (("--dim", "rows=2", "--output", "z"), "unknown output 'z', the model has y"),
        pytest.param(
            ("--dim", "rows=2,2"),
            "--dim: expected NAME=SIZE, got 'rows=2,2'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--shape", "x=-1,*,4"),
            "--shape: expected NAME=SIZE, got 'x=-1,*,4'",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--const", "y=1"), "no input 'y', it has x", marks=pytest.mark.slow),
        pytest.param(
            ("--mean", "1,a"),
            "--mean: expected comma-separated numbers, got '1,a'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--std", "nan"),
            "--std: expected comma-separated numbers, got 'nan'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--resize", "pad:3"),
            "--resize: expected one of stretch, crop, pad, or crop:256",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--labels", "no/such"), "--labels: 'no/such' cannot be read", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--batch-axis", "x=-1"),
            "--batch-axis: expected TENSOR=DIMENSION, got 'x=-1'",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_mistake_is_one_line_and_an_exit_status(
    linear: Path, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    target = tmp_path / "models" / "linear"
    status, _, err = await run(*command("import", str(linear), str(target), *arguments))

    assert 1 == status
    assert err.startswith("error: ")
    assert text in err
    assert not target.exists()


@pytest.mark.slow  # it starts two processes; import tests cover each part
async def test_sizes_constants_and_axes_are_served(tmp_path: Path) -> None:
    """x [N,length] * factor + state [1,N,length], for which clients send the batch first."""
    nodes = [node("Mul", ["x", "factor"], ["m"]), node("Add", ["m", "state"], ["y"])]
    inputs: Inputs = {
        "x": (FLOAT, ["N", "length"]),
        "factor": (FLOAT, []),
        "state": (FLOAT, [1, "N", "length"]),
    }
    path = save(model(nodes, inputs, ["y"]), tmp_path)
    target = tmp_path / "models" / "scaled"
    arguments = ("--dim", "length=2,3", "--const", "factor=10", "--max-batch-size", "2")
    axes = ("--batch-axis", "state=1", "--batch-axis", "y=1")
    status, out, err = await run(*command("import", str(path), str(target), *arguments, *axes))

    assert (0, "") == (status, err)
    assert "checked against onnxruntime" in out
    async with served(target.parent) as server, aiohttp.ClientSession() as session:
        for length in (2, 3):
            x = {"name": "x", "datatype": "FP32", "shape": [2, length], "data": [1] * 2 * length}
            state = {**x, "name": "state", "shape": [2, 1, length], "data": [*range(2 * length)]}
            url = f"http://{server.http}/v2/models/scaled/infer"
            async with session.post(url, json={"inputs": [x, state]}) as answer:
                (y,) = (await answer.json())["outputs"]

            assert [2, 1, length] == y["shape"]
            assert [10.0 + number for number in range(2 * length)] == y["data"]


@pytest.mark.slow
async def test_a_picture_gets_the_label_that_the_import_was_given(tmp_path: Path) -> None:
    """Input [N,3,4,4], as in most imported models; the mean of each channel is its score."""
    inputs: Inputs = {"image": (FLOAT, ["N", 3, 4, 4])}
    means = node("ReduceMean", ["image"], ["scores"], axes=[2, 3], keepdims=0)
    path = save(model([means], inputs, ["scores"]), tmp_path)
    target, labels = tmp_path / "models" / "colours", tmp_path / "names"
    labels.write_text("red\ngreen\nblue\n")
    flags = ("--labels", str(labels), "--scale", "0.00392156862745098", "--mean", "0.5")
    more = ("--std", "1,1,0.1", "--resize", "crop:6")
    status, out, err = await run(*command("import", str(path), str(target), *flags, *more))
    picture = tmp_path / "picture.jpeg"
    Image.new("RGB", (40, 30), (0, 250, 150)).save(picture)

    assert (0, "") == (status, err)
    assert "class names of 'scores' are in labels.txt, one per line" in out
    async with served(target.parent) as server:
        ask = ("infer", "colours", "--image", str(picture), "--url", server.url)
        status, out, err = await run(*command(*ask))

    assert (0, "") == (status, err)
    # Blue wins by its deviation: 150 / 255 is far from the mean.
    assert ["blue", "green", "red"] == re.findall("blue|green|red", out)


@pytest.mark.slow
async def test_import_says_which_operation_mixes_rows(tmp_path: Path) -> None:
    """A declaration of independence does not override it."""
    inputs: Inputs = {"x": (FLOAT, ["N", 4])}
    path = save(model([node("CumSum", ["x", "axis"], ["y"])], inputs, ["y"], AXIS), tmp_path)
    arguments = ("import", str(path), str(tmp_path / "models" / "sums"))
    status, out, err = await run(*command(*arguments))
    declared, _, said = await run(*command(*arguments, "--batch-independent"))

    assert (0, "") == (status, err)
    assert "max_batch_size 0" in out
    assert out.strip().splitlines()[-1].startswith("rows are mixed: stablehlo.")
    assert 1 == declared
    assert "rows are declared independent, but they are not: mixed" in said
