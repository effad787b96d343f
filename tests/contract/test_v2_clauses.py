"""Clauses of the V2 protocol by their values: repositories, versions, metadata, images."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from support import identity_models
from support.http import connect, message
from support.server import RunningServer, Serve
from support.typed_contract import ModelInferRequest, ModelInferResponse
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

SERVICE = "/inference.GRPCInferenceService/"
VERSIONS = ("1", "2", "10")
FRAMES = (2, 3)
"""Number of clips, and of pictures per clip."""
PICTURE = (4, 5, 3)


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    root = tmp_path / "models"
    identity_models.write(root, "echo", "FP32")
    config = json.loads((root / "echo/config.json").read_text())
    config["version_policy"] = {"all": {}}
    (root / "echo/config.json").write_text(json.dumps(config))
    for version in VERSIONS[1:]:
        (root / "echo" / version).mkdir()
    identity_models.write(root, "clips", "UINT8", (-1, -1, *PICTURE))
    async with serve(root, load_model=("*",), http_endpoint="port:0") as running:
        yield running


@pytest.fixture
async def channel(server: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.url) as channel:
        yield channel


@pytest.fixture
def stub(channel: Any) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize("method", ["Index", "ModelLoad", "ModelUnload"])
async def test_a_repository_by_name_is_not_there(stub: Any, method: str) -> None:
    """Model repository extension: only the unnamed repository exists."""
    named: dict[str, Any] = {"repository_name": "other"}
    if method != "Index":
        named["model_name"] = "echo"
    asked = getattr(pb, f"Repository{method}Request")(**named)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(stub, f"Repository{method}")(asked)
    ready = await stub.ModelReady(pb.ModelReadyRequest(name="echo"))

    assert grpc.StatusCode.UNIMPLEMENTED is refused.value.code()
    assert "repository_name" in str(refused.value.details())
    assert ready.ready


@pytest.mark.parametrize(
    ("path", "version"), [("", "10"), *((f"/versions/{v}", v) for v in VERSIONS)]
)
async def test_the_latest_version_answers_unless_another_is_asked_for(
    server: RunningServer, path: str, version: str
) -> None:
    """The latest version has the greatest number; versions are not compared as strings."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [7]}
    body = json.dumps({"inputs": [tensor]}).encode()
    assert server.http is not None
    async with connect(server.http) as client:
        answers = []
        for _ in range(2):  # the second request takes the fast path
            await client.send(message("POST", f"/v2/models/echo{path}/infer", body=body))
            answers.append(await client.answer())

    assert [version] * 2 == [answer.json["model_version"] for answer in answers]
    assert [[7.0]] * 2 == [answer.json["outputs"][0]["data"] for answer in answers]


async def test_metadata_has_no_parameters(channel: Any) -> None:
    """Field 6 is a parameter map in one dialect and a string map in another, so it is empty."""
    asked = pb.ModelMetadataRequest(name="echo").SerializeToString()
    answer = await channel.unary_unary(f"{SERVICE}ModelMetadata")(asked)
    metadata = pb.ModelMetadataResponse.FromString(answer)

    assert list(VERSIONS) == list(metadata.versions)
    assert [("x", "FP32", [-1])] == [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs]
    assert answer == metadata.SerializeToString()
    metadata.DiscardUnknownFields()
    assert answer == metadata.SerializeToString()


async def test_pictures_of_an_input_with_five_dimensions_are_counted_by_two(channel: Any) -> None:
    """OVMS, binary inputs: a model of [N, M, H, W, C] takes encoded images of shape [N, M]."""
    expected = np.empty((*FRAMES, *PICTURE), np.uint8)
    files = []
    for place in np.ndindex(*FRAMES):
        expected[place] = 10 * place[0] + place[1]
        file = io.BytesIO()
        Image.fromarray(expected[place]).save(file, "PNG")
        files.append(file.getvalue())
    request = ModelInferRequest(model_name="clips")
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=FRAMES)
    tensor.contents.bytes_contents.extend(files)
    call = channel.unary_unary(f"{SERVICE}ModelInfer")
    (output,) = ModelInferResponse.FromString(await call(request.SerializeToString())).outputs

    assert ("UINT8", [*FRAMES, *PICTURE]) == (output.datatype, list(output.shape))
    assert expected.ravel().tolist() == list(output.contents.uint_contents)
