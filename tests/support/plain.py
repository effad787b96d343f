"""The server's HTTP/2, with plain HTTP on it instead of gRPC: every request gets the same body."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from grpclib.protocol import H2Protocol, Stream
from h2.exceptions import StreamClosedError

from xlaserve.transport.grpc.codec import WireCodec
from xlaserve.transport.grpc.server import GrpcServer, _Handler, _Protocol

BODY = b"served\n"
_STREAMS = 100


class _PlainHandler(_Handler):
    """Answers at once, whatever was asked, and however much of it has come."""

    def accept(
        self, stream: Stream, headers: Sequence[tuple[str, str]], release_stream: Callable[[], None]
    ) -> None:
        task = self.loop.create_task(_answer(stream))
        self._tasks[stream] = task
        task.add_done_callback(lambda _: release_stream())


async def _answer(stream: Stream) -> None:
    with suppress(StreamClosedError):
        await stream.send_headers([(":status", "200")])
        await stream.send_data(BODY, end_stream=True)


class _PlainServer(GrpcServer):
    def _protocol_factory(self) -> H2Protocol:
        handler = _PlainHandler(
            self._mapping, self._codec, self._status_details_codec, self.__dispatch__
        )
        self._handlers.add(handler)
        return _Protocol(self, handler)


@asynccontextmanager
async def plain_server() -> AsyncIterator[int]:
    """Serve for the length of a block; gives the port."""
    server = _PlainServer(
        [],
        codec=WireCodec(),
        max_message_bytes=1 << 20,
        max_connections=100,
        max_streams=_STREAMS,
    )
    listening = socket.create_server(("127.0.0.1", 0))
    await server.listen(listening)
    try:
        yield listening.getsockname()[1]
    finally:
        await server.drain(0)
        await asyncio.sleep(0)
