"""Graceful shutdown of an HTTP server: answers requests in flight and resets no connection."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from xlaserve.http.connection.bodies import BodyReader
from xlaserve.http.connection.connection import Connection, Server
from xlaserve.net.accepting import Acceptor

_IDLE_SECONDS = 0.25
"""Seconds for which idle connections are kept open, since a request may already be in transit."""
_HANDSHAKE_SECONDS = 1.0
"""Seconds to wait for pending TLS handshakes."""
_FAREWELL_SECONDS = 2.0
"""Seconds to wait for aborted connections to close."""
_POLL_SECONDS = 0.01


class Drain:
    """Drains the connections of a server.

    The server accepts the connections in the accept queue and then closes the listening socket, so
    that new clients are refused and none is reset. Every later answer has `Connection: close` (RFC
    9112, 9.6). Idle connections stay open briefly, since a request may be in transit (RFC 9112,
    9.5). Bodies that stop arriving are refused, and connections that outlast the grace period are
    aborted.
    """

    def __init__(
        self,
        server: Server,
        bodies: BodyReader,
        end_streams: Callable[[], None],
        acceptor: Acceptor,
    ) -> None:
        """`end_streams` ends running event streams when the grace period expires."""
        self._server = server
        self._bodies = bodies
        self._end_streams = end_streams
        self._acceptor = acceptor

    async def run(self, grace_seconds: float) -> None:
        """Answer requests in flight until the grace period ends, then abort the rest."""
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
        """Wait until every connection is closed, or until loop time `until`."""
        loop = asyncio.get_running_loop()
        while self._server.connections and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
