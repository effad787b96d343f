"""A model is ready in all workers or in none, because a client may reach any of them."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support import several
from support.conditions import until
from support.python_models import VECTORS, write

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST_SECONDS = 20
DRAIN = ("--drain-seconds", "300")
GATED = """
import asyncio, os, pathlib, time

GATE = pathlib.Path({gate!r})

class Model(PythonModel):
    def load(self, context):
        try:
            (GATE / f"taken-{{context.version}}").touch(exist_ok=False)
        except FileExistsError:
            (GATE / "waiting").touch()
            while not (GATE / "open").exists():
                time.sleep(0.01)

    async def infer(self, inputs):
        (GATE / "infers").touch()
        while not (GATE / "open").exists():
            await asyncio.sleep(0.01)
        return {{"y": inputs["x"]}}
"""
"""A model whose second load, and all of whose requests, wait until a gate is open."""


@dataclass
class Gated:
    """A server of two workers, and the gate of its model."""

    url: str
    model: Path
    gate: Path

    def close(self) -> None:
        """Close the gate, and start afresh."""
        for file in self.gate.iterdir():
            file.unlink()

    def open(self) -> None:
        """Open the gate."""
        (self.gate / "open").touch()


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def gated_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gated]:
    """A server shared by these tests, each of which starts with the model unloaded."""
    gate = tmp_path_factory.mktemp("gate")
    models = several.repository(tmp_path_factory.mktemp("models"))
    write(models, "gated", GATED.format(gate=str(gate)), VECTORS)
    config = models / "gated" / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy: { all { } }\n")
    flags = ("--model-control-mode", "explicit", "--load-model", "who", *DRAIN)
    async with several.several(models, *flags) as running:
        yield Gated(running.http, models / "gated", gate)


async def post(session: aiohttp.ClientSession, path: str, body: Any = None) -> int:
    """Return the status of a POST request."""
    async with session.post(path, json=body) as answer:
        return answer.status


async def readiness(sessions: list[aiohttp.ClientSession], version: str = "") -> list[int]:
    """Return the readiness status of the model in each worker."""
    path = f"/v2/models/gated{version and '/versions/'}{version}/ready"
    found = []
    for session in sessions:
        async with session.get(path) as answer:
            found.append(answer.status)
    return found


@pytest.mark.slow
async def test_a_model_is_ready_when_all_have_it(server: Gated) -> None:
    """The worker that was asked loads it first; the same holds for a version added by a reload."""
    server.close()
    load, waiting = "/v2/repository/models/gated/load", server.gate / "waiting"
    async with several.one_each(server.url) as sessions:
        first = asyncio.ensure_future(post(sessions[0], load))
        async with several.one_each(server.url) as asking:
            await until(waiting.exists)
            loading = await readiness(asking)
            server.open()
            assert 200 == await first
            loaded = await readiness(asking)
            server.close()
            (server.gate / "taken-1").touch()
            shutil.copytree(server.model / "1", server.model / "2")
            second = asyncio.ensure_future(post(sessions[0], load))
            await until(waiting.exists)
            reloading = [await readiness(asking, version) for version in ("", "1", "2")]
            server.open()
            assert 200 == await second
            reloaded = await readiness(asking, "2")
        await post(sessions[0], "/v2/repository/models/gated/unload")

    assert ([400, 400], [200, 200]) == (loading, loaded)
    ready_of_old, of_new = [[200, 200], [200, 200]], reloading[2]
    assert ready_of_old == reloading[:2]
    assert 200 not in of_new
    assert [200, 200] == reloaded


@pytest.mark.slow
async def test_a_model_that_one_worker_unloads_is_ready_in_none(server: Gated) -> None:
    """The first worker waits for a request; the others have not begun."""
    server.close()
    server.open()
    async with (
        several.one_each(server.url) as sessions,
        several.one_each(server.url) as beside,
    ):
        busy = await several.asked(sessions[0], server.url)
        pairs = {await several.asked(session, server.url): session for session in beside}
        assert 200 == await post(sessions[0], "/v2/repository/models/gated/load")
        before = await readiness(sessions)
        server.close()
        request = asyncio.ensure_future(post(sessions[0], "/v2/models/gated/infer", several.who()))
        await until((server.gate / "infers").exists)
        unload = "/v2/repository/models/gated/unload"
        unloading = asyncio.ensure_future(post(pairs[busy], unload))
        async with asyncio.timeout(MOST_SECONDS):
            # The other worker reports it before the first one has finished.
            while 200 in (during := await readiness(sessions[1:])):
                await asyncio.sleep(0.01)
        assert not unloading.done()
        server.open()
        statuses = await request, await unloading

    assert ([200, 200], [400]) == (before, during)
    assert (200, 200) == statuses


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_load_in_which_a_worker_dies_ends_in_all_or_none(
    server: Gated, victim: int
) -> None:
    """Either the asked worker (0) dies or another one; its replacement has the same models."""
    server.close()
    load = "/v2/repository/models/gated/load"
    async with several.one_each(server.url) as sessions:
        pids = [await several.asked(session, server.url) for session in sessions]
        loading = asyncio.ensure_future(post(sessions[0], load))
        await until((server.gate / "waiting").exists)
        os.kill(pids[victim], signal.SIGKILL)
        await several.is_gone(pids[victim])
        server.open()
        if victim:
            assert 200 == await loading
        else:
            with pytest.raises(aiohttp.ClientError):
                await loading
    async with several.one_each(server.url) as sessions, asyncio.timeout(MOST_SECONDS):
        while [200, 200] != await readiness(sessions):
            await asyncio.sleep(0.01)
        assert 200 == await post(sessions[0], "/v2/repository/models/gated/unload")
        left = await readiness(sessions)

    assert [400, 400] == left
