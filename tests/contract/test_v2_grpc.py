"""The V2 inference protocol over gRPC, method by method, in the order of its document."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc


@pytest.fixture
async def stub(serve: Serve, example_models: Path) -> AsyncIterator[Any]:
    async with serve(example_models, load_model=("simple", "identity")) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_server_live(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live


async def test_server_ready(stub: Any) -> None:
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [("simple", "", True), ("simple", "1", True), ("mlp", "", False)],
)
async def test_model_ready(stub: Any, name: str, version: str, expected: bool) -> None:
    """A model in the repository is not ready until it is loaded."""
    response = await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))

    assert expected is response.ready


@pytest.mark.parametrize(("name", "version"), [("nope", ""), ("simple", "7")])
async def test_model_ready_of_what_there_is_not(stub: Any, name: str, version: str) -> None:
    code = await code_of(stub.ModelReady(pb.ModelReadyRequest(name=name, version=version)))

    assert grpc.StatusCode.NOT_FOUND is code


async def test_server_metadata(stub: Any) -> None:
    """Every listed extension is implemented."""
    metadata = await stub.ServerMetadata(pb.ServerMetadataRequest())

    assert "xlaserve" == metadata.name
    assert metadata.version
    assert [
        "model_repository",
        "model_repository(unload_dependents)",
        "model_configuration",
        "binary_tensor_data",
        "parameters",
        "schedule_policy",
        "sequence",
        "statistics",
        "classification",
        "logging",
        "system_shared_memory",
    ] == list(metadata.extensions)


async def test_model_metadata(stub: Any) -> None:
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="simple"))

    assert ("simple", ["1"], "jax_export") == (
        metadata.name,
        list(metadata.versions),
        metadata.platform,
    )
    assert [("INPUT0", "INT32", [-1, 16]), ("INPUT1", "INT32", [-1, 16])] == [
        (t.name, t.datatype, list(t.shape)) for t in metadata.inputs
    ]
    assert [("OUTPUT0", "INT32", [-1, 16]), ("OUTPUT1", "INT32", [-1, 16])] == [
        (t.name, t.datatype, list(t.shape)) for t in metadata.outputs
    ]


def simple_request(**more: Any) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor
    shape = [1, 16]
    return pb.ModelInferRequest(
        model_name="simple",
        inputs=[tensor(name=f"INPUT{i}", datatype="INT32", shape=shape) for i in range(2)],
        **more,
    )


async def test_model_infer_with_raw_contents(stub: Any) -> None:
    values = [np.full(16, value, np.int32) for value in (7, 2)]
    request = simple_request(raw_input_contents=[v.tobytes() for v in values], id="42")
    response = await stub.ModelInfer(request)

    assert ("simple", "1", "42") == (response.model_name, response.model_version, response.id)
    assert [9, 5] == [np.frombuffer(raw, np.int32)[0] for raw in response.raw_output_contents]


async def test_model_infer_with_typed_contents(stub: Any) -> None:
    request = simple_request()
    for tensor, value in zip(request.inputs, (7, 2), strict=True):
        tensor.contents.int_contents.extend([value] * 16)
    response = await stub.ModelInfer(request)

    assert [9, 5] == [np.frombuffer(raw, np.int32)[0] for raw in response.raw_output_contents]


async def test_model_infer_answers_only_the_outputs_asked_for(stub: Any) -> None:
    request = simple_request(raw_input_contents=[bytes(64)] * 2)
    request.outputs.add(name="OUTPUT1")
    response = await stub.ModelInfer(request)

    assert ["OUTPUT1"] == [output.name for output in response.outputs]
    assert 1 == len(response.raw_output_contents)


async def test_parameters_of_every_kind_are_taken(stub: Any) -> None:
    request = simple_request(raw_input_contents=[bytes(64)] * 2)
    request.parameters["a"].bool_param = False
    request.parameters["b"].int64_param = -1
    request.parameters["c"].string_param = ""
    request.parameters["d"].double_param = 0.5
    request.parameters["e"].uint64_param = 2**64 - 1
    request.inputs[0].parameters["f"].string_param = "x"
    response = await stub.ModelInfer(request)

    assert 2 == len(response.outputs)


async def test_a_parameter_without_a_value_is_refused(stub: Any) -> None:
    request = simple_request(raw_input_contents=[bytes(64)] * 2)
    request.parameters["a"].SetInParent()

    assert grpc.StatusCode.INVALID_ARGUMENT is await code_of(stub.ModelInfer(request))


async def test_repository_index(stub: Any) -> None:
    everything = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
    ready = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))

    assert {
        "digits": ("", "UNAVAILABLE"),
        "identity": ("1", "READY"),
        "mlp": ("", "UNAVAILABLE"),
        "simple": ("1", "READY"),
    } == {model.name: (model.version, model.state) for model in everything.models}
    assert ["identity", "simple"] == [model.name for model in ready.models]


async def test_repository_model_load(stub: Any) -> None:
    await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="mlp"))

    assert (await stub.ModelReady(pb.ModelReadyRequest(name="mlp"))).ready


async def test_repository_model_unload(stub: Any) -> None:
    await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="simple"))
    index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())

    assert ("UNAVAILABLE", "unloaded") in [(m.state, m.reason) for m in index.models]
    assert grpc.StatusCode.NOT_FOUND is await code_of(stub.ModelInfer(simple_request()))
