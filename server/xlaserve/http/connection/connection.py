"""An HTTP/1.1 connection: reads each request and answers it before it starts the next.

`states.py` defines the state table. Only this module decides where a request ends and the next one
begins, whether the fast path or the general path answers it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import TypeAlias, cast

import structlog

from xlaserve.concurrency.completion import settle
from xlaserve.errors.panics import ENDS
from xlaserve.http.connection.chunks import BodyFault
from xlaserve.http.connection.fast_path import FastPath
from xlaserve.http.connection.head_parser import HeadParser, Malformed
from xlaserve.http.connection.heads import Heads
from xlaserve.http.connection.held import Held, read_bytes
from xlaserve.http.connection.request import Request
from xlaserve.http.connection.request_body import Body
from xlaserve.http.connection.response_head import response_head
from xlaserve.http.connection.sending import send
from xlaserve.http.connection.states import Input, State
from xlaserve.http.edge import error_response
from xlaserve.net.ledger import Ledger
from xlaserve.net.stall import Stall
from xlaserve.serving.call import Peer
from xlaserve.serving.peers import peer_of
from xlaserve.tensors import Buffer

_FULL = "too many HTTP connections are open (max_http_connections), try again"
_LINGER_SECONDS = 2.0
"""Seconds during which leftover request bytes are read, so that the client gets the response."""

_log = structlog.get_logger("http")

Respond: TypeAlias = Callable[[Request], Awaitable[None]]
"""Answers a general-path request; raises ConnectionError if its client has disconnected."""


class Server:
    """Protocol factory of a listener, with a connection limit."""

    def __init__(
        self,
        respond: Respond,
        *,
        listener: str,
        max_connections: int,
        max_header_bytes: int,
        idle_seconds: float,
        heads: Heads,
        body_seconds: float,
        ledger: Ledger,
    ) -> None:
        self.respond = respond
        self.listener = listener
        """Name of the setting that defines the endpoint."""
        self.max_connections = max_connections
        self.max_header_bytes = max_header_bytes
        self.idle_seconds = idle_seconds
        self.heads = heads
        self.body_seconds = body_seconds
        self.ledger = ledger
        self.unread_bytes = 2 * read_bytes(ledger.limit)
        """Maximum number of body bytes that the handler has not read: above it, reading pauses; the
        last read may exceed it."""
        self.connections: set[Connection] = set()
        """Open connections, without refused ones."""
        self.is_draining = False
        """Whether every response closes its connection."""

    @property
    def admitted(self) -> int:
        """Return the number of open connections, without refused ones."""
        return len(self.connections)

    def __call__(self) -> "Connection":
        return Connection(self)


class Connection(asyncio.Protocol):
    """An HTTP/1.1 connection. Malformed requests are answered with `{"error": text}`."""

    transport: asyncio.Transport
    held: Held
    """Memory account of the connection. Unset, like `peer`, on a refused connection."""
    peer: Peer
    """The client; all calls of the connection share this object."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._fast: FastPath | None = None
        """The connection's fast path; None if the connection was refused or lost."""
        self._head: HeadParser | None = None
        """Parser of an incomplete header block in state GENERAL; None once the block is
        complete."""
        self._request: Request | None = None
        """The current general-path request."""
        self._task: asyncio.Task[None] | None = None
        """The task that answers `_request`."""
        self._resumed: asyncio.Future[None] | None = None
        """Set while writing is paused; completes when the client reads again."""
        self._is_paused = False
        self._since = 0.0
        """Loop time at which the connection began to wait for a request or for the rest of one."""
        self._later: asyncio.TimerHandle | None = None
        """Timer of the next idle check, or of the end of lingering."""
        self._stall = Stall()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        # uvloop's transport does not inherit from asyncio.Transport
        self.transport = transport = cast("asyncio.Transport", transport)
        if server.admitted < server.max_connections:
            account = server.ledger.open()
            self.held = Held(account, transport)
            self.peer = peer_of(transport, server.listener, account)
            self._fast = FastPath(server.heads.plans, self, transport, server.body_seconds)
            server.connections.add(self)
            self._since = self._loop.time()
            self._later = self._loop.call_later(server.idle_seconds, self._check_timeouts)
            return
        answer = error_response(_FULL, HTTPStatus.SERVICE_UNAVAILABLE)
        transport.write(response_head(answer, answer.size, is_last=True) + b"".join(answer.parts))
        transport.close()

    # --- Received bytes ---

    def data_received(self, data: bytes) -> None:
        fast = self._fast
        if fast is not None:
            if fast.state is _AT_REST:
                fast.read(data)
            elif fast.state is _GENERAL:
                self._read(fast, data)
            else:
                fast.receive(data)

    def take_over(self, data: bytes) -> None:
        """Read a general-path request that begins with `data`."""
        fast = self._fast
        assert fast is not None
        self._since = self._loop.time()
        self._head = HeadParser(self.server.max_header_bytes)
        self._read(fast, data)

    def _read(self, fast: FastPath, data: bytes) -> None:
        """Feed bytes to the current request; keep pipelined bytes until it has been answered."""
        head = self._head
        if head is not None:
            try:
                used = head.feed(data)
            except Malformed as error:
                self._refuse(fast, error)
                return
            if used is None:
                return
            self._head = None
            self._begin(fast, head)
            data = data[used:]
        request = self._request
        assert request is not None
        body = request.body
        used = body.feed(data) if data else 0
        self.held.arrived(used)
        if body.is_complete:
            fast.change(Input.GENERAL_WHOLE)
            if used < len(data):
                fast.receive(data[used:])

    def _begin(self, fast: FastPath, head: HeadParser) -> None:
        body = Body(head.length, self.transport, self.server.unread_bytes)
        request = Request(head, body, self, fast.take_waited_seconds())
        request.opened_ns = fast.take_opened_ns()
        self._request = request
        self._task = self._loop.create_task(self._answer(request))

    def _refuse(self, fast: FastPath, error: Malformed) -> None:
        """Answer a malformed request with an error, and close the connection."""
        self._head = None
        answer = error_response(f"the request cannot be read: {error}", error.status)
        head = response_head(answer, answer.size, is_last=True)
        self.transport.write(head + b"".join(answer.parts))
        self._end(fast)

    # --- Answers on the general path ---

    async def _answer(self, request: Request) -> None:
        try:
            await self.server.respond(request)
            await self._settle(request)
        except asyncio.CancelledError:
            self.force_close()
            raise
        except ConnectionError:
            self.force_close()  # the client disconnected during the response, which is no error
        except ENDS:
            raise
        except BaseException as error:
            _log.error("unexpected exception", exc_info=error)
            await self._fail(request)

    async def _fail(self, request: Request) -> None:
        """Send an error if no response was started; otherwise abort the connection."""
        if request.is_begun:
            self.abort()
            return
        request.is_last = True
        answer = error_response("internal error", HTTPStatus.INTERNAL_SERVER_ERROR)
        with suppress(ConnectionError):
            await send(request, answer)
        if self._fast is not None:
            self._end(self._fast)

    async def _settle(self, request: Request) -> None:
        """Start the next request once the client has read this response, or close."""
        await self.flushed()
        fast, body = self._fast, request.body
        if fast is None:
            return
        if not (request.is_last or body.is_complete or body.fault or self.held.has_overrun):
            with suppress(TimeoutError, BodyFault):
                async with asyncio.timeout(_LINGER_SECONDS):
                    await body.drop()
        if request.is_last or not body.is_complete:
            self._end(fast)
            return
        self._request = self._task = None
        self._since = self._loop.time()
        fast.return_from_general()

    def ends_with(self, request: Request) -> bool:
        """Tell whether the connection must close after the response to a request."""
        if not request.keeps_alive or self.server.is_draining:
            return True
        return request.may_lack_body or request.body.fault is not None or self.held.has_overrun

    def check_open(self) -> None:
        """Raise ConnectionError if the connection is closing."""
        if self._fast is None or self.transport.is_closing():
            raise ConnectionResetError("the client has closed the connection")

    async def write(self, data: Buffer) -> None:
        """Write bytes, and wait while the write buffer is full; raises ConnectionError."""
        self.check_open()
        self.transport.write(data)
        await self.flushed()

    async def flushed(self) -> None:
        """Wait until the write buffer has drained."""
        while self._is_paused:
            self._resumed = self._loop.create_future()
            try:
                await self._resumed
            finally:
                self._resumed = None

    # --- Timeouts and write flow control ---

    def _check_timeouts(self) -> None:
        """Close the connection if its idle timeout has expired, or schedule the next check."""
        fast = self._fast
        if fast is None:
            return
        seconds, now = self.server.idle_seconds, self._loop.time()
        until = now + seconds
        if fast.state is State.IDLE or self._head is not None:
            until = max(self._since, fast.answered_at) + seconds
            if until <= now:
                fast.end(Input.CLOSE)
                self.transport.close()
                return
        self._later = self._loop.call_at(until, self._check_timeouts)

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._fast is not None:
            self.held.pause()
            self._fast.change(Input.PAUSE)

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._resumed is not None:
            settle(self._resumed, None)
        if self._fast is not None:
            self.held.resume()
            self._fast.resume()

    def checks_without_progress(self) -> int:
        """Return the number of checks since the write buffer last shrank or was empty."""
        waits = self.held.waits_in_transport if self._fast is not None else 0
        return self._stall.look(waits, waits=waits > 0)

    # --- Shutdown ---

    def drain(self) -> None:
        """Move a request with an incomplete body to the general path and its drain timeout."""
        if self._fast is not None:
            self._fast.hand_over()

    def close_idle(self) -> None:
        """Close the connection if no request is in flight on it."""
        fast = self._fast
        if fast is not None and (fast.state in _IDLE or self._head is not None):
            fast.end(Input.CLOSE)
            self.force_close()

    def _end(self, fast: FastPath) -> None:
        """Close the connection after its last response.

        Bytes that still arrive are read and discarded for a while: closing a socket with unread
        bytes would reset it, and the client could lose the response (RFC 9112, 9.6). A draining
        server lingers only for clients that have already sent more.
        """
        request, transport = self._request, self.transport
        has_more = fast.has_ahead or request is None or not request.body.is_complete
        fast.end(Input.CLOSE)
        lingers = has_more or not self.server.is_draining
        if self.held.has_overrun or not lingers or not transport.can_write_eof():
            transport.close()
            return
        if transport.is_closing():
            return
        try:
            transport.write_eof()
        except OSError:
            transport.close()  # the client has disconnected
            return
        transport.resume_reading()
        if self._later is not None:
            self._later.cancel()
        self._later = self._loop.call_later(_LINGER_SECONDS, transport.close)

    def force_close(self) -> None:
        """Stop reading, and close the connection once the write buffer is empty."""
        self.transport.close()

    def abort(self) -> None:
        """Close the connection immediately, and cancel its request."""
        if self._fast is not None:
            self._fast.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._fast is None:
            return
        self._fast.end(Input.LOST)
        self._fast = self._head = self._request = None
        self.server.connections.discard(self)
        self.held.close()
        if self._later is not None:
            self._later.cancel()
        if self._task is not None:
            self._task.cancel()


_AT_REST, _GENERAL = State.IDLE, State.GENERAL
"""Module globals, because looking up an enum member is slow."""
_IDLE = frozenset({State.IDLE, State.BLOCKED})
