"""An HTTP/1.1 connection: each request is read, answered, and followed by the next one.

`states.py` says what happens to the bytes that come. There is one reader: where a request ends, and
the next one begins, is decided here, whoever answers it.
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
"""Seconds of reading the rest of a request, so that its sender sees the answer."""

_log = structlog.get_logger("http")

Respond: TypeAlias = Callable[[Request], Awaitable[None]]
"""Answers a general-path request; raises ConnectionError if its client is gone."""


class Server:
    """Makes a protocol for each connection, up to a limit."""

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
        """Setting of its endpoint."""
        self.max_connections = max_connections
        self.max_header_bytes = max_header_bytes
        self.idle_seconds = idle_seconds
        self.heads = heads
        self.body_seconds = body_seconds
        self.ledger = ledger
        self.unread_bytes = 2 * read_bytes(ledger.limit)
        """Limit of buffered body bytes before the handler reads, plus one read."""
        self.connections: set[Connection] = set()
        """Open, admitted connections."""
        self.is_draining = False
        """Whether every answer closes its connection."""

    @property
    def admitted(self) -> int:
        """Return how many connections are open and were not refused."""
        return len(self.connections)

    def __call__(self) -> "Connection":
        return Connection(self)


class Connection(asyncio.Protocol):
    """An HTTP/1.1 connection; malformed requests get `{"error": text}` too."""

    transport: asyncio.Transport
    held: Held
    """Account of the connection; missing, like the following, on a refused one."""
    peer: Peer
    """The client; one object for all calls of the connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._fast: FastPath | None = None
        """None where the connection is refused or lost."""
        self._head: HeadParser | None = None
        """While GENERAL: the header block that comes; None once it is whole."""
        self._request: Request | None = None
        """The request of the general path."""
        self._task: asyncio.Task[None] | None = None
        """Its general-path task."""
        self._resumed: asyncio.Future[None] | None = None
        """While the client does not read: until it does."""
        self._is_paused = False
        self._since = 0.0
        """Loop time at which the connection began to wait for a request, or for the rest of one."""
        self._later: asyncio.TimerHandle | None = None
        """Time of the next idle check, or of the last read."""
        self._stall = Stall()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        # uvloop's is one in all but name
        self.transport = transport = cast("asyncio.Transport", transport)
        if server.admitted < server.max_connections:
            account = server.ledger.open()
            self.held = Held(account, transport)
            self.peer = peer_of(transport, server.listener, account)
            self._fast = FastPath(server.heads.plans, self, transport, server.body_seconds)
            server.connections.add(self)
            self._since = self._loop.time()
            self._later = self._loop.call_later(server.idle_seconds, self._look)
            return
        answer = error_response(_FULL, HTTPStatus.SERVICE_UNAVAILABLE)
        transport.write(response_head(answer, answer.size, is_last=True) + b"".join(answer.parts))
        transport.close()

    # --- bytes ---

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
        """Read a request of the general path, whose first bytes are those."""
        fast = self._fast
        assert fast is not None
        self._since = self._loop.time()
        self._head = HeadParser(self.server.max_header_bytes)
        self._read(fast, data)

    def _read(self, fast: FastPath, data: bytes) -> None:
        """Take bytes of a request; pipelined bytes are kept until its answer."""
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
        """Refuse a malformed request after the answers to earlier ones."""
        self._head = None
        answer = error_response(f"the request cannot be read: {error}", error.status)
        head = response_head(answer, answer.size, is_last=True)
        self.transport.write(head + b"".join(answer.parts))
        self._end(fast)

    # --- answers of the general path ---

    async def _answer(self, request: Request) -> None:
        try:
            await self.server.respond(request)
            await self._settle(request)
        except asyncio.CancelledError:
            self.force_close()
            raise
        except ConnectionError:
            self.force_close()  # a client that leaves while it is sent an answer is no mistake
        except ENDS:
            raise
        except BaseException as error:
            _log.error("unexpected exception", exc_info=error)
            await self._fail(request)

    async def _fail(self, request: Request) -> None:
        """Report a missing answer, or cut the client off after a partial one."""
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
        """Go on with the next request, once the client has read the answer to this one."""
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
        """Tell whether the answer to a request is the last one."""
        if not request.keeps_alive or self.server.is_draining:
            return True
        return request.may_lack_body or request.body.fault is not None or self.held.has_overrun

    def check_open(self) -> None:
        """Raise ConnectionError once nothing more can be sent."""
        if self._fast is None or self.transport.is_closing():
            raise ConnectionResetError("the client has closed the connection")

    async def write(self, data: Buffer) -> None:
        """Send bytes, and return when the client has read nearly all; raises ConnectionError."""
        self.check_open()
        self.transport.write(data)
        await self.flushed()

    async def flushed(self) -> None:
        """Return when the client has read nearly everything."""
        while self._is_paused:
            self._resumed = self._loop.create_future()
            try:
                await self._resumed
            finally:
                self._resumed = None

    # --- the time it has, and the pace of its client ---

    def _look(self) -> None:
        """Close the connection after its idle time, or check again later."""
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
        self._later = self._loop.call_at(until, self._look)

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

    def looks_without_progress(self) -> int:
        """Return how many looks ago the last bytes left, or no answer waited for its client."""
        waits = self.held.waits_in_transport if self._fast is not None else 0
        return self._stall.look(waits, waits=waits > 0)

    # --- shutdown ---

    def drain(self) -> None:
        """Limit the wait for a body to a drain's."""
        if self._fast is not None:
            self._fast.hand_over()

    def close_idle(self) -> None:
        """Close the connection if no request is in flight on it."""
        fast = self._fast
        if fast is not None and (fast.state in _IDLE or self._head is not None):
            fast.end(Input.CLOSE)
            self.force_close()

    def _end(self, fast: FastPath) -> None:
        """Close the connection behind its last answer.

        What still comes is read for a while, and dropped: to close a socket of which something was
        not read takes the answer away from the client (RFC 9112, 9.6). A server that drains waits
        only for those that have sent more already.
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
            transport.close()  # the client was quicker
            return
        transport.resume_reading()
        if self._later is not None:
            self._later.cancel()
        self._later = self._loop.call_later(_LINGER_SECONDS, transport.close)

    def force_close(self) -> None:
        """Close the connection, and read no more of it."""
        self.transport.close()

    def abort(self) -> None:
        """Cut the connection off, cancelling its requests."""
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
"""Global names, since looking up a member of an enum takes a while."""
_IDLE = frozenset({State.IDLE, State.BLOCKED})
