"""Access rules on a server of two processes: quotas and reloads apply to all of them."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import several
from support.conditions import until
from support.process import ServerProcess
from support.python_models import VECTORS, write

from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.slow
MOST_SECONDS = 120
RATED, BUSY, PLAIN = new_token(), new_token(), new_token()
GATED = """
import asyncio, pathlib, uuid

class Model(PythonModel):
    async def infer(self, inputs):
        pathlib.Path({begun!r}, str(uuid.uuid4())).touch()
        while not pathlib.Path({gate!r}).exists():
            await asyncio.sleep(0.01)
        return {{"y": inputs["x"]}}
"""


def rules(*more: dict[str, Any]) -> str:
    """Write the rules: two tenants with quotas, and anonymous callers who may look for workers."""
    anyone = {"name": "anyone", "anyone": True, "allow": ["infer", "health"], "models": ["who"]}
    rated = {"requests_per_second": 1e-6, "burst": 5}
    tenants: list[tuple[str, str, dict[str, float]]]
    tenants = [("rated", RATED, rated), ("busy", BUSY, {"concurrent_requests": 2})]
    callers: list[dict[str, Any]] = [
        {"name": name, "token": digest_of(token), "allow": ["infer"], **quota}
        for name, token, quota in tenants
    ]
    return json.dumps({"caller": [*callers, *more, anyone]})


@asynccontextmanager
async def tenants(tmp_path: Path) -> AsyncIterator[tuple[ServerProcess, Path]]:
    models, file = several.repository(tmp_path / "models"), tmp_path / "rules.json"
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    begun.mkdir()
    write(models, "gated", GATED.format(gate=str(gate), begun=str(begun)), VECTORS)
    file.write_text(rules())
    async with several.several(models, "--access-rules", str(file)) as server:
        yield server, file


async def ask(session: aiohttp.ClientSession, token: str, model: str = "who") -> int:
    """Infer as a tenant; return the status, or 0 if the connection was closed."""
    headers, path = {"authorization": f"Bearer {token}"}, f"/v2/models/{model}/infer"
    try:
        async with session.post(path, json=several.who(), headers=headers) as response:
            await response.read()
            return response.status
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return 0


async def test_quotas_are_of_all_workers_together(tmp_path: Path) -> None:
    """Rates, concurrent requests, and the requests in flight of a killed worker."""
    async with tenants(tmp_path) as (server, _), asyncio.timeout(MOST_SECONDS):
        async with several.one_each(server.http) as (one, other):
            rated = Counter([await ask((one, other)[n % 2], RATED) for n in range(12)])
            victim = await several.asked(one, server.http)
            held = [asyncio.ensure_future(ask(s, BUSY, "gated")) for s in (one, other)]
            await begun(tmp_path, 2)
            full = [await ask(session, BUSY) for session in (one, other) * 4]
            os.kill(victim, signal.SIGKILL)
            cut = await held[0]
            new = asyncio.ensure_future(asked_until_taken(other))
            await begun(tmp_path, 3)
            full += [await ask(other, BUSY) for _ in range(4)]
            (tmp_path / "gate").touch()
            found = [await held[1], await new, await ask(other, RATED)]

    assert {200: 5, 429: 7} == rated
    assert (0, [200, 200, 429]) == (cut, found)
    assert {429} == set(full)


async def begun(tmp_path: Path, count: int) -> None:
    await until(lambda: len(list((tmp_path / "begun").iterdir())) == count)


async def asked_until_taken(session: aiohttp.ClientSession) -> int:
    while (status := await ask(session, BUSY, "gated")) == 429:
        await asyncio.sleep(0.01)
    return status


async def test_new_rules_are_of_all_workers(tmp_path: Path) -> None:
    """With SIGHUP, also for open connections; an invalid file changes nothing."""
    plain = {"name": "plain", "token": digest_of(PLAIN), "allow": ["infer"]}
    async with tenants(tmp_path) as (server, file), asyncio.timeout(MOST_SECONDS):
        async with several.one_each(server.http) as both:
            before = [await ask(session, PLAIN, "echo") for session in both]
            file.write_text(rules(plain))
            server.process.send_signal(signal.SIGHUP)
            for session in both:
                while await ask(session, PLAIN, "echo") != 200:
                    await asyncio.sleep(0.01)
            file.write_text("no rules")
            server.process.send_signal(signal.SIGHUP)
            await reported(server, "not reloaded")
            after = [await ask(session, PLAIN, "echo") for session in both]

    assert ([404, 404], [200, 200]) == (before, after)


async def reported(server: ServerProcess, event: str) -> None:
    """Wait until both workers have logged an event."""
    seen = set[int]()
    while seen != {0, 1}:
        await server.until(event)
        seen |= {record["worker"] for record in server.log if record.get("event") == event}
        server.log[:] = [record for record in server.log if record.get("event") != event]
