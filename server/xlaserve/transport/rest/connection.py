"""An HTTP connection: aiohttp's, with a fast path for requests whose header block is known.

`states.py` says which of the two has the bytes that come, and how they change hands.
"""

import asyncio
from http import HTTPStatus
from typing import NamedTuple, cast

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from xlaserve.core.server import NAME
from xlaserve.core.serving.call import Peer
from xlaserve.core.serving.ledger import Ledger
from xlaserve.transport.peers import peer_of
from xlaserve.transport.rest.aiohttp_connection import AiohttpConnection
from xlaserve.transport.rest.edge import error_response
from xlaserve.transport.rest.fast_path import FastPath, head_of
from xlaserve.transport.rest.heads import Heads, size_of
from xlaserve.transport.rest.held import Held
from xlaserve.transport.rest.states import Input, State
from xlaserve.transport.stall import Stall

_FULL = b'{"error":"too many HTTP connections are open (max_http_connections), try again"}'

_log = structlog.get_logger("http")


class Beginning(NamedTuple):
    """The start of a request of the general path."""

    head: bytes
    """Its header block; empty where it is not known."""
    waited_seconds: float
    """Seconds its body was waited for before aiohttp had the first of it."""
    opened_ns: int = 0
    """When its header block was there, if that was then; 0 for now."""


class Server(web.Server):
    """Makes a protocol for each connection, up to a limit."""

    def __init__(
        self,
        *arguments: object,
        listener: str,
        max_connections: int,
        heads: Heads,
        body_seconds: float,
        ledger: Ledger,
        handler_cancellation: bool,
        **options: object,
    ) -> None:
        super().__init__(*arguments, handler_cancellation=handler_cancellation)  # type: ignore[arg-type]
        self._options = options
        self.listener = listener
        """The setting of the endpoint that it serves."""
        self.max_connections = max_connections
        self.heads = heads
        self.body_seconds = body_seconds
        self.ledger = ledger
        self.admitted = 0
        """Connections that are open and were not refused; aiohttp counts by making a list."""
        self.is_draining = False
        """Whether every answer is the last one of its connection."""

    def __call__(self) -> RequestHandler:
        return Connection(self, self._options)


class Connection(AiohttpConnection):
    """A connection whose faults are answered as `{"error": text}` too."""

    held: Held
    """The account of the connection; absent from one that is refused, as is the following."""
    peer: Peer
    """The client; one object for all calls of the connection."""

    def __init__(self, server: Server, options: dict[str, object]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.server = server
        self._fast: FastPath | None = None
        """None where the connection is refused or lost."""
        self._received = 0
        """Bytes that aiohttp was given, counted from where its request began."""
        self._size: int | None = None
        """Bytes of that request; None where that is not known, or not yet."""
        self._head = b""
        """Its header block, until aiohttp has read it."""
        self._stall = Stall()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        if server.admitted < server.max_connections:
            server.admitted += 1
            account = server.ledger.open()
            self.held = Held(account, transport)
            self.peer = peer_of(transport, server.listener, account)
            super().connection_made(transport)
            self._fast = FastPath(server.heads.plans, self, transport, server.body_seconds)
            return
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(_FULL)}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + _FULL)
        transport.close()

    # --- bytes ---

    def data_received(self, data: bytes) -> None:
        fast = self._fast
        if fast is not None and fast.state is _AT_REST and data:
            fast.read(data)
        else:
            self._receive(fast, data)

    def _receive(self, fast: FastPath | None, data: bytes) -> None:
        if fast is None or not data:
            # Without bytes it is aiohttp that calls, to go on with those that it has.
            super().data_received(data)
            return
        state = fast.state
        if state < State.GENERAL or state is State.ANSWERING:
            fast.receive(data)
        elif state in _READING:
            self.held.arrived(len(data))
            if state is State.GENERAL:
                self._received += len(data)
                self._count(fast)
            super().data_received(data)

    def take_over(self, data: bytes) -> None:
        """Give aiohttp bytes that begin where a request does."""
        self._received, self._size, self._head = len(data), None, head_of(data)
        super().data_received(data)

    def answered_all(self) -> None:
        """Have the fast path begin what came while aiohttp answered."""
        fast = self._fast
        if fast is not None and fast.state is State.ANSWERING:
            fast.return_from_general()

    def begin(self, request: web.BaseRequest) -> Beginning:
        """Return what is known of a request that aiohttp has begun."""
        fast = self._fast
        if fast is None or fast.state is not State.GENERAL:
            return Beginning(b"", 0.0)
        head, self._head = self._head, b""
        self._size = size_of(head, request)
        if self._size is None:
            fast.change(Input.UNFRAMED)
            head = b""
        else:
            self._count(fast)
        return Beginning(head, fast.take_waited_seconds(), fast.take_opened_ns())

    def _count(self, fast: FastPath) -> None:
        """Find out whether aiohttp has all bytes of its request, or more."""
        if self._size is None or self._received < self._size:
            return
        whole = self._received == self._size
        fast.change(Input.GENERAL_WHOLE if whole else Input.UNFRAMED)

    # --- the time it has, and the pace of its client ---

    @property
    def used_at(self) -> float:
        """Return when the fast path had a request last, or an answer that was not sent."""
        fast = self._fast
        if fast is None:
            return 0.0
        return asyncio.get_running_loop().time() if fast.state in _IN_USE else fast.answered_at

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._fast is not None:
            self.held.pause()
            self._fast.change(Input.PAUSE)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._fast is not None:
            self.held.resume()
            self._fast.resume()

    def looks_without_progress(self) -> int:
        """Return how many looks ago the last bytes left, or no answer waited for its client."""
        waits = self.held.waits_in_transport if self._fast is not None else 0
        return self._stall.look(waits, waits=waits > 0)

    # --- the end ---

    def drain(self) -> None:
        """Have a body that has not come be waited for no longer than a drain waits."""
        if self._fast is not None:
            self._fast.hand_over()

    def close_idle(self) -> None:
        """Close the connection if no request is in flight on it."""
        fast = self._fast
        if fast is None:
            return
        idle = fast.state in _IDLE or (fast.state in _GENERAL and self.awaits_request)
        if idle:
            fast.end(Input.CLOSE)
            self.force_close()

    def abort(self) -> None:
        """Cut the connection off; what is in flight on it is cancelled."""
        if self._fast is not None:
            self._fast.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._fast is not None:
            self._fast.end(Input.LOST)
            self._fast = None
            self.server.admitted -= 1
            self.held.close()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        # A client that leaves while it is sent an answer is no mistake, and costs no traceback.
        if status == HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(exc, ConnectionError):
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


_AT_REST = State.IDLE
"""A global name, since looking up a member of an enum takes a while."""
_IDLE = frozenset({State.IDLE, State.BLOCKED})
_READING = frozenset({State.GENERAL, State.ADOPTED})
_GENERAL = frozenset({State.GENERAL, State.ANSWERING, State.ADOPTED})
_IN_USE = frozenset({State.RECEIVING, State.EXECUTING, State.QUEUED, State.BLOCKED})
"""States in which aiohttp knows nothing of what the connection is kept for."""
