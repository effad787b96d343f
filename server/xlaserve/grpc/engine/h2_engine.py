"""grpclib's own connections over h2, bounded: the reference for our engine."""

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
    """The server, as its connections know it."""

    def admit(self, protocol: Any) -> bool:
        """Tell whether another connection is admitted."""
        ...

    def disconnected(self, protocol: Any) -> None:
        """Record the end of a connection."""
        ...


class CheckingHandler(RequestHandler):
    """Looks at the headers of a request first, as the router does with our own engine."""

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], None]) -> None:
        """Start a request, and release its resources when it ends."""

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
    """Return the answer to a client at the wrong port (gRPC over HTTP/2, Requests)."""
    if found[":method"] != "POST":
        return ((":status", "405"),)
    if not is_grpc(found.get("content-type")):
        return ((":status", "415"),)
    return None


class _H2(H2Connection):
    """An h2 that goes on to answer behind a client's GOAWAY, as RFC 9113 6.8 wants it."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.last_stream_id = frame.last_stream_id
        return [], [event]


class _Events(EventsProcessor):
    """The streams of a connection: the last ones are known once it leaves."""

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
            # RFC 9113 8.7: nothing was done, so that the client may ask another server.
            self.connection._connection.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
        else:
            super().process_request_received(event)

    def process_connection_terminated(self, event: ConnectionTerminated) -> None:
        """The client opens no more streams; those that it has opened are answered (6.8)."""
        self._owner.leave()

    def process_ping_ack_received(self, event: PingAckReceived) -> None:
        super().process_ping_ack_received(event)
        if event.ping_data == ROUND_TRIP:
            self._owner.came_back()


class H2Engine(H2Protocol):
    """One connection."""

    def __init__(
        self,
        owner: Owner,
        handler: RequestHandler,
        limits: Http2Limits,
        account: Account,
    ) -> None:
        self._account = account
        # Every byte is a character of Latin-1: in ASCII one odd header would end the connection.
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
        """Whether a GOAWAY was sent, and its PING is unanswered."""
        self.leaves = False
        """Whether the client knows which streams are the last ones."""

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
            h2.clear_outbound_data_buffer()  # no SETTINGS, as with our own engine
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
        """Return how many requests are in flight."""
        return len(self.processor.streams)

    async def idle(self, *, but_waiting: bool = False) -> None:
        """Return when every request has ended, or only waits for its client."""
        await self.requests.idle(but_waiting=but_waiting)

    def go_away(self) -> None:
        """Ask the client to open no more streams; those on their way are still served (6.8)."""
        self._go_away(_LAST_POSSIBLE_STREAM, ErrorCodes.NO_ERROR)
        if not self.connection.is_closing():
            self._awaits_client = True
            self.connection._transport.write(PingFrame(0, opaque_data=ROUND_TRIP).serialize())

    def came_back(self) -> None:
        """Leave: the client has answered the PING, so all of its streams are known."""
        if self._awaits_client:
            self.leave()

    def leave(self) -> None:
        """Tell the client which streams are the last ones; later ones are refused (6.8, 8.7)."""
        if not self.leaves:
            self.leaves = True
            self._go_away(self._last_stream, ErrorCodes.NO_ERROR)
            self.ended()

    def ended(self) -> None:
        """Close a leaving connection after its last stream."""
        if self.leaves and not self.processor.streams and not self.connection.is_closing():
            self.connection._transport.close()

    def end(self) -> None:
        """Say which streams were served, and close."""
        self._end(ErrorCodes.NO_ERROR)

    def abort(self) -> None:
        """Cut the connection off, unsent bytes included."""
        self.connection._transport.abort()

    @property
    def _last_stream(self) -> int:
        return self.connection._connection.highest_inbound_stream_id

    def _end(self, code: ErrorCodes, reason: bytes = b"") -> None:
        if not self.connection.is_closing():
            self._go_away(self._last_stream, code, reason)
            self.connection._transport.close()

    def _go_away(self, last_stream_id: int, code: ErrorCodes, reason: bytes = b"") -> None:
        # Past h2, which would end the connection with the first GOAWAY that it sends.
        if not self.connection.is_closing():
            frame = GoAwayFrame(0, last_stream_id, code, additional_data=reason)
            self.connection._transport.write(frame.serialize())


class _Connection(Connection):
    """A connection whose streams bound their messages."""

    max_message_bytes = 0
    answer_seconds = 0.0
    account: Account

    def create_stream(self, *, stream_id: int | None = None, wrapper: Any = None) -> Stream:
        h2, transport = self._connection, self._transport
        return _Stream(self, h2, transport, stream_id=stream_id, wrapper=wrapper)


class _Stream(Stream):
    """A stream that refuses a message by its length prefix, before it takes its bytes."""

    connection: _Connection
    waiting = False
    """Whether nothing is done about it until its client sends something."""
    deadline: float | None = None
    """The client's deadline by the clock of the event loop; None for none."""
    is_encoded = False
    """Whether its headers say that messages may be compressed."""
    opened_ns = 0
    """Its call begins with its headers."""

    _held = 0
    """Bytes that count for the message which was read last."""
    _at_prefix = True
    """Whether a prefix is read next: grpclib reads prefix and message in turns."""
    _charged = 0
    """Bytes that count for the stream until it ends."""
    _expecting: asyncio.TimerHandle | None = None
    """While it sends: looks whether the client reads."""

    @property
    def account(self) -> Account:
        """Return the account of its connection."""
        return self.connection.account

    def keep(self) -> int:
        """Return the charge of the last message, and keep it."""
        kept, self._held = self._held, 0
        return kept

    def reserve(self, count: int) -> bool:
        """Reserve bytes of a message; false without memory."""
        if not self.connection.account.reserve(count):
            return False
        self._charged += count
        return True

    def release(self, count: int) -> None:
        """Count bytes no more."""
        self._charged -= count
        self.connection.account.release(count)

    def send_now(self, message: bytes) -> bool:
        """Return false: grpclib sends every message."""
        return False

    def release_all(self) -> None:
        """Release all bytes: it has ended."""
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
        except AssertionError:  # of grpclib's buffer, and nobody's fault here
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
        """Cut the connection off if no more than `sent` bytes of the stream have left in time."""
        if self.data_sent == sent:
            self._transport.abort()
            return
        loop, seconds = asyncio.get_running_loop(), self.connection.answer_seconds
        self._expecting = loop.call_later(
            seconds, self._expect_progress, self.data_sent, context=outside_call()
        )
