"""The V2 service over a real socket with grpcio as client: every datatype, every error."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import time, invisible to type checkers.

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.tensors import DATATYPES, from_bytes, to_bytes

INVALID = grpc.StatusCode.INVALID_ARGUMENT
VALUES: dict[str, Any] = {
    "BOOL": [True, False, True],
    "UINT8": [0, 255, 7],
    "UINT16": [0, 65535, 7],
    "UINT32": [0, 2**32 - 1, 7],
    "UINT64": [0, 2**64 - 1, 7],
    "INT8": [-128, 127, 0],
    "INT16": [-32768, 32767, 0],
    "INT32": [-(2**31), 2**31 - 1, 0],
    "INT64": [-(2**63), 2**63 - 1, 0],
    "FP16": [0.5, -65504.0, 2.0**-24],
    "BF16": [0.5, -1.0, 3.0e38],
    "FP32": [0.5, -3.4028234663852886e38, 1e-45],
    "FP64": [0.5, -1.7976931348623157e308, 5e-324],
    "BYTES": [b"", b"\x00\xff", "wörter".encode()],
}


def test_every_datatype_is_here() -> None:
    assert set(DATATYPES) == set(VALUES)


def write_identity(root: Path, name: str, config: str, max_batch_size: int = 0) -> None:
    tensor = {"data_type": config, "dims": [-1]}
    (root / name / "1").mkdir(parents=True)
    text = {
        "backend": "identity",
        "max_batch_size": max_batch_size,
        "input": [tensor | {"name": "x"}],
        "output": [tensor | {"name": "y"}],
    }
    (root / name / "config.json").write_text(json.dumps(text))


@dataclass
class Service:
    """A stub of the service, with shorthands for ModelInfer."""

    stub: Any
    http: str | None = None

    async def infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        return await self.stub.ModelInfer(request)

    async def fault(self, request: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.stub.ModelInfer(request)
        return caught.value.code(), caught.value.details() or ""


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Service]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(url, options=options) as channel:
        yield Service(service_pb2_grpc.GRPCInferenceServiceStub(channel))


@pytest.fixture
async def service(serve: Serve, tmp_path: Path) -> AsyncIterator[Service]:
    root = tmp_path / "models"
    for name, row in DATATYPES.items():
        write_identity(root, name.lower(), row.config_name)
    write_identity(root, "batched", "TYPE_FP32", max_batch_size=4)
    async with serve(root, model_control_mode="none", max_message_bytes=1 << 20) as server:
        async with connected(server.url) as connection:
            yield connection


def tensor(name: str = "x", datatype: str = "FP32", shape: Any = (3,)) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)


def raw(datatype: str, data: bytes, shape: Any = (3,), model: str = "") -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        model_name=model or datatype.lower(),
        inputs=[tensor(datatype=datatype, shape=shape)],
        raw_input_contents=[data],
    )


def typed(datatype: str, values: Any, field: str | None = None) -> pb.ModelInferRequest:
    request = raw(datatype, b"", (len(values),))
    del request.raw_input_contents[:]
    getattr(request.inputs[0].contents, field or DATATYPES[datatype].contents or "").extend(values)
    return request


def packed(datatype: str) -> bytes:
    row = DATATYPES[datatype]
    return bytes(to_bytes(row, np.array(VALUES[datatype], dtype=row.dtype)))


# # --- ModelInfer: valid requests ---


@pytest.mark.parametrize("datatype", DATATYPES)
async def test_raw_contents_of_every_datatype(service: Service, datatype: str) -> None:
    """V2 protocol, raw_input_contents: little-endian, row-major, unpadded."""
    response = await service.infer(raw(datatype, packed(datatype)))

    assert [packed(datatype)] == list(response.raw_output_contents)
    assert ("y", datatype, [3]) == (
        response.outputs[0].name,
        response.outputs[0].datatype,
        list(response.outputs[0].shape),
    )


@pytest.mark.parametrize("datatype", [name for name, row in DATATYPES.items() if row.contents])
async def test_typed_contents_of_every_datatype_that_has_them(
    service: Service, datatype: str
) -> None:
    response = await service.infer(typed(datatype, VALUES[datatype]))

    assert [packed(datatype)] == list(response.raw_output_contents)


async def test_the_answer_echoes_the_id_and_names_the_version(service: Service) -> None:
    request = raw("FP32", packed("FP32"))
    request.id = "request-7"
    response = await service.infer(request)

    assert ("fp32", "1", "request-7") == (
        response.model_name,
        response.model_version,
        response.id,
    )


async def test_a_version_and_outputs_can_be_asked_for(service: Service) -> None:
    request = raw("FP32", packed("FP32"))
    request.model_version = "1"
    request.outputs.add(name="y")
    response = await service.infer(request)

    assert ["y"] == [output.name for output in response.outputs]


async def test_an_empty_tensor_is_a_tensor(service: Service) -> None:
    response = await service.infer(raw("FP32", b"", (0,)))

    assert [b""] == list(response.raw_output_contents)


# # --- ModelInfer: errors ---

THREE = np.zeros(3, np.float32).tobytes()


def mixed() -> pb.ModelInferRequest:
    request = typed("FP32", [1.0, 2.0, 3.0])
    request.raw_input_contents.append(THREE)
    return request


def twice() -> pb.ModelInferRequest:
    request = raw("FP32", THREE)
    request.inputs.add(name="x", datatype="FP32", shape=[3])
    request.raw_input_contents.append(THREE)
    return request


def asking(*names: str) -> pb.ModelInferRequest:
    request = raw("FP32", THREE)
    for name in names:
        request.outputs.add(name=name)
    return request


def named(name: str) -> pb.ModelInferRequest:
    request = raw("FP32", THREE)
    request.inputs[0].name = name
    return request


def of_shape(shape: tuple[int, ...], request: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """Give the input a shape that may not match its elements."""
    request.inputs[0].shape[:] = shape
    return request


FAULTS: list[tuple[pb.ModelInferRequest, str]] = [
    (named("q"), "model 'fp32': unexpected inference input 'q', it has 'x'"),
    (twice(), "input 'x' already exists in request"),
    (pb.ModelInferRequest(model_name="fp32"), "expected 1 inputs but got 0, missing 'x'"),
    (asking("q"), "unexpected inference output 'q', it has 'y'"),
    (asking("y", "y"), "output 'y' already exists in request"),
    (raw("INT32", THREE, model="fp32"), "input 'x': expected FP32[-1], got INT32[3]"),
    (raw("FP31", THREE, model="fp32"), "unknown datatype 'FP31', expected one of BOOL"),
    (raw("FP32", THREE, (3, 1)), "input 'x': expected FP32[-1], got FP32[3,1]"),
    (raw("FP32", THREE, (-3,)), "a shape without negative dimensions, got [-3]"),
    (raw("FP32", THREE[:-1]), "input 'x': expected 12 bytes for FP32[3], got 11 bytes"),
    (raw("FP32", THREE + b"\0"), "input 'x': expected 12 bytes for FP32[3], got 13 bytes"),
    (raw("FP32", THREE * 2), "input 'x': expected 12 bytes for FP32[3], got 24 bytes"),
    (raw("FP32", THREE * 2, (1, 3), "batched"), "expected 12 bytes for FP32[1,3], got 24 bytes"),
    (raw("FP32", THREE, (2**62, 4)), "bytes for FP32[4611686018427387904,4], got 12 bytes"),
    (raw("FP32", b""), "expected 12 bytes for FP32[3], got 0"),
    (mixed(), "no contents field together with raw_input_contents, got fp32_contents"),
    (typed("INT8", [128]), "input 'x': expected INT8 between -128 and 127, got 128"),
    (typed("UINT16", [65536]), "expected UINT16 between 0 and 65535, got 65536"),
    (typed("FP32", [1.0], "fp64_contents"), "expected fp32_contents for FP32, got fp64_contents"),
    (of_shape((3,), typed("FP32", [1.0] * 4)), "expected 3 elements for FP32[3], got 4 elements"),
    (of_shape((3,), typed("FP32", [1.0] * 2)), "expected 3 elements for FP32[3], got 2 elements"),
    (of_shape((1,), typed("BYTES", [b"a", b"b"])), "expected 1 elements for BYTES[1], got 2"),
    (typed("FP16", [1.0], "fp32_contents"), "raw_input_contents, the only encoding of FP16"),
    (raw("BOOL", b"\0\1\2"), "expected BOOL bytes of 0 or 1"),
    (raw("BYTES", b"\5\0\0\0abc", (1,)), "expected 5 bytes of element 0, got 3 bytes"),
    (raw("BYTES", b"\1\0\0\0ab", (1,)), "expected 1 element"),
    (raw("BYTES", b"\1\0", (1,)), "input 'x'"),
    (raw("FP32", THREE * 5, (5, 3), "batched"), "a batch of 1 to 4 rows, got FP32[5,3]"),
]


@pytest.mark.parametrize(("request_", "text"), FAULTS, ids=[text[:60] for _, text in FAULTS])
async def test_a_fault_of_the_request_is_an_invalid_argument(
    service: Service, request_: pb.ModelInferRequest, text: str
) -> None:
    """The error names the model, the tensor, what was expected and what was received."""
    code, details = await service.fault(request_)

    assert INVALID is code
    assert text in details


async def test_more_raw_contents_than_inputs_are_refused(service: Service) -> None:
    request = raw("FP32", THREE)
    request.raw_input_contents.append(THREE)

    assert (INVALID, "model 'fp32': expected 1 raw_input_contents, one for each input, got 2") == (
        await service.fault(request)
    )


async def test_an_unknown_model_or_version_is_not_found(service: Service) -> None:
    """The text starts with the words that clients look for."""
    unknown = await service.fault(raw("FP32", THREE, model="nope"))
    request = raw("FP32", THREE)
    request.model_version = "9"
    version = await service.fault(request)

    assert [grpc.StatusCode.NOT_FOUND] * 2 == [unknown[0], version[0]]
    assert unknown[1].startswith("Request for unknown model: 'nope'")
    assert version[1].startswith("Request for unknown model: 'fp32' version 9")


async def test_a_message_over_the_limit_is_refused_by_its_length(service: Service) -> None:
    code, details = await service.fault(raw("FP32", b"\0" * (1 << 21), (1 << 19,)))

    assert grpc.StatusCode.RESOURCE_EXHAUSTED is code
    assert "max_message_bytes" in details
    await service.infer(raw("FP32", THREE))


async def test_what_is_not_built_says_so(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest())

    assert grpc.StatusCode.UNIMPLEMENTED is caught.value.code()
    assert "CUDA shared memory is not implemented by this server" == caught.value.details()


async def test_a_text_of_the_client_is_cut_before_it_comes_back(service: Service) -> None:
    """Clients limit the headers they accept, and percent-encoding makes text longer."""
    code, details = await service.fault(raw("FP32", THREE, model="é" * 6000))

    assert grpc.StatusCode.NOT_FOUND is code
    assert len(details) < 2048


# --- the other methods ---


async def test_the_server_describes_itself(service: Service) -> None:
    metadata = await service.stub.ServerMetadata(pb.ServerMetadataRequest())

    assert "xlaserve" == metadata.name
    assert {"model_repository", "model_repository(unload_dependents)"} <= set(metadata.extensions)
    assert (await service.stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await service.stub.ServerReady(pb.ServerReadyRequest())).ready


async def test_a_model_describes_itself(service: Service) -> None:
    """The batch dimension is reported as -1 in front of the dims (ModelMetadata)."""
    metadata = await service.stub.ModelMetadata(pb.ModelMetadataRequest(name="batched"))
    tensors = [(t.name, t.datatype, list(t.shape)) for t in (*metadata.inputs, *metadata.outputs)]

    assert [("x", "FP32", [-1, -1]), ("y", "FP32", [-1, -1])] == tensors
    assert ("batched", ["1"], "identity") == (
        metadata.name,
        list(metadata.versions),
        metadata.platform,
    )


async def test_readiness_of_a_model_that_is_not_there_is_not_found(service: Service) -> None:
    assert (await service.stub.ModelReady(pb.ModelReadyRequest(name="fp32"))).ready
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.ModelReady(pb.ModelReadyRequest(name="nope"))

    assert grpc.StatusCode.NOT_FOUND is caught.value.code()


async def test_a_named_repository_is_not_implemented(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="other"))

    assert grpc.StatusCode.UNIMPLEMENTED is caught.value.code()


async def test_arrays_view_the_received_message() -> None:
    """Zero-copy from the message to the array, where the layout allows."""
    message = bytearray(b"\0" * 12)
    array = from_bytes(DATATYPES["FP32"], (3,), memoryview(message))
    message[3] = 0x40

    assert 2.0 == array[0]
    assert ml_dtypes.bfloat16 == from_bytes(DATATYPES["BF16"], (6,), memoryview(message)).dtype
