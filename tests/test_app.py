"""The server as a whole: startup, drain, health."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import time, invisible to type checkers.

import asyncio
import socket
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.frames import Kind, parse
from support.server import Serve
from support.wire import request_headers, sent
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.app import server as app
from xlaserve.app.server import Application
from xlaserve.errors import InvalidSettings
from xlaserve.residence import host
from xlaserve.runtime.devices import device
from xlaserve.settings import Settings
from xlaserve.settings.choices import Device, ProcessCount

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

INFER = request_headers("/inference.GRPCInferenceService/ModelInfer")


async def test_a_repository_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="repository: expected a directory"):
        Application(Settings(repository=tmp_path / "nowhere"))


async def test_several_processes_are_refused_on_a_device_that_one_owns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `auto` the device is known only once JAX has started."""
    monkeypatch.setattr(device, "start", lambda *_, **__: "cuda")
    settings = Settings(repository=tmp_path, processes=ProcessCount(2), device=Device.AUTO)

    with pytest.raises(InvalidSettings, match="processes: expected 1 with a device of cuda"):
        await Application(settings).load()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("settings", "device_mib", "sharing", "expected_mib"),
    [
        ({"container_memory_bytes": 1000 * MIB}, None, 1, 900),
        ({"container_memory_bytes": 1000 * MIB}, None, 2, 450),
        ({"container_memory_bytes": 50 * MIB}, None, 1, 0),
        ({}, None, 1, 1900),
        ({}, None, 2, 950),
        ({}, 500, 2, 400),
        ({}, 50, 2, 0),
        ({"container_memory_bytes": 1000 * MIB}, 500, 1, 400),
        ({"capacity_bytes": 300 * MIB}, None, 2, 300),
        ({"capacity_bytes": 300 * MIB, "container_memory_bytes": 1000 * MIB}, 500, 2, 300),
    ],
)
def test_models_get_what_there_is_less_the_overhead(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    device_mib: int | None,
    sharing: int,
    expected_mib: int,
) -> None:
    """From the device, otherwise from the container or the machine, which CPU devices share.

    A capacity set explicitly is for models alone.
    """
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: 2000 * MIB)
    read = Settings.read({}, repository=tmp_path, memory_overhead_bytes=100 * MIB, **settings)
    device_bytes = None if device_mib is None else device_mib * MIB

    assert expected_mib * MIB == host.capacity_bytes(read, device_bytes, sharing)


async def test_a_server_needs_a_grpc_endpoint(tmp_path: Path) -> None:
    application = Application(Settings(repository=tmp_path, grpc_endpoint="none"))
    with pytest.raises(InvalidSettings, match="grpc_endpoint"):
        async with application.running():
            pass


@pytest.mark.parametrize("second", ["port:0", "unix:{}/data.sock", ""])
async def test_inference_has_an_endpoint_of_its_own_where_one_is_set(
    tmp_path: Path, second: str
) -> None:
    """Both endpoints serve everything; an equal or empty setting means a single endpoint."""
    application = Application(
        Settings(
            repository=tmp_path,
            grpc_endpoint=f"unix:{tmp_path}/grpc.sock",
            grpc_data_endpoint=second.format(tmp_path),
            http_endpoint="none",
        )
    )
    async with application.running() as addresses:
        for address in {addresses.grpc, addresses.grpc_data}:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

                assert (await stub.ServerLive(pb.ServerLiveRequest())).live

    assert bool(second) is (addresses.grpc != addresses.grpc_data)
    assert [] == list(tmp_path.iterdir())


async def test_the_port_answers_before_models_are_loaded(example_models: Path) -> None:
    """The server is live immediately, and ready when the startup is complete."""
    settings = Settings(repository=example_models, grpc_endpoint="port:0", http_endpoint="none")
    application = Application(settings)
    async with application.running() as addresses:
        async with grpc.aio.insecure_channel(addresses.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready


async def test_health_follows_models(serve: Serve, example_models: Path) -> None:
    """grpc.health.v1, per service and per model name; a watch reports every change."""
    async with serve(example_models, load_model=("identity",)) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="identity"))
            first = await watch.read()
            await server.application.control.unload("identity")
            second = await watch.read()
            watch.cancel()

    assert [SERVING, NOT_SERVING] == [first.status, second.status]


async def test_requests_in_progress_end_before_the_server_does(
    example_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain interrupts nothing: accepted requests are answered."""
    settings = Settings(
        repository=example_models,
        grpc_endpoint="port:0",
        http_endpoint="none",
        inline_execution_seconds=0,
    )
    application = Application(settings)
    x = np.ones((64, 784), np.float32)
    request = pb.ModelInferRequest(
        model_name="mlp",
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=x.shape)],
        raw_input_contents=[x.tobytes()],
    )
    async with application.running() as addresses:
        await application.load()
        channel = grpc.aio.insecure_channel(addresses.grpc)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.ServerLive(pb.ServerLiveRequest())
        calls = [asyncio.ensure_future(_await(stub.ModelInfer(request))) for _ in range(100)]
        while not application.registry.requests:
            await asyncio.sleep(0)
    outcomes = await asyncio.gather(*calls)
    await channel.close()

    # A request that arrives after the announcement gets UNAVAILABLE, and may be retried.
    assert {"OK"} <= set(outcomes) <= {"OK", "UNAVAILABLE"}
    assert 0 == application.registry.requests


async def test_an_inference_that_waits_for_its_connection_is_answered(
    serve: Serve, example_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent before the client could know of the shutdown, so it counts as in flight."""
    monkeypatch.setattr(app, "_ARRIVAL_SECONDS", 3600.0)
    request = pb.ModelInferRequest(
        model_name="identity",
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 16])],
        raw_input_contents=[b"abcdefgh" * 8],
    )
    async with serve(example_models, load_model=("identity",)) as server:
        host, _, port = server.url.rpartition(":")
        client = socket.create_connection((host, int(port)), timeout=30)
        drain = server.application.grpc.drain

        async def drain_with_one_more(seconds: float) -> None:
            client.sendall(sent(INFER, request.SerializeToString()))
            await drain(seconds)

        monkeypatch.setattr(server.application.grpc, "drain", drain_with_one_more)
    with client:
        octets = b"".join(iter(lambda: client.recv(1 << 16), b""))
    answers = [frame.payload for frame in parse(octets)[0] if frame.kind == Kind.DATA]

    assert 1 == len(answers)
    assert b"abcdefgh" * 8 in answers[0]


async def _await(call: "grpc.aio.UnaryUnaryCall[object, object]") -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"
