"""Each signal that the documentation names, to each process, whatever the server does then."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.conditions import until
from support.object_server import Shelves, serving_objects
from support.process import ServerProcess, served
from support.python_models import OWN, VECTORS, write
from support.replacing import ending, records

SECONDS = 120
GATED = """
import asyncio, pathlib

class Model(PythonModel):
    async def infer(self, inputs):
        pathlib.Path({begun!r}).touch()
        while not pathlib.Path({gate!r}).exists():
            await asyncio.sleep(0.01)
        return {{"y": inputs["x"]}}
"""
PLAIN = """
class Model(PythonModel):
    def infer(self, inputs):
        return {"y": inputs["x"]}
"""
FAR = {
    "root/far/config.pbtxt": f'backend: "python"\n{VECTORS}'.encode(),
    "root/far/1/model.py": f"{OWN}{PLAIN}".encode(),
}
BODY = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
TARGETS = ("parent", "group", "worker")
STATES = ("idle", "loading", "draining")
QUICK = (signal.SIGTERM, "group", 1, "loading")
CASES = [
    pytest.param(*case, marks=[] if case == QUICK else [pytest.mark.slow])
    for number in SIGNALS
    for target in TARGETS
    for processes in (1, 2)
    for state in STATES
    if target != "worker" or processes > 1
    for case in [(number, target, processes, state)]
]


@dataclass
class Scene:
    """A server that is idle, waits for a store that hangs, or drains with a request in flight."""

    server: ServerProcess
    session: aiohttp.ClientSession
    shelves: Shelves
    gate: Path
    begun: Path

    async def post(self, path: str) -> int:
        """Post, and return the status; 0 for a connection that was closed."""
        try:
            url = f"http://{self.server.http}{path}"
            async with self.session.post(url, json=BODY) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def begin(self, state: str) -> "asyncio.Task[int] | None":
        """Bring it into a state; returns what a client waits for."""
        if state == "idle":
            return None
        if state == "loading":
            self.shelves.may_list.clear()
            asked = asyncio.ensure_future(self.post("/v2/repository/models/far/load"))
            known = len(self.shelves.asked)
            await until(lambda: ("GET", "root/far/", "") in self.shelves.asked[known:])
            return asked
        asked = asyncio.ensure_future(self.post("/v2/models/gated/infer"))
        await until(self.begun.exists)
        self.server.process.send_signal(signal.SIGTERM)
        await self.server.until("shutting down")
        return asked

    def sends(self, number: int, target: str) -> Callable[[], None]:
        """Return what sends a signal."""
        leader = self.server.process.pid
        if target == "group":
            return lambda: os.killpg(leader, number)
        workers = [record["pid"] for record in records(self.server, "worker started")]
        pids = workers if target == "worker" else [leader]

        def send() -> None:
            for pid in pids:
                os.kill(pid, number)

        return send


@asynccontextmanager
async def scene(tmp_path: Path, processes: int) -> AsyncIterator[Scene]:
    models, gate, begun = tmp_path / "models", tmp_path / "gate", tmp_path / "begun"
    write(models, "gated", GATED.format(begun=str(begun), gate=str(gate)), VECTORS)
    write(models, "plain", PLAIN, VECTORS)
    settings: dict[str, Any] = {
        "model-control-mode": "explicit",
        "processes": processes,
        "remote-schemes": "http",
        "remote-cache-directory": tmp_path / "cache",
        "grace-seconds": 10 * SECONDS,
        "load-seconds": 10 * SECONDS,
    }
    flags = [str(text) for name, value in settings.items() for text in (f"--{name}", value)]
    flags += ["--allow-python-models", "--load-model", "gated", "--load-model", "plain"]
    with serving_objects(**FAR) as (url, shelves):
        async with (
            served(models, *flags, "--model-repository", url, group="new") as server,
            ending(server),
            aiohttp.ClientSession() as session,
            asyncio.timeout(2 * SECONDS),
        ):
            if processes > 1:
                await server.until("workers ready")
            yield Scene(server, session, shelves, gate, begun)


@pytest.mark.parametrize(("number", "target", "processes", "state"), CASES)
async def test_a_signal_does_what_the_page_says(
    tmp_path: Path, number: signal.Signals, target: str, processes: int, state: str
) -> None:
    """Workers ignore all; whoever waits is answered; nothing ends that is not told to."""
    stops = number in (signal.SIGTERM, signal.SIGINT) and target != "worker"
    replaces = number is signal.SIGUSR2 and target != "worker" and state != "draining"
    async with scene(tmp_path, processes) as at:
        asked = await at.begin(state)
        send = at.sends(number, target)
        send()
        if state == "draining":
            if stops:
                await ends_by_the_next(at, send)
            else:
                at.gate.touch()
            status = await at.server.ended()
            assert asked is not None
            assert [-number, 0] if stops else [0, 200] == [status, await asked]
            return
        if replaces:
            await is_replaced(at)
        elif not stops:
            assert 200 == await at.post("/v2/models/plain/infer")
            at.shelves.may_list.set()
            if asked is not None:
                assert 200 == await asked
                asked = None
            at.server.process.send_signal(signal.SIGTERM)
        if asked is not None:
            assert 503 == await asked
        assert 0 == await at.server.ended()


async def ends_by_the_next(at: Scene, send: Callable[[], None]) -> None:
    """Send a signal until the server has ended: those of the first second count once."""
    while at.server.process.returncode is None:
        try:
            send()
        except ProcessLookupError:
            break
        await asyncio.sleep(0.1)


async def is_replaced(at: Scene) -> None:
    """Read the log until the new server has replaced it, then have the new one end."""
    await at.server.until("server replaced")
    assert [] == records(at.server, "server not replaced")
    new = records(at.server, "server replaced")[-1]["by"]
    assert 200 == await at.post("/v2/models/plain/infer")
    os.kill(new, signal.SIGTERM)
