"""The event log of a server of several processes is one, kept by the parent."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import several
from support.process import START_SECONDS

pytestmark = pytest.mark.slow


async def events(session: aiohttp.ClientSession, **query: str) -> list[dict[str, Any]]:
    async with session.get("/page/events", params=query) as answer:
        assert 200 == answer.status, await answer.text()
        return list(reversed((await answer.json())["events"]))


async def of_workers(session: aiohttp.ClientSession) -> list[Any]:
    found = await events(session, search="worker")
    return [one for one in found if one["kind"].startswith("worker")]


async def test_every_worker_shows_the_events_of_all_and_a_death_loses_none(tmp_path: Path) -> None:
    models = several.repository(tmp_path)
    (models / "broken" / "1").mkdir(parents=True)
    flags = ("--model-control-mode", "explicit", "--load-model", "who")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(several.several(models, *flags))
        made = [aiohttp.ClientSession(f"http://{server.http}") for _ in range(2)]
        sessions = [await stack.enter_async_context(session) for session in made]
        for session in sessions:
            async with session.get("/v2/health/live"):
                pass
        async with sessions[0].post("/v2/repository/models/echo/load", json={}) as answer:
            assert 200 == answer.status
        async with sessions[1].post("/v2/repository/models/broken/load", json={}) as answer:
            assert 400 <= answer.status
        seen = [await events(session) for session in sessions]
        assert seen[0] == seen[1]
        shown = [(one["kind"], one.get("model")) for one in seen[0]]
        assert 2 == shown.count(("worker started", None))
        assert 1 == shown.count(("load", "who")), "worker 0 notes the start for all"
        assert 1 == shown.count(("load", "echo")), "the one that was asked notes it for all"
        failed = [one for one in seen[0] if one.get("model") == "broken"]
        assert 1 == len([one for one in failed if one.get("cause") != "other worker"])
        workers = [one["worker"] for one in failed]
        assert sorted(set(workers)) == sorted(workers), "a failure is noted where it happened"
        async with asyncio.timeout(START_SECONDS):
            os.kill(several.workers(server)[1], signal.SIGKILL)
            async with aiohttp.ClientSession(f"http://{server.http}") as session:
                while len(found := await of_workers(session)) < 4:
                    await asyncio.sleep(0.05)
                last = await events(session)

    died, started = found[-2:]
    assert ("worker died", True, 1) == (died["kind"], died["failed"], died["worker"])
    assert ("worker started", 1) == (started["kind"], started["worker"])
    assert seen[0] == last[: len(seen[0])]
