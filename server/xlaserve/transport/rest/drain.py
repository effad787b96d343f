"""The graceful end of an HTTP server: what has begun is answered, and nothing is reset."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from xlaserve.transport.rest.bodies import BodyReader
from xlaserve.transport.rest.connection import Connection, Server

_IDLE_SECONDS = 0.25
"""Seconds a drain leaves connections without a request open: one may be on its way."""
_FAREWELL_SECONDS = 2.0
"""Seconds a stop waits for connections that were cut off."""
_LOOK_SECONDS = 0.01


class Drain:
    """Serves the connections of a socket until it is run, which ends all of them.

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
        accepting: asyncio.AbstractServer,
        listening: socket.socket,
    ) -> None:
        self._server = server
        self._bodies = bodies
        self._end_streams = end_streams
        self._accepting = accepting
        self._listening = listening
        """Another descriptor of the socket: event loops close theirs when they accept no more."""

    @classmethod
    async def prepare(
        cls,
        server: Server,
        bodies: BodyReader,
        end_streams: Callable[[], None],
        listening: socket.socket,
        backlog: int,
    ) -> Self:
        """Accept the connections of a socket that is bound and listens.

        `end_streams` ends the answers that go on when the grace expires.
        """
        own = listening.dup()
        own.setblocking(False)
        loop = asyncio.get_running_loop()
        accepting = await loop.create_server(server, sock=listening, backlog=backlog)
        return cls(server, bodies, end_streams, accepting, own)

    async def run(self, grace_seconds: float) -> None:
        """Answer what has begun within the time, cut off the rest, and stop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        self._server.is_draining = True
        await self._accept_last()
        self._bodies.drain()
        for connection in self._connections():
            connection.drain()
        await self._closed(min(until, loop.time() + _IDLE_SECONDS))
        for connection in self._connections():
            connection.close_idle()
        await self._closed(until)
        if self._server.connections:
            self._end_streams()
            await self._closed(loop.time() + _IDLE_SECONDS)
        for connection in self._connections():
            connection.abort()
        await self._closed(loop.time() + _FAREWELL_SECONDS)

    async def _accept_last(self) -> None:
        """Take the connections that wait to be accepted, and refuse all further ones."""
        loop = asyncio.get_running_loop()
        self._accepting.close()
        accepted = []
        with suppress(OSError):
            while True:
                accepted.append(self._listening.accept()[0])
        self._listening.close()
        for connection in accepted:
            connection.setblocking(False)
            with suppress(OSError):
                await loop.connect_accepted_socket(self._server, connection)

    def _connections(self) -> list[Connection]:
        return [c for c in self._server.connections if isinstance(c, Connection)]

    async def _closed(self, until: float) -> None:
        """Return when every connection is closed, or the time has come."""
        loop = asyncio.get_running_loop()
        while self._server.connections and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
