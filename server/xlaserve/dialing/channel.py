"""A grpclib channel that can be closed completely, for our own clients."""

import asyncio
from typing import cast

from grpclib.client import Channel, Handler
from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol

from xlaserve.dialing.address import ServerAddress

_CLOSE_SECONDS = 1.0
"""Maximum wait for the server's close_notify; then the connection is aborted."""


class ClientChannel(Channel):
    """A grpclib channel to one address, with an awaitable close."""

    def __init__(self, address: ServerAddress, codec: CodecBase) -> None:
        if address.socket_path:
            super().__init__(path=address.socket_path, ssl=address.tls, codec=codec)
        else:
            super().__init__(address.host, address.port, ssl=address.tls, codec=codec)
        self._open: set[_Connection] = set()

    async def aclose(self) -> None:
        """Close the channel, and wait until its sockets are closed.

        `close` only starts the TLS shutdown, which waits for the server's close_notify (RFC 8446
        6.1). If the event loop ended before that, the socket would stay open.
        """
        self.close()
        if self._open:
            await asyncio.wait([each.lost for each in self._open], timeout=_CLOSE_SECONDS)
        if self._open:
            for late in self._open:
                late.abort()
            await asyncio.wait([each.lost for each in self._open])

    def _protocol_factory(self) -> H2Protocol:
        return _Connection(self, self._open)


class _Connection(H2Protocol):
    """A connection that adds itself to a set while it is open."""

    def __init__(self, channel: ClientChannel, those_open: "set[_Connection]") -> None:
        super().__init__(Handler(), channel._config, channel._h2_config)
        self._those_open = those_open
        self._to_server: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the socket is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._to_server = cast(asyncio.Transport, transport)
        self._those_open.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._to_server = None
        self._those_open.discard(self)
        super().connection_lost(exc)
        self.lost.set_result(None)

    def abort(self) -> None:
        """Abort the connection without a TLS shutdown."""
        if self._to_server is not None:
            self._to_server.abort()
