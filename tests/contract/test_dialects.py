"""Variants of V2 that clients of Triton, MLServer and KServe use where V2 is ambiguous."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support import identity_models
from support.asking import client
from support.http import ask
from support.server import RunningServer, Serve

from xlaserve.dialing import over_grpc
from xlaserve.dialing.interface import CallFailed
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.tensors import DATATYPES
from xlaserve_proto import inference as pb

V2 = "/inference.GRPCInferenceService/"
REPOSITORY = "/inference.model_repository.ModelRepositoryService/"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model with parameters, and a model without versions."""
    models = tmp_path / "models"
    identity_models.write(models, "same", "FP32", [1])
    config = json.loads((models / "same" / "config.json").read_text())
    config["parameters"] = {"owner": {"string_value": "A"}}
    (models / "same" / "config.json").write_text(json.dumps(config))
    (models / "none").mkdir()
    return models


def request(model: str, value: float = 1, **more: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequestInferInputTensor(name="x", datatype="FP32", shape=[1])
    tensor.contents.fp32_contents = [value]
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], **more)


async def called(server: RunningServer, method: str, message: Any, answer: Any) -> Any:
    async with grpc.aio.insecure_channel(server.url) as channel:
        call = channel.unary_unary(method, bytes, answer.FromString)
        async with asyncio.timeout(60):
            return await call(message)


async def test_a_stream_has_the_answers_of_mlserver(serve: Serve, root: Path) -> None:
    """MLServer's service streams ModelInferResponse and ends the stream with the error status."""
    found: list[Any] = []

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        for number in range(3):
            yield request("same", number, id=str(number))
        yield request("nobody")

    async def read(channel: grpc.aio.Channel) -> None:
        path, parse = f"{V2}ModelStreamInfer", pb.ModelInferResponse.FromString
        async for answer in channel.stream_stream(path, bytes, parse)(requests()):
            found.append((answer.model_name, answer.id, answer.outputs[0].contents))

    async with (
        serve(root, load_model=("same",), v2_dialect="mlserver") as server,
        grpc.aio.insecure_channel(server.url) as channel,
        asyncio.timeout(60),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(channel)

    assert [("same", str(n), [float(n)]) for n in range(3)] == [
        (name, identity, contents.fp32_contents) for name, identity, contents in found
    ]
    assert grpc.StatusCode.NOT_FOUND is raised.value.code()
    assert "'nobody'" in str(raised.value.details())


async def test_the_repository_service_of_mlserver_is_served(serve: Serve, root: Path) -> None:
    changes: tuple[tuple[str, Any, Any], ...] = (
        ("Load", pb.RepositoryModelLoadRequest, pb.RepositoryModelLoadResponse),
        ("Unload", pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse),
    )
    states = []
    async with serve(root) as server:
        for method, message, answer in changes:
            path = f"{REPOSITORY}RepositoryModel{method}"
            await called(server, path, message(model_name="same"), answer)
            index, asked = f"{REPOSITORY}RepositoryIndex", pb.RepositoryIndexRequest()
            rows = await called(server, index, asked, pb.RepositoryIndexResponse)
            states += [row.state for row in rows.models if row.name == "same"]
        path, missing = f"{REPOSITORY}RepositoryModelLoad", changes[0][1](model_name="nobody")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await called(server, path, missing, changes[0][2])

    assert ["READY", "UNAVAILABLE"] == states
    assert "'nobody'" in str(raised.value.details())


@pytest.mark.parametrize("dialect", ["triton", "mlserver", "kserve"])
async def test_metadata_has_the_map_of_its_dialect(serve: Serve, root: Path, dialect: str) -> None:
    """Field 6: entry 1 is the name; entry 2 is a string, or a message with a string in field 3."""
    async with (
        serve(root, load_model=("same",), v2_dialect=dialect) as server,
        grpc.aio.insecure_channel(server.url) as channel,
    ):
        call = channel.unary_unary(f"{V2}ModelMetadata", bytes)
        answer = bytes(await call(pb.ModelMetadataRequest(name="same")))

    text = b"A" if dialect == "kserve" else b"\x1a\x01A"
    entry = b"\x0a\x05owner\x12" + bytes([len(text)]) + text
    assert answer.endswith(b"\x32" + bytes([len(entry)]) + entry)
    known = pb.ModelMetadataResponse.FromString(answer.removesuffix(entry)[:-2])
    assert ("same", ["1"], ["x"]) == (known.name, known.versions, [t.name for t in known.inputs])


@pytest.mark.parametrize("owner", ["A", "ABCDEFGHI", ""])
@pytest.mark.parametrize("dialect", ["triton", "mlserver", "kserve"])
async def test_metadata_of_any_dialect_is_read(
    serve: Serve, root: Path, dialect: str, owner: str
) -> None:
    """By our own client; the second string also parses as a message of unknown fields."""
    path = root / "same" / "config.json"
    config = json.loads(path.read_text())
    config["parameters"] = {"owner": {"string_value": owner}}
    path.write_text(json.dumps(config))
    async with (
        serve(root, load_model=("same",), v2_dialect=dialect) as server,
        over_grpc.Client(server.url, timeout=60) as own,
    ):
        tensors, described = await own.tensors("same"), await own.describe("same")

    assert ["x"] == [one.name for one in tensors.inputs]
    assert described["parameters"] == {"owner": {"string_param": owner}}


async def test_a_stream_that_cannot_be_read_names_the_setting(serve: Serve, root: Path) -> None:
    tensor = InferInput("x", DATATYPES["FP32"], np.ones(1, np.float32))

    async def read(url: str, model: str) -> None:
        async with over_grpc.Client(url, timeout=60) as own:
            async for _ in own.stream(InferRequest(model, "", "", (tensor,)), 60):
                pass

    told = {}
    async with serve(root, load_model=("same",), v2_dialect="mlserver") as server:
        for model in ("same", "nobody"):
            with pytest.raises(CallFailed) as raised:
                await read(server.url, model)
            told[model] = str(raised.value)

    assert "--v2-dialect mlserver" in told["same"]
    assert "NOT_FOUND" in told["nobody"]


@pytest.mark.parametrize("bodies", [True, False])
async def test_health_has_a_body_where_the_setting_says_so(
    serve: Serve, root: Path, bodies: bool
) -> None:
    paths = ("/v2/health/live", "/v2/health/ready", "/v2/models/same/ready")
    async with serve(root, load_model=("same",), http_endpoint="port:0", health_bodies=bodies) as s:
        found = [await ask(str(s.http), "GET", path) for path in paths]
        await called(
            s,
            f"{V2}RepositoryModelUnload",
            pb.RepositoryModelUnloadRequest(model_name="same"),
            pb.RepositoryModelUnloadResponse,
        )
        gone = await ask(str(s.http), "GET", paths[-1])

    assert [200] * 3 == [answer.status for answer in found]
    assert gone.status in (400, 404)
    assert [bodies] * 3 == [bool(answer.body) for answer in found]


async def test_a_file_of_a_load_may_begin_with_a_slash(serve: Serve, root: Path) -> None:
    """As in Triton, over gRPC and REST; it is still relative to the model directory."""
    config = (root / "same" / "config.json").read_text()
    async with serve(root, http_endpoint="port:0") as server, client(server) as asking:
        for name in ("file:1/a.txt", "file:/1/a.txt"):
            await asking.grpc.load_model("loaded", config=config, files={name: b"abc"})
            directory = server.application.registry.resolve("loaded")[0]
            assert "1" == directory.number
            await asking.grpc.unload_model("loaded")
            text = {name: base64.b64encode(b"abc").decode(), "config": config}
            body = json.dumps({"parameters": text}).encode()
            path = "/v2/repository/models/loaded/load"
            answer = await ask(str(server.http), "POST", path, body=body)
            assert 200 == answer.status, answer.body
        refused = {"config": config, "file://1/a.txt": base64.b64encode(b"abc").decode()}
        body = json.dumps({"parameters": refused}).encode()
        answer = await ask(str(server.http), "POST", path, body=body)

    assert 400 == answer.status
