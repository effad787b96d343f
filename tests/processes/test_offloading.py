"""Two workers execute the requests of clients that are all connected to one of them."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support import several, slow_models
from support.conditions import until
from support.process import ServerProcess
from tritonclient.utils import InferenceServerException

from xlaserve.workers.offload.board import WorkerBoard

pytestmark = pytest.mark.slow
ENOUGH = 16
"""Enough requests to offload a batch: the owner has at most two batches of four, and as many must
be queued.
"""
MEASURED_AGAIN_SECONDS = 15
QUICK, LONG = 10_000, 300_000
"""Loop counts of models whose batches take tens of milliseconds, and nearly a second."""


@dataclass
class Pinned:
    """A server of two workers, and the one that gets all requests."""

    server: ServerProcess
    models: Path
    owner: int
    """The number of that worker; the helper has the other one."""
    clients: dict[int, Any]
    """A session with each worker, by its number."""
    sessions: dict[int, aiohttp.ClientSession]
    board: WorkerBoard

    @property
    def helper(self) -> int:
        return 1 - self.owner

    async def infer(self, value: float) -> float:
        """Return the model's answer over a connection to the owner; raises its error."""
        tensor = triton.InferInput("x", [1, slow_models.WIDTH], "FP32")
        tensor.set_data_from_numpy(np.full((1, slow_models.WIDTH), value, np.float32))
        answer = await self.clients[self.owner].infer("slow", [tensor])
        return float(answer.as_numpy("y")[0, 0])

    async def outcome(self, value: float) -> float | str:
        """Return the answer, or the error status."""
        try:
            return await self.infer(value)
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"

    async def counted(self) -> dict[str, int]:
        """Return the number of offloaded batches by outcome."""
        async with self.sessions[self.owner].get("/metrics") as answer:
            text = await answer.text()
        rows = re.findall(r'xlaserve_offloaded_batches_total\{.*outcome="(\w+)"\} (\d+)', text)
        return {outcome: int(count) for outcome, count in rows}

    async def offloads(self) -> None:
        """Wait until the helper has executed one more batch."""
        before = (await self.counted())["executed"]
        while before == (await self.counted())["executed"]:
            await asyncio.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the helper."""
        os.kill(several.workers(self.server)[self.helper], number)


@asynccontextmanager
async def pinned(tmp_path: Path, loops: int) -> AsyncIterator[Pinned]:
    models = several.repository(tmp_path / "models")
    slow_models.export_slow(models, "slow", loops)
    explicit = ("--model-control-mode", "explicit", "--load-model", "*")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(several.several(models, *explicit))
        numbers = {pid: number for number, pid in several.workers(server).items()}
        clients = await stack.enter_async_context(several.clients(server.url))
        made = await stack.enter_async_context(several.one_each(server.http))
        sessions = {numbers[await several.asked(one, server.http)]: one for one in made}
        board = WorkerBoard(shared_board(server.process.pid), 2)
        by_number = {numbers[pid]: client for pid, client in clients.items()}
        yield Pinned(server, models, 0, by_number, sessions, board)


def shared_board(parent: int) -> int:
    """Open the board through the parent's descriptor: it has no name."""
    for link in Path(f"/proc/{parent}/fd").iterdir():
        if "xlaserve-workers" in str(link.readlink()):
            return os.open(link, os.O_RDWR)
    raise LookupError("the parent has no board")


async def test_a_worker_without_clients_executes_too(tmp_path: Path) -> None:
    """Each client gets the answer to its own request."""
    async with pinned(tmp_path, QUICK) as pin:

        async def client(number: int) -> list[float]:
            return [await pin.infer(100 * number + step) for step in range(8)]

        answers = await asyncio.gather(*(client(number) for number in range(12)))
        counted = await pin.counted()

    assert answers == [[100 * n + step + 1 for step in range(8)] for n in range(12)]
    assert counted["executed"] > 0
    assert 0 == counted["lost"]


async def test_what_a_killed_helper_executes_fails_and_nothing_else(tmp_path: Path) -> None:
    """The rest of the queue is answered by its owner and by the replacement."""
    async with pinned(tmp_path, LONG) as pin:
        await until(lambda: pin.board.is_idle(pin.helper))
        victim = several.workers(pin.server)[pin.helper]
        asked = [asyncio.ensure_future(pin.outcome(value)) for value in range(ENOUGH)]
        await until(lambda: pin.board.begun(pin.helper, pin.owner))
        pin.kill()
        found = await asyncio.gather(*asked)
        counted = await pin.counted()
        await several.replaced(pin.server, pin.helper, victim)
        await until(lambda: pin.board.is_idle(pin.helper))
        again = await asyncio.gather(*(pin.infer(value) for value in range(ENOUGH)))
        executed = (await pin.counted())["executed"]

    failed = {value: one for value, one in enumerate(found) if one != value + 1}
    assert 0 < len(failed) <= 4
    for one in failed.values():
        assert isinstance(one, str)
        assert one.startswith("StatusCode.INTERNAL: model 'slow': the worker 1 process has")
    assert 1 == counted["lost"]
    assert ([value + 1 for value in range(ENOUGH)], True) == (again, executed > 0)


async def test_what_a_helper_had_not_begun_is_executed_at_home(tmp_path: Path) -> None:
    """It is stopped before the batch arrives, and then killed: no client notices."""
    async with pinned(tmp_path, QUICK) as pin:
        # Once a batch was offloaded the two are connected: the board says only that a worker is
        # idle.
        while not (before := await pin.counted()).get("executed"):
            await asyncio.gather(*(pin.infer(value) for value in range(ENOUGH)))
        await until(lambda: pin.board.is_idle(pin.helper))
        pin.kill(signal.SIGSTOP)
        asked = [asyncio.ensure_future(pin.outcome(value)) for value in range(ENOUGH)]
        # All but the helper's batch, which has four requests at most.
        await until(lambda: sum(one.done() for one in asked) >= ENOUGH - 4)
        waiting = sum(not one.done() for one in asked)
        pin.kill()
        found = await asyncio.gather(*asked)
        counted = await pin.counted()

    assert [value + 1 for value in range(ENOUGH)] == found
    assert waiting > 0
    assert before | {"refused": before["refused"] + 1} == counted


async def test_a_reload_mixes_no_versions(tmp_path: Path) -> None:
    """Once a request was answered from the new files, no later answer comes from the old ones.

    The asked worker loads them first, and the helper seconds later.
    """
    async with pinned(tmp_path, QUICK) as pin:
        stopped = False
        wrong: list[tuple[float, float]] = []
        newest = 1.0

        async def client() -> None:
            nonlocal newest
            while not stopped:
                known = newest
                added = await pin.infer(10) - 10
                newest = max(newest, added)
                if added < known:
                    wrong.append((added, known))

        clients = [asyncio.ensure_future(client()) for _ in range(12)]
        last, offloaded = 1, 0
        while offloaded < 2:
            last += 1
            slow_models.export_slow(pin.models, "slow", QUICK, add=last)
            load = "/v2/repository/models/slow/load"
            async with pin.sessions[pin.owner].post(load) as answer:
                assert 200 == answer.status, await answer.text()
            # A warm-up that others disturbed may have measured that batches do not pay: no batch
            # leaves then, and the next load measures again.
            with suppress(TimeoutError):
                async with asyncio.timeout(MEASURED_AGAIN_SECONDS):
                    await pin.offloads()
                    offloaded += 1
        stopped = True
        await asyncio.gather(*clients)
        counted = await pin.counted()

    assert [] == wrong
    assert last == newest
    assert counted["refused"] > 0
    assert 0 == counted["lost"]


async def test_a_server_that_is_told_to_stop_answers_what_helpers_execute(tmp_path: Path) -> None:
    """The helper has no request of its own, and stops after the batch it has begun."""
    async with pinned(tmp_path, LONG) as pin:
        await until(lambda: pin.board.is_idle(pin.helper))
        asked = [asyncio.ensure_future(pin.outcome(value)) for value in range(ENOUGH)]
        await until(lambda: pin.board.begun(pin.helper, pin.owner))
        pin.server.process.send_signal(signal.SIGTERM)
        found = await asyncio.gather(*asked)
        status = await pin.server.process.wait()

    assert [value + 1 for value in range(ENOUGH)] == found
    assert 0 == status
