"""Memory per open connection: thousands of clients keep connections open between requests."""

import asyncio
import gc
import json
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hpack import Encoder
from support import frames, identity_models
from support.engines import own_engine_only
from support.floods import INFER
from support.server import Serve
from support.victim import infer_request
from support.wire import framed, request_headers

MOST_BYTES = 10 << 10
CONNECTIONS = 200
_BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]}
).encode()


def grpc_request() -> bytes:
    """Return a client's first bytes, whose header fields enter the dynamic table."""
    fields = (
        *request_headers(INFER),
        ("user-agent", "grpc-go/1.76.0"),
        ("grpc-timeout", "29995m"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("x-request-id", "b0a4f6a8-8dd5-4ff4-8f0c-5c7e0a3b6f11"),
    )
    block = Encoder().encode(fields)
    message = framed(infer_request("echo", 16))
    parts = (
        frames.settings(),
        frames.SETTINGS_ACK,
        frames.headers(1, block),
        frames.data(1, message, end_stream=True),
    )
    return frames.PREFACE + b"".join(map(bytes, parts))


def rest_request() -> bytes:
    """Return a keep-alive request."""
    head = (
        "POST /v2/models/echo/infer HTTP/1.1",
        "Host: localhost",
        "User-Agent: python-httpx/0.28",
        "Content-Type: application/json",
        f"Content-Length: {len(_BODY)}",
    )
    return "\r\n".join((*head, "", "")).encode() + _BODY


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def connect(url: str, request: bytes, count: int, kept: ExitStack) -> None:
    """Open connections, send a request on each, read the answer, and keep them open."""
    loop = asyncio.get_running_loop()
    host, _, port = url.rpartition(":")
    for _ in range(count):
        client = kept.enter_context(socket.socket())
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, request)
        answer = b""
        while b"grpc-status" not in answer and b'"data":[0.5' not in answer:
            more = await loop.sock_recv(client, 1 << 16)
            assert more
            answer += more
        assert b"grpc-message" not in answer


@own_engine_only
@pytest.mark.parametrize("door", ["gRPC", "REST"])
async def test_a_connection_that_was_answered_holds_little(
    serve: Serve, tmp_path: Path, door: str
) -> None:
    identity_models.write(tmp_path / "models", "echo", "FP32", (1, 16))
    async with serve(tmp_path / "models", http_endpoint="port:0", load_model=("*",)) as server:
        assert server.http is not None
        url, request = (
            (server.url, grpc_request()) if door == "gRPC" else (server.http, rest_request())
        )
        with ExitStack() as kept, traced():
            # The first connections allocate everything that is shared.
            await connect(url, request, 20, kept)
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            await connect(url, request, CONNECTIONS, kept)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()

    each = (after - before) / CONNECTIONS
    # Only Python's allocations: those of the event loop in C are not traced.
    assert MOST_BYTES > each, f"{each:.0f} bytes for each connection"
    assert each > 1000, "they are not all open"
