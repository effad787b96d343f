import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import FLOAT, Inputs, model, node, save
from support.process import command, run, served

from xlaserve.models import manifest

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
    assert re.search(r"^cpu: [0-9.]+ (k|M)?B$", out, re.MULTILINE)

    async with served(target.parent) as server:
        assert 1 == server.event("started")["ready"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "its dimension 'rows' is open"),
        (("--dim", "rows=two"), "--dim: expected NAME=SIZE, got 'rows=two'"),
        (("--dim", "rows=2", "--output", "z"), "there is no output 'z', but y"),
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


async def test_import_says_which_operation_mixes_rows(tmp_path: Path) -> None:
    """And what is declared does not stand against it."""
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
