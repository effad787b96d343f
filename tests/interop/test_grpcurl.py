"""grpcurl without proto files: it uses server reflection."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.process import run
from support.server import Serve

SERVICE = "inference.GRPCInferenceService"
Grpcurl = Callable[..., Awaitable[str]]


@pytest.fixture
async def call(grpcurl: str, serve: Serve, example_models: Path) -> AsyncIterator[Grpcurl]:
    """Run grpcurl against a server with the example models, and return its output."""
    async with serve(example_models, load_model=("identity", "simple")) as server:

        async def run_grpcurl(*arguments: str, data: Any = None) -> str:
            messages = data if isinstance(data, list) else [data]
            payload = () if data is None else ("-d", " ".join(map(json.dumps, messages)))
            status, out, err = await run(grpcurl, "-plaintext", *payload, server.url, *arguments)
            assert status == 0, err
            return out

        yield run_grpcurl


async def test_list_names_the_services(call: Grpcurl) -> None:
    expected = [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        SERVICE,
    ]

    assert expected == sorted((await call("list")).split())


async def test_describe_shows_methods_and_messages(call: Grpcurl) -> None:
    service = await call("describe", SERVICE)
    message = await call("describe", "inference.ModelInferRequest")

    assert "rpc ModelInfer ( .inference.ModelInferRequest )" in service
    assert "repeated bytes raw_input_contents = 7;" in message


def simple(first: int, second: int, **more: Any) -> dict[str, Any]:
    tensors = [
        {"name": n, "datatype": "INT32", "shape": [1, 16], "contents": {"int_contents": [v] * 16}}
        for n, v in (("INPUT0", first), ("INPUT1", second))
    ]
    return {"model_name": "simple", "inputs": tensors, **more}


async def test_an_inference_needs_no_proto_file(call: Grpcurl) -> None:
    answer = json.loads(await call(f"{SERVICE}/ModelInfer", data=simple(7, 2)))
    values = [
        np.frombuffer(base64.b64decode(raw), np.int32).tolist()
        for raw in answer["rawOutputContents"]
    ]

    assert ["OUTPUT0", "OUTPUT1"] == [output["name"] for output in answer["outputs"]]
    shown = [output["contents"]["intContents"] for output in answer["outputs"]]
    assert [[9] * 16, [5] * 16] == shown == values


async def test_a_stream_of_inferences_needs_none_either(call: Grpcurl) -> None:
    requests = [simple(7, 2, id="a"), simple(7, 2, id="b", model_name="nope"), simple(1, 1, id="c")]
    out = await call(f"{SERVICE}/ModelStreamInfer", data=requests)
    told, rest = [], out.lstrip()
    while rest:
        message, end = json.JSONDecoder().raw_decode(rest)
        told.append(message)
        rest = rest[end:].lstrip()
    first, error, last = told

    assert list("abc") == [message["inferResponse"]["id"] for message in told]
    assert [9] * 16 == first["inferResponse"]["outputs"][0]["contents"]["intContents"]
    assert {"triton_final_response": {"boolParam": True}} == first["inferResponse"]["parameters"]
    assert error["errorMessage"].startswith("Request for unknown model: 'nope'")
    assert [2] * 16 == last["inferResponse"]["outputs"][0]["contents"]["intContents"]


async def test_health_is_answered(call: Grpcurl) -> None:
    answers = [
        json.loads(await call("grpc.health.v1.Health/Check", data={"service": name}))
        for name in ("", SERVICE, "identity")
    ]

    assert [{"status": "SERVING"}] * 3 == answers
