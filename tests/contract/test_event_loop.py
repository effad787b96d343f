"""A slow request does not block others, shown by the order of events on every protocol."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.http import ask
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import xlaserve

TRIPS = 10_000_000
"""About a second; it only has to be longer than a request takes."""


BEFORE = 5


def spin(params: None, n: jax.Array) -> dict[str, jax.Array]:
    return {
        "y": jax.lax.fori_loop(
            0, n[0], lambda i, c: c * 0.5 + i.astype(jnp.float32), jnp.float32(0)
        )[None]
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loops as often as its input says, and an ensemble with it."""
    root = tmp_path_factory.mktemp("models")
    xlaserve.export_model(spin, None, {"n": ("INT32", [1])}, root / "spin" / "1")
    config = {
        "input": [{"name": "n", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
        "ensemble_scheduling": {
            "step": [{"model_name": "spin", "input_map": {"n": "n"}, "output_map": {"y": "y"}}]
        },
    }
    (root / "steps" / "1").mkdir(parents=True)
    (root / "steps" / "config.json").write_text(json.dumps(config))
    return root


async def over_grpc(server: RunningServer, model: str, trips: int) -> None:
    async with grpc.aio.insecure_channel(server.url) as channel:
        data = np.array([trips], np.int32).tobytes()
        message = pb.ModelInferRequest(model_name=model, raw_input_contents=[data])
        message.inputs.add(name="n", datatype="INT32", shape=[1])
        await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)


async def over_rest(server: RunningServer, model: str, trips: int) -> None:
    tensor = {"name": "n", "datatype": "INT32", "shape": [1], "data": [trips]}
    body = json.dumps({"inputs": [tensor]}).encode()
    assert server.http is not None
    answer = await ask(server.http, "POST", f"/v2/models/{model}/infer", body=body)
    assert 200 == answer.status


@pytest.mark.parametrize(
    ("infer", "model"),
    [(over_grpc, "spin"), (over_rest, "spin"), (over_grpc, "steps")],
    ids=["grpc", "rest", "ensemble"],
)
async def test_a_loop_as_long_as_its_input_says_holds_no_other_connection(
    serve: Serve, repository: Path, infer: Any, model: str
) -> None:
    """Even if earlier executions were quick."""
    settings = {"inline_execution_seconds": 0.05, "http_endpoint": "port:0"}
    async with serve(repository, load_model=("spin", "steps"), **settings) as server:
        for _ in range(BEFORE):
            await infer(server, model, 1)
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await stub.ServerLive(pb.ServerLiveRequest())
            slow = asyncio.ensure_future(infer(server, model, TRIPS))
            instance = server.application.registry.resolve("spin")[1]
            while not (instance.users or slow.done()):
                await asyncio.sleep(0)
            await stub.ServerLive(pb.ServerLiveRequest())
            (report,) = server.application.control.catalog.statistics("spin")
            executed = report.totals.execution_count
            await slow

    assert BEFORE == executed
