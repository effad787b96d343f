"""SIGTERM under load: health changes first, then every request in flight is answered."""

import asyncio
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.conditions import until
from support.process import ServerProcess, served
from support.python_models import write
from support.tls import write_certificate
from tritonclient.grpc import service_pb2, service_pb2_grpc

pb: Any = service_pb2
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.ServingStatus.Value(name) for name in ("SERVING", "NOT_SERVING")
)
EACH = 50
"""Number of requests of each of the four kinds in flight."""
SECONDS = 60
OFTEN = 10
"""Number of the fifty drains that `slow` runs; `large` runs the rest."""

GATED = """
import asyncio, pathlib

class Model(PythonModel):
    async def infer(self, inputs):
        while not pathlib.Path({gate!r}).exists():
            await asyncio.sleep(0.01)
        return {{"y": inputs["x"]}}
"""
LOADING = """
import pathlib, time

class Model(PythonModel):
    def load(self, context):
        pathlib.Path({begun!r}).touch()
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""
VECTORS = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
INFER = pb.ModelInferRequest(
    model_name="gated",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1])],
    raw_input_contents=[b"\0\0\x80\x3f"],
)
REST = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}


@dataclass
class Loaded:
    """A server with a model that answers once a gate file exists."""

    server: ServerProcess
    gate: Path
    begun: Path
    """File created when the load of another model begins; that load ends with the gate, too."""
    unix: str
    stack: AsyncExitStack
    authority: trustme.CA | None = None
    """CA of the server's certificate, if it serves over TLS."""

    async def channel(self, address: str) -> grpc.aio.Channel:
        """Open a gRPC channel."""
        if self.authority is None:
            channel = grpc.aio.insecure_channel(address)
        else:
            signed = grpc.ssl_channel_credentials(self.authority.cert_pem.bytes())
            named = [("grpc.ssl_target_name_override", "localhost")]
            channel = grpc.aio.secure_channel(address, signed, named)
        return await self.stack.enter_async_context(channel)

    async def stub(self, address: str) -> Any:
        return service_pb2_grpc.GRPCInferenceServiceStub(await self.channel(address))

    async def session(self) -> aiohttp.ClientSession:
        trusting = ssl.create_default_context()
        if self.authority is not None:
            self.authority.configure_trust(trusting)
        connector = aiohttp.TCPConnector(limit=0, ssl=trusting)
        return await self.stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    def at(self, path: str) -> str:
        """Return the URL of a path."""
        port = self.server.http.rpartition(":")[2]
        return f"http{'' if self.authority is None else 's'}://localhost:{port}{path}"

    async def executing(self) -> int:
        """Return the number of admitted inferences without an answer."""
        return await self.metric("xlaserve_requests_in_progress")

    async def metric(self, name: str) -> int:
        """Return the sum of a metric over all label values."""
        async with AsyncExitStack() as stack:
            session = await replace(self, stack=stack).session()
            async with session.get(self.at("/metrics")) as answer:
                text = await answer.text()
        rows = (line for line in text.splitlines() if line.startswith(f"{name}{{"))
        return sum(int(float(row.rpartition(" ")[2])) for row in rows)


async def answered(load: Loaded) -> int:
    """Return the number of successful inferences."""
    return await load.metric("nv_inference_request_success")


@asynccontextmanager
async def loaded(tmp_path: Path, *flags: str, tls: bool = False) -> AsyncIterator[Loaded]:
    models, gate, begun = tmp_path / "models", tmp_path / "gate", tmp_path / "begun"
    write(models, "gated", GATED.format(gate=str(gate)), VECTORS)
    write(models, "loading", LOADING.format(gate=str(gate), begun=str(begun)), VECTORS)
    unix = f"unix:{tmp_path}/grpc.sock"
    settings = (
        "--allow-python-models",
        "--model-control-mode",
        "explicit",
        "--load-model",
        "gated",
        *flags,
    )
    # On a busy machine, a hundred simultaneous handshakes take some time.
    data = ["--grpc-data-endpoint", unix, "--preface-seconds", str(SECONDS)]
    authority = trustme.CA() if tls else None
    if authority is not None:
        for name, file in write_certificate(authority, tmp_path).items():
            data += [f"--{name.replace('_', '-')}", file]
    async with AsyncExitStack() as stack, served(models, *settings, *data) as server:
        yield Loaded(server, gate, begun, unix, stack, authority)


async def streamed(stub: Any) -> str:
    async def requests() -> AsyncIterator[Any]:
        yield INFER

    async for answer in stub.ModelStreamInfer(requests()):
        return answer.error_message or "OK"
    return "nothing"


async def outcome(asked: Awaitable[Any]) -> str:
    try:
        answer = await asked
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return answer if isinstance(answer, str) else "OK"


async def rest(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(url, json=REST) as answer:
        await answer.read()
        closes = answer.headers.get("Connection")
        return "OK" if (200, "close") == (answer.status, closes) else f"{answer.status} {closes}"


async def drained_under_load(tmp_path: Path, *, tls: bool = False) -> None:
    async with loaded(tmp_path, tls=tls) as load:
        url = load.at("/v2/models/gated/infer")
        tcp, unix, session = (
            await load.stub(load.server.url),
            await load.stub(load.unix),
            await load.session(),
        )
        loading = asyncio.ensure_future(
            outcome(unix.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="loading")))
        )
        await until(load.begun.exists)
        asked: list[asyncio.Task[str]] = []
        for _ in range(EACH):
            asked += [
                asyncio.ensure_future(outcome(request))
                for request in (
                    tcp.ModelInfer(INFER),
                    unix.ModelInfer(INFER),
                    streamed(tcp),
                    rest(session, url),
                )
            ]
        while await load.executing() < len(asked):
            assert not [task.result() for task in asked if task.done()]
            await asyncio.sleep(0.02)
        stub: Any = health_pb2_grpc.HealthStub(await load.channel(load.server.url))
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        seen = [(await watch.read()).status]
        load.server.process.send_signal(signal.SIGTERM)
        seen.append((await watch.read()).status)
        assert [SERVING, NOT_SERVING] == seen
        # Nothing may be answered before the watch reports NOT_SERVING.
        assert not any(task.done() for task in asked)
        load.gate.touch()
        async with asyncio.timeout(SECONDS):
            outcomes = Counter(await asyncio.gather(*asked))
            told = await loading
            status = await load.server.process.wait()

    assert {"OK": 4 * EACH} == outcomes
    assert told == "OK" or told.startswith("UNAVAILABLE")
    assert 0 == status


async def test_a_server_that_is_told_to_stop_answers_all_that_is_in_flight(tmp_path: Path) -> None:
    """200 requests (gRPC, gRPC streams, Unix socket, REST) and a load; none is cut off."""
    await drained_under_load(tmp_path)


# --- Clients that keep sending -------------------------------------------------------------------

REFUSED = "refused"
"""Outcome of a request rejected cleanly because the server is shutting down."""
WORKERS = 6


async def busy_grpc(stub: Any) -> str:
    """Send requests until one fails; return REFUSED or the error."""
    while True:
        try:
            await stub.ModelInfer(INFER, timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
            is_clean = "failed to connect" in text or "the server is shutting down" in text
            return REFUSED if is_clean else text


async def busy_rest(session: aiohttp.ClientSession, url: str) -> str:
    while True:
        try:
            async with session.post(url, json=REST) as answer:
                text = await answer.text()
                if 503 == answer.status and "shutting down" in text:
                    return REFUSED
                assert 200 == answer.status
        except aiohttp.ClientConnectorError:
            return REFUSED
        except aiohttp.ClientError as error:
            return repr(error)


@pytest.mark.slow
async def test_clients_that_go_on_are_never_cut(tmp_path: Path) -> None:
    """Requests already sent are answered; after that, clients cannot connect."""
    async with loaded(tmp_path) as load:
        load.gate.touch()
        url = load.at("/v2/models/gated/infer")
        session = await load.session()
        asked = [
            asyncio.ensure_future(busy)
            for _ in range(WORKERS)
            for busy in (
                busy_grpc(await load.stub(load.server.url)),
                busy_grpc(await load.stub(load.unix)),
                busy_rest(session, url),
            )
        ]
        while await answered(load) < 20 * len(asked):
            await asyncio.sleep(0.02)
        load.server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            outcomes = Counter(await asyncio.gather(*asked))
            status = await load.server.process.wait()

    assert {REFUSED: 3 * WORKERS} == outcomes
    assert 0 == status


# --- A second signal, and SIGHUP -----------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_two_signals_at_once_are_one(tmp_path: Path, processes: int) -> None:
    """A process manager signals both the group and the parent, or sends SIGINT, then SIGTERM."""
    async with loaded(tmp_path, "--processes", str(processes)) as load:
        stub = await load.stub(load.server.url)
        asked = asyncio.ensure_future(outcome(stub.ModelInfer(INFER)))
        while not await load.executing():
            await asyncio.sleep(0.02)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            load.server.process.send_signal(number)
        await load.server.until("shutting down")
        load.gate.touch()
        async with asyncio.timeout(SECONDS):
            told = await asked
            status = await load.server.ended()

    assert ("OK", 0) == (told, status)


@pytest.mark.slow
async def test_a_second_signal_ends_the_server_now(tmp_path: Path) -> None:
    """Its exit status is that of the signal (143 in a shell); a request in flight is lost."""
    async with loaded(tmp_path) as load:
        stub = await load.stub(load.server.url)
        asked = asyncio.ensure_future(outcome(stub.ModelInfer(INFER)))
        while not await load.executing():
            await asyncio.sleep(0.02)
        load.server.process.send_signal(signal.SIGTERM)
        await load.server.until("shutting down")
        async with asyncio.timeout(SECONDS):
            # Signals within the first second count as repetitions of the first one.
            while load.server.process.returncode is None:
                load.server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
            status = load.server.process.returncode
            told = await asked

    assert -signal.SIGTERM == status
    assert told.startswith("UNAVAILABLE")


@pytest.mark.slow
async def test_a_storm_of_hangups_ends_nothing(tmp_path: Path) -> None:
    """Not even during a drain."""
    async with loaded(tmp_path) as load:
        stub = await load.stub(load.server.url)
        asked = asyncio.ensure_future(outcome(stub.ModelInfer(INFER)))
        while not await load.executing():
            await asyncio.sleep(0.02)
        for _ in range(300):
            load.server.process.send_signal(signal.SIGHUP)
        await load.server.until("reloaded")
        load.server.process.send_signal(signal.SIGTERM)
        await load.server.until("shutting down")
        for _ in range(300):
            load.server.process.send_signal(signal.SIGHUP)
        load.gate.touch()
        async with asyncio.timeout(SECONDS):
            told = await asked
            status = await load.server.process.wait()

    assert ("OK", 0) == (told, status)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "repeat",
    [pytest.param(repeat, marks=[pytest.mark.large] * (repeat >= OFTEN)) for repeat in range(50)],
)
async def test_no_request_is_cut_in_fifty_drains(tmp_path: Path, repeat: int) -> None:
    """D1 of the acceptance table: over gRPC and REST, with TLS every second time."""
    await drained_under_load(tmp_path, tls=bool(repeat % 2))
