"""What gRPC clients make the server hold is on the ledger: refused in time, and never left there.

On either engine, with limits that are quickly reached.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import frames
from support.engines import own_engine_only
from support.floods import INFER, LIVE
from support.frames import data, headers, literals, peer
from support.server import RunningServer, serving
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.core.serving.ledger import Kind, Ledger

MIB = 1 << 20
Request: Any = pb.ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]


@asynccontextmanager
async def limited(folder: Path, **settings: Any) -> AsyncIterator[tuple[RunningServer, Ledger]]:
    """Serve no models; nothing may be left on the ledger behind the last connection."""
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
    """Ask a model that is not there with a message of so many bytes."""
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
