"""Unsupported parts of the protocol are reported, and harmless requests succeed."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import identity_models
from support.http import Answer, connect, message
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

MODEL = "/v2/models/echo"

ABSENT = [
    ("POST", "/v2/cudasharedmemory/region/a/register"),
]
"""Routes of the CUDA shared memory extension."""
NO_VERSIONS = ("abc", "-1", "1.0", " 1", "\N{SUPERSCRIPT TWO}")


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    models = tmp_path / "models"
    identity_models.write(models, "echo", "FP32")
    async with serve(
        models, load_model=("echo",), http_endpoint="port:0", server_name="triton"
    ) as running:
        yield running


async def ask(server: RunningServer, method: str, path: str, body: bytes = b"") -> Answer:
    assert server.http is not None
    async with connect(server.http) as connection:
        await connection.send(message(method, path, body=body, length=len(body)))
        return await connection.answer()


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def code_of(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code().name, str(refused.value.details())


async def test_what_is_not_built_is_501(server: RunningServer) -> None:
    answers = {row: await ask(server, *row) for row in ABSENT}

    assert [] == [row for row, answer in answers.items() if answer.status != 501]
    assert all("is not implemented by this server" in a.error for a in answers.values())
    assert 404 == (await ask(server, "GET", "/v2/nothing")).status


@pytest.mark.parametrize("version", NO_VERSIONS)
async def test_a_version_is_a_number(server: RunningServer, stub: Any, version: str) -> None:
    """It is the client's error, and does not mean that the model is gone."""
    asked = {"name": "echo", "version": version}
    infer = pb.ModelInferRequest(model_name="echo", model_version=version)
    calls = [
        stub.ModelReady(pb.ModelReadyRequest(**asked)),
        stub.ModelMetadata(pb.ModelMetadataRequest(**asked)),
        stub.ModelConfig(pb.ModelConfigRequest(**asked)),
        stub.ModelStatistics(pb.ModelStatisticsRequest(**asked)),
        stub.ModelInfer(infer),
    ]
    codes = [await code_of(call) for call in calls]
    shown = version.encode().replace(b" ", b"%20")
    path = f"{MODEL}/versions/" + "".join(
        chr(octet) if octet < 0x80 else f"%{octet:02X}" for octet in shown
    )
    rows = [("GET", path + end) for end in ("", "/ready", "/config", "/stats")]
    answers = [await ask(server, *row) for row in [*rows, ("POST", f"{path}/infer")]]

    assert {("INVALID_ARGUMENT", answers[0].error)} == set(codes)
    assert [400] * 5 == [answer.status for answer in answers]
    assert answers[0].error.startswith("model 'echo': expected a version in digits")


async def test_a_version_that_is_not_there_is_not_found(server: RunningServer, stub: Any) -> None:
    request = pb.ModelReadyRequest(name="echo", version="99")
    code, text = await code_of(stub.ModelReady(request))

    assert "NOT_FOUND" == code
    assert text.startswith("Request for unknown model")
    assert 404 == (await ask(server, "GET", f"{MODEL}/versions/99/ready")).status


async def test_an_unknown_model_is_an_error_of_ready_and_of_unload(stub: Any) -> None:
    for call in (
        stub.ModelReady(pb.ModelReadyRequest(name="nobody")),
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="nobody")),
    ):
        assert "NOT_FOUND" == (await code_of(call))[0]


async def test_the_server_has_the_name_that_it_is_given(server: RunningServer, stub: Any) -> None:
    """Some stock clients only work with the name "triton"."""
    over_grpc = (await stub.ServerMetadata(pb.ServerMetadataRequest())).name

    assert "triton" == over_grpc == (await ask(server, "GET", "/v2")).json["name"]
