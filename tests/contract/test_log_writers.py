"""Every line that a server prints is a record, whoever prints it, in whichever of its processes."""

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest
from support import log_writers, python_models
from support.process import ServerProcess, served

CODE = f"""
import atexit, gc, logging, sys, threading, warnings

class Model(PythonModel):
    def load(self, context):
        atexit.register(int, "at the end")

    def infer(self, inputs):
        codes = {[log_writers.code(name) for name in log_writers.TOGETHER]!r}
        exec(codes[int(inputs["x"][0])], globals())
        return {{"y": inputs["x"]}}
"""
PROCESS = "\nparameters { key: 'execution' value { string_value: 'process' } }"
SHAPES = {
    "one process": (),
    "workers": ("--processes", "2"),
    "front ends": ("--processes", "2", "--process-roles", "front-ends"),
}
WRITER_KEYS = {"logger", "thread", "pid", "of", "place", "model"}
ENGINE = "xlaserve.workers.worker"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    python_models.write(root, "thread", CODE, python_models.VECTORS)
    python_models.write(root, "process", CODE, python_models.VECTORS + PROCESS)
    return root


def shown(server: ServerProcess, name: str) -> list[str]:
    """Return what records say who printed a mark, one text of keys for each."""
    mark = log_writers.mark(name)
    return [one for one in map(json.dumps, server.log) if mark in one]


async def have_printed(server: ServerProcess, model: str, name: str) -> None:
    """Have a model print, and read the log until it is there."""
    before = len(shown(server, name))
    row = log_writers.TOGETHER.index(name)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [row]}]}
    async with (
        aiohttp.ClientSession(f"http://{server.http}") as session,
        session.post(f"/v2/models/{model}/infer", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
    while len(shown(server, name)) == before:
        assert await server.read()


@pytest.mark.parametrize(
    "shape",
    [
        "one process",
        pytest.param("workers", marks=pytest.mark.slow),
        pytest.param("front ends", marks=pytest.mark.slow),
    ],
)
async def test_what_models_print_is_in_records(
    repository: Path, shape: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each line is JSON, says who printed it, and nothing is on stdout."""
    flags = ("--allow-python-models", *SHAPES[shape])
    # XLA says in C++ which devices it has.
    serving = served(repository, *flags, TF_CPP_MIN_LOG_LEVEL="0")
    async with serving as server, asyncio.timeout(120):
        if shape != "one process":
            await server.until("workers ready")
        for model in ("thread", "process"):
            # Long lines last: of a process so many lines are shown in a second.
            for name in sorted(log_writers.TOGETHER, key=lambda n: log_writers.WRITERS[n].lasts):
                await have_printed(server, model, name)
        assert 0 == await server.stop()
    ours = log_writers.mark("structlog")
    printed = [r for r in server.log if log_writers.MARK in json.dumps(r) and r["event"] != ours]

    assert [] == server.plain
    assert "" == capfd.readouterr().out
    assert [] == [one for one in printed if not WRITER_KEYS & one.keys()]
    assert any("pjrt_client.cc" in r.get("line", "") for r in server.log)
    assert any("at the end" in r.get("exception", "") for r in server.log)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
async def test_what_a_crash_prints_is_in_records(
    repository: Path, shape: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of each process that has faulthandler; the server itself is last, and nobody is left then."""
    flags = ("--allow-python-models", *SHAPES[shape])
    async with served(repository, *flags) as server, asyncio.timeout(240):
        if shape != "one process":
            await server.until("workers ready")
        top = psutil.Process(server.process.pid)
        victims = [one for one in top.children() if ENGINE in one.cmdline()]
        for one in (*victims, top):
            one.send_signal(signal.SIGABRT)
            while not crashed(server, one.pid):
                assert await server.read(), server.log[-5:]
        assert -signal.SIGABRT == await server.ended()

    assert len(victims) == (0 if shape == "one process" else 2)
    assert [] == server.plain
    assert "" == capfd.readouterr().out


def crashed(server: ServerProcess, pid: int) -> bool:
    """Tell whether the log has what faulthandler printed in a process."""
    lines = [r["line"] for r in server.log if r.get("pid") == pid and "line" in r]
    return any("Fatal Python error: Aborted" in one for one in lines)
