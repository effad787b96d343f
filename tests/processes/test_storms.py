"""Repeated signals during a hand-over: no request fails, and one server is left, or none."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from support import several
from support.process import ServerProcess, served
from support.replacing import ending, is_over, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLIENTS = 4
MOST_SECONDS = 400


@dataclass
class Load:
    """Clients that send requests continuously, half of them on persistent connections."""

    url: str
    found: set[int] = field(default_factory=set)
    """The processes that have answered."""
    answered: int = 0

    async def _ask(self, ended: asyncio.Event, *, keeps: bool) -> None:
        while not ended.is_set():
            async with aiohttp.ClientSession() as session:
                for _ in range(20 if keeps else 1):
                    self.found.add(await several.asked(session, self.url))
                    self.answered += 1
                    if ended.is_set():
                        return

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Send requests during a block, which fails if a request fails."""
        ended = asyncio.Event()
        asking = [
            asyncio.ensure_future(self._ask(ended, keeps=bool(number % 2)))
            for number in range(CLIENTS)
        ]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*asking)
        assert self.answered > CLIENTS


@asynccontextmanager
async def reading(server: ServerProcess) -> AsyncIterator[None]:
    """Read the log during a block, so that the pipe does not fill up."""

    async def read() -> None:
        while await server.read():
            pass

    task = asyncio.ensure_future(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def seen(server: ServerProcess, event: str, count: int = 1) -> None:
    while len(records(server, event)) < count:
        await asyncio.sleep(0.01)


async def storm(pid: int, number: int, times: int) -> None:
    """Send a signal 200 times a second."""
    for _ in range(times):
        os.kill(pid, number)
        await asyncio.sleep(0.005)


async def test_a_storm_of_sighup_reads_all_again_and_fails_no_request(tmp_path: Path) -> None:
    models = several.repository(tmp_path / "models")
    log = tmp_path / "access.jsonl"
    flags = ("--allow-python-models", "--access-log", str(log))
    async with served(models, *flags) as server, asyncio.timeout(MOST_SECONDS):
        load = Load(server.http)
        async with reading(server), load.going_on():
            await storm(server.process.pid, signal.SIGHUP, 2000)
            moved = tmp_path / "moved.jsonl"
            log.rename(moved)
            server.process.send_signal(signal.SIGHUP)
            # The last reopening is not lost: the file exists again.
            while not log.exists():
                await asyncio.sleep(0.01)
        assert 0 == await server.stop()
    assert {server.process.pid} == load.found
    assert [] == records(server, "not reloaded")
    lines = len(moved.read_text().splitlines()) + len(log.read_text().splitlines())
    assert load.answered == lines


@pytest.mark.parametrize(
    "moment",
    ["replacement started", "listening", "client changes handed over", "server replaced"],
)
async def test_sigterm_during_a_handover_ends_all_of_it(tmp_path: Path, moment: str) -> None:
    models = several.repository(tmp_path / "models")
    async with served(models, "--allow-python-models") as server, asyncio.timeout(MOST_SECONDS):
        async with ending(server), reading(server):
            listening = len(records(server, "listening"))
            server.process.send_signal(signal.SIGUSR2)
            await seen(server, moment, 1 + (listening if moment == "listening" else 0))
            server.process.send_signal(signal.SIGTERM)
            new = server.event("replacement started")["pid"]
            await is_over(server.process.pid)
            if records(server, "server replaced"):
                # It serves in place of the old one by then.
                async with aiohttp.ClientSession() as session:
                    assert new == await several.asked(session, server.http)
                os.kill(new, signal.SIGTERM)
            await is_over(new)
    # Both have drained; one that was not ready may have had nothing to drain.
    stopped = len(records(server, "stopped"))
    assert stopped >= 1 + bool(records(server, "server replaced"))
