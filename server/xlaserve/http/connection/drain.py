"""The graceful end of an HTTP server: requests in flight are answered, nothing is reset."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from xlaserve.http.connection.bodies import BodyReader
from xlaserve.http.connection.connection import Connection, Server
from xlaserve.net.accepting import Acceptor

_IDLE_SECONDS = 0.25
"""Seconds for which a drain keeps idle connections: a request may be on its way."""
_HANDSHAKE_SECONDS = 1.0
"""Seconds for which a drain waits for TLS handshakes, without requests so far."""
_FAREWELL_SECONDS = 2.0
"""Seconds for which a stop waits for aborted connections."""
_LOOK_SECONDS = 0.01


class Drain:
    """Ends the connections of a server, once it is run.

    A server that drains accepts what waits in the accept queue and then closes its socket, so that
    further clients are refused and none is reset. Each answer from then on says `Connection: close`
    (RFC 9112, 9.6). A connection without a request is left open for a moment, since one may be on
    its way (RFC 9112, 9.5), a body that does not come is refused, and what takes longer than the
    grace is cut off.
    """

    def __init__(
        self,
        server: Server,
        bodies: BodyReader,
        end_streams: Callable[[], None],
        acceptor: Acceptor,
    ) -> None:
        """`end_streams` ends running event streams when the grace period expires.

        A body that has not come by then is refused.
        """
        self._server = server
        self._bodies = bodies
        self._end_streams = end_streams
        self._acceptor = acceptor

    async def run(self, grace_seconds: float) -> None:
        """Answer running requests within the time, cut off the rest, and stop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        self._server.is_draining = True
        self._acceptor.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(grace_seconds, _HANDSHAKE_SECONDS)):
                await self._acceptor.begun()
        await self._acceptor.aborted()
        self._bodies.drain()
        for connection in self._connections():
            connection.drain()
        await self._closed(min(until, loop.time() + _IDLE_SECONDS))
        for connection in self._connections():
            connection.close_idle()
        await self._closed(until)
        if self._server.connections:
            self._bodies.refuse()
            self._end_streams()
            await self._closed(loop.time() + _IDLE_SECONDS)
        for connection in self._connections():
            connection.abort()
        await self._closed(loop.time() + _FAREWELL_SECONDS)

    def _connections(self) -> list[Connection]:
        return list(self._server.connections)

    async def _closed(self, until: float) -> None:
        """Return when every connection is closed, or the time has come."""
        loop = asyncio.get_running_loop()
        while self._server.connections and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
