"""Adapts a gRPC-Web request to grpclib's stream interface."""

from functools import partial
from typing import NoReturn

from grpclib.protocol import Peer
from h2.errors import ErrorCodes
from h2.exceptions import StreamClosedError

from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.http2.messages import PREFIX, Problem
from xlaserve.grpc.http2.stream import Buffer
from xlaserve.grpc.problems import refuse
from xlaserve.grpc.request_headers import Headers
from xlaserve.grpc_web.frames import Messages, from_text, to_text, trailers
from xlaserve.http.connection.exchange import Exchange
from xlaserve.http.connection.sending import Stream
from xlaserve.http.threads import OffLoop
from xlaserve.net.ledger import Account

_OF_HTTP = frozenset({":status", "content-type"})
"""gRPC response headers that are sent differently over HTTP/1.1."""
_EXPOSED = "Access-Control-Expose-Headers"
_STREAM = 1
"""Stream id for exceptions; HTTP/1.1 has no stream ids."""


class WebConnection:
    """Implements the part of grpclib's `Connection` that grpclib's server calls."""

    messages_sent = 0
    messages_received = 0
    last_message_sent: float | None = None
    last_message_received: float | None = None

    def __init__(self, exchange: Exchange) -> None:
        self.transport = exchange.request.transport

    def get_peer(self) -> Peer:
        """Return the client's address as grpclib's `Peer`."""
        return Peer(self.transport)


class WebStream:
    """One request; implements the part of grpclib's `Stream` that a server uses, and `Accepted`."""

    opened_ns = 0
    """Always 0: the call is created when the headers have arrived."""

    def __init__(
        self,
        exchange: Exchange,
        limits: Http2Limits,
        threads: OffLoop,
        *,
        deadline: float | None,
        is_text: bool,
        streaming: bool,
    ) -> None:
        self.connection = WebConnection(exchange)
        self.deadline = deadline
        self._transport = self.connection.transport
        self._exchange = exchange
        self._limits = limits
        self._threads = threads
        self._is_text = is_text
        self._streaming = streaming
        self._messages: Messages | None = None
        """The request's messages; None until the body was read."""
        self._message: Buffer | None = None
        """The next message, after `recv_data` has returned its length prefix."""
        self._answer: Stream | None = None
        self._has_ended = False

    # --- interface for streaming methods: see `Accepted` ---

    @property
    def account(self) -> Account:
        """Return the connection's account in the memory ledger."""
        return self._exchange.held.account

    def keep(self) -> int:
        """Return 0: the whole body stays reserved until the request ends."""
        return 0

    def send_now(self, message: bytes) -> bool:
        """Return false: every message is sent through `send_data`."""
        return False

    def reserve(self, count: int) -> bool:
        """Reserve bytes in the ledger; false if there is no memory for them."""
        return self._exchange.held.account.reserve(count)

    def release(self, count: int) -> None:
        """Release bytes reserved in the ledger."""
        self._exchange.held.account.release(count)

    # --- interface for grpclib ---

    async def recv_data(self, size: int) -> Buffer:
        """Return a length prefix, then its message; empty at the end of the request."""
        if self._message is not None:
            message, self._message = self._message, None
            return message
        if self._messages is None:
            body = await self._body()
            limit = self._limits.max_message_bytes
            self._messages = Messages(body, limit, streaming=self._streaming)
        found = self._messages.next()
        if isinstance(found, Problem):
            raise refuse(found, self._exchange.path, self._limits, self._messages.length)
        if found is None:
            return b""
        if len(found):
            # Copy for streaming methods, which keep messages and must not keep the whole body.
            self._message = bytes(found) if self._streaming else found
        return PREFIX.pack(0, len(found))

    async def _body(self) -> memoryview:
        held = self._exchange.held
        body = await self._exchange.read()
        if not self._is_text:
            return body
        held.grow(len(body))  # an upper bound for the decoded body, next to the encoded one
        decoded = await self._threads.run(len(body), partial(from_text, body))
        held.grow(len(decoded) - 2 * len(body))
        return decoded

    async def send_headers(self, headers: Headers, end_stream: bool = False) -> None:
        """Send headers, or trailers, which are the last part of the body."""
        own = [(name, value) for name, value in headers if name not in _OF_HTTP]
        if self._answer is None:
            await self._begin([] if end_stream else own)
        if end_stream:
            await self._write(trailers(own))
            self._has_ended = True

    async def _begin(self, metadata: Headers) -> None:
        exchange = self._exchange
        answer = self._answer = Stream(exchange.request, exchange.headers)
        for name, value in metadata:
            answer.headers.add(name, value)
        if metadata and _EXPOSED in exchange.headers:
            names = ", ".join(dict(metadata))
            answer.headers[_EXPOSED] = f"{exchange.headers[_EXPOSED]}, {names}"
        text = "-text" if self._is_text else ""
        answer.headers["Content-Type"] = f"application/grpc-web{text}+proto"
        try:
            answer.begin()
        except ConnectionError:
            self._raise_closed()

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send a length-prefixed message; waits while the client reads too slowly."""
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        held, answer = self._exchange.held, self._answer
        if answer is None or self._transport.is_closing():
            self._raise_closed()
        held.begin_part(2 * len(data) if self._is_text else len(data))
        try:
            if self._is_text:
                data = await self._threads.run(len(data), partial(to_text, data))
            await answer.write(data)
        except ConnectionError:
            self._raise_closed()
        finally:
            held.end_answer()

    def _raise_closed(self) -> NoReturn:
        raise StreamClosedError(_STREAM)

    def end(self) -> None:
        """End a complete response; abort the connection if the response is incomplete."""
        if self._answer is not None and self._has_ended:
            self._answer.end()
        else:
            self.reset_nowait()

    async def reset(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Abort the connection."""
        self.reset_nowait(error_code)

    def reset_nowait(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Abort the connection, because HTTP/1.1 cannot reset a single stream."""
        self._transport.abort()

    @property
    def closable(self) -> bool:
        """Tell whether the response has not ended yet."""
        return not (self._has_ended or self._transport.is_closing())
