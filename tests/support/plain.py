"""Our HTTP/2 server with plain HTTP instead of gRPC; it answers every request alike."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.frames import LARGEST_FRAME, literals
from xlaserve.grpc.http2.connection import ServerConnection
from xlaserve.grpc.http2.limits import Http2Limits, Shared
from xlaserve.grpc.http2.messages import Placement, StreamingReader
from xlaserve.grpc.http2.protocol import Http2Protocol
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.grpc.injection import Injection
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.runner import Runner
from xlaserve.grpc.server import GrpcServer
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory
from xlaserve.serving.gates import Gates

BODY = b"served\n"
_OK = literals([(":status", "200")])
_MOST = 1 << 20


class _Plain:
    """A route that answers every complete request with BODY."""

    message_first = False
    placement: Placement | None = None

    def begin(self, stream: ServerStream) -> None:
        """Answer when the request is complete."""

        def look() -> None:
            if stream.ended_by_client and stream.open:
                stream.send_headers(_OK)
                stream.send_data([BODY], len(BODY), end=True)

        stream.reader = StreamingReader(_MOST, look)
        look()


class _PlainServer(GrpcServer):
    def connect(self, protocol: Http2Protocol, transport: asyncio.Transport) -> ServerConnection:
        return ServerConnection(
            self._limits,
            lambda head: _Plain(),
            self._shared,
            wake=protocol.wake,
            buffer=self._buffer,
        )


@asynccontextmanager
async def plain_server() -> AsyncIterator[int]:
    """Serve for the duration of a block; yields the port."""
    server = _PlainServer(
        Runner({}, WireCodec(), Gates(), Injection({}), message_seconds=1),
        # One h2spec case assumes the minimum frame size limit.
        limits=Http2Limits(max_frame_bytes=LARGEST_FRAME),
        max_connections=100,
        shared=Shared(Ledger(_MOST), MessageMemory(0)),
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server.listen(listening)
    try:
        yield listening.getsockname()[1]
    finally:
        await server.drain(0)
