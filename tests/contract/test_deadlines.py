"""Deadlines of gRPC requests, on both HTTP/2 engines."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.floods import INFER
from support.frames import data, headers, literals, peer
from support.server import serving
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb

METADATA = "/inference.GRPCInferenceService/ModelMetadata"
SECONDS = 0.3


@pytest.mark.parametrize("path", [INFER, METADATA])
async def test_a_deadline_counts_from_the_headers(tmp_path: Path, path: str) -> None:
    """Not from the message, which may arrive later (gRPC over HTTP/2, Timeout)."""
    (tmp_path / "models").mkdir()
    request: Any = pb.ModelMetadataRequest(name="m")  # pyright: ignore[reportAttributeAccessIssue]
    message = framed(request.SerializeToString())
    block = literals([*request_headers(path), ("grpc-timeout", f"{SECONDS * 1000:.0f}m")])
    async with serving(tmp_path, tmp_path / "models") as server, peer(server.url) as client:
        client.send(headers(1, block))
        await client.ping()
        await asyncio.sleep(1.2 * SECONDS)
        client.send(data(1, message, end_stream=True))
        client.send(headers(3, block), data(3, message, end_stream=True))
        late, in_time = await client.outcome(1), await client.outcome(3)

    assert ("grpc-status 4", "grpc-status 5") == (late, in_time)
