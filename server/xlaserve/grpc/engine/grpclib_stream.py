"""Adapts a stream of our HTTP/2 engine to grpclib's interface, for the general path."""

import asyncio
from typing import cast

from grpclib import GRPCError
from grpclib.protocol import Peer
from grpclib.protocol import Stream as GrpclibStreamType
from h2.errors import ErrorCodes
from h2.exceptions import StreamClosedError

from xlaserve.grpc.compression import ACCEPTED, answer_encoding, compress, decompress
from xlaserve.grpc.handler import RequestHandler
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.grpc.http2.headers import HeaderWriter
from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.http2.messages import (
    PREFIX,
    PREFIX_BYTES,
    Placement,
    Problem,
    StreamingReader,
    UnaryReader,
)
from xlaserve.grpc.http2.states import State
from xlaserve.grpc.http2.stream import Buffer, ServerStream
from xlaserve.grpc.problems import refuse
from xlaserve.grpc.request_headers import Headers
from xlaserve.net.ledger import Account


class GrpclibConnection:
    """Implements the part of grpclib's `Connection` that grpclib's server calls."""

    messages_sent = 0
    messages_received = 0
    last_message_sent: float | None = None
    last_message_received: float | None = None

    def __init__(
        self, transport: asyncio.Transport, handler: RequestHandler, limits: Http2Limits
    ) -> None:
        self.transport = transport
        self.handler = handler
        self.limits = limits
        self.writer = HeaderWriter()

    def get_peer(self) -> Peer:
        """Return the client's address as grpclib's `Peer`."""
        return Peer(self.transport)

    def is_closing(self) -> bool:
        """Tell whether the transport is closing, so that nothing more can be sent."""
        return self.transport.is_closing()


class GrpclibStream:
    """One request; implements the part of `grpclib.protocol.Stream` that a server uses."""

    def __init__(self, stream: ServerStream, connection: GrpclibConnection) -> None:
        self.id = stream.id
        self.connection = connection
        self.deadline = stream.deadline
        self.opened_ns = stream.opened_ns
        self._transport = connection.transport
        self._stream = stream
        self._message: Buffer | None = None
        """The next message, after `recv_data` has returned its length prefix."""
        self._taken = False
        self._held = 0
        """Bytes reserved in the ledger for the last message read."""
        self._more: asyncio.Future[None] | None = None
        self._sent: asyncio.Future[None] | None = None
        self._reader: StreamingReader | None = None
        self._encoding = ""
        """Encoding of the responses, or an empty string for no compression."""
        self.waiting = False
        """Whether the method is waiting for the client's next message."""

    def start(self, *, streaming: bool) -> None:
        """Start the task that answers; the message of a unary request is already complete."""
        stream = self._stream
        if streaming:
            limit = self.connection.limits.max_message_bytes
            stream.reader = self._reader = StreamingReader(limit, self._wake)
        stream.call = self
        accepted = cast(GrpclibStreamType, self)
        self.connection.handler.accept(accepted, stream.head.fields, self._release)

    # --- interface for the connection ---

    @property
    def awaits_client(self) -> bool:
        """Tell whether the method is waiting for the client's next message."""
        return self.waiting

    def cancel(self, reason: str) -> None:
        """Cancel the task: the client reset the stream or disconnected."""
        self.connection.handler.cancel(cast(GrpclibStreamType, self))

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _release(self) -> None:
        # Without a reader the connection drops further DATA.
        self._stream.call = self._stream.reader = self._reader = None
        if self._stream.open:  # the method returned without sending a status
            self._stream.reset(ErrorCode.INTERNAL_ERROR)

    # --- interface for streaming methods: see `Accepted` ---

    @property
    def account(self) -> Account:
        """Return the connection's account in the memory ledger."""
        return self._stream.owner.account

    def keep(self) -> int:
        """Return the bytes reserved for the last message; the caller now has to release them."""
        kept, self._held = self._held, 0
        return kept

    def reserve(self, count: int) -> bool:
        """Reserve more bytes in the ledger; false if there is no memory for them."""
        return self._stream.reserve(count)

    def release(self, count: int) -> None:
        """Release bytes reserved in the ledger."""
        self._stream.hold(-count)

    def send_now(self, message: bytes) -> bool:
        """Send a message without awaiting; false if it has to be queued or compressed first."""
        stream = self._stream
        if self._encoding or not stream.headers_sent:
            return False
        size = len(message)
        return stream.output.short_data(
            stream, (PREFIX.pack(0, size), message), size + PREFIX_BYTES
        )

    # --- interface for grpclib ---

    async def recv_data(self, size: int) -> Buffer:
        """Return a length prefix, then its message, decompressed; empty when the request ended.

        grpclib calls this alternately for the prefix and for the message.
        """
        if self._message is not None:
            message, self._message = self._message, None
            return message
        if self._reader is None:
            received = self._unary()
        else:
            received = await self._next(self._reader)
        if received is None:
            return b""
        compressed, message = received
        if compressed:
            message = await self._inflated(message)
        # Even if the message is empty: grpclib asks for it anyway.
        self._message = message
        return PREFIX.pack(0, len(message))

    async def _inflated(self, message: Buffer) -> Buffer:
        limit = self.connection.limits.max_message_bytes
        return await decompress(message, self._stream.head.fields, limit, self._reserve)

    def _reserve(self, count: int) -> None:
        """Reserve bytes for a decompressed message, or release them if `count` is negative.

        Raises GRPCError if there is no memory.
        """
        if count < 0:
            self._stream.hold(count)
        elif not self._stream.reserve(count):
            raise self._refusal(Problem.NO_MEMORY)
        self._held += count

    def _unary(self) -> tuple[bool, Buffer] | None:
        stream = self._stream
        if stream.problem is not None:
            size = stream.reader.length if isinstance(stream.reader, UnaryReader) else 0
            raise self._refusal(stream.problem, size)
        if self._taken or stream.message is None:
            return None
        self._taken = True
        message, stream.message = stream.message, None
        return stream.compressed, message

    async def _next(self, reader: StreamingReader) -> tuple[bool, Buffer] | None:
        stream = self._stream
        if self._held:
            stream.hold(-self._held)
            self._held = 0
        while True:
            got = reader.next()
            if isinstance(got, Problem):
                size = reader.declared() if got is Problem.TOO_LARGE else 0
                raise self._refusal(got, size)
            if got is not None:
                self._held = PREFIX_BYTES + len(got[1])
                # The result is ignored: if there is no memory, the next call raises.
                stream.expect(reader.missing if reader.received else 0)
                return got
            if stream.ended_by_client:
                problem = reader.end()
                if problem is not None:
                    raise self._refusal(problem)
                return None
            if not stream.expect(reader.missing if reader.received else 0):
                raise self._refusal(Problem.NO_MEMORY)
            self._more = asyncio.get_running_loop().create_future()
            self.waiting = True
            try:
                await self._more
            finally:
                self.waiting = False
                self._more = None

    def _refusal(self, problem: Problem, size: int = 0) -> GRPCError:
        return refuse(problem, self._stream.head.path, self.connection.limits, size)

    async def send_headers(self, headers: Headers, end_stream: bool = False) -> None:
        """Send headers, or trailers."""
        stream = self._stream
        if not stream.open:
            raise StreamClosedError(self.id)
        if not stream.headers_sent:
            headers = [*headers, ("grpc-accept-encoding", ACCEPTED)]
            if self.connection.limits.compress_answers and not end_stream:
                self._encoding = answer_encoding(stream.head.fields)
            if self._encoding:
                headers.append(("grpc-encoding", self._encoding))
        stream.send_headers(self.connection.writer.write(headers), end=end_stream)

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send a message and return once all of it has been written.

        `data` is one message with its length prefix, as grpclib passes it.
        Raises BudgetExhausted if the ledger has no memory to queue it.
        """
        stream = self._stream
        sent: Buffer = data
        if self._encoding:
            sent = await compress(self._encoding, data, stream.owner.account)
        if not stream.open:
            raise StreamClosedError(self.id)
        if not stream.send_data((sent,), len(sent), end=end_stream):
            raise self.account.refusal("the answer", len(sent))
        if stream.unsent:
            self._sent = asyncio.get_running_loop().create_future()
            stream.on_sent = self._wake_sender
            await self._sent

    def _wake_sender(self) -> None:
        self._stream.on_sent = None
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    async def reset(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Send RST_STREAM."""
        self.reset_nowait(error_code)

    def reset_nowait(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Send RST_STREAM."""
        self._stream.reset(ErrorCode(error_code))

    @property
    def closable(self) -> bool:
        """Tell whether the stream still has to be closed by the server."""
        return not self._transport.is_closing() and self._stream.state in _NOT_OVER


_NOT_OVER = frozenset((State.OPEN, State.HALF_CLOSED_REMOTE))


class GrpclibRoute:
    """Route whose requests a grpclib service method answers, each in a task."""

    placement: Placement | None = None

    def __init__(self, connection: GrpclibConnection, *, streaming: bool) -> None:
        self._connection = connection
        self._streaming = streaming
        self.message_first = not streaming

    def begin(self, stream: ServerStream) -> None:
        """Start the task that answers the request."""
        GrpclibStream(stream, self._connection).start(streaming=self._streaming)
