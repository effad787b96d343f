"""Several processes are one server: connections are shared, and workers that die are replaced."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from support import several
from support.process import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST_SECONDS = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    """One server of two processes for all tests here; they leave it with two."""
    models = several.repository(tmp_path_factory.mktemp("models"))
    async with several.several(models) as running:
        yield running


@pytest.mark.parametrize("count", [4, 64])
async def test_each_worker_has_as_many_connections(server: ServerProcess, count: int) -> None:
    """The kernel alone would leave one worker with up to all of them."""
    found = await several.connections_of(server.http, count)

    assert [count // 2] * 2 == list(found.values())


async def test_a_worker_that_dies_is_replaced_and_the_other_serves_on(
    server: ServerProcess,
) -> None:
    """New connections are answered at once; the replacement has some once it has models."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(MOST_SECONDS):
        before = set(await several.connections_of(server.http, 2))
        victim = await several.asked(session, server.http)
        (left,) = before - {victim}
        os.kill(victim, signal.SIGKILL)
        await several.is_gone(victim)
        # Its connections are closed, and the client makes a new one.
        assert left == await several.asked(session, server.http)
        assert {left} == set(await several.connections_of(server.http, 2))
        found = set[int]()
        while len(found) < 2:
            found = set(await several.connections_of(server.http, 2))

        assert found - before
        assert found & before == {left}


async def test_sigterm_ends_all_of_it(tmp_path: Path) -> None:
    """The parent drains its workers, and ends when they have."""
    async with several.several(several.repository(tmp_path)) as running:
        workers = several.workers(running).values()

        assert await running.stop() == 0

        for pid in workers:
            await asyncio.wait_for(several.is_gone(pid), MOST_SECONDS)
    stopped = [record.get("worker") for record in running.log if record["event"] == "stopped"]
    assert {0, 1, None} == set(stopped)
    assert stopped[-1] is None


async def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Nobody would ever stop them."""
    async with several.several(several.repository(tmp_path)) as running:
        running.process.kill()

        for pid in several.workers(running).values():
            await asyncio.wait_for(several.is_gone(pid), MOST_SECONDS)
