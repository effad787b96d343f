"""Pending loads when a server of several processes is stopped, or when their client leaves."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest
from support import python_models, several

MOST_SECONDS = 120
LOADS = 8
SLOW = """
import pathlib, time
here = pathlib.Path({began!r})
(here / str(time.time_ns())).touch()
while not pathlib.Path({gate!r}).exists():
    time.sleep(0.01)
"""
FLAGS = ("--model-control-mode", "explicit", "--load-model", "who", "--grace-seconds", "600")


def slow(models: Path, name: str, folder: Path) -> None:
    """Write a model whose load records that it has begun, and then waits for a file."""
    python_models.write_function(models, name, several.WHO, several.CONFIG)
    file = models / name / "1" / "model.py"
    began, gate = str(folder / "began"), str(folder / "gate")
    file.write_text(SLOW.format(began=began, gate=gate) + file.read_text())


async def begun(folder: Path, count: int) -> None:
    while len(list((folder / "began").iterdir())) < count:
        await asyncio.sleep(0.01)


async def load(url: str, name: str) -> int:
    """Request a load over a separate connection; return the status."""
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{url}/v2/repository/models/{name}/load") as response:
            await response.read()
            return response.status


@pytest.mark.slow
async def test_loads_that_wait_at_sigterm_are_answered(tmp_path: Path) -> None:
    """Draining workers still read their parent's messages, without which no load could end."""
    models = several.repository(tmp_path / "models")
    (tmp_path / "began").mkdir()
    slow(models, "slow", tmp_path)
    async with several.several(models, *FLAGS) as running, asyncio.timeout(MOST_SECONDS):
        loads = [asyncio.ensure_future(load(running.http, "slow")) for _ in range(LOADS)]
        await begun(tmp_path, 1)
        running.process.send_signal(signal.SIGTERM)
        await running.until("shutting down")
        (tmp_path / "gate").touch()
        statuses = await asyncio.gather(*loads)
        status = await running.process.wait()

    assert {503} == set(statuses)
    assert 0 == status
