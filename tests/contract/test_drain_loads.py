"""SIGTERM while loads are queued: each is answered, and the server exits early."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from support.conditions import until
from support.http import Connection, connect, message
from support.process import STOP_SECONDS, served
from support.python_models import write
from support.several import LAYOUTS
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.errors import ShuttingDown

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

LOADS = 20
GRACE_SECONDS = 10 * STOP_SECONDS
"""Time a drain would take if it waited for the loads."""
CONFIG = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
NEVER_LOADED = """
import pathlib, time

class Model(PythonModel):
    def load(self, context):
        pathlib.Path({begun!r}).touch()
        while True:
            time.sleep(0.01)

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""


ALONE = (("grpc.use_local_subchannel_pool", 1),)
"""Gives each channel its own connection."""


async def send_over_rest(client: Connection, model: str) -> None:
    path = f"/v2/repository/models/{model}/load"
    await client.send(message("POST", path, body=b"{}"))


async def send_over_grpc(channel: grpc.aio.Channel, model: str) -> Any:
    """Send a load request, and return once the server has read it."""
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    asked = stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=model))
    await stub.ServerLive(pb.ServerLiveRequest())  # same connection
    return asked


async def told_over_grpc(asked: Any) -> str:
    try:
        await asked
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name != "2" else []) for name in LAYOUTS],
)
async def test_every_load_that_waits_is_answered_and_the_server_ends(
    tmp_path: Path, layout: str
) -> None:
    """Two of twenty loads run a model's code that never returns; the others wait for a thread."""
    models, begun = tmp_path / "models", tmp_path / "begun"
    begun.mkdir()
    names = [f"m{number}" for number in range(LOADS)]
    for name in names:
        write(models, name, NEVER_LOADED.format(begun=str(begun / name)), CONFIG)
    settings = {
        "model-control-mode": "explicit",
        "load-threads": "2",
        "grace-seconds": str(GRACE_SECONDS),
        "load-seconds": str(GRACE_SECONDS),
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
    async with (
        AsyncExitStack() as stack,
        served(models, "--allow-python-models", *flags, *LAYOUTS[layout]) as server,
    ):
        clients = [await stack.enter_async_context(connect(server.http)) for _ in names[::2]]
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(server.url, options=ALONE))
            for _ in names[1::2]
        ]
        for client, name in zip(clients, names[::2], strict=True):
            await send_over_rest(client, name)
        asked = [
            await send_over_grpc(channel, name)
            for channel, name in zip(channels, names[1::2], strict=True)
        ]
        await until(lambda: any(begun.iterdir()))
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_SECONDS):
            over_rest = [(await client.answer()).status for client in clients]
            over_grpc = [await told_over_grpc(one) for one in asked]
        status = await server.ended()

    assert [503] * (LOADS // 2) == over_rest
    assert [f"UNAVAILABLE: {ShuttingDown()}"] * (LOADS // 2) == over_grpc
    assert 0 == status
