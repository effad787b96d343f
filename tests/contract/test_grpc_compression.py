"""gRPC message compression in both directions, with the stock clients."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import h2.events
import numpy as np
import pytest
from support import identity_models
from support.engines import own_engine_only
from support.server import RunningServer, Serve
from support.stock import stock_client
from support.wire import connect, request_headers
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

pytestmark = own_engine_only

DATA = np.zeros((1, 2048), np.float32)
ALGORITHMS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    identity_models.write(tmp_path / "models", "echo", "FP32", (-1, -1))
    async with serve(tmp_path / "models", load_model=("echo",), http_endpoint="port:0") as running:
        yield running


def asked() -> Any:
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[DATA.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=DATA.shape)
    return request


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_grpcio_compresses_and_is_answered_compressed(
    server: RunningServer, algorithm: str
) -> None:
    """Unary and streaming calls; the answer names its compression."""
    compression = ALGORITHMS[algorithm]
    async with grpc.aio.insecure_channel(server.url, compression=compression) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(asked())
        stream = stub.ModelStreamInfer(iter([asked()] * 3))
        streamed = [message.infer_response async for message in stream]

    expected = [DATA.tobytes()]
    assert expected == list(answer.raw_output_contents)
    assert [expected] * 3 == [list(each.raw_output_contents) for each in streamed]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["grpc", "grpc.aio"])
async def test_tritonclient_compresses(server: RunningServer, kind: str, algorithm: str) -> None:
    async with stock_client(kind, server) as client:
        tensor = client.input("x", list(DATA.shape), "FP32")
        tensor.set_data_from_numpy(DATA)
        answer = await client.ask("infer", "echo", [tensor], compression_algorithm=algorithm)

    assert DATA.tolist() == answer.as_numpy("y").tolist()


@pytest.mark.parametrize(
    ("headers", "is_compressed"),
    [
        ((("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip,identity")), True),
        ((("grpc-encoding", "gzip"), ("grpc-accept-encoding", "identity")), False),
        ((("grpc-accept-encoding", "gzip,identity"),), False),
    ],
)
async def test_an_answer_is_compressed_where_its_request_says_so(
    server: RunningServer, headers: Sequence[tuple[str, str]], is_compressed: bool
) -> None:
    path = "/inference.GRPCInferenceService/ModelInfer"
    async with connect(server.url) as wire:
        stream = wire.send(request_headers(path, *headers), asked().SerializeToString())
        head: Any = await wire.until(h2.events.ResponseReceived, stream)
        first: Any = await wire.until(h2.events.DataReceived, stream)

    assert ("gzip" if is_compressed else None) == dict(head.headers).get("grpc-encoding")
    assert is_compressed == bool(first.data[0])
    assert is_compressed == (int.from_bytes(first.data[1:5], "big") < DATA.nbytes // 8)
