"""A datatype is a table row: FP8 E4M3, added as CONTRIBUTING says, works on every path."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.added_datatype import ANSWERED, MODELS, RAW, VALUES

import xlaserve
import xlaserve_proto
from xlaserve.http.dashboard.protos import read_protos

AFTER = '    _row("BYTES", 13, np.object_, "bytes_contents"),\n'
ROW = '    _row("FP8", 15, ml_dtypes.float8_e4m3fn, tolerance=0.2),\n'
IN_PROTO = "    TYPE_BF16 = 14\n"
SHAPES = {"jax": (1, 4)}
OUT = np.abs(VALUES).tobytes().hex()
"""The answer of a model that computes absolute values."""


def _copied(package: Any, root: Path) -> Path:
    source = Path(package.__file__).parent
    return Path(shutil.copytree(source, root / source.name, ignore=lambda *_: {"__pycache__"}))


def _added(file: Path, beside: str, line: str) -> None:
    text = file.read_text()
    assert text.count(beside) == 1
    file.write_text(text.replace(beside, beside + line))


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answers of every path, in a copy of the source with the new row."""
    root = tmp_path_factory.mktemp("copy")
    _added(_copied(xlaserve, root) / "tensors/__init__.py", AFTER, ROW)
    # The output of `python tools/generate.py` for the new line of the proto.
    proto = _copied(xlaserve_proto, root) / "inference" / "__init__.py"
    _added(proto, IN_PROTO, "    TYPE_FP8 = 15\n")
    protos = root / "xlaserve" / "http" / "dashboard" / "protos"
    protos.mkdir(exist_ok=True)
    for name, text in read_protos().items():
        (protos / name).write_text(text)
    path = os.pathsep.join((str(root), str(Path(__file__).parent)))

    ended = subprocess.run(
        (sys.executable, "-m", "support.added_datatype", str(root)),
        env=os.environ | {"PYTHONPATH": path, "XLASERVE_COMPILE_PROCESSES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.returncode, ended.stdout + ended.stderr
    return json.loads((root / ANSWERED).read_text())


def test_the_table_reads_and_writes_it(answered: Any) -> None:
    """A number that is too large is refused even if the datatype has no infinity."""
    found = answered["elements"]

    assert "expected FP8, got a number out of range" == found.pop("too large")
    assert dict.fromkeys(found, True) == found


@pytest.mark.parametrize("model", MODELS)
def test_each_kind_of_model_is_asked_on_every_path(answered: Any, model: str) -> None:
    found, out = answered[model], RAW.hex() if model == "identity" else OUT
    *raw, typed = found["grpc"]
    http = found["http"]

    assert [["FP8", out]] * 3 == raw
    assert typed.startswith("INVALID_ARGUMENT")
    assert "FP8" in typed
    assert (out, out, out) == (found["client"], found["memory"], http["npy"])
    assert out == http["binary"]
    shown = np.abs(VALUES) if model != "identity" else VALUES
    assert {"predictions": shown.reshape(SHAPES.get(model, (4,))).tolist()} == http["bare JSON"]
    assert "FP8" in http["JSON"]
    assert "FP8" in http["typed JSON"]
    first = "1.500000:0" if model == "identity" else "448.000000:1"
    assert first == http["classes"][0]
