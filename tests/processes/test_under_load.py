"""Deaths and signals under load, as clients of a server of two processes see them."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from support import several
from support.conditions import until
from support.process import ServerProcess
from support.python_models import VECTORS, write
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = pytest.mark.slow
pb: Any = service_pb2
MOST_SECONDS = 120
EACH = 8
"""Request loops on each connection."""
MOST_DEATHS = 5
GATED = """
import asyncio, os, pathlib, uuid

class Model(PythonModel):
    async def infer(self, inputs):
        pathlib.Path({begun!r}, f"{{os.getpid()}}-{{uuid.uuid4()}}").touch()
        while not pathlib.Path({gate!r}).exists():
            await asyncio.sleep(0.01)
        return {{"y": inputs["x"]}}
"""
REST = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}


def infer(model: str) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1])
    content = b"\0\0\x80\x3f"
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[content])


def process_of(answer: Any) -> int:
    """Return the process that has answered."""
    return int.from_bytes(answer.raw_output_contents[0], "little")


@dataclass
class Loaded:
    """A server, and connections to each of its workers."""

    server: ServerProcess
    gate: Path
    begun: Path
    stubs: dict[int, Any]
    """A separate gRPC connection to each worker, by its process id."""
    sessions: dict[int, aiohttp.ClientSession]

    async def held(self, count: int) -> None:
        """Wait until the gate holds this many requests."""
        await until(lambda: len(list(self.begun.iterdir())) == count)


@asynccontextmanager
async def loaded(tmp_path: Path) -> AsyncIterator[Loaded]:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    begun.mkdir()
    models = several.repository(tmp_path / "models")
    write(models, "gated", GATED.format(gate=str(gate), begun=str(begun)), VECTORS)
    async with AsyncExitStack() as stack, several.several(models) as server:
        stubs: dict[int, Any] = {}
        while len(stubs) < 2:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(server.url, options=options)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(
                await stack.enter_async_context(channel)
            )
            answer = await stub.ModelInfer(infer("who"), timeout=MOST_SECONDS)
            stubs.setdefault(process_of(answer), stub)
        made = await stack.enter_async_context(several.one_each(server.http))
        sessions = {await several.asked(one, server.http): one for one in made}
        yield Loaded(server, gate, begun, stubs, sessions)


async def outcome(asked: Awaitable[Any]) -> str:
    try:
        await asked
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def rest(load: Loaded, process: int) -> str:
    url = f"http://{load.server.http}/v2/models/gated/infer"
    try:
        async with load.sessions[process].post(url, json=REST) as answer:
            return "OK" if answer.status == 200 else str(answer.status)
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return "closed"


class Busy:
    """Sends requests to `who` on one connection until told to stop."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._stopped = False
        self.processes = Counter[int]()
        self.errors = Counter[str]()
        self.tasks = [asyncio.ensure_future(self._ask()) for _ in range(EACH)]

    async def _ask(self) -> None:
        while not self._stopped:
            try:
                answer = await self._stub.ModelInfer(infer("who"), timeout=MOST_SECONDS)
                self.processes[process_of(answer)] += 1
            except grpc.aio.AioRpcError as error:
                self.errors[f"{error.code().name}: {error.details()}"] += 1
                await asyncio.sleep(0.01)  # as clients that retry do

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self.tasks)


async def test_a_worker_that_is_killed_takes_only_its_own_requests(tmp_path: Path) -> None:
    """Requests of the other worker succeed; its own fail, and succeed when retried."""
    async with loaded(tmp_path) as load:
        victim, left = load.stubs
        busy = {process: Busy(stub) for process, stub in load.stubs.items()}
        asked = {
            process: [
                asyncio.ensure_future(outcome(load.stubs[process].ModelInfer(infer("gated")))),
                asyncio.ensure_future(rest(load, process)),
            ]
            for process in (victim, left)
        }
        await load.held(4)
        await until(lambda: all(one.processes.total() > 20 for one in busy.values()))
        os.kill(victim, signal.SIGKILL)
        cut = await asyncio.wait_for(asyncio.gather(*asked[victim]), MOST_SECONDS)
        before = busy[left].processes[left]
        await until(lambda: busy[victim].processes[left] > 20)
        await until(lambda: busy[left].processes[left] > before + 20)
        load.gate.touch()
        kept = await asyncio.wait_for(asyncio.gather(*asked[left]), MOST_SECONDS)
        for one in busy.values():
            await one.stop()

    assert (["UNAVAILABLE", "closed"], ["OK", "OK"]) == (cut, kept)
    assert ({left}, Counter()) == (set(busy[left].processes), busy[left].errors)
    assert all(text.startswith("UNAVAILABLE") for text in busy[victim].errors)


async def test_a_server_that_is_told_to_stop_answers_what_all_its_workers_have(
    tmp_path: Path,
) -> None:
    """Accepted requests are answered; later ones are refused with a retryable status."""
    async with loaded(tmp_path) as load:
        busy = [Busy(stub) for stub in load.stubs.values()]
        asked = [
            asyncio.ensure_future(request)
            for process, stub in load.stubs.items()
            for request in (outcome(stub.ModelInfer(infer("gated"))), rest(load, process))
        ]
        await load.held(4)
        await until(lambda: all(one.processes.total() > 20 for one in busy))
        load.server.process.send_signal(signal.SIGTERM)
        # Every connection was notified: no later request is answered.
        await until(lambda: all(one.errors for one in busy))
        assert not any(task.done() for task in asked)
        load.gate.touch()
        told = await asyncio.wait_for(asyncio.gather(*asked), MOST_SECONDS)
        status = await asyncio.wait_for(load.server.process.wait(), MOST_SECONDS)
        for one in busy:
            await one.stop()

    assert (["OK"] * 4, 0) == (told, status)
    refused = {text for one in busy for text in one.errors}
    assert {"UNAVAILABLE"} == {text.partition(":")[0] for text in refused}
    assert not [
        text
        for text in refused
        if "failed to connect" not in text and "the server is shutting down" not in text
    ]


async def test_a_worker_that_dies_five_times_ends_the_server(tmp_path: Path) -> None:
    """With status 1 and one line that says why; the other worker drains."""
    async with several.several(several.repository(tmp_path)) as server:
        for deaths in range(1, MOST_DEATHS + 1):
            os.kill(several.workers(server)[0], signal.SIGKILL)
            if deaths < MOST_DEATHS:
                server.log[:] = [r for r in server.log if r.get("event") != "worker started"]
                async with asyncio.timeout(MOST_SECONDS):
                    await server.until("worker started")
        async with asyncio.timeout(MOST_SECONDS):
            out, rest_of_log = await server.process.communicate()

    assert 1 == server.process.returncode
    assert not out
    lines = [
        line for line in rest_of_log.decode().splitlines() if "5 times within a minute" in line
    ]
    assert 1 == len(lines)
    assert "worker 0 died 5 times within a minute: it ended by signal SIGKILL" in lines[0]
    assert b"Traceback" not in rest_of_log
