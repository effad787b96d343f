"""Threads decode and encode long gRPC messages, so that other requests are not delayed."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import h2.events
import numpy as np
import pytest
from support import identity_models
from support.conditions import until
from support.engines import own_engine_only
from support.http import ask
from support.server import RunningServer, Serve
from support.wire import connect, framed, request_headers
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from xlaserve import tensors
from xlaserve.concurrency.host import HostJob, HostThreads
from xlaserve.grpc.infer import long_messages
from xlaserve.grpc.infer.decoded_infer import DecodedInfer

pytestmark = own_engine_only

MAX_HELD_BYTES = 32 << 20
MANY = 30_000


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "text", "BYTES", (-1,))
    identity_models.write(root, "flag", "BOOL", (-1,))
    identity_models.write(root, "number", "INT64", (-1,))
    return root


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    names = ("text", "flag", "number")
    settings = {"load_model": names, "max_held_bytes": MAX_HELD_BYTES}
    async with serve(repository, http_endpoint="port:0", **settings) as running:
        yield running


def of_texts(count: int, model: str = "text") -> Any:
    texts = np.array([b"%d" % (index * 7) for index in range(count)], np.object_)
    raw = bytes(serialize_byte_tensor(texts).item())
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="BYTES", shape=[count])
    return request


def of_flags(count: int) -> Any:
    request = pb.ModelInferRequest(model_name="flag", raw_input_contents=[b"\1\0" * (count // 2)])
    request.inputs.add(name="x", datatype="BOOL", shape=[count])
    return request


def of_numbers(count: int) -> Any:
    raw = np.arange(count, dtype=np.int64).tobytes()
    request = pb.ModelInferRequest(model_name="number", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="INT64", shape=[count])
    return request


def of_typed_texts(count: int) -> Any:
    request = pb.ModelInferRequest(model_name="text")
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=[count])
    tensor.contents.bytes_contents.extend(b"%d" % index for index in range(count))
    return request


def of_typed_numbers(count: int) -> Any:
    request = pb.ModelInferRequest(model_name="number")
    tensor = request.inputs.add(name="x", datatype="INT64", shape=[count])
    tensor.contents.int64_contents.extend(range(1 << 20, (1 << 20) + count))
    return request


def contents_of(request: Any) -> bytes:
    """Return a request's tensor in the encoding of raw contents."""
    if request.raw_input_contents:
        return bytes(request.raw_input_contents[0])
    contents = request.inputs[0].contents
    if contents.int64_contents:
        return np.array(contents.int64_contents, np.int64).tobytes()
    texts = np.array(list(contents.bytes_contents), np.object_)
    return bytes(serialize_byte_tensor(texts).item())


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record the calls run on host threads, except model executions.

    A busy machine may also repeat slow event loop work on a thread.
    """
    noted: list[object] = []
    start = HostThreads.start

    def noting(self: HostThreads, call: Any, completion: Any, model: Any = None) -> HostJob:
        if model is None:
            noted.append(call)
        return start(self, call, completion, model)

    monkeypatch.setattr(HostThreads, "start", noting)
    return noted


LONG: dict[str, tuple[Callable[[], Any], int]] = {
    "texts": (lambda: of_texts(MANY), 2),
    "one long text": (lambda: of_texts_of(b"x" * (512 << 10)), 1),
    "flags": (lambda: of_flags(2 << 20), 1),
    "typed texts": (lambda: of_typed_texts(10_000), 2),
    "typed numbers": (lambda: of_typed_numbers(30_000), 1),
}
"""Requests, and how many thread calls each takes."""


def of_texts_of(*texts: bytes) -> Any:
    raw = serialize_byte_tensor(np.array(texts, np.object_)).item()
    request = pb.ModelInferRequest(model_name="text", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="BYTES", shape=[len(texts)])
    return request


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize("name", LONG)
async def test_threads_read_and_write_what_is_long(
    server: RunningServer, in_threads: list[object], name: str, compression: Any
) -> None:
    make, times = LONG[name]
    request = make()
    async with grpc.aio.insecure_channel(server.url, compression=compression) as channel:
        answer = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)

    assert [contents_of(request)] == list(answer.raw_output_contents)
    # Compression happens in the same thread call or in an additional one.
    assert times <= len(in_threads) <= times + (compression is grpc.Compression.Gzip)


@pytest.mark.parametrize(("model", "times"), [("text", 3), ("flag", 2), ("number", 1)])
async def test_threads_read_long_binary_tensors_over_rest_too(
    server: RunningServer, in_threads: list[object], model: str, times: int
) -> None:
    """Threads also encode answers and count BYTES elements; other tensors are views."""
    made = {"text": of_texts(MANY), "flag": of_flags(1 << 20), "number": of_numbers(20_000)}[model]
    raw = made.raw_input_contents[0]
    described = {
        "name": "x",
        "datatype": made.inputs[0].datatype,
        "shape": list(made.inputs[0].shape),
        "parameters": {"binary_data_size": len(raw)},
    }
    message = {"inputs": [described], "parameters": {"binary_data_output": True}}
    text = json.dumps(message).encode()
    length = ("Inference-Header-Content-Length", str(len(text)))
    path = f"/v2/models/{model}/infer"
    assert server.http is not None
    answer = await ask(server.http, "POST", path, length, body=text + raw)

    assert 200 == answer.status
    assert answer.body.endswith(raw)
    assert times == len(in_threads)


async def test_the_event_loop_reads_and_writes_what_is_short(
    server: RunningServer, in_threads: list[object]
) -> None:
    requests = [of_texts(100), of_flags(1000), of_typed_texts(100), of_typed_numbers(100)]
    async with grpc.aio.insecure_channel(server.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = [await stub.ModelInfer(request) for request in requests]

    assert [[contents_of(request)] for request in requests] == [
        list(answer.raw_output_contents) for answer in answers
    ]
    assert [] == in_threads


async def test_requests_of_a_stream_are_read_by_threads_in_their_order(
    server: RunningServer, in_threads: list[object]
) -> None:
    requests = [of_texts(MANY), of_texts(3), of_typed_texts(10_000), of_texts(4)]
    async with grpc.aio.insecure_channel(server.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = [answer async for answer in stub.ModelStreamInfer(iter(requests))]

    assert [[contents_of(request)] for request in requests] == [
        list(answer.infer_response.raw_output_contents) for answer in answers
    ]
    assert 3 == len(in_threads)


def cut_off(request: Any) -> Any:
    request.raw_input_contents[0] = request.raw_input_contents[0][:-1]
    return request


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (
            cut_off(of_texts(MANY)),
            grpc.StatusCode.INVALID_ARGUMENT,
            f"model 'text', input 'x': expected 6 bytes of element {MANY - 1}, got 5 bytes",
        ),
        (cut_off(of_texts(MANY, "nobody")), grpc.StatusCode.NOT_FOUND, "unknown model: 'nobody'"),
    ],
)
async def test_what_a_thread_finds_wrong_is_said_as_ever(
    server: RunningServer, request_: Any, status: Any, text: str, streamed: bool
) -> None:
    async with grpc.aio.insecure_channel(server.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if streamed:
            (answer,) = [each async for each in stub.ModelStreamInfer(iter([request_]))]
            said = answer.error_message
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(request_)
            assert status is refused.value.code()
            said = refused.value.details() or ""

    assert text in said


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_memory_of_elements_is_reserved_before_any_is_made(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, compression: Any
) -> None:
    cuts: list[object] = []
    monkeypatch.setattr(tensors, "cut", lambda *arguments: cuts.append(arguments))
    count = MAX_HELD_BYTES // 40
    request = pb.ModelInferRequest(model_name="text", raw_input_contents=[bytes(4 * count)])
    request.inputs.add(name="x", datatype="BYTES", shape=[count])
    async with grpc.aio.insecure_channel(server.url, compression=compression) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)

    assert grpc.StatusCode.RESOURCE_EXHAUSTED is refused.value.code()
    assert [] == cuts
    await until(lambda: not server.application.ledger.held)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[threading.Event]:
    """Block calls until the end of the block; the event is set by the first one."""
    there, may_go = threading.Event(), threading.Event()
    call = getattr(owner, name)

    def waiting(*arguments: Any, **named: Any) -> Any:
        there.set()
        assert may_go.wait(60)
        return call(*arguments, **named)

    monkeypatch.setattr(owner, name, waiting)
    try:
        yield there
    finally:
        may_go.set()


LEAVING = {
    "reading": (long_messages, "made_bytes", 1),
    "writing": (tensors, "packed", 2),
}
"""The blocked function, and how many of the two requests get executed."""


@pytest.mark.parametrize("stage", LEAVING)
async def test_a_client_that_leaves_while_a_thread_works_leaves_nothing(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Other requests are served meanwhile, and the connection remains usable."""
    application = server.application
    async with grpc.aio.insecure_channel(server.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(of_texts(3))
        (report,) = application.control.catalog.statistics("text")
        with held_up(monkeypatch, *LEAVING[stage][:2]) as there:
            asked = stub.ModelInfer(of_texts(MANY))
            await until(there.is_set)
            served = await stub.ModelInfer(of_flags(10))
            asked.cancel()
            await until(lambda: not application.ledger.held)
        again = await stub.ModelInfer(of_texts(MANY))
        (later,) = application.control.catalog.statistics("text")

    assert [contents_of(of_flags(10))] == list(served.raw_output_contents)
    assert [contents_of(of_texts(MANY))] == list(again.raw_output_contents)
    executed = later.totals.execution_count - report.totals.execution_count
    assert LEAVING[stage][2] == executed
    await until(lambda: not application.ledger.held)
    assert not application.registry.resolve("text")[0].admission.in_progress


async def test_a_deadline_passes_while_a_thread_reads(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reports it; this client waits longer."""
    path = "/inference.GRPCInferenceService/ModelInfer"
    headers = request_headers(path, ("grpc-timeout", "300m"))
    message = framed(of_texts_of(*[b""] * 6000).SerializeToString())
    async with connect(server.url) as wire:
        with held_up(monkeypatch, DecodedInfer, "request") as there:
            stream = wire.open(headers)
            half = len(message) // 2
            wire.h2.send_data(stream, message[:half])
            wire.h2.send_data(stream, message[half:], end_stream=True)
            wire.flush()
            head: Any = await wire.until(h2.events.ResponseReceived, stream)
            assert there.is_set()

    assert "4" == dict(head.headers)["grpc-status"]
