"""Our own connections under grpclib's server."""

import asyncio

from xlaserve.grpc.handler import RequestHandler
from xlaserve.grpc.http2.busy_poll import BusyPoll
from xlaserve.grpc.http2.connection import ReceiveBuffer
from xlaserve.grpc.http2.protocol import Host, Http2Protocol

_LOOK_SECONDS = 0.02


class OwnEngine(Http2Protocol):
    """One connection."""

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
        """Return how many requests are in flight."""
        return len(self.core.streams)

    async def idle(self, *, but_waiting: bool = False) -> None:
        """Return when every request has ended, or only waits for its client."""
        streams = self.core.streams
        # Of one that has not begun the message may be on its way; the sweeps see to its time.
        while any(  # noqa: ASYNC110
            not (but_waiting and stream.begun and stream.awaits_client)
            for stream in streams.values()
        ):
            await asyncio.sleep(_LOOK_SECONDS)
        await self.requests.idle(but_waiting=but_waiting)
