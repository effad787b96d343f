"""A gRPC-Web request behind grpclib's stream interface, so that every service answers it."""

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
"""Headers of gRPC that HTTP/1.1 has in another form."""
_EXPOSED = "Access-Control-Expose-Headers"
_STREAM = 1
"""Number of the only stream of such a connection, for errors."""


class WebConnection:
    """The part of a connection that grpclib uses."""

    messages_sent = 0
    messages_received = 0
    last_message_sent: float | None = None
    last_message_received: float | None = None

    def __init__(self, exchange: Exchange) -> None:
        self.transport = exchange.request.transport

    def get_peer(self) -> Peer:
        """Return who the client is."""
        return Peer(self.transport)


class WebStream:
    """One request: the part of `grpclib.protocol.Stream` that a server uses, and `Accepted`."""

    opened_ns = 0
    """Its call begins with its headers."""

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
        """None until the body was read."""
        self._message: Buffer | None = None
        """The message whose prefix was read."""
        self._answer: Stream | None = None
        self._has_ended = False

    # --- as methods with many requests call it ---

    @property
    def account(self) -> Account:
        """Return the account of its connection."""
        return self._exchange.held.account

    def keep(self) -> int:
        """Return 0: the whole body is counted until the request ends."""
        return 0

    def send_now(self, message: bytes) -> bool:
        """Return false: grpclib sends every message."""
        return False

    def reserve(self, count: int) -> bool:
        """Reserve more bytes; false without memory."""
        return self._exchange.held.account.reserve(count)

    def release(self, count: int) -> None:
        """Count this many bytes fewer."""
        self._exchange.held.account.release(count)

    # --- as grpclib calls it ---

    async def recv_data(self, size: int) -> Buffer:
        """Return a prefix, then its message; empty at the end."""
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
            # Methods with many requests keep what they are given.
            self._message = bytes(found) if self._streaming else found
        return PREFIX.pack(0, len(found))

    async def _body(self) -> memoryview:
        held = self._exchange.held
        body = await self._exchange.read()
        if not self._is_text:
            return body
        held.grow(len(body))  # as much as it may become, while both are there
        decoded = await self._threads.run(len(body), partial(from_text, body))
        held.grow(len(decoded) - 2 * len(body))
        return decoded

    async def send_headers(self, headers: Headers, end_stream: bool = False) -> None:
        """Send headers, or the trailers, which are the end of the body."""
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
        """Send a message after its prefix, and return when the client reads fast enough."""
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
        """End a complete answer; cut the client off after an incomplete one."""
        if self._answer is not None and self._has_ended:
            self._answer.end()
        else:
            self.reset_nowait()

    async def reset(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Cut the client off."""
        self.reset_nowait(error_code)

    def reset_nowait(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Cut the client off: HTTP/1.1 has no reset of a stream."""
        self._transport.abort()

    @property
    def closable(self) -> bool:
        """Tell whether its answer has not ended."""
        return not (self._has_ended or self._transport.is_closing())
