"""An engine and two front ends act as one server for gRPC and REST clients on real sockets."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import identity_models, python_models, several
from support.process import ServerProcess
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST_SECONDS = 120
FRONT_ENDS = 2
WHO = "/v2/models/who/infer"
LARGE = 1 << 20
"""Elements of a tensor large enough for the slab."""

GATED = """
import asyncio, pathlib

class Model(PythonModel):
    async def infer(self, inputs):
        pathlib.Path({begun!r}).touch()
        while not pathlib.Path({gate!r}).exists():
            await asyncio.sleep(0.01)
        return {{"y": inputs["x"]}}
"""
SAYS = """
class Model(PythonModel):
    async def infer(self, inputs, request: Request):
        raise InferenceError(f"got {sorted(request.parameters.items())}")
"""


@dataclass
class Running:
    """The shared server of these tests, and its repository, to which they may write."""

    grpc: str
    http: str
    models: Path
    process: ServerProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A server of three processes, which each test leaves as it found it."""
    models = several.repository(tmp_path_factory.mktemp("models"))
    identity_models.write(models, "texts", "BYTES", [-1])
    identity_models.write(models, "halves", "BF16", [-1])
    flags = ["--process-roles", "front-ends", "--model-control-mode", "explicit"]
    for model in ("who", "echo", "texts"):
        flags += ["--load-model", model]
    async with several.several(models, *flags, processes=FRONT_ENDS + 1) as running:
        yield Running(running.url, running.http, models, running)


@asynccontextmanager
async def each(server: Running) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """Yield sessions that are open at once, so that each front end has some of them."""
    async with AsyncExitStack() as stack:
        sessions = []
        for _ in range(2 * FRONT_ENDS):
            connector = aiohttp.TCPConnector(keepalive_timeout=MOST_SECONDS)
            session = aiohttp.ClientSession(f"http://{server.http}", connector=connector)
            sessions.append(await stack.enter_async_context(session))
            await get(session, "/v2/health/live")
        yield sessions


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with session.get(path) as response:
        return response.status, await response.json()


async def post(session: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


def tensor(values: np.ndarray[Any, Any], datatype: str) -> Any:
    """Return a gRPC input named `x`."""
    found = triton.InferInput("x", list(values.shape), datatype)
    found.set_data_from_numpy(values)
    return found


async def test_all_models_are_in_the_engine(server: Running) -> None:
    """The same process answers, whichever front end is asked."""
    engine = several.workers(server.process)[0]
    async with each(server) as sessions:
        found = {await several.asked(session, server.http) for session in sessions}

    assert {engine} == found


@pytest.mark.parametrize("count", [8, LARGE])
async def test_tensors_of_grpc_come_back_as_they_were(server: Running, count: int) -> None:
    """Small tensors travel in a record, large ones through the slab."""
    given = np.arange(count, dtype=np.float32)
    async with triton.InferenceServerClient(server.grpc) as client:
        answer: Any = await client.infer("echo", [tensor(given, "FP32")], request_id="seven")

    assert np.array_equal(given, answer.as_numpy("y"))
    assert "seven" == answer.get_response().id


async def held(session: aiohttp.ClientSession) -> float:
    """Return the bytes reserved for clients in all processes, without spare memory."""
    async with session.get("/metrics") as response:
        text = await response.text()
    rows = re.findall(r'xlaserve_held_bytes\{kind="(\w+)"\} (\S+)', text)
    return sum(float(count) for kind, count in rows if kind != "spare")


async def test_nothing_is_held_behind_an_answer(server: Running) -> None:
    """Even if the client has read it slowly and sends no further request."""
    size = 4 * 8 * LARGE
    parameters = {"binary_data_size": size}
    x = {"name": "x", "datatype": "FP32", "shape": [size // 4], "parameters": parameters}
    request = {"inputs": [x], "parameters": {"binary_data_output": True}}
    body = json.dumps(request).encode()
    head = (
        "POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Inference-Header-Content-Length: {len(body)}\r\n"
        f"Content-Length: {len(body) + size}\r\n\r\n"
    )
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(aiohttp.ClientSession(f"http://{server.http}"))
        client = stack.enter_context(socket.socket())
        # Its kernel does not read ahead.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", int(server.http.rpartition(":")[2])))
        await loop.sock_sendall(client, head.encode() + body + bytes(size))
        async with asyncio.timeout(MOST_SECONDS):
            while await held(other) < size:
                await asyncio.sleep(0.01)
        seen = [await held(other) for _ in range(20)]
        answer = bytearray()
        while part := await loop.sock_recv(client, 1 << 20):
            answer += part
        async with asyncio.timeout(MOST_SECONDS):
            while left := await held(other):
                await asyncio.sleep(0.01)

    assert min(seen) >= size
    assert answer.endswith(bytes(size))
    assert left == 0


async def test_texts_come_back_as_they_were(server: Running) -> None:
    """For elements of any length, over both protocols."""
    given = np.array([b"", b"a", "long \u00e9".encode() * 1000], np.object_)
    body = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [2], "data": ["", "\u00e9"]}]}
    async with triton.InferenceServerClient(server.grpc) as client, each(server) as sessions:
        answer: Any = await client.infer("texts", [tensor(given, "BYTES")])
        status, found = await post(sessions[0], "/v2/models/texts/infer", body)

    assert given.tolist() == answer.as_numpy("y").tolist()
    assert (200, ["", "\u00e9"]) == (status, found["outputs"][0]["data"])


async def test_a_load_is_one_of_the_server(server: Running) -> None:
    """It is answered once all front ends show the model; so are reloads and unloads."""
    async with each(server) as sessions:

        async def values() -> list[Any]:
            found = []
            for session in sessions:
                _, answer = await post(session, "/v2/models/number/infer", several.who())
                found.append(answer["outputs"][0]["data"][0])
            return found

        found = []
        for number in (1, 2):
            body = f"return {{'y': np.full(1, {number}, np.float32)}}"
            python_models.write_function(server.models, "number", body)
            loaded = await post(sessions[number], "/v2/repository/models/number/load")
            found.append((loaded, await values()))
        unloaded = await post(sessions[0], "/v2/repository/models/number/unload")
        states = [(await get(session, "/v2/models/number/ready"))[0] for session in sessions]

    many = len(sessions)
    assert [((200, {}), [1] * many), ((200, {}), [2] * many)] == found
    assert ((200, {}), [400] * many) == (unloaded, states)


async def test_a_load_that_fails_says_why(server: Running) -> None:
    """The error is that of a single process, and no model is shown as loaded."""
    python_models.write(server.models, "wrong", "raise OSError('no weights')\n")
    async with each(server) as sessions:
        status, answer = await post(sessions[0], "/v2/repository/models/wrong/load")
        _, index = await post(sessions[1], "/v2/repository/index")

    (row,) = [row for row in index if row["name"] == "wrong"]
    assert (400, True) == (status, "no weights" in answer["error"])
    assert ("UNAVAILABLE", True) == (row["state"], "no weights" in row["reason"])


async def test_a_configuration_comes_along_with_a_load(server: Running) -> None:
    """The engine gets the configuration, and the front ends show it."""
    config = '{"backend": "identity", "parameters": {"said": {"string_value": "so"}}'
    config += ', "input": [{"name": "x", "data_type": "TYPE_BF16", "dims": [1]}]'
    config += ', "output": [{"name": "y", "data_type": "TYPE_BF16", "dims": [1]}]}'
    async with triton.InferenceServerClient(server.grpc) as client, each(server) as sessions:
        await client.load_model("halves", config=config)
        found = [(await get(session, "/v2/models/halves/config"))[1] for session in sessions]
        await client.unload_model("halves")

    assert ["so"] * len(found) == [one["parameters"]["said"]["string_value"] for one in found]


async def test_statistics_are_of_all(server: Running) -> None:
    """A request counts once, whichever front end received it; refused ones count too."""
    wrong = {"inputs": [{"name": "x", "datatype": "INT8", "shape": [1], "data": [1]}]}
    async with each(server) as sessions:
        _, before = await get(sessions[0], "/v2/models/echo/stats")
        for session in sessions:
            assert (await post(session, "/v2/models/echo/infer", several.who()))[0] == 200
            assert (await post(session, "/v2/models/echo/infer", wrong))[0] == 400
        found = [(await get(session, "/v2/models/echo/stats"))[1] for session in sessions]
        async with sessions[1].get("/metrics") as response:
            metrics = await response.text()

    def counts(said: Any) -> tuple[int, ...]:
        of_model = said["model_stats"][0]
        kinds = of_model["inference_stats"]
        return (
            of_model["execution_count"],
            *(kinds[kind]["count"] for kind in ("success", "fail")),
        )

    expected = tuple(count + len(sessions) for count in counts(before))
    assert [expected] * len(sessions) == [counts(one) for one in found]
    (line,) = [
        line
        for line in metrics.splitlines()
        if line.startswith("nv_inference_request_success{") and '"echo"' in line
    ] or [""]
    assert float(expected[1]) == float(line.rpartition(" ")[2] or -1)


async def test_parameters_and_errors_of_code_cross(server: Running) -> None:
    """Parameters keep their types, and errors the status that the model's code asks for."""
    python_models.write(server.models, "says", SAYS, python_models.VECTORS)
    body = several.who() | {"parameters": {"a": 1, "b": "two", "c": True}}
    async with each(server) as sessions:
        await post(sessions[0], "/v2/repository/models/says/load")
        status, answer = await post(sessions[1], "/v2/models/says/infer", body)
        await post(sessions[0], "/v2/repository/models/says/unload")

    assert (400, True) == (status, "[('a', 1), ('b', 'two'), ('c', True)]" in answer["error"])


@pytest.mark.slow
async def test_a_front_end_that_dies_is_replaced(server: Running) -> None:
    """The other one keeps serving, and the new one shows the engine's models; nothing leaks."""
    engine, victim, other = several.workers(server.process).values()
    shared = (slabs(engine) & slabs(victim)) - slabs(other)
    os.kill(victim, signal.SIGKILL)
    await several.is_gone(victim)
    async with aiohttp.ClientSession(f"http://{server.http}") as new:
        assert (await post(new, "/v2/models/echo/infer", several.who()))[0] == 200
    async with asyncio.timeout(MOST_SECONDS):
        while True:
            async with aiohttp.ClientSession(f"http://{server.http}") as new:
                if (await get(new, "/v2/health/ready"))[0] == 200:
                    break
            await asyncio.sleep(0.05)
        await several.replaced(server.process, 1, victim)
        while slabs(engine) & shared:
            await asyncio.sleep(0.05)

    assert len(shared) == 3


def slabs(process: int) -> set[int]:
    """Return the inodes of the memory files that a process has open."""
    links = Path(f"/proc/{process}/fd").iterdir()
    return {link.stat().st_ino for link in links if "memfd:" in str(link.readlink())}


@pytest.mark.slow
async def test_an_engine_that_dies_is_replaced(server: Running, tmp_path: Path) -> None:
    """Its executions fail with INTERNAL; connections stay open, and client loads are repeated."""
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    code = GATED.format(begun=str(begun), gate=str(gate))
    python_models.write(server.models, "gated", code, python_models.VECTORS)
    victim = several.workers(server.process)[0]
    given = [tensor(np.ones(1, np.float32), "FP32")]
    async with triton.InferenceServerClient(server.grpc) as client, each(server) as sessions:
        await client.load_model("gated")
        held = asyncio.ensure_future(client.infer("gated", given))
        async with asyncio.timeout(MOST_SECONDS):
            while not begun.exists():
                await asyncio.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(InferenceServerException) as raised:
                await held
            assert "StatusCode.INTERNAL" == raised.value.status()
            gate.touch()
            said = set()
            while True:
                try:
                    await client.infer("gated", given)
                    break
                except InferenceServerException as error:
                    said.add(error.status())
                await asyncio.sleep(0.05)
            ready = [(await get(session, "/v2/models/gated/ready"))[0] for session in sessions]
            await several.replaced(server.process, 0, victim)
        await client.unload_model("gated")

    assert said <= {"StatusCode.UNAVAILABLE"}
    assert [200] * len(sessions) == ready


@pytest.mark.slow
async def test_a_front_end_that_cannot_reach_the_new_engine_is_replaced(server: Running) -> None:
    """A front end out of file descriptors could never reach an engine again."""
    victims = several.workers(server.process)
    for number in range(1, 1 + FRONT_ENDS):
        resource.prlimit(victims[number], resource.RLIMIT_NOFILE, (3, 3))
    os.kill(victims[0], signal.SIGKILL)
    async with asyncio.timeout(MOST_SECONDS):
        for number, victim in victims.items():
            await several.replaced(server.process, number, victim)
        while True:
            async with each(server) as sessions:
                said = [(await post(one, WHO, several.who()))[0] for one in sessions]
            if said == [200] * len(said):
                break
            await asyncio.sleep(0.05)
    found = {record["worker"] for record in server.process.log if record["event"] == "worker died"}

    assert found >= set(victims)


@pytest.mark.slow
async def test_what_is_in_flight_is_answered_when_the_server_ends(tmp_path: Path) -> None:
    """The engine ends after its front ends."""
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    models = tmp_path / "models"
    models.mkdir()
    code = GATED.format(begun=str(begun), gate=str(gate))
    python_models.write(models, "gated", code, python_models.VECTORS)
    flags = ("--process-roles", "front-ends")
    async with several.several(models, *flags) as server, asyncio.timeout(MOST_SECONDS):
        client = triton.InferenceServerClient(server.url)
        given = [tensor(np.ones(1, np.float32), "FP32")]
        held = asyncio.ensure_future(client.infer("gated", given))
        while not begun.exists():
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        await server.until("shutting down")
        gate.touch()
        answer: Any = await held
        await client.close()
        await server.process.communicate()

    assert (0, [1.0]) == (server.process.returncode, answer.as_numpy("y").tolist())
