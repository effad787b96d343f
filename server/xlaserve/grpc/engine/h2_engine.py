"""grpclib's connections over h2 with our limits: the reference for our engine."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from grpclib import GRPCError
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.protocol import Connection, EventsProcessor, H2Protocol, Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event, PingAckReceived, RequestReceived
from h2.settings import SettingCodes
from hyperframe.frame import Frame, GoAwayFrame, PingFrame

from xlaserve.grpc.calls import FieldsView
from xlaserve.grpc.handler import RequestHandler
from xlaserve.grpc.http2.control_frames import ROUND_TRIP
from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.http2.messages import Problem
from xlaserve.grpc.problems import PROBLEMS
from xlaserve.grpc.request_headers import (
    Headers,
    is_grpc,
    malformed,
    refusal,
    refusal_headers,
    timeout_seconds,
)
from xlaserve.net.ledger import Account, Kind
from xlaserve.serving.call import outside_call

_LAST_POSSIBLE_STREAM = 2**31 - 1
_COMPRESSED = (
    Status.UNIMPLEMENTED,
    "--http2-engine h2 does not support compressed messages: send them uncompressed",
)
_UNNAMED = (Status.INTERNAL, "a compressed message without grpc-encoding")


class Owner(Protocol):
    """The server's interface for its connections."""

    def admit(self, protocol: Any) -> bool:
        """Register a new connection, or return false if there are too many."""
        ...

    def disconnected(self, protocol: Any) -> None:
        """Unregister a closed connection."""
        ...


class CheckingHandler(RequestHandler):
    """Validates the headers of each request first, as `Router` does for our own engine."""

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], None]) -> None:
        """Start a request; at its end, also release its bytes in the ledger."""

        def release() -> None:
            release_stream()
            cast("_Stream", stream).release_all()

        super().accept(stream, headers, release)

    async def _handle(self, stream: Stream, headers: Headers) -> None:
        if malformed(headers):
            stream.reset_nowait(ErrorCodes.PROTOCOL_ERROR)
            return
        found = dict(headers)
        seconds, own = timeout_seconds(headers), cast("_Stream", stream)
        if seconds is not None:
            own.deadline = asyncio.get_running_loop().time() + seconds
        own.is_encoded = found.get("grpc-encoding", "identity") != "identity"
        answer = _not_grpc(found) or self._refused(found[":path"], headers, own.deadline)
        if answer is None:
            await super()._handle(stream, headers)
            return
        await stream.send_headers([*answer], end_stream=True)
        if stream.closable:
            stream.reset_nowait()

    def _refused(self, path: str, headers: Headers, deadline: float | None) -> Headers | None:
        refused = refusal(headers)
        if refused is None and path not in self._runner.methods:
            refused = self.no_method(path, FieldsView(headers), deadline)
        return refused and refusal_headers(*refused)


def _not_grpc(found: Mapping[str, str]) -> Headers | None:
    """Return the response to a request that is not gRPC, or None (gRPC over HTTP/2, Requests)."""
    if found[":method"] != "POST":
        return ((":status", "405"),)
    if not is_grpc(found.get("content-type")):
        return ((":status", "415"),)
    return None


class _H2(H2Connection):
    """Keeps answering open streams after the client's GOAWAY, as RFC 9113 6.8 requires."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.last_stream_id = frame.last_stream_id
        return [], [event]


class _Events(EventsProcessor):
    """Refuses new streams once the connection has sent its final GOAWAY."""

    def __init__(self, handler: RequestHandler, connection: Connection, owner: "H2Engine") -> None:
        super().__init__(handler, connection)
        self._owner = owner

    def register(self, stream: Stream) -> Callable[[], None]:
        release_stream = super().register(stream)

        def release() -> None:
            release_stream()
            self._owner.ended()

        return release

    def process_request_received(self, event: RequestReceived) -> None:
        if self._owner.leaves and event.stream_id is not None:
            # REFUSED_STREAM: not processed, so the client may retry elsewhere (RFC 9113 8.7).
            self.connection._connection.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
        else:
            super().process_request_received(event)

    def process_connection_terminated(self, event: ConnectionTerminated) -> None:
        """Handle the client's GOAWAY: answer the open streams, then close (RFC 9113 6.8)."""
        self._owner.leave()

    def process_ping_ack_received(self, event: PingAckReceived) -> None:
        super().process_ping_ack_received(event)
        if event.ping_data == ROUND_TRIP:
            self._owner.came_back()


class H2Engine(H2Protocol):
    """The protocol of one connection, over h2."""

    def __init__(
        self,
        owner: Owner,
        handler: RequestHandler,
        limits: Http2Limits,
        account: Account,
    ) -> None:
        self._account = account
        # Latin-1 decodes any byte; with ASCII a single non-ASCII header would end the connection.
        h2_config = H2Configuration(
            client_side=False,
            header_encoding="latin-1",
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        super().__init__(handler, Configuration().__for_server__(), h2_config)
        self._owner = owner
        self._limits = limits
        self.requests = handler
        self._admitted = False
        self._awaits_client = False
        """Whether the first GOAWAY and its PING were sent, and the PING is unanswered."""
        self.leaves = False
        """Whether the final GOAWAY, which names the last stream, was sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        h2 = _H2(config=self.h2_config)
        h2.initiate_connection()
        window = self.config.http2_connection_window_size
        h2.increment_flow_control_window(window - h2.local_settings.initial_window_size)
        h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: self.config.http2_stream_window_size,
                SettingCodes.MAX_CONCURRENT_STREAMS: self._limits.max_streams,
            }
        )
        connection = _Connection(h2, cast("asyncio.Transport", transport), config=self.config)
        connection.max_message_bytes = self._limits.max_message_bytes
        connection.answer_seconds = self._limits.answer_seconds
        connection.account = self._account
        self.connection = connection
        tls = transport.get_extra_info("ssl_object")
        is_h2 = tls is None or tls.selected_alpn_protocol() == "h2"
        self._admitted = is_h2 and self._owner.admit(self)
        if is_h2 and not self._admitted:
            h2.clear_outbound_data_buffer()  # send no SETTINGS if refused, like our own engine
        self.connection.flush()
        self.connection.initialize()
        self.processor = _Events(self.requests, self.connection, self)
        self.requests.connected(transport, self._account)
        if not is_h2:  # RFC 9113 3.2, 9.2
            self._end(ErrorCodes.INADEQUATE_SECURITY, b"TLS without ALPN h2")
        elif not self._admitted:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._account.close()
        self._owner.disconnected(self)

    @property
    def open_streams(self) -> int:
        """Return the number of open streams."""
        return len(self.processor.streams)

    async def idle(self, *, but_waiting: bool = False) -> None:
        """Wait until every request has ended or, with `but_waiting`, waits for its client."""
        await self.requests.idle(but_waiting=but_waiting)

    def go_away(self) -> None:
        """Start a graceful shutdown: send a GOAWAY that still allows all streams, and a PING.

        Streams that the client opened before it read the GOAWAY are served (RFC 9113 6.8).
        """
        self._go_away(_LAST_POSSIBLE_STREAM, ErrorCodes.NO_ERROR)
        if not self.connection.is_closing():
            self._awaits_client = True
            self.connection._transport.write(PingFrame(0, opaque_data=ROUND_TRIP).serialize())

    def came_back(self) -> None:
        """Send the final GOAWAY: the client answered the PING, so all of its streams are known."""
        if self._awaits_client:
            self.leave()

    def leave(self) -> None:
        """Send the final GOAWAY; later streams are refused (RFC 9113 6.8, 8.7)."""
        if not self.leaves:
            self.leaves = True
            self._go_away(self._last_stream, ErrorCodes.NO_ERROR)
            self.ended()

    def ended(self) -> None:
        """Close the connection if the final GOAWAY was sent and no stream is open."""
        if self.leaves and not self.processor.streams and not self.connection.is_closing():
            self.connection._transport.close()

    def end(self) -> None:
        """Send a GOAWAY that names the last stream, then close."""
        self._end(ErrorCodes.NO_ERROR)

    def abort(self) -> None:
        """Close the connection immediately, discarding unsent bytes."""
        self.connection._transport.abort()

    @property
    def _last_stream(self) -> int:
        return self.connection._connection.highest_inbound_stream_id

    def _end(self, code: ErrorCodes, reason: bytes = b"") -> None:
        if not self.connection.is_closing():
            self._go_away(self._last_stream, code, reason)
            self.connection._transport.close()

    def _go_away(self, last_stream_id: int, code: ErrorCodes, reason: bytes = b"") -> None:
        # Bypass h2, which would consider the connection closed after sending one GOAWAY.
        if not self.connection.is_closing():
            frame = GoAwayFrame(0, last_stream_id, code, additional_data=reason)
            self.connection._transport.write(frame.serialize())


class _Connection(Connection):
    """A grpclib connection whose streams limit the size of messages."""

    max_message_bytes = 0
    answer_seconds = 0.0
    account: Account

    def create_stream(self, *, stream_id: int | None = None, wrapper: Any = None) -> Stream:
        h2, transport = self._connection, self._transport
        return _Stream(self, h2, transport, stream_id=stream_id, wrapper=wrapper)


class _Stream(Stream):
    """Rejects an oversized message from its length prefix, before reading its bytes."""

    connection: _Connection
    waiting = False
    """Whether the method is waiting for the client's next message."""
    deadline: float | None = None
    """The client's deadline in event loop time, or None."""
    is_encoded = False
    """Whether the request has a `grpc-encoding` other than identity."""
    opened_ns = 0
    """Always 0: the arrival of headers is not recorded on h2."""

    _held = 0
    """Bytes reserved in the ledger for the last message read."""
    _at_prefix = True
    """Whether the next read is a length prefix: grpclib alternates prefix and message."""
    _charged = 0
    """Bytes reserved in the ledger for the stream, released at its end."""
    _expecting: asyncio.TimerHandle | None = None
    """While a response is sent: the timer that checks whether the client reads it."""

    @property
    def account(self) -> Account:
        """Return the connection's account in the memory ledger."""
        return self.connection.account

    def keep(self) -> int:
        """Return the bytes reserved for the last message; the caller now has to release them."""
        kept, self._held = self._held, 0
        return kept

    def reserve(self, count: int) -> bool:
        """Reserve bytes for a message; false if there is no memory for them."""
        if not self.connection.account.reserve(count):
            return False
        self._charged += count
        return True

    def release(self, count: int) -> None:
        """Release bytes reserved in the ledger."""
        self._charged -= count
        self.connection.account.release(count)

    def send_now(self, message: bytes) -> bool:
        """Return false: on h2 every message is sent through `send_data`."""
        return False

    def release_all(self) -> None:
        """Release all bytes of the stream, at its end."""
        self.release(self._charged)

    async def recv_data(self, size: int) -> bytes:
        limit = self.connection.max_message_bytes
        if size > limit:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"the message has {size} bytes, the limit is {limit} (max_message_bytes)",
            )
        self.release(self.keep())
        if not self.reserve(size):
            raise GRPCError(*PROBLEMS[Problem.NO_MEMORY])
        self._held = size
        self.waiting = True
        try:
            data: bytes = await super().recv_data(size)
        except AssertionError:  # grpclib's buffer raises it if the stream ends within a message
            raise GRPCError(*PROBLEMS[Problem.TRUNCATED]) from None
        finally:
            self.waiting = False
        self._at_prefix = not self._at_prefix
        if size and not data and self._at_prefix:
            raise GRPCError(*PROBLEMS[Problem.TRUNCATED])
        if data and not self._at_prefix and data[0]:
            compressed = _COMPRESSED if self.is_encoded else _UNNAMED
            raise GRPCError(*(compressed if data[0] == 1 else PROBLEMS[Problem.FLAG]))
        return data

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        account = self.connection.account
        if not account.reserve(len(data), Kind.ANSWERS):
            raise account.refusal("the answer", len(data))
        self._expect_progress()
        try:
            await super().send_data(data, end_stream)
        finally:
            account.release(len(data), Kind.ANSWERS)
            assert self._expecting is not None
            self._expecting.cancel()

    def _expect_progress(self, sent: int = -1) -> None:
        """Abort the connection if the stream has sent nothing beyond `sent` bytes; else rearm."""
        if self.data_sent == sent:
            self._transport.abort()
            return
        loop, seconds = asyncio.get_running_loop(), self.connection.answer_seconds
        self._expecting = loop.call_later(
            seconds, self._expect_progress, self.data_sent, context=outside_call()
        )
