"""Several processes act as one server: connections, changes and deaths, with two workers."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import python_models, several
from support.process import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST_SECONDS = 60

ONCE = """
import pathlib

class Model(PythonModel):
    def load(self, context):
        pathlib.Path({taken!r}).open("x").close()

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""
"""A model that only the first process can load."""


WAITS = """
import os, pathlib, time

class Model(PythonModel):
    def load(self, context):
        (pathlib.Path({begun!r}) / f"{{os.getpid()}}-{{time.monotonic_ns()}}").touch()
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""
"""A model that records each load that has begun, and finishes loading once a gate is open."""
IN_PROCESS = "parameters { key: 'execution' value { string_value: 'process' } }\n"


@dataclass
class Running:
    """The shared server of these tests, and its repository, to which they may write."""

    url: str
    grpc: str
    models: Path
    process: ServerProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A server of two processes, which each test leaves with two."""
    models = several.repository(tmp_path_factory.mktemp("models"))
    flags = ("--model-control-mode", "explicit", "--load-model", "who")
    async with several.several(models, *flags) as running:
        yield Running(running.http, running.url, models, running)


async def ask(
    session: aiohttp.ClientSession, path: str, body: Any = None, method: str = "POST"
) -> tuple[int, Any]:
    """Return status and body of a request on a session with a single connection."""
    async with session.request(method, path, json=body) as response:
        return response.status, await response.json()


async def ask_ready(session: aiohttp.ClientSession, model: str) -> int:
    """Return the readiness status of a model."""
    async with session.get(f"/v2/models/{model}/ready") as response:
        return response.status


async def value(session: aiohttp.ClientSession, model: str) -> Any:
    """Return a vector model's answer to 1.0."""
    _, answer = await ask(session, f"/v2/models/{model}/infer", several.who())
    return answer["outputs"][0]["data"][0] if "outputs" in answer else answer


def constant(models: Path, name: str, number: float) -> None:
    """Write a model that answers with a constant."""
    python_models.write_function(models, name, f"return {{'y': np.full(1, {number}, np.float32)}}")


@pytest.mark.parametrize("count", [4, 64])
async def test_each_worker_has_as_many_connections(server: Running, count: int) -> None:
    """The kernel alone might give one worker nearly all of them (see test_handing.py)."""
    async with asyncio.timeout(MOST_SECONDS):
        # Until the parent knows that the connections of another test are closed.
        while list((await several.connections_of(server.url, count)).values()) != [count // 2] * 2:
            await asyncio.sleep(0.01)


async def test_a_load_that_was_answered_is_a_load_of_all(server: Running) -> None:
    """The next request sees it on any worker; the same holds for reloads and unloads."""
    constant(server.models, "number", 1)
    async with several.one_each(server.url) as (one, other):
        assert (200, {}) == await ask(one, "/v2/repository/models/number/load")
        first = [await value(session, "number") for session in (other, one)]
        constant(server.models, "number", 2)
        assert (200, {}) == await ask(other, "/v2/repository/models/number/load")
        second = [await value(session, "number") for session in (one, other)]
        assert (200, {}) == await ask(one, "/v2/repository/models/number/unload")
        third = [(await ask(s, "/v2/models/number/ready", method="GET"))[0] for s in (other, one)]

    assert ([1, 1], [2, 2], [400, 400]) == (first, second, third)


async def test_a_load_over_grpc_is_a_load_of_all(server: Running) -> None:
    """Including the configuration and files in the request."""
    async with (
        triton.InferenceServerClient(server.grpc) as client,
        several.one_each(server.url) as sessions,
    ):
        config = '{"backend": "identity", "parameters": {"said": {"string_value": "so"}}}'
        tensors = ', "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}]'
        tensors += ', "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]}'
        await client.load_model("echo", config=config[:-1] + tensors)
        found = [await ask(session, "/v2/models/echo/config", method="GET") for session in sessions]
        await client.unload_model("echo")

    assert ["so", "so"] == [answer["parameters"]["said"]["string_value"] for _, answer in found]


async def test_a_load_that_fails_in_one_worker_is_undone_in_all(
    server: Running, tmp_path: Path
) -> None:
    """The client gets the error, and no worker has the model."""
    code = ONCE.format(taken=str(tmp_path / "taken"))
    python_models.write(server.models, "once", code, python_models.VECTORS)
    async with several.one_each(server.url) as (one, other):
        status, answer = await ask(one, "/v2/repository/models/once/load")
        states = [(await ask(s, "/v2/models/once/ready", method="GET"))[0] for s in (one, other)]

    assert (400, True) == (status, "FileExistsError" in answer["error"])
    assert [400, 400] == states
    assert (tmp_path / "taken").exists()


async def test_workers_load_side_by_side_and_a_load_given_up_ends_in_both(
    server: Running, tmp_path: Path
) -> None:
    """Both have begun before one ends; when the client leaves, an unload finds nothing."""
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    begun.mkdir()
    code = WAITS.format(begun=str(begun), gate=str(gate))
    python_models.write(server.models, "waits", code, python_models.VECTORS + IN_PROCESS)

    async def both_have_begun() -> None:
        async with asyncio.timeout(MOST_SECONDS):
            while len(list(begun.iterdir())) < 2:
                await asyncio.sleep(0.01)

    load = "/v2/repository/models/waits/load"
    async with several.one_each(server.url) as (one, other):
        loading = asyncio.ensure_future(ask(one, load))
        await both_have_begun()
        loading.cancel()
        # The gate is closed: the unload is answered because neither load continues.
        unloaded = await ask(other, "/v2/repository/models/waits/unload")
        for file in begun.iterdir():
            file.unlink()
        again = asyncio.ensure_future(ask(other, load))
        await both_have_begun()
        gate.touch()
        loaded = await again
    async with several.one_each(server.url) as sessions:
        ready = [(await ask_ready(session, "waits")) for session in sessions]
        await ask(sessions[0], "/v2/repository/models/waits/unload")

    assert [(200, {}), (200, {})] == [unloaded, loaded]
    assert [200, 200] == ready


async def test_an_unload_behind_a_load_given_up_waits_for_no_other_load(
    server: Running, tmp_path: Path
) -> None:
    """Code in a thread cannot be stopped: each worker has begun once, and none begins again."""
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    begun.mkdir()
    code = WAITS.format(begun=str(begun), gate=str(gate))
    python_models.write(server.models, "left", code, python_models.VECTORS)
    async with several.one_each(server.url) as (one, other), asyncio.timeout(MOST_SECONDS):
        loading = asyncio.ensure_future(ask(one, "/v2/repository/models/left/load"))
        while len(list(begun.iterdir())) < 2:
            await asyncio.sleep(0.01)
        loading.cancel()
        unloading = asyncio.ensure_future(ask(other, "/v2/repository/models/left/unload"))
        gate.touch()
        unloaded = await unloading
    async with several.one_each(server.url) as sessions:
        ready = [(await ask_ready(session, "left")) for session in sessions]

    assert (200, {}) == unloaded
    assert [400, 400] == ready
    assert 2 == len({file.name.partition("-")[0] for file in begun.iterdir()})
    assert 2 == len(list(begun.iterdir()))


async def test_shared_memory_is_registered_with_all(server: Running) -> None:
    """A request may reach another worker than the registration did."""
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        async with several.one_each(server.url) as (one, other):
            region = {"key": f"/{memory.name}", "offset": 0, "byte_size": 64}
            assert (200, {}) == await ask(
                one, "/v2/systemsharedmemory/region/mine/register", region
            )
            _, known = await ask(other, "/v2/systemsharedmemory/status", method="GET")
            taken, _ = await ask(other, "/v2/systemsharedmemory/region/mine/register", region)
            await ask(other, "/v2/systemsharedmemory/unregister")
            _, left = await ask(one, "/v2/systemsharedmemory/status", method="GET")
    finally:
        memory.close()
        memory.unlink()

    assert ["mine"] == [row["name"] for row in known]
    assert (409, []) == (taken, left)


async def test_log_settings_are_of_all(server: Running) -> None:
    """Clients do not know which worker they reach."""
    async with several.one_each(server.url) as (one, other):
        await ask(one, "/v2/logging", {"log_info": False})
        _, found = await ask(other, "/v2/logging", method="GET")
        await ask(other, "/v2/logging", {"log_info": True})
        _, then = await ask(one, "/v2/logging", method="GET")

    assert (False, True) == (found["log_info"], then["log_info"])


@pytest.mark.slow
async def test_a_hangup_of_the_parent_reaches_all(server: Running) -> None:
    """Each worker reloads what a single process would."""
    log, seen = server.process.log, set[int]()
    server.process.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(MOST_SECONDS):
        while seen != {0, 1}:
            await server.process.until("reloaded")
            seen |= {one["worker"] for one in log if one.get("event") == "reloaded"}
            log[:] = [one for one in log if one.get("event") != "reloaded"]

    assert {0, 1} == seen


@pytest.mark.slow
async def test_a_worker_that_dies_is_replaced_by_one_that_has_what_all_have(
    server: Running,
) -> None:
    """The other worker keeps serving, and gets every connection until then."""
    constant(server.models, "kept", 3)
    async with several.one_each(server.url) as (one, other), asyncio.timeout(MOST_SECONDS):
        await ask(one, "/v2/repository/models/kept/load")
        victim, left = await several.asked(one, server.url), await several.asked(other, server.url)
        os.kill(victim, signal.SIGKILL)
        await several.is_gone(victim)
        async with aiohttp.ClientSession() as new:
            assert left == await several.asked(new, server.url)
    async with several.one_each(server.url) as sessions:
        found = {await several.asked(session, server.url) for session in sessions}
        kept = [await value(session, "kept") for session in sessions]

    assert left in found
    assert [3, 3] == kept
