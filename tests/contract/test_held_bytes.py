"""The ledger covers memory held for gRPC clients: limits apply, and nothing leaks.

On both HTTP/2 engines, with small limits.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import frames, identity_models
from support.engines import own_engine_only
from support.floods import INFER, LIVE
from support.frames import data, headers, literals, peer
from support.http import connect, message
from support.server import RunningServer, serving
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.net import compression
from xlaserve.net.ledger import Kind, Ledger

MIB = 1 << 20
GZIP = grpc.Compression.Gzip
Request: Any = pb.ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]


@asynccontextmanager
async def limited(folder: Path, **settings: Any) -> AsyncIterator[tuple[RunningServer, Ledger]]:
    """Run a server without models; check that the ledger is empty after the last connection."""
    repository = folder / "models"
    repository.mkdir()
    async with serving(folder, repository, **settings) as server:
        ledger = server.application.ledger
        yield server, ledger
        await until(lambda: ledger.held == 0)
    assert [0] * len(Kind) == [ledger.held_for(kind) for kind in Kind]


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def outcome(url: str, size: int) -> tuple[grpc.StatusCode, str]:
    """Send a message of `size` bytes to a nonexistent model; return the error."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(url, options=options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(Request(model_name="m", raw_input_contents=[bytes(size)]))
    return refused.value.code(), refused.value.details() or ""


async def test_a_message_that_there_is_no_memory_for_is_refused(tmp_path: Path) -> None:
    async with limited(tmp_path, max_held_bytes=4 * MIB) as (server, ledger):
        code, text = await outcome(server.url, 3 * MIB + 1)
        small = await outcome(server.url, 1000)

        assert grpc.StatusCode.RESOURCE_EXHAUSTED is code
        assert "max_held_bytes" in text
        assert grpc.StatusCode.NOT_FOUND is small[0]
        assert 1 == ledger.refused


async def test_under_pressure_small_messages_of_others_pass(tmp_path: Path) -> None:
    async with limited(tmp_path, max_held_bytes=4 * MIB) as (server, ledger):
        other = ledger.open()
        other.hold(3 * MIB + MIB // 2)
        codes = [(await outcome(server.url, size))[0] for size in (1000, 10_000, MIB // 8)]
        other.close()

    assert [
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ] == codes


@own_engine_only
async def test_a_message_is_reserved_whole_before_it_comes(tmp_path: Path) -> None:
    async with limited(tmp_path, max_held_bytes=4 * MIB) as (server, ledger):
        async with peer(server.url) as client:
            prefix = bytes(1) + (2 * MIB).to_bytes(4, "big")
            client.send(headers(1, literals(request_headers(INFER))), data(1, prefix + b"ab"))
            await until(lambda: ledger.held == 2 * MIB)
            assert grpc.StatusCode.RESOURCE_EXHAUSTED is (await outcome(server.url, 2 * MIB))[0]
            client.send(frames.rst_stream(1))
            await until(lambda: ledger.held == 0)
            client.send(headers(3, literals(request_headers(INFER))), data(3, prefix))
            await until(lambda: ledger.held == 2 * MIB)


@own_engine_only
async def test_a_header_block_in_progress_counts(tmp_path: Path) -> None:
    async with limited(tmp_path) as (server, ledger):
        async with peer(server.url) as client:
            block = literals([*request_headers(LIVE), ("x-long", "y" * 3000)])
            client.send(headers(1, block[:1000], end_headers=False, end_stream=False))
            await until(lambda: ledger.held_for(Kind.AHEAD) == 1000)
            client.send(frames.continuation(1, block[1000:2000], end_headers=False))
            await until(lambda: ledger.held_for(Kind.AHEAD) == 2000)
            client.send(frames.continuation(1, block[2000:]), data(1, framed(b""), end_stream=True))
            assert "grpc-status 0" in await client.outcome(1)
            assert 0 == ledger.held


Tensor: Any = Request.InferInputTensor
Contents: Any = pb.InferTensorContents  # pyright: ignore[reportAttributeAccessIssue]
ELEMENTS = 500_000


def typed_integers() -> Any:
    """Each one-byte element becomes eight bytes."""
    contents = Contents(int64_contents=[1] * ELEMENTS)
    tensor = Tensor(name="x", datatype="INT64", shape=[ELEMENTS], contents=contents)
    return Request(model_name="int64", inputs=[tensor])


def raw_strings() -> Any:
    """Each six-byte element becomes about sixty bytes."""
    count = ELEMENTS // 8
    tensor = Tensor(name="x", datatype="BYTES", shape=[count])
    raw = b"\2\0\0\0ab" * count
    return Request(model_name="bytes", inputs=[tensor], raw_input_contents=[raw])


@pytest.mark.parametrize("large", [typed_integers, raw_strings])
@pytest.mark.parametrize("limit", [4 * MIB, 64 * MIB])
async def test_what_a_message_becomes_is_held_as_well(
    tmp_path: Path, large: Callable[[], Any], limit: int
) -> None:
    identity_models.write(tmp_path / "models", "int64", "INT64")
    identity_models.write(tmp_path / "models", "bytes", "BYTES")
    settings: Any = {"max_held_bytes": limit, "load_model": ("int64", "bytes")}
    async with serving(tmp_path, tmp_path / "models", http_endpoint="port:0", **settings) as server:
        ledger = server.application.ledger
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            code, text = grpc.StatusCode.OK, ""
            try:
                await stub.ModelInfer(large())
            except grpc.aio.AioRpcError as error:
                code, text = error.code(), error.details() or ""
        await until(lambda: ledger.held == 0)

    if limit == 4 * MIB:
        assert grpc.StatusCode.RESOURCE_EXHAUSTED is code
        assert "the tensors" in text
        assert "max_held_bytes" in text
    else:
        assert grpc.StatusCode.OK is code


async def test_what_a_message_of_a_stream_becomes_is_held_as_well(tmp_path: Path) -> None:
    identity_models.write(tmp_path / "models", "int64", "INT64")
    settings: Any = {"max_held_bytes": 4 * MIB, "load_model": ("int64",)}
    async with serving(tmp_path, tmp_path / "models", **settings) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = [answer async for answer in stub.ModelStreamInfer(iter([typed_integers()]))]
        await until(lambda: server.application.ledger.held == 0)

    assert 1 == len(answers)
    assert "the tensors" in answers[0].error_message


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("/v2/models/bytes/infer", {}),
        ("/invocations", {"sagemaker": True}),
    ],
)
async def test_binary_strings_over_http_are_held_as_well(
    tmp_path: Path, path: str, settings: dict[str, Any]
) -> None:
    """Each six-byte element becomes about sixty bytes, in many concurrent bodies."""
    identity_models.write(tmp_path / "models", "bytes", "BYTES")
    settings = {"max_held_bytes": 4 * MIB, "load_model": ("bytes",), **settings}
    count = ELEMENTS // 8
    raw = b"\2\0\0\0ab" * count
    described = {
        "name": "x",
        "datatype": "BYTES",
        "shape": [count],
        "parameters": {"binary_data_size": len(raw)},
    }
    text = json.dumps({"inputs": [described]}).encode()
    length = ("Inference-Header-Content-Length", str(len(text)))
    async with serving(tmp_path, tmp_path / "models", http_endpoint="port:0", **settings) as server:
        url = server.http
        assert url is not None

        async def ask() -> tuple[int, str]:
            async with connect(url) as client:
                answer = await client.ask(message("POST", path, length, body=text + raw))
            return answer.status, answer.error

        answers = await asyncio.gather(*(ask() for _ in range(8)))
        await until(lambda: server.application.ledger.held == 0)

    assert {503} == {status for status, _ in answers}
    assert any("the tensors" in error for _, error in answers)
    assert all("max_held_bytes" in error for _, error in answers)


@own_engine_only
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_the_compressed_copy_of_an_answer_is_held_as_well(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for compression, the answer is sent uncompressed."""
    identity_models.write(tmp_path / "models", "echo", "FP32")
    settings: Any = {"max_held_bytes": 4 * MIB, "load_model": ("echo",)}
    request = Request(model_name="echo", raw_input_contents=[bytes(MIB // 16)])
    request.inputs.append(Tensor(name="x", datatype="FP32", shape=[MIB // 64]))
    held: list[int] = []
    deflate = compression.deflate_where_worth

    def seen(*given: Any) -> Any:
        held.append(ledger.held)
        return deflate(*given)

    monkeypatch.setattr(compression, "deflate_where_worth", seen)

    async def ask(server: RunningServer) -> None:
        async with grpc.aio.insecure_channel(server.url, compression=GZIP) as channel:
            stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            if method == "ModelInfer":
                answer = await stub.ModelInfer(request)
            else:
                (answer,) = [
                    each.infer_response async for each in stub.ModelStreamInfer(iter([request]))
                ]
        assert [bytes(MIB // 16)] == list(answer.raw_output_contents)

    async with serving(tmp_path, tmp_path / "models", **settings) as server:
        ledger = server.application.ledger
        await ask(server)
        with_memory = held[:]
        await until(lambda: ledger.held == 0)
        other = ledger.open()
        other.hold(3 * MIB + MIB // 4)
        await ask(server)
        other.close()
        await until(lambda: ledger.held == 0)

    assert with_memory == held
    assert held[0] >= 2 * MIB // 16
