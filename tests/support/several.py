"""A server with several processes, and ways to tell its workers apart."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import numpy as np
import tritonclient.grpc.aio as triton

from support import identity_models, python_models
from support.process import START_SECONDS, ServerProcess, served

READY = "workers ready"
LAYOUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "1": (),
        "2": ("--processes", "2"),
        "front-ends": ("--processes", "3", "--process-roles", "front-ends"),
    }
)
"""Flags for one process, for two workers, and for two front ends with an engine."""
WHO = "import os\nreturn {'y': np.full(1, os.getpid(), np.int64)}"
"""Body of a model that returns its process id."""
CONFIG = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_INT64, dims: [ 1 ] }]
"""


def repository(root: Path) -> Path:
    """Return a repository with the model `who`, and `echo`, an identity model."""
    python_models.write_function(root, "who", WHO, CONFIG)
    identity_models.write(root, "echo", "FP32", [-1])
    return root


@asynccontextmanager
async def several(models: Path, *flags: str, processes: int = 2) -> AsyncIterator[ServerProcess]:
    """Run a server with several ready processes for the duration of a block."""
    given = ("--processes", str(processes), "--allow-python-models", *flags)
    async with served(models, *given) as server:
        await server.until(READY)
        yield server


def workers(server: ServerProcess) -> dict[int, int]:
    """Return the latest process id of each worker by worker number."""
    started = [record for record in server.log if record.get("event") == "worker started"]
    return {record["worker"]: record["pid"] for record in started}


async def replaced(server: ServerProcess, number: int, victim: int) -> None:
    """Read the log until a worker that died has a new process.

    Otherwise the next test would mistake the dead process for it.
    """
    while workers(server)[number] == victim:
        assert await server.read(), f"the server ended: {server.log}"


async def is_gone(pid: int) -> None:
    """Wait until a process has disappeared."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)


def who(row: float = 1.0) -> dict[str, Any]:
    """Return a request for the model `who`."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [row]}]}


async def asked(session: aiohttp.ClientSession, url: str) -> int:
    """Return the id of the process that serves a session's connection."""
    async with session.post(f"http://{url}/v2/models/who/infer", json=who()) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return int(answer["outputs"][0]["data"][0])


async def connections_of(url: str, count: int) -> Counter[int]:
    """Open several connections at the same time, and count them per process."""
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(count)]
        return Counter([await asked(session, url) for session in sessions])


@asynccontextmanager
async def one_each(url: str, count: int = 2) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """Yield one session per worker, with a connection that stays open."""
    async with AsyncExitStack() as stack, asyncio.timeout(START_SECONDS):
        found: dict[int, aiohttp.ClientSession] = {}
        while len(found) < count:
            # Keep the connection open however long the other sessions take.
            connector = aiohttp.TCPConnector(keepalive_timeout=START_SECONDS)
            session = aiohttp.ClientSession(f"http://{url}", connector=connector)
            await stack.enter_async_context(session)
            if found.setdefault(await asked(session, url), session) is not session:
                # A replaced worker takes seconds to start: do not use up the connection limit.
                await session.close()
                await asyncio.sleep(0.01)
        yield list(found.values())


async def connections_ready(url: str, model: str, count: int) -> set[int]:
    """Return the statuses of readiness requests, each on its own connection."""
    async with AsyncExitStack() as stack:
        found = set[int]()
        for _ in range(count):
            session = await stack.enter_async_context(aiohttp.ClientSession())
            async with session.get(f"http://{url}/v2/models/{model}/ready") as response:
                found.add(response.status)
        return found


@asynccontextmanager
async def clients(url: str, count: int = 2) -> AsyncIterator[dict[int, Any]]:
    """Yield one gRPC client per worker, by process id, each with its own connection."""
    async with AsyncExitStack() as stack, asyncio.timeout(START_SECONDS):
        found: dict[int, Any] = {}
        while len(found) < count:
            options = [("grpc.use_local_subchannel_pool", 1)]
            client = triton.InferenceServerClient(url, channel_args=options)
            await stack.enter_async_context(client)
            tensor = triton.InferInput("x", [1], "FP32")
            tensor.set_data_from_numpy(np.ones(1, np.float32))
            answer: Any = await client.infer("who", [tensor])
            found.setdefault(int(answer.as_numpy("y")[0]), client)
        yield found
