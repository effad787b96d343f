"""Worker deaths during reloads and unloads, and sequences during a reload."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import several
from support.conditions import until
from support.python_models import VECTORS, write

pytestmark = pytest.mark.slow
MOST_SECONDS = 120
NUMBERED = """
import asyncio, os, pathlib, time

GATE = pathlib.Path({gate!r})

class Model(PythonModel):
    def load(self, context):
        file = GATE / f"loads-{number}"
        with file.open("a") as loads:
            loads.write("x")
        while len(file.read_text()) == {held} and not (GATE / "open").exists():
            time.sleep(0.01)

    async def infer(self, inputs):
        if inputs["x"][0] == 7:
            (GATE / f"infers-{{os.getpid()}}").touch()
            while not (GATE / "open").exists():
                await asyncio.sleep(0.01)
        return {{"y": np.full(1, {number}, np.float32)}}
"""
"""A model that answers its number; one of its loads waits for a gate, as do requests of 7."""


@dataclass
class Numbered:
    """A server of two workers, and its numbered model."""

    url: str
    models: Path
    gate: Path

    def write(self, number: int, held: int = 0) -> None:
        """Rewrite the model; its load number `held` waits for the gate (1: the first worker's)."""
        code = NUMBERED.format(gate=str(self.gate), number=number, held=held)
        write(self.models, "numbered", code, VECTORS)

    async def loads(self, number: int, count: int) -> None:
        """Wait until this many workers have begun to load the model."""
        file = self.gate / f"loads-{number}"
        await until(lambda: file.exists() and len(file.read_text()) == count)


@asynccontextmanager
async def numbered(tmp_path: Path) -> AsyncIterator[Numbered]:
    gate, models = tmp_path / "gate", several.repository(tmp_path / "models")
    gate.mkdir()
    flags = ("--model-control-mode", "explicit", "--load-model", "who", "--drain-seconds", "300")
    async with several.several(models, *flags) as running, asyncio.timeout(MOST_SECONDS):
        yield Numbered(running.http, models, gate)


async def post(session: aiohttp.ClientSession, path: str, body: Any = None) -> int:
    async with session.post(path, json=body) as answer:
        return answer.status


async def value(session: aiohttp.ClientSession) -> Any:
    """Return the number that a worker answers, or the error status."""
    async with session.post("/v2/models/numbered/infer", json=several.who()) as answer:
        found = await answer.json()
        return found["outputs"][0]["data"][0] if answer.status == 200 else answer.status


LOAD, UNLOAD = (f"/v2/repository/models/numbered/{verb}" for verb in ("load", "unload"))


@pytest.mark.parametrize(("held", "victim"), [(1, 0), (2, 0), (2, 1)])
async def test_a_reload_in_which_a_worker_dies_leaves_one_version(
    tmp_path: Path, held: int, victim: int
) -> None:
    """The worker dies in its own load, in the other's, or as the other: all serve one version."""
    async with numbered(tmp_path) as server:
        server.write(1)
        async with several.one_each(server.url) as sessions:
            assert 200 == await post(sessions[0], LOAD)
            pids = [await several.asked(session, server.url) for session in sessions]
            server.write(2, held)
            loading = asyncio.ensure_future(post(sessions[0], LOAD))
            await server.loads(2, held)
            during = await value(sessions[1])
            os.kill(pids[victim], signal.SIGKILL)
            await several.is_gone(pids[victim])
            (server.gate / "open").touch()
            ended = (await asyncio.gather(loading, return_exceptions=True))[0]
        async with several.one_each(server.url) as sessions:
            after = [await value(session) for session in sessions]

    assert 1 == during
    assert [2, 2] == after
    assert 200 == ended if victim else isinstance(ended, aiohttp.ClientError)


async def test_files_that_a_replacement_is_the_first_to_load_are_loaded_by_all(
    tmp_path: Path,
) -> None:
    """Without any request for it, and before the replacement answers."""
    async with numbered(tmp_path) as server:
        server.write(1)
        async with several.one_each(server.url) as sessions:
            assert 200 == await post(sessions[0], LOAD)
            server.write(2)
            os.kill(victim := await several.asked(sessions[0], server.url), signal.SIGKILL)
            await several.is_gone(victim)
        async with several.one_each(server.url) as sessions:
            newer = [await value(session) for session in sessions]

    assert [2, 2] == newer


@pytest.mark.parametrize("victim", [0, 1])
async def test_an_unload_in_which_a_worker_dies_ends_in_all_or_none(
    tmp_path: Path, victim: int
) -> None:
    """The worker dies while its unload waits for a request: the other and its replacement agree."""
    async with numbered(tmp_path) as server:
        server.write(1)
        async with several.one_each(server.url) as sessions, several.one_each(server.url) as more:
            assert 200 == await post(sessions[0], LOAD)
            pids = [await several.asked(session, server.url) for session in sessions]
            others = {await several.asked(session, server.url): session for session in more}
            busy = pids[victim]
            body = several.who(7.0)
            infer = "/v2/models/numbered/infer"
            request = asyncio.ensure_future(post(others[busy], infer, body))
            await until((server.gate / f"infers-{busy}").exists)
            unloading = asyncio.ensure_future(post(sessions[0], UNLOAD))
            # All workers hide it from the start, although the busy one drains.
            # A separate connection is used: the unload occupies the worker's.
            while await ready(others[pids[1 - victim]]) == 200:
                await asyncio.sleep(0.01)
            os.kill(busy, signal.SIGKILL)
            await several.is_gone(busy)
            ended = await asyncio.gather(request, unloading, return_exceptions=True)
        async with several.one_each(server.url) as sessions:
            left = {await value(session) for session in sessions}

    assert isinstance(ended[0], aiohttp.ClientError)
    assert 200 == ended[1] if victim else isinstance(ended[1], aiohttp.ClientError), ended
    assert left in ([{404}] if victim else [{1}, {404}])


async def ready(session: aiohttp.ClientSession) -> int:
    async with session.get("/v2/models/numbered/ready") as answer:
        return answer.status
