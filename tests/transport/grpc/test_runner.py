"""Completed requests leave no reference cycles behind."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import time, invisible to type checkers.

import asyncio
import gc
import gzip
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import h2.events
import numpy as np
import pytest
import pytest_asyncio
from support import generating, identity_models
from support.server import RunningServer, serving
from support.wire import connect, framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.grpc import runner
from xlaserve.grpc.infer.infer_fast_path import FastPathCall
from xlaserve.grpc.runner import RpcStream

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = "/inference.GRPCInferenceService/"
STREAM = SERVICE + "ModelStreamInfer"
WATCH = "/grpc.health.v1.Health/Watch"
_PATIENCE_SECONDS = 20


def asking(model: str, *values: float) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[len(values)])
    raw = np.array(values, np.float32).tobytes()
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw])
    return bytes(request.SerializeToString())


MANY = asking("count", 1_000_000, 1)
CASES: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "answered": (SERVICE + "ServerLive", b"", {}),
    "refused": (SERVICE + "ModelMetadata", b"\x0a\x04nope", {}),
    "malformed": (SERVICE + "ModelMetadata", b"\x0a\x7f", {}),
    "not built": (SERVICE + "TraceSetting", b"", {}),
    "expired": (WATCH, b"", {"grpc-timeout": "5m"}),
    "reset": (WATCH, b"", {}),
    "many answers": (STREAM, asking("count", 3, 1), {}),
    "an error in a stream": (STREAM, asking("nope", 1), {}),
    "an error that ends it": (STREAM, asking("nope", 1), {"triton_grpc_error": "true"}),
    "malformed in a stream": (STREAM, b"\x0a\x7f", {}),
    "an expired stream": (STREAM, MANY, {"grpc-timeout": "20m"}),
    "a stream that is reset": (STREAM, MANY, {}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("runner")
    for name in ("count", "fp32"):
        identity_models.write(folder / "models", name, "FP32")
    with pytest.MonkeyPatch.context() as patch:
        generating.install(patch)
        async with serving(folder, folder / "models", load_model=("*",)) as running:
            yield running


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect weak references to the parts of requests, with the garbage collector disabled."""
    references: list[Any] = []

    class Noted(RpcStream):
        def __init__(self, accepted: Any, *args: Any, **named: Any) -> None:
            super().__init__(accepted, *args, **named)
            references.extend(map(weakref.ref, (self, accepted, asyncio.current_task())))

    monkeypatch.setattr(runner, "RpcStream", Noted)
    gc.disable()
    try:
        yield references
    finally:
        gc.enable()


@pytest.mark.parametrize("name", CASES)
async def test_a_request_that_ended_leaves_no_reference_cycle(
    server: RunningServer, streams: list[Any], name: str
) -> None:
    """A cycle would keep its message and its answer until the next collection."""
    path, message, headers = CASES[name]
    async with connect(server.url) as wire:
        stream = wire.open(request_headers(path, *headers.items()))
        wire.h2.send_data(stream, framed(message), end_stream=True)
        wire.flush()
        if "reset" in name:
            await wire.until(h2.events.DataReceived, stream)
            wire.h2.reset_stream(stream, 8)
            await wire.ping()
        else:
            await wire.until(h2.events.StreamEnded, stream)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while any(reference() is not None for reference in streams):
                await asyncio.sleep(0.001)

    assert 3 == len(streams)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect weak references to inference calls, with the garbage collector disabled."""
    references: list[Any] = []
    made = FastPathCall.__init__

    def noted(call: FastPathCall, *args: Any, **named: Any) -> None:
        made(call, *args, **named)
        references.append(weakref.ref(call))

    monkeypatch.setattr(FastPathCall, "__init__", noted)
    gc.disable()
    try:
        yield references
    finally:
        gc.enable()


@pytest.mark.parametrize("headers", [{}, {"grpc-timeout": "60S"}])
async def test_no_timer_keeps_a_call_that_was_answered(
    server: RunningServer, calls: list[Any], headers: dict[str, str]
) -> None:
    """Cancelled timers keep their context until they are due, and so do decompression tasks."""
    message = gzip.compress(asking("fp32", 1, 2))
    async with connect(server.url) as wire:
        headers = {"grpc-encoding": "gzip", **headers}
        stream = wire.open(request_headers(SERVICE + "ModelInfer", *headers.items()))
        wire.h2.send_data(stream, b"\x01" + framed(message)[1:], end_stream=True)
        wire.flush()
        assert "0" == (await wire.trailers(stream))["grpc-status"]
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while any(reference() is not None for reference in calls):
                await asyncio.sleep(0.001)

    assert 1 == len(calls)
