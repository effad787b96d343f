"""grpclib's own connections over h2, bounded: the reference for our engine."""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol, cast

from grpclib import GRPCError
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.protocol import Connection, EventsProcessor, H2Protocol, Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from xlaserve.transport.grpc.handler import RequestHandler
from xlaserve.transport.grpc.request_headers import (
    NOT_FOUND,
    Headers,
    malformed,
    refusal,
    refusal_headers,
)
from xlaserve.transport.grpc.routes import CONTENT_TYPES
from xlaserve.transport.http2.limits import Http2Limits

_LAST_POSSIBLE_STREAM = 2**31 - 1


class Owner(Protocol):
    """The server, as its connections know it."""

    def admit(self, protocol: Any) -> bool:
        """Tell whether there may be one more connection."""
        ...

    def disconnected(self, protocol: Any) -> None:
        """Take note that a connection is gone."""
        ...


class CheckingHandler(RequestHandler):
    """Looks at the headers of a request first, as the router does with our own engine."""

    async def _handle(self, stream: Stream, headers: Headers) -> None:
        if malformed(headers):
            stream.reset_nowait(ErrorCodes.PROTOCOL_ERROR)
            return
        found = dict(headers)
        answer = _not_grpc(found) or self._refused(found[":path"], headers)
        if answer is None:
            await super()._handle(stream, headers)
            return
        await stream.send_headers([*answer], end_stream=True)
        if stream.closable:
            stream.reset_nowait()

    def _refused(self, path: str, headers: Headers) -> Headers | None:
        refused = refusal(headers)
        if refused is None and path not in self._runner.methods:
            refused = NOT_FOUND
        return refused and refusal_headers(*refused)


def _not_grpc(found: Mapping[str, str]) -> Headers | None:
    """Return the answer to who is at the wrong port (gRPC over HTTP/2, Requests)."""
    if found[":method"] != "POST":
        return ((":status", "405"),)
    if found.get("content-type") not in CONTENT_TYPES:
        return ((":status", "415"),)
    return None


class H2Engine(H2Protocol):
    """One connection."""

    def __init__(
        self,
        owner: Owner,
        handler: RequestHandler,
        limits: Http2Limits,
    ) -> None:
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        h2 = H2Connection(config=self.h2_config)
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
        self.connection = connection
        self.connection.flush()
        self.connection.initialize()
        self.processor = EventsProcessor(self.handler, self.connection)
        self.requests.connected(transport)
        self._admitted = self._owner.admit(self)
        if not self._admitted:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._owner.disconnected(self)

    @property
    def open_streams(self) -> int:
        """Return how many requests are not over."""
        return len(self.processor.streams)

    async def idle(self, *, but_waiting: bool = False) -> None:
        """Return when every request has ended, or waits for its client where that is enough."""
        await self.requests.idle(but_waiting=but_waiting)

    def go_away(self) -> None:
        """Ask the client to open no more streams."""
        self._go_away(_LAST_POSSIBLE_STREAM, ErrorCodes.NO_ERROR)

    def end(self) -> None:
        """Say which streams were served, and close."""
        self._end(ErrorCodes.NO_ERROR)

    def abort(self) -> None:
        """Cut the connection off, whatever is still to be written."""
        self.connection._transport.abort()

    def _end(self, code: ErrorCodes) -> None:
        if not self.connection.is_closing():
            last = self.connection._connection.highest_inbound_stream_id
            self._go_away(last, code)
            self.connection._transport.close()

    def _go_away(self, last_stream_id: int, code: ErrorCodes) -> None:
        # Past h2, which would end the connection with the first GOAWAY that it sends.
        if not self.connection.is_closing():
            frame = GoAwayFrame(0, last_stream_id=last_stream_id, error_code=code)
            self.connection._transport.write(frame.serialize())


class _Connection(Connection):
    """A connection whose streams bound the messages that they receive."""

    max_message_bytes = 0

    def create_stream(self, *, stream_id: int | None = None, wrapper: Any = None) -> Stream:
        h2, transport = self._connection, self._transport
        return _Stream(self, h2, transport, stream_id=stream_id, wrapper=wrapper)


class _Stream(Stream):
    """A stream that refuses a message by its length prefix, before it takes its bytes."""

    connection: _Connection
    waiting = False
    """Whether nothing is done about it until its client sends something."""

    def keep(self) -> int:
        """Return 0: this engine has no ledger."""
        return 0

    def reserve(self, count: int) -> bool:
        """Let it have what it wants."""
        return True

    def release(self, count: int) -> None:
        """Count nothing."""

    async def recv_data(self, size: int) -> bytes:
        limit = self.connection.max_message_bytes
        if size > limit:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"the message has {size} bytes, the limit is {limit} (max_message_bytes)",
            )
        self.waiting = True
        try:
            return await super().recv_data(size)
        finally:
            self.waiting = False
