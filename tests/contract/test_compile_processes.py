"""Loads are compiled in processes of their own: what a client and an operator see of that."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from support import mesh
from support.conditions import MOST_SECONDS, until
from support.http import Answer, ask
from support.process import ServerProcess, served
from support.runtime import StartRuntime
from support.shelf import Shelf

import xlaserve
from xlaserve.authoring import lowering

FLAGS = ("--model-control-mode", "explicit", "--compile-processes", "1")
SHAPE = (2, 3)
FOLDED = {"long": 25_000, "endless": 400_000}
"""Numbers whose greatest one XLA finds while it compiles: in seconds, and in an hour."""


def _export(root: Path, name: str, factor: float) -> None:
    xlaserve.export_model(
        lambda p, x: {"y": x @ p["w"] + p["b"][None, :]},
        {"w": np.full(SHAPE, factor, np.float32), "b": np.ones(3, np.float32)},
        {"x": ("FP32", [-1, 2])},
        root / name / "1",
        max_batch_size=2,
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("first", "second")):
        _export(root, name, 2.0 + number)
    xlaserve.export_model(
        lambda p, x: {"y": x - p}, np.float32(1), {"x": ("FP32", [2])}, root / "third" / "1"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lowering, "_check_runs_alike", lambda *given: None)  # it compiles
        for name, count in FOLDED.items():
            _export_folded(root / name / "1", count)
    return root


def _export_folded(path: Path, count: int) -> None:
    def greatest(params: Any, x: jax.Array) -> Any:
        numbers, least = lax.iota(np.float32, count), np.float32(0)
        most = lax.reduce_window(numbers, least, lax.max, (count // 2,), (1,), "SAME")
        return {"y": x + params + most[0]}

    xlaserve.export_model(greatest, np.float32(1), {"x": ("FP32", [8])}, path)


@pytest.fixture
async def server(repository: Path, tmp_path: Path) -> AsyncIterator[ServerProcess]:
    async with served(repository, *FLAGS, "--scratch-directory", str(tmp_path)) as running:
        yield running


async def post(server: ServerProcess, path: str, said: object = None) -> Answer:
    body = b"" if said is None else json.dumps(said).encode()
    return await ask(server.http, "POST", path, body=body)


async def load(server: ServerProcess, model: str) -> Answer:
    return await post(server, f"/v2/repository/models/{model}/load")


async def infer(server: ServerProcess, model: str, rows: int) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 2], "data": [1] * 2 * rows}
    return (await post(server, f"/v2/models/{model}/infer", {"inputs": [tensor]})).json


def compilers(server: int) -> Sequence[int]:
    """Return the processes that compile for a server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if (
                b"xlaserve.runtime.programs.compilers.child" in words
                and str(server).encode() in words
            ):
                found.append(int(path.parent.name))
    return found


def is_there(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and nobody asked for does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def held(server: ServerProcess, model: str = "long") -> "tuple[asyncio.Task[Answer], int]":
    """Begin a load that compiles for a while; return it and the process that compiles it."""
    loading = asyncio.ensure_future(load(server, model))
    async with asyncio.timeout(MOST_SECONDS):
        while "compiling" not in await reason(server, model):
            await asyncio.sleep(0.01)
        # A trial has a process of its own, of the same command.
        while not (compiles := events(server, "compiler process started")):
            await server.read()
    pid = compiles[-1]["pid"]
    assert isinstance(pid, int)
    return loading, pid


async def reason(server: ServerProcess, model: str) -> str:
    """Return how far a load has come, as the index says."""
    index = (await post(server, "/v2/repository/index", {})).json
    return "".join(row["reason"] for row in index if row["name"] == model)


def events(server: ServerProcess, name: str) -> list[dict[str, object]]:
    return [record for record in server.log if record.get("event") == name]


@pytest.mark.slow
async def test_loads_are_compiled_in_one_process_that_is_niced(server: ServerProcess) -> None:
    """It is there once something is compiled, and stays; the answers are what they were."""
    assert [] == compilers(server.process.pid)
    niceness = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    loads = [(await load(server, model)).status for model in ("first", "second", "third")]
    (pid,) = compilers(server.process.pid)
    answers = [await infer(server, "first", rows) for rows in (1, 2)]

    assert [200] * 3 == loads
    assert [[5.0] * 3, [5.0] * 6] == [one["outputs"][0]["data"] for one in answers]
    assert min(19, niceness + 10) == os.getpriority(os.PRIO_PROCESS, pid)
    assert 0 == await server.stop()
    assert not is_there(pid)
    assert [pid] == [record["pid"] for record in events(server, "compiler process started")]
    assert [] == events(server, "compiled in the server")


@pytest.mark.slow
async def test_a_load_survives_the_end_of_the_process(server: ServerProcess) -> None:
    """Killed by an operator, or for want of memory; another one tries again, as the log says."""
    loading, pid = await held(server)
    os.kill(pid, signal.SIGKILL)

    assert 200 == (await loading).status
    assert 0 == await server.stop()
    first, other = (record["pid"] for record in events(server, "compiler process started"))
    assert (pid, True) == (first, pid != other)
    (record,) = events(server, "compiler process lost, compilation retried")
    assert ("long", "warning") == (record["model"], record["level"])


@pytest.mark.slow
async def test_a_process_that_hangs_ends_its_load_and_no_other(
    repository: Path, tmp_path: Path
) -> None:
    """The load fails once its time is over, its thread with it, and the next one goes on."""
    flags = ("--load-seconds", "30", "--scratch-directory", str(tmp_path))
    async with served(repository, *FLAGS, *flags) as server:
        loading, pid = await held(server, "endless")
        failed = await loading
        await until(lambda: not is_there(pid))
        other = await load(server, "second")

        assert 200 != failed.status
        assert b"(load_seconds)" in failed.body
        assert 200 == other.status
        assert 0 == await server.stop()


def slow_in(processes: Any) -> Sequence[int]:
    """Return the processes that compile `slow` now."""
    tasks = tuple(processes._running)
    return [task._process.pid for task in tasks if task.job.model == "slow" and task._process]


@pytest.mark.slow
@pytest.mark.usefixtures("compilations")  # what other tests have compiled needs no process
@pytest.mark.parametrize("endpoint", ["port:0"])
async def test_a_load_that_is_cancelled_ends_the_process(
    start: StartRuntime, models: Shelf, endpoint: str
) -> None:
    """The process is gone, as no thread of the server could be; the next load has another."""
    async with start(compile_processes=1) as runtime:
        processes: Any = runtime.application.compilation.processes
        call = runtime.mesh.load("slow", models.path("slow"))
        waiting = asyncio.ensure_future(mesh.code(call))
        # It is there before, for loads to come: this one has to be in it.
        await until(lambda: slow_in(processes))
        (pid,) = slow_in(processes)
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: not is_there(pid))
        await runtime.mesh.load("m", models.path("plus-1"))

        assert 1 == processes.count


@pytest.mark.slow
async def test_sigterm_within_a_compilation_ends_both(server: ServerProcess) -> None:
    loading, pid = await held(server)
    status = await server.stop()
    with suppress(OSError, EOFError, asyncio.IncompleteReadError):
        await loading

    assert 0 == status
    await until(lambda: not is_there(pid))


@pytest.mark.slow
async def test_a_server_that_is_killed_leaves_no_process(server: ServerProcess) -> None:
    """Also one that is stopped, and hears of nothing: the system ends it."""
    loading, pid = await held(server)
    os.kill(pid, signal.SIGSTOP)
    await server.stop(signal.SIGKILL)
    with suppress(OSError, EOFError, asyncio.IncompleteReadError):
        await loading

    await until(lambda: not is_there(pid))
