"""Deadlines of gRPC requests, on both HTTP/2 engines."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from h2.exceptions import StreamClosedError
from support.conditions import until
from support.engines import ENGINE
from support.floods import INFER
from support.frames import LARGEST_FRAME, data, headers, literals, peer
from support.server import serving
from support.tls import trusting, write_certificate
from support.wire import Wire, connect, framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.settings.choices import Http2Engine

METADATA = "/inference.GRPCInferenceService/ModelMetadata"
SECONDS = 0.3
HALF_BYTES = 30_000
DEADLINE_EXCEEDED, NOT_FOUND = "4", "5"


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


WAYS: Mapping[str, Mapping[str, Any]] = {
    "": {"http2_engine": ENGINE},
    "over TLS": {"http2_engine": ENGINE, "tls": True},
    "h2": {"http2_engine": Http2Engine.H2},
    "h2, over TLS": {"http2_engine": Http2Engine.H2, "tls": True},
}


def send(wire: Wire, stream: int, octets: bytes) -> None:
    """Send a part of a message."""
    for at in range(0, len(octets), LARGEST_FRAME):
        wire.h2.send_data(stream, octets[at : at + LARGEST_FRAME])
    wire.flush()


@pytest.mark.parametrize("path", [INFER, METADATA])
@pytest.mark.parametrize("way", WAYS)
async def test_a_deadline_holds_while_the_message_comes(
    tmp_path: Path, way: str, path: str
) -> None:
    """Its memory is then free, and the rest of the message disturbs no other request."""
    (tmp_path / "models").mkdir()
    settings = dict(WAYS[way])
    tls = None
    if settings.pop("tls", False):
        authority = trustme.CA()
        settings |= write_certificate(authority, tmp_path)
        tls = trusting(authority)
    request: Any = pb.ModelMetadataRequest(name="m")  # pyright: ignore[reportAttributeAccessIssue]
    whole, long = request.SerializeToString(), framed(bytes(2 * HALF_BYTES))
    timeout = ("grpc-timeout", f"{SECONDS * 1000:.0f}m")
    async with (
        # The client here waits for 20 seconds: only the deadline can end the requests in time.
        serving(tmp_path, tmp_path / "models", message_timeout_seconds=60, **settings) as server,
        connect(server.url, tls) as wire,
    ):
        ledger = server.application.ledger
        peak = ledger.watch()
        await wire.ping()  # the server's windows have then arrived
        opened = [wire.open(request_headers(path, timeout)) for _ in range(3)]
        send(wire, opened[0], long[:HALF_BYTES])
        send(wire, opened[1], long[:2])
        late = [(await wire.trailers(stream))["grpc-status"] for stream in opened]
        await until(lambda: not ledger.held)
        most = peak.take()
        with suppress(StreamClosedError):  # grpclib resets the stream
            send(wire, opened[0], long[HALF_BYTES:])
        after = [wire.send(request_headers(path), whole) for _ in range(2)]
        in_time = [(await wire.trailers(stream))["grpc-status"] for stream in after]
        await until(lambda: not ledger.held)

    assert [DEADLINE_EXCEEDED] * 3 == late
    assert most >= 2 * HALF_BYTES
    assert [NOT_FOUND] * 2 == in_time
