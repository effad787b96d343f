"""Our own HTTP/2 connections, as the gRPC server uses them."""

import asyncio

from xlaserve.grpc.handler import RequestHandler
from xlaserve.grpc.http2.busy_poll import BusyPoll
from xlaserve.grpc.http2.connection import ReceiveBuffer
from xlaserve.grpc.http2.protocol import Host, Http2Protocol

_LOOK_SECONDS = 0.02


class OwnEngine(Http2Protocol):
    """The protocol of one connection, on our own HTTP/2 engine."""

    def __init__(
        self, host: Host, handler: RequestHandler, buffer: ReceiveBuffer, poll: BusyPoll
    ) -> None:
        super().__init__(host, buffer, poll)
        self.requests = handler

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.requests.close()

    @property
    def open_streams(self) -> int:
        """Return the number of open streams."""
        return len(self.core.streams)

    async def idle(self, *, but_waiting: bool = False) -> None:
        """Wait until every request has ended or, with `but_waiting`, waits for its client."""
        streams = self.core.streams
        # A request that has not begun counts as active: its message may still be arriving, and
        # the connection's sweeps expire it if it takes too long.
        while any(  # noqa: ASYNC110
            not (but_waiting and stream.begun and stream.awaits_client)
            for stream in streams.values()
        ):
            await asyncio.sleep(_LOOK_SECONDS)
        await self.requests.idle(but_waiting=but_waiting)
