"""SIGTERM and SIGINT to all processes of a server, as systemd and terminals send them."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import jax
import jax.export
import jax.numpy as jnp
import pytest
from support import several
from support.process import STOP_SECONDS, ServerProcess, served
from support.python_models import write_function

SORTS = 300
"""Enough for XLA to need at least five seconds."""
FLAGS = ("--allow-python-models", "--model-control-mode", "explicit", "--load-model", "who")
COMPILER = "xlaserve.runtime.programs.compilers.child"
PYTHON_MODEL = "xlaserve.python_models.process.child"
CONFIG = several.CONFIG + 'parameters { key: "execution" value { string_value: "process" } }'


def write_sorts(directory: Path) -> None:
    """Write a version with `jax.export`, which compiles nothing."""

    def sorted_often(x: jax.Array) -> jax.Array:
        for _ in range(SORTS):
            x = jnp.sort(x * 1.5)
        return x

    exported = jax.export.export(jax.jit(sorted_often))(jnp.zeros(8, jnp.float32))
    directory.mkdir(parents=True)
    (directory / "model.jaxexp").write_bytes(exported.serialize())


def descendants(pid: int) -> dict[int, str]:
    """Return the descendants of a process, the latest first, with their command lines."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= descendants(child)
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


async def compiling(server: ServerProcess) -> dict[int, str]:
    """Return all children of a server, once one is compiling and one runs a Python model."""
    while True:
        found = descendants(server.process.pid)
        if all(any(one in said for said in found.values()) for one in (COMPILER, PYTHON_MODEL)):
            return found
        await asyncio.sleep(0.01)


async def load(http: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{http}/v2/repository/models/sorts/load", json={}) as response,
    ):
        return response.status, await response.text()


def loud(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log records above info, and those about compilations."""
    quiet = ("debug", "info")
    return [
        record
        for record in log
        if record["level"] not in quiet or record["event"] == "compiled in the server"
    ]


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
)
async def test_a_signal_to_all_while_a_model_compiles_is_a_plain_stop(
    tmp_path: Path, number: int, processes: int
) -> None:
    """The children get it first, yet none is stopped, replaced, or blamed on its model."""
    write_function(tmp_path / "models", "who", several.WHO, CONFIG)
    write_sorts(tmp_path / "models/sorts/1")
    flags = (*FLAGS, "--processes", str(processes))
    async with served(tmp_path / "models", *flags, XLASERVE_COMPILE_PROCESSES="1") as server:
        if processes > 1:
            await server.until(several.READY)
        loading = asyncio.ensure_future(load(server.http))
        async with asyncio.timeout(STOP_SECONDS):
            children = await compiling(server)
            await server.until("compiler process started")
            for child in children:
                os.kill(child, number)
            async with aiohttp.ClientSession() as session:
                # By then a child that reacts to the signal has ended, and its parent has noticed.
                async with session.get(f"http://{server.http}/v2/models/who/stats") as response:
                    assert 200 == response.status
            status = await server.stop(number)
            answer = await loading

    assert [] == loud(server.log)
    assert (0, 503) == (status, answer[0]), answer
    workers = [
        one.get("worker") for one in server.log if one["event"] == "compiler process started"
    ]
    assert len(workers) == len(set(workers)) >= 1, "each has its first one"
