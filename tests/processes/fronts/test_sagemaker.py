"""A multi-model container with front ends: a single list of models with their original URLs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import identity_models, several
from support.process import ServerProcess

pytestmark = pytest.mark.slow
MOST_SECONDS = 120
X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [2.5]}]}


@dataclass
class Container:
    """The platform, with a connection to each front end and some more."""

    server: ServerProcess
    sessions: list[aiohttp.ClientSession]
    archives: Path

    def url(self, name: str) -> str:
        return str(self.archives / name)

    async def load(self, name: str, archive: str, session: int = 0) -> tuple[int, str]:
        body = {"model_name": name, "url": self.url(archive)}
        async with self.sessions[session].post("/models", json=body) as answer:
            return answer.status, await answer.text()

    async def unload(self, name: str, session: int = 0) -> int:
        async with self.sessions[session].delete(f"/models/{name}") as answer:
            return answer.status

    async def invoke(self, name: str, session: int) -> Any:
        async with self.sessions[session].post(f"/models/{name}/invoke", json=X) as answer:
            if answer.status != 200:
                return answer.status
            return (await answer.json())["outputs"][0]["data"]

    async def listed(self) -> list[dict[str, str]]:
        """Return the models with their URLs, after checking that all connections agree."""
        found = []
        for session in self.sessions:
            async with session.get("/models") as answer:
                models = (await answer.json())["models"]
            found.append({model["modelName"]: model["modelUrl"] for model in models})
        assert all(one == found[0] for one in found)
        return found[:1]


@pytest.fixture
async def container(tmp_path: Path) -> AsyncIterator[Container]:
    """A container of an engine and two front ends, before its first model."""
    archives = tmp_path / "opt"
    for name in ("one", "two"):
        identity_models.write(archives, name, "FP32")
    (tmp_path / "models").mkdir()
    flags = ("--process-roles", "front-ends", "--sagemaker", "--sagemaker-multi-model")
    root = ("--model-root", str(archives))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            several.several(tmp_path / "models", *flags, *root, processes=3)
        )
        sessions = []
        for _ in range(4):
            connector = aiohttp.TCPConnector(keepalive_timeout=MOST_SECONDS)
            session = aiohttp.ClientSession(f"http://{server.http}", connector=connector)
            sessions.append(await stack.enter_async_context(session))
            async with session.get("/ping") as answer:
                assert 200 == answer.status
        yield Container(server, sessions, archives)


async def test_models_of_urls_are_those_of_every_front_end(container: Container) -> None:
    """Once a load or unload is answered, every front end shows it."""
    loads = [await container.load("a/b?", "one", 0), await container.load("c", "two", 1)]
    again = await container.load("c", "one", 0)
    listed = await container.listed()
    answers = [await container.invoke("c", number) for number in range(4)]
    gone = [await container.unload("c", 2), await container.unload("c", 3)]
    left = await container.listed()
    refused = [await container.invoke("c", number) for number in range(4)]

    assert [200, 200] == [status for status, _ in loads]
    assert 409 == again[0]
    assert [{"a/b?": container.url("one"), "c": container.url("two")}] == listed
    assert [[2.5]] * 4 == answers
    assert [200, 404] == gone
    assert [{"a/b?": container.url("one")}] == left
    assert [404] * 4 == refused


async def test_a_load_that_fails_leaves_no_name(container: Container) -> None:
    """The platform gets the reason, and may reuse the name."""
    failed = await container.load("a", "nothing")
    loaded = await container.load("a", "one", 1)

    assert 400 <= failed[0] < 500
    assert "nothing" in failed[1]
    assert 200 == loaded[0]
    assert [{"a": container.url("one")}] == await container.listed()


async def test_an_engine_that_replaces_another_has_the_same_urls(container: Container) -> None:
    """The models that the platform had loaded are loaded again."""
    await container.load("a", "one")
    victim = several.workers(container.server)[0]
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(MOST_SECONDS):
        await several.replaced(container.server, 0, victim)
        while await container.invoke("a", 0) != [2.5]:
            await asyncio.sleep(0.05)

    assert [{"a": container.url("one")}] == await container.listed()
