"""Statistics, metrics and access log match what clients got, even if an answer is refused.

The product of protocols and obstacles after an execution: too little memory, or values that the
format cannot represent.
"""

import base64
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import grpc
import pytest
from support import python_models
from support.conditions import until
from support.engines import ENGINE
from support.grpc_web import frame, plain, read
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

ORIGIN = "https://app.example"
HELD_BYTES = 1 << 20
SHORT, LONG, MUCH = 4, 30_000, 400_000
"""Elements of an answer: 30,000 are encoded on a thread, 400,000 exceed the memory limit."""
NUMBERS = "return {'y': np.random.default_rng(1).random(int(x[0]), np.float32)}"
OCTETS = "return {'y': np.array([b'\\xff' if x[0] == 30_000 else b'a'], object)}"
CONFIG = """
input [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_%s, dims: [ -1 ] }]
"""
ASKED = (SHORT, LONG, MUCH, SHORT, MUCH, LONG)


@dataclass(frozen=True)
class Client:
    """Clients for all protocols."""

    server: RunningServer
    session: aiohttp.ClientSession
    stub: Any


def message(model: str, count: int, *, typed: bool = False) -> Any:
    """Return a request for `count` elements."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[1])
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor])
    if typed:
        request.inputs[0].contents.int_contents.append(count)
    else:
        request.raw_input_contents.append(count.to_bytes(4, "little"))
    return request


def v2(count: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [count]}]}


Door = Callable[[Client, str, int], Awaitable[bool]]
"""Requests `count` elements from a model; returns whether there was an answer."""


def unary(*, typed: bool, compression: Any = None) -> Door:
    async def ask(client: Client, model: str, count: int) -> bool:
        try:
            await client.stub.ModelInfer(
                message(model, count, typed=typed), compression=compression, timeout=60
            )
        except grpc.aio.AioRpcError as error:
            assert grpc.StatusCode.RESOURCE_EXHAUSTED is error.code(), error
            return False
        return True

    return ask


async def streamed(client: Client, model: str, count: int) -> bool:
    stream = client.stub.ModelStreamInfer(iter([message(model, count)]), timeout=60)
    (answer,) = [answer async for answer in stream]
    return not answer.error_message


def web(kind: str) -> Door:
    async def ask(client: Client, model: str, count: int) -> bool:
        body = frame(message(model, count).SerializeToString())
        is_text = "text" in kind
        headers = {"Content-Type": kind, "X-Grpc-Web": "1", "Origin": ORIGIN}
        async with client.session.post(
            "/inference.GRPCInferenceService/ModelInfer",
            data=base64.b64encode(body) if is_text else body,
            headers=headers,
        ) as answer:
            data = await answer.read()
            _, trailers = read(plain(data) if is_text else data)
        return trailers["grpc-status"] == "0"

    return ask


def rest(headers: Mapping[str, str] = MappingProxyType({}), *, binary: bool = False) -> Door:
    async def ask(client: Client, model: str, count: int) -> bool:
        asked = v2(count) | {"parameters": {"binary_data_output": binary}}
        url = f"/v2/models/{model}/infer"
        async with client.session.post(url, json=asked, headers=dict(headers)) as answer:
            said = await answer.read()
            return answer.status == 200 and b"event: error" not in said

    return ask


def sagemaker(accept: str) -> Door:
    async def ask(client: Client, model: str, count: int) -> bool:
        url = f"/models/{model}/invoke"
        headers = {"Accept": accept}
        async with client.session.post(url, json=v2(count), headers=headers) as answer:
            said = await answer.read()
            assert answer.status in {200, 400, 503}, said
            return answer.status == 200

    return ask


DOORS: Mapping[str, Door] = {
    "gRPC raw": unary(typed=False),
    "gRPC typed": unary(typed=True),
    "gRPC compressed": unary(typed=False, compression=grpc.Compression.Gzip),
    "gRPC stream": streamed,
    "gRPC-Web": web("application/grpc-web+proto"),
    "gRPC-Web text": web("application/grpc-web-text+proto"),
    "REST JSON": rest(),
    "REST binary": rest(binary=True),
    "REST compressed": rest({"Accept-Encoding": "gzip"}),
    "REST events": rest({"Accept": "text/event-stream"}),
    "REST one by one": rest({"X-Own": "general", "Expect": "100-continue"}),
    "SageMaker JSON": sagemaker("application/json"),
    "SageMaker binary": sagemaker("application/octet-stream"),
}
ENGINES = [ENGINE] if ENGINE == "h2" else [ENGINE, "h2"]


@asynccontextmanager
async def asking(serve: Serve, folder: Path, engine: str) -> AsyncIterator[tuple[Client, Path]]:
    models, log = folder / "models", folder / "access.jsonl"
    python_models.write_function(models, "numbers", NUMBERS, CONFIG % "FP32")
    python_models.write_function(models, "octets", OCTETS, CONFIG % "STRING")
    options = [("grpc.max_receive_message_length", -1)]
    async with (
        serve(
            models,
            load_model=("*",),
            allow_python_models=True,
            http_endpoint="port:0",
            max_held_bytes=HELD_BYTES,
            http2_engine=engine,
            access_log=str(log),
            cors_origin=(ORIGIN,),
        ) as server,
        aiohttp.ClientSession(f"http://{server.http}") as session,
        grpc.aio.insecure_channel(server.url, options=options) as channel,
    ):
        yield Client(server, session, service_pb2_grpc.GRPCInferenceServiceStub(channel)), log


async def counted(client: Client, model: str) -> tuple[int, int]:
    """Return the successful and failed requests, according to statistics and metrics."""
    async with client.session.get(f"/v2/models/{model}/stats") as answer:
        found = (await answer.json())["model_stats"][0]["inference_stats"]
    async with client.session.get("/metrics") as answer:
        text = await answer.text()
    said = tuple(
        sum(
            int(float(value))
            for value in re.findall(rf'(?m)^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)', text)
        )
        for name in ("nv_inference_request_success", "nv_inference_request_failure")
    )
    counts = found["success"]["count"], found["fail"]["count"]
    assert said == counts
    return counts


@pytest.mark.parametrize("engine", ENGINES)
async def test_records_tell_what_clients_got(serve: Serve, tmp_path: Path, engine: str) -> None:
    """Each protocol is used repeatedly in mixed order, so fast paths are covered."""
    chance = random.Random(7)
    got: dict[str, list[bool]] = {}
    async with asking(serve, tmp_path, engine) as (client, log):
        for name, ask in DOORS.items():
            for model in ("numbers", "octets"):
                before = await counted(client, model)
                asked = chance.sample(ASKED, len(ASKED))
                answers = [await ask(client, model, count) for count in asked]
                after = await counted(client, model)
                told = after[0] - before[0], after[1] - before[1]
                got[f"{name}, {model}"] = answers

                assert (answers.count(True), answers.count(False)) == told, (name, model)
                if model == "numbers":
                    assert [count != MUCH for count in asked] == answers, name

        def lines() -> list[Any]:
            found = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
            return [line for line in found if line["operation"] == "infer" and "model" in line]

        everything = list(chain.from_iterable(got.values()))
        await until(lambda: len(lines()) == len(everything))
    refused = [line for line in lines() if line["status"] not in ("OK", "200")]

    assert everything == [line["status"] in ("OK", "200") for line in lines()]
    assert all(line["error"] for line in refused)
    assert not all(got["REST JSON, octets"])
