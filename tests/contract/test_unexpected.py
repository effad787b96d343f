"""Only errors with a traceback in the log count as unexpected; clients cannot cause any."""

import asyncio
import gzip
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support import identity_models
from support.conditions import MOST_SECONDS
from support.engines import own_engine_only
from support.http import ask, chunked, connect, message
from support.server import RunningServer, Serve
from support.wire import connect as connect_wire
from support.wire import framed, request_headers

SERVICE = "/inference.GRPCInferenceService/"
METHODS = ("ModelInfer", "ModelMetadata", "ModelStreamInfer")
GARBAGE = b"\x0a\xff\xff\xff\xff\x7f"
"""A field that is longer than its message."""
MANY = b"\x3a\x00" * 200
"""More fields than `max_message_fields`: parameters in ModelInfer, unknown fields elsewhere."""
MAX_BYTES = 1 << 20


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    identity_models.write(tmp_path / "models", "echo", "FP32")
    async with serve(
        tmp_path / "models",
        load_model=("*",),
        http_endpoint="port:0",
        message_timeout_seconds=0.2,
        max_message_bytes=MAX_BYTES,
        max_message_fields=100,
        cors_origin=("https://app.example",),
    ) as running:
        yield running


Act = Callable[[RunningServer, str], Awaitable[str]]
"""Misuses an RPC; returns the status of the answer."""


def octets(
    data: bytes, *more: tuple[str, str], ends: bool = True
) -> Callable[[RunningServer, str], Awaitable[str]]:
    """Send bytes as the DATA of a call."""

    async def act(server: RunningServer, method: str) -> str:
        async with connect_wire(server.url) as wire:
            stream = wire.open(request_headers(SERVICE + method, *more))
            wire.h2.send_data(stream, data, end_stream=ends)
            wire.flush()
            return (await wire.trailers(stream))["grpc-status"]

    return act


def compressed(data: bytes) -> bytes:
    return b"\1" + struct.pack(">I", len(data)) + data


GZIP, ZSTD = ("grpc-encoding", "gzip"), ("grpc-encoding", "zstd")
FAULTS: Mapping[str, Act] = {
    "malformed": octets(framed(GARBAGE)),
    "too many fields": octets(framed(MANY)),
    "announced too large": octets(b"\0" + struct.pack(">I", MAX_BYTES + 1), ends=False),
    "of a strange encoding": octets(compressed(b"data"), ZSTD),
    "no gzip": octets(compressed(b"data"), GZIP),
    "a bomb": octets(compressed(gzip.compress(bytes(2 * MAX_BYTES))), GZIP),
    "malformed within gzip": octets(compressed(gzip.compress(GARBAGE)), GZIP),
    "cut off": octets(framed(GARBAGE)[:-2]),
    "of a strange flag": octets(b"\7" + struct.pack(">I", 1) + b"a"),
}
UNARY = {
    "stalled": octets(b"\0\0", ends=False),
    "none": octets(b""),
    "two": octets(2 * framed(b"")),
}


async def reasons(server: RunningServer) -> dict[str, int]:
    """Return the values of xlaserve_refusals_total by reason."""
    answer = await ask(str(server.http), "GET", "/metrics")
    name = 'xlaserve_refusals_total{reason="'
    rows = [line for line in answer.body.decode().splitlines() if line.startswith(name)]
    assert rows
    return {row.split('"')[1]: int(row.rsplit(" ", 1)[1]) for row in rows}


def increases(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    found = {name: after[name] - before.get(name, 0) for name in after}
    return {name: count for name, count in found.items() if count}


@own_engine_only
@pytest.mark.parametrize("method", METHODS)
async def test_no_message_of_a_client_is_unexpected(server: RunningServer, method: str) -> None:
    faults = FAULTS if method == "ModelStreamInfer" else {**FAULTS, **UNARY}
    for fault, act in faults.items():
        for _ in range(3):  # the fast path, the general path, and their caches
            before = await reasons(server)
            with capture_logs() as log:
                status = await act(server, method)
            after = await reasons(server)
            found = increases(before, after)

            assert "0" != status, fault
            assert [] == [line for line in log if line.get("exc_info")], fault
            assert "Unexpected" not in found, (fault, found)
            if method != "ModelStreamInfer" or fault not in ("too many fields", "malformed"):
                assert 1 == sum(found.values()), (fault, found)


GRPC_WEB = ("Content-Type", "application/grpc-web+proto")
JSON = ("Content-Type", "application/json")
INFER = "/v2/models/echo/infer"
ON_HTTP: Mapping[str, bytes] = {
    "gRPC-Web, malformed": message("POST", SERVICE + "ModelInfer", GRPC_WEB, body=framed(GARBAGE)),
    "gRPC-Web, compressed": message(
        "POST", SERVICE + "ModelInfer", GRPC_WEB, body=compressed(b"data")
    ),
    "gRPC-Web, empty": message("POST", SERVICE + "ModelInfer", GRPC_WEB, length=0),
    "gRPC-Web, broken chunks": message(
        "POST", SERVICE + "ModelInfer", GRPC_WEB, ("Transfer-Encoding", "chunked"), length=None
    )
    + b"zz\r\n",
    "no JSON": message("POST", INFER, JSON, body=b"{"),
    "no UTF-8": message("POST", INFER, JSON, body=b'{"inputs":"\xff"}'),
    "no gzip": message("POST", INFER, JSON, ("Content-Encoding", "gzip"), body=b"data"),
    "a strange coding": message("POST", INFER, JSON, ("Content-Encoding", "zstd"), body=b"data"),
    "broken chunks": message("POST", INFER, ("Transfer-Encoding", "chunked"), length=None)
    + b"zz\r\n",
    "too large": message("POST", INFER, ("Transfer-Encoding", "chunked"), length=None)
    + chunked(bytes(MAX_BYTES + 1)),
    "a long header of JSON": message(
        "POST", INFER, ("Inference-Header-Content-Length", "9" * 30), body=b"{}"
    ),
}


@pytest.mark.parametrize("fault", ON_HTTP)
async def test_no_request_over_http_is_unexpected(server: RunningServer, fault: str) -> None:
    for _ in range(3):
        before = await reasons(server)
        with capture_logs() as log:
            async with connect(str(server.http)) as client:
                await client.send(ON_HTTP[fault])
                assert await client.reader.read(1)
        found = increases(before, await reasons(server))

        assert [] == [line for line in log if line.get("exc_info")]
        assert "Unexpected" not in found, found
        assert 1 == sum(found.values()), found


@pytest.mark.parametrize("path", [INFER, SERVICE + "ModelInfer"])
async def test_a_client_that_leaves_within_its_body_is_not_unexpected(
    server: RunningServer, path: str
) -> None:
    before = await reasons(server)
    kind = GRPC_WEB if path.startswith(SERVICE) else JSON
    with capture_logs() as log:
        async with connect(str(server.http)) as client:
            await client.send(message("POST", path, kind, body=b"{", length=100))
        async with asyncio.timeout(MOST_SECONDS):
            while not (found := increases(before, await reasons(server))):
                pass

    assert {"Cancelled": 1} == found
    assert [] == [line for line in log if line.get("exc_info")]


async def test_what_has_a_traceback_is_unexpected(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the general and fast paths of both transports; the metric's row exists from the start."""

    def failing(*given: Any, **named: Any) -> Any:
        raise ValueError("nobody expects this")

    before = await reasons(server)
    assert 0 == before.get("Unexpected")
    monkeypatch.setattr(type(server.application.registry), "resolve", failing)
    body = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
    ).encode()
    with capture_logs() as log:
        assert 500 == (await ask(str(server.http), "POST", INFER, JSON, body=body)).status
        status = await octets(framed(b"\x0a\x04echo"))(server, "ModelInfer")
        assert "13" == status
        status = await octets(framed(b"\x0a\x04echo"))(server, "ModelMetadata")
        assert "13" == status
    traced = [line for line in log if line.get("exc_info")]

    assert 3 == len(traced), log
    assert {"Unexpected": 3} == increases(before, await reasons(server))
