"""Answers are compressed where that saves bytes: the compressor's calls and results."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support import identity_models
from support.engines import own_engine_only
from support.http import connect, message
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.net import compression

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

FLOATS = 2 << 20
"""8 MiB as FP32."""
TRIED = 64 << 10
RANDOM = np.random.default_rng(7).standard_normal(FLOATS).astype(np.float32)
ZEROS = np.zeros(FLOATS, np.float32)
SETTING = {"max_message_bytes": 64 << 20, "http_endpoint": "port:0"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "echo", "FP32")
    return root


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of each input of the compressor."""
    calls: list[int] = []
    original = compression.deflate

    def noting(coding: str, parts: Any) -> bytes:
        kept = [bytes(part) for part in parts]
        calls.append(sum(map(len, kept)))
        return original(coding, kept)

    monkeypatch.setattr(compression, "deflate", noting)
    return calls


@pytest.fixture
async def server(serve: Serve, models: Path) -> AsyncIterator[RunningServer]:
    async with serve(models, load_model=("echo",), **SETTING) as running:
        yield running


def binary(values: np.ndarray[Any, Any]) -> bytes:
    """Return a REST request with binary input and output."""
    data = values.tobytes()
    head = {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [len(values)],
                "parameters": {"binary_data_size": len(data)},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    length = ("Inference-Header-Content-Length", str(len(text)))
    gzip = ("Accept-Encoding", "gzip")
    return message("POST", "/v2/models/echo/infer", length, gzip, body=text + data)


async def over_rest(server: RunningServer, values: np.ndarray[Any, Any]) -> list[bool]:
    """Send three requests, the last two on the fast path; return which answers were compressed."""
    found = []
    async with connect(str(server.http)) as client:
        for _ in range(3):
            answer = await client.ask(binary(values))
            assert 200 == answer.status
            found.append("content-encoding" in answer.headers)
            if not found[-1]:
                assert answer.body.endswith(values.tobytes())
    return found


async def over_grpc(server: RunningServer, values: np.ndarray[Any, Any]) -> list[bytes]:
    """Ask three times, unary and streaming, with a client that accepts compression."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[values.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[len(values)])
    gzip = grpc.Compression.Gzip
    async with grpc.aio.insecure_channel(server.url, options=options, compression=gzip) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [await stub.ModelInfer(request) for _ in range(2)]
        stream = stub.ModelStreamInfer(iter([request]))
        calls += [message.infer_response async for message in stream]
    return [call.raw_output_contents[0] for call in calls]


async def test_random_numbers_are_tried_and_sent_as_they_are(
    server: RunningServer, given: list[int]
) -> None:
    assert [False] * 3 == await over_rest(server, RANDOM)
    assert [TRIED] * 3 == given


@own_engine_only
async def test_so_are_those_of_grpc(server: RunningServer, given: list[int]) -> None:
    assert [RANDOM.tobytes()] * 3 == await over_grpc(server, RANDOM)
    assert [TRIED] * 3 == given


async def test_what_compresses_well_is_compressed(server: RunningServer, given: list[int]) -> None:
    assert [True] * 3 == await over_rest(server, ZEROS)
    assert 3 * (TRIED + ZEROS.nbytes) <= sum(given)


@own_engine_only
async def test_so_is_that_of_grpc(server: RunningServer, given: list[int]) -> None:
    assert [ZEROS.tobytes()] * 3 == await over_grpc(server, ZEROS)
    assert 3 * (TRIED + ZEROS.nbytes) <= sum(given)


async def test_json_is_compressed_as_before(server: RunningServer, given: list[int]) -> None:
    values = RANDOM[:50_000].tolist()
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(values)], "data": values}
    body = json.dumps({"inputs": [tensor]}).encode()
    asked = message("POST", "/v2/models/echo/infer", ("Accept-Encoding", "gzip"), body=body)
    async with connect(str(server.http)) as client:
        for _ in range(3):
            answer = await client.ask(asked)
            assert "gzip" == answer.headers["content-encoding"]
    assert 6 == len(given)


@pytest.mark.parametrize("compresses", [False, True])
async def test_a_setting_turns_it_off(
    serve: Serve, models: Path, given: list[int], compresses: bool
) -> None:
    few = ZEROS[:1000]
    settings = {**SETTING, "compress_answers": compresses}
    async with serve(models, load_model=("echo",), **settings) as server:
        assert [compresses] * 3 == await over_rest(server, few)
        assert [few.tobytes()] * 3 == await over_grpc(server, few)
    # Small answers are compressed without a trial; the h2 engine compresses nothing.
    assert compresses == bool(given)
