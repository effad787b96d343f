"""A ready server has imported all of its own code: replaced files break no load."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import kinds
from support.process import run

LOADING = """
import asyncio
import json
import sys

from xlaserve.app.server import Application
from xlaserve.settings import Settings


def ours():
    return {name for name in sys.modules if name.split(".")[0] == "xlaserve"}


async def load():
    settings = Settings.read(
        {},
        repository=sys.argv[1],
        scratch_directory=sys.argv[2],
        model_control_mode="explicit",
        grpc_endpoint="port:0",
        http_endpoint="port:0",
        device="cpu",
        allow_python_models=True,
        compilation_cache_directory="none",
        compile_processes=0,
    )
    application = Application(settings)
    async with application.running():
        await application.load()
        before = ours()
        for name in sys.argv[3:]:
            await application.control.load(name)
        print("FOUND", json.dumps([len(before), sorted(ours() - before)]))


asyncio.run(load())
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("plain", "python", "served_onnx"), id="some"),
        pytest.param(tuple(kinds.KINDS), id="all", marks=pytest.mark.slow),
    ],
)
async def test_no_load_imports_code_of_the_server(tmp_path: Path, names: Sequence[str]) -> None:
    """For every kind of model, in a fresh process, from readiness on."""
    kinds.write(tmp_path / "models", iter(names))
    paths = (str(tmp_path / "models"), str(tmp_path))
    code, out, err = await run(sys.executable, "-c", LOADING, *paths, *names)

    assert 0 == code, err
    (found,) = (line for line in out.splitlines() if line.startswith("FOUND"))
    count, late = json.loads(found.removeprefix("FOUND"))
    assert 100 < count
    assert [] == late
