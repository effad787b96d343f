"""Clients that do not read their answers are disconnected, and their memory is released."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import frames, identity_models
from support.engines import own_engine_only
from support.floods import INFER, LIVE
from support.frames import data, headers, literals, peer
from support.http import message
from support.server import RunningServer, Serve
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.runtime import identity
from xlaserve.runtime.identity import IdentityModel
from xlaserve.runtime.loaded import Answer
from xlaserve.tensors import Parameter

MIB = 1 << 20
ANSWER_BYTES = 24 * MIB
"""More than the buffers of both sockets."""
RAW = ("Inference-Header-Content-Length", "0")
SECONDS = 0.4

Request: Any = pb.ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]
Tensor: Any = Request.InferInputTensor


class Endless(IdentityModel):
    """A model with endless answers."""

    def generate(
        self, inputs: Mapping[str, Any], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        while True:
            yield Answer({"y": np.zeros(100_000, np.uint8)})


@pytest.fixture
async def endless(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningServer]:
    monkeypatch.setattr(identity, "IdentityModel", Endless)
    async with serving(serve, tmp_path) as running:
        yield running


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with serving(serve, tmp_path) as running:
        yield running


@asynccontextmanager
async def serving(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    identity_models.write(tmp_path / "models", "m", "UINT8")
    async with serve(
        tmp_path / "models",
        http_endpoint="port:0",
        load_model=("m",),
        answer_timeout_seconds=SECONDS,
        drain_seconds=0.01,
    ) as running:
        yield running


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def sluggish(
    url: str | None,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect with a small receive buffer."""
    assert url is not None
    host, _, port = url.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
    try:
        yield reader, writer
    finally:
        writer.close()


def http_request(size: int = ANSWER_BYTES) -> bytes:
    return message("POST", "/v2/models/m/infer", RAW, body=bytes(size))


async def ask(client: frames.Peer, size: int) -> None:
    """Request an answer of `size` bytes."""
    await client.ping()  # wait until both sides' settings are in force
    tensor = Tensor(name="x", datatype="UINT8", shape=[size])
    request = Request(model_name="m", inputs=[tensor], raw_input_contents=[bytes(size)])
    body = framed(request.SerializeToString())
    client.send(headers(1, literals(request_headers(INFER))))
    for start in range(0, len(body), 1 << 14):
        part = body[start : start + (1 << 14)]
        client.send(data(1, part, end_stream=start + len(part) == len(body)))


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_an_http_answer_that_is_not_read_is_dropped(server: RunningServer) -> None:
    ledger = server.application.ledger
    async with sluggish(server.http) as (reader, writer):
        writer.write(http_request())
        await until(lambda: ledger.held >= ANSWER_BYTES)
        await until(lambda: ledger.held == 0)
        assert len(await rest_of(reader)) < ANSWER_BYTES


async def test_answers_of_the_fast_path_that_are_not_read_are_dropped(
    server: RunningServer,
) -> None:
    ledger = server.application.ledger
    one = http_request(60_000)
    async with sluggish(server.http) as (reader, writer):
        for _ in range(3):
            writer.write(one)  # so that its header block is cached
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(60_000)
        # More than the socket buffers take.
        writer.write(one * 400)
        await until(lambda: ledger.held > 0)
        await until(lambda: ledger.held == 0)
        assert len(await rest_of(reader)) < 400 * 60_000


async def test_what_waits_for_its_client_does_not_keep_an_unloaded_model_in_use(
    endless: RunningServer,
) -> None:
    """A decoupled model's memory is freed in time after an unload."""
    application = endless.application
    instance = application.registry.resolve("m")[1]
    async with sluggish(endless.http) as (_, writer):
        body = b'{"inputs":[{"name":"x","datatype":"UINT8","shape":[1],"data":[1]}]}'
        events = ("Accept", "text/event-stream")
        writer.write(message("POST", "/v2/models/m/infer", events, body=body))
        await until(lambda: application.ledger.held)
        await application.control.unload("m")
        await until(lambda: not instance.users)
        await until(lambda: not application.ledger.held)


async def test_a_client_that_reads_slowly_gets_all_of_it(server: RunningServer) -> None:
    """It takes several times the limit for a client that reads nothing."""
    async with sluggish(server.http) as (reader, writer):
        writer.write(http_request())
        head = await reader.readuntil(b"\r\n\r\n")
        left = ANSWER_BYTES
        while left:
            # Less than the socket buffers, so that the server sees progress each time.
            left -= len(await reader.readexactly(min(left, 2 * MIB)))
            await asyncio.sleep(SECONDS / 4)

    assert head.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
async def test_a_grpc_connection_that_is_not_read_is_closed(server: RunningServer) -> None:
    """Its connection window is never updated, so most of the answer cannot be sent."""
    ledger = server.application.ledger
    async with peer(server.url, (frames.Setting.INITIAL_WINDOW_SIZE, 1 << 28)) as client:
        await ask(client, MIB)
        await until(lambda: ledger.held >= MIB // 2)
        await until(lambda: ledger.held == 0)
        assert await client.take(lambda frame: frame.kind == frames.Kind.GOAWAY) is None


@own_engine_only
async def test_a_grpc_stream_that_is_not_read_ends_alone(server: RunningServer) -> None:
    ledger = server.application.ledger
    async with peer(server.url) as client:
        client.send(frames.window_update(0, 1 << 28))
        await ask(client, MIB)
        await until(lambda: ledger.held >= MIB // 2)
        await until(lambda: ledger.held == 0)
        assert "RST_STREAM ENHANCE_YOUR_CALM" == await client.outcome(1)
        client.send(headers(3, literals(request_headers(LIVE))))
        client.send(data(3, framed(b""), end_stream=True))
        assert "grpc-status 0" == await client.outcome(3)


@pytest.mark.slow
async def test_a_grpc_client_that_reads_slowly_gets_all_of_it(server: RunningServer) -> None:
    async with peer(server.url) as client:
        client.send(frames.window_update(0, 1 << 28))
        await ask(client, MIB // 2)
        for _ in range(16):
            await asyncio.sleep(SECONDS / 4)
            client.send(frames.window_update(1, 1 << 15))
        assert "grpc-status 0" == await client.outcome(1)
