"""Call records contain what the transport measured, on every path that reads requests."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import grpc
import numpy as np
import pytest
from support import identity_models
from support.conditions import MOST_SECONDS, until
from support.engines import own_engine_only
from support.http import connect, message
from support.server import RunningServer, Serve
from support.wire import connect as connect_wire
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.http.connection.fast_path import FastPath
from xlaserve.serving.call import Call, Outcome
from xlaserve.serving.call_record import CallRecord
from xlaserve.tensors import BYTES, to_bytes

SERVICE = "/inference.GRPCInferenceService/"
VALUES = np.arange(4, dtype=np.float32)


class Records:
    """Collects the records of completed calls (an Observer)."""

    began = None

    def __init__(self) -> None:
        self.found: list[CallRecord] = []

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        self.found += [call.record for call in calls if call.record is not None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "echo", "FP32")
    identity_models.write(root, "texts", "BYTES")
    return root


@pytest.fixture
async def server(serve: Serve, models: Path) -> AsyncIterator[RunningServer]:
    async with serve(models, load_model=("*",), http_endpoint="port:0") as running:
        yield running


@pytest.fixture
def records(server: RunningServer) -> Records:
    noting = Records()
    server.application.gates.observe(noting, needs_records=True)
    return noting


def asking_echo() -> Any:
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[VALUES.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[4])
    return request


QUESTIONS = {
    "ModelInfer": asking_echo(),
    "ModelMetadata": pb.ModelMetadataRequest(name="echo"),
    "ModelReady": pb.ModelReadyRequest(name="echo"),
}


@pytest.mark.parametrize("method", QUESTIONS)
async def test_a_call_begins_with_its_headers_however_late_its_message_comes(
    server: RunningServer, records: Records, method: str
) -> None:
    """Three times each on the fast path and the general path, compared by a monotonic clock."""
    octets = framed(QUESTIONS[method].SerializeToString())
    async with connect_wire(server.url) as wire:
        for cut in (0, 3, len(octets) - 1):
            stream = wire.open(request_headers(SERVICE + method))
            wire.h2.send_data(stream, octets[:cut])
            await wire.ping()
            seen = perf_counter_ns()
            wire.h2.send_data(stream, octets[cut:], end_stream=True)
            wire.flush()
            assert "0" == (await wire.trailers(stream))["grpc-status"]
            record = records.found[-1]

            assert record.begun_ns < seen < record.received_ns < record.written_ns
    assert 3 == len(records.found)


BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": VALUES.tolist()}]}
).encode()


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_a_call_begins_with_its_head_however_late_its_body_comes(
    server: RunningServer,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
    is_handed_over: bool,
) -> None:
    """On the fast path, and after it has handed a partial body over to the general path."""
    waiting: list[FastPath] = []
    original = FastPath._await_body

    def noting(self: FastPath, *given: Any) -> None:
        original(self, *given)
        waiting.append(self)

    monkeypatch.setattr(FastPath, "_await_body", noting)
    seen = 0
    request = message("POST", "/v2/models/echo/infer", body=BODY)
    async with connect(str(server.http)) as client:
        for _ in range(2):
            assert 200 == (await client.ask(request)).status
        for number in range(3):
            await client.send(request[: -len(BODY) + number])
            await until(lambda: len(waiting) == number + 1)  # noqa: B023
            seen = perf_counter_ns()
            if is_handed_over:
                waiting[-1].hand_over()
            answer = await client.ask(request[-len(BODY) + number :])
            record = records.found[-1]

            assert 200 == answer.status
            assert record.begun_ns < seen < record.received_ns
            assert len(BODY) == record.bytes_in
        assert 200 == (await client.ask(request)).status

    assert 6 == len(records.found)
    assert seen < records.found[-1].begun_ns


@own_engine_only
@pytest.mark.parametrize("count", [4, 5000])
@pytest.mark.parametrize("coding", grpc.Compression)
async def test_bytes_are_counted_as_they_are_inflated(
    server: RunningServer, records: Records, coding: grpc.Compression, count: int
) -> None:
    """Including answers that are written on a thread."""
    texts = np.array([b"text"] * count, np.object_)
    raw = bytes(to_bytes(BYTES, texts))
    request = pb.ModelInferRequest(model_name="texts", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="BYTES", shape=[count])
    data = request.SerializeToString()
    async with grpc.aio.insecure_channel(server.url, compression=coding) as channel:
        ask = channel.unary_unary(SERVICE + "ModelInfer")
        for _ in range(3):
            async with asyncio.timeout(MOST_SECONDS):
                answer = await ask(data)
            record = records.found[-1]

            assert (len(data), len(answer)) == (record.bytes_in, record.bytes_out)
            assert record.begun_ns <= record.received_ns <= record.written_ns
