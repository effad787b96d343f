"""An HTTP connection: aiohttp's, with a short lane for requests whose heads are known."""

import asyncio
from http import HTTPStatus
from typing import NamedTuple, cast

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from xlaserve.core.server import NAME
from xlaserve.core.serving.ledger import Ledger
from xlaserve.transport.rest.edge import error_response
from xlaserve.transport.rest.heads import Heads, size_of
from xlaserve.transport.rest.held import Held
from xlaserve.transport.rest.lane import Lane, head_of

_FULL = b'{"error":"too many HTTP connections are open (max_http_connections), try again"}'

_log = structlog.get_logger("http")


class Beginning(NamedTuple):
    """How a request began."""

    head: bytes
    """Empty where it is not known."""
    waited_seconds: float
    """How long its body was waited for before aiohttp had the first of it."""


class Server(web.Server):
    """Makes a protocol for each connection, up to a limit."""

    def __init__(
        self,
        *arguments: object,
        max_connections: int,
        heads: Heads,
        body_seconds: float,
        ledger: Ledger,
        **options: object,
    ) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.max_connections = max_connections
        self.heads = heads
        self.body_seconds = body_seconds
        self.ledger = ledger

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Connection(RequestHandler):
    """A connection whose faults are answered as `{"error": text}` too.

    Of what is aiohttp's own it uses `_waiter`, the future for which the connection waits while it
    has no request; `_process_keepalive`, which closes it then after a while; and
    `_next_keepalive_close_time`, when that is.
    """

    held: Held
    """What the connection holds; absent from one that is over the limit."""
    _lane: Lane | None = None
    _received = 0
    """Bytes that aiohttp was given, counted from where a request began."""
    _size: int | None = 0
    """How many bytes that request has; None where that is not known, or not yet."""
    _head = b""
    """Its head, until aiohttp has read it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._manager
        assert isinstance(server, Server)
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        if len(server.connections) < server.max_connections:
            self.held = Held(server.ledger.open(), transport)
            super().connection_made(transport)
            self._lane = Lane(server.heads.plans, self, transport, server.body_seconds)
            return
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(_FULL)}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + _FULL)
        transport.close()

    def data_received(self, data: bytes) -> None:
        lane, waiter = self._lane, self._waiter
        if not data:
            # aiohttp itself calls so, to go on with the bytes that it has.
            super().data_received(data)
        elif lane is not None and lane.busy:
            lane.receive(data)
        elif self._received != self._size:
            self.held.arrived(len(data))
            self._received += len(data)
            super().data_received(data)
        elif lane is not None and waiter is not None and not waiter.done():
            lane.receive(data)
        else:
            self.otherwise(data)

    def otherwise(self, data: bytes) -> None:
        """Let aiohttp have bytes that begin where a request does."""
        self._received, self._size, self._head = len(data), None, head_of(data)
        super().data_received(data)

    def begin(self, request: web.BaseRequest) -> Beginning:
        """Return what is known of a request that aiohttp has begun."""
        head, self._head = self._head, b""
        self._size = size_of(head, request)
        waited = 0.0
        if self._lane is not None:
            waited, self._lane.waited_seconds = self._lane.waited_seconds, 0.0
        return Beginning(head if self._size is not None else b"", waited)

    # --- the time it has ---

    def answered(self) -> None:
        """Let the time begin anew in which the next request must come."""
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout

    def _process_keepalive(self) -> None:
        if self._lane is not None and not self._lane.is_idle:
            self.answered()
        super()._process_keepalive()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._lane is not None:
            self.held.pause()
            self._lane.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._lane is not None:
            self.held.resume()
            self._lane.resume()

    # --- the end ---

    def close(self) -> None:
        if self._lane is not None:
            self._lane.hand_over()
            self._lane.closing = True
        super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        if self._lane is not None:
            await self._lane.end(timeout)
        await super().shutdown(timeout)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._lane is not None:
            self._lane.cancel()
            self._lane = None
            self.held.close()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("unexpected exception", exc_info=exc)
        text = f"the request cannot be read: {message or exc}" if status < 500 else "internal error"
        answer = error_response(text, HTTPStatus(status))
        response = web.Response(
            status=status,
            body=b"".join(answer.parts),
            headers={"Content-Type": answer.content_type, "Server": NAME},
        )
        response.force_close()
        return response
