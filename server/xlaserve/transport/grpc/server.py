"""grpclib's server, bounded: message size, connections, malformed headers, a graceful end."""

import asyncio
import re
import socket
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from grpclib import GRPCError
from grpclib._typing import IServable
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.protocol import Connection, EventsProcessor, H2Protocol, Stream
from grpclib.server import Handler, Server, request_handler
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from xlaserve.transport.grpc.identifiers import split_binary_lists

Headers: TypeAlias = list[tuple[str, str]]

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_SECONDS = MappingProxyType({"H": 3600, "M": 60, "S": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9})
_SHORT_SECONDS = 0.05
"""A shorter time may be over before grpclib begins to watch it, which it then calls UNKNOWN."""
_NO_SECONDS = 1e-3
"""A time that is over before anything can be done."""
_LAST_POSSIBLE_STREAM = 2**31 - 1
_ARRIVAL_SECONDS = 1.0
"""How long a drain waits for the messages of requests that have begun."""
_LOOK_SECONDS = 0.05


class GrpcServer(Server):
    """grpclib's server over h2 with the limits that grpclib leaves out."""

    def __init__(
        self,
        services: Collection[IServable],
        *,
        codec: CodecBase,
        max_message_bytes: int,
        max_connections: int,
        max_streams: int,
    ) -> None:
        super().__init__(services, codec=codec)
        # Every byte is a character of it: in ASCII one odd header would end the whole connection.
        self._h2_config.header_encoding = "latin-1"
        self._max_message_bytes = max_message_bytes
        self._max_connections = max_connections
        self._max_streams = max_streams
        self._connections: set[_Protocol] = set()
        self._further: list[asyncio.AbstractServer] = []

    async def listen(self, listening: socket.socket) -> None:
        """Serve on a socket that is bound and listens; may be called for more than one."""
        if self._server is None:
            await self.start(sock=listening)
            return
        factory = self._protocol_factory
        self._further.append(await self._loop.create_server(factory, sock=listening))

    def _protocol_factory(self) -> H2Protocol:
        handler = _Handler(
            self._mapping, self._codec, self._status_details_codec, self.__dispatch__
        )
        self._handlers.add(handler)
        return _Protocol(self, handler)

    # --- the life of a connection, told by its protocol ---

    def _admit(self, protocol: "_Protocol") -> bool:
        if len(self._connections) >= self._max_connections:
            return False
        self._connections.add(protocol)
        return True

    def _lost(self, protocol: "_Protocol", handler: "_Handler") -> None:
        self._connections.discard(protocol)
        self._handlers.discard(handler)

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._connections)

    @property
    def limits(self) -> tuple[int, int]:
        """Return the most bytes of a message and the most streams of a connection."""
        return self._max_message_bytes, self._max_streams

    async def drain(self, grace_seconds: float) -> None:
        """Take no more connections, tell clients to go, and end when requests have ended.

        RFC 9113, 6.8: the first GOAWAY names no stream, so that requests on their way are still
        served; the last one comes with the close. Requests that take longer than
        `grace_seconds` are cut off, and those that only wait for their client to send something
        when all others have ended.
        """
        if self._server is None:
            return  # nothing listens: there is HTTP alone
        for listening in (self._server, *self._further):
            if listening is not None:
                listening.close()
        for protocol in self._connections:
            protocol.announce_end()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._idle()
        for protocol in tuple(self._connections):
            protocol.end()
        self.close()
        await self.wait_closed()

    async def _idle(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ARRIVAL_SECONDS):
                for protocol in tuple(self._connections):
                    await protocol.idle()
        for protocol in tuple(self._connections):
            await protocol.idle(but_waiting=True)


class _Protocol(H2Protocol):
    """One connection."""

    def __init__(self, server: GrpcServer, handler: "_Handler") -> None:
        super().__init__(handler, server._config, server._h2_config)
        self._server = server
        self._own_handler = handler
        self._admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        h2 = H2Connection(config=self.h2_config)
        h2.initiate_connection()
        window = self.config.http2_connection_window_size
        h2.increment_flow_control_window(window - h2.local_settings.initial_window_size)
        max_message_bytes, max_streams = self._server.limits
        h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: self.config.http2_stream_window_size,
                SettingCodes.MAX_CONCURRENT_STREAMS: max_streams,
            }
        )
        connection = _Connection(h2, cast("asyncio.Transport", transport), config=self.config)
        connection.max_message_bytes = max_message_bytes
        self.connection = connection
        self.connection.flush()
        self.connection.initialize()
        self.processor = EventsProcessor(self.handler, self.connection)
        self._admitted = self._server._admit(self)
        if not self._admitted:
            self.end(ErrorCodes.ENHANCE_YOUR_CALM)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._server._lost(self, self._own_handler)

    async def idle(self, *, but_waiting: bool = False) -> None:
        await self._own_handler.idle(but_waiting=but_waiting)

    def announce_end(self) -> None:
        self._go_away(_LAST_POSSIBLE_STREAM, ErrorCodes.NO_ERROR)

    def end(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
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


class _Handler(Handler):
    """Runs the requests of one connection, after a look at their headers."""

    def accept(
        self, stream: Stream, headers: Sequence[tuple[str, str]], release_stream: Callable[[], None]
    ) -> None:
        # A request that is cancelled before its task first runs never comes to release its stream,
        # and with it what the client may send on the connection.
        release = ExitStack()
        release.callback(release_stream)
        task = self.loop.create_task(self._handle(stream, list(headers), release.close))
        self._tasks[stream] = task

        def done(_: object) -> None:
            self._tasks.pop(stream, None)
            release.close()

        task.add_done_callback(done)

    def cancel(self, stream: Stream) -> None:
        task = self._tasks.pop(stream, None)
        if task is not None:
            task.cancel()
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)

    async def idle(self, *, but_waiting: bool) -> None:
        """Return when every request has ended, or waits for its client where that is enough."""
        while tasks := self._cancelled | {
            task for stream, task in self._tasks.items() if not (but_waiting and _waits(stream))
        }:
            # One that begins to wait does not end.
            await asyncio.wait(tasks, timeout=_LOOK_SECONDS if but_waiting else None)

    async def _handle(
        self, stream: Stream, headers: Headers, release_stream: Callable[[], None]
    ) -> None:
        refusal = _refusal(headers)
        if refusal is not None:
            try:
                await _refuse(stream, *refusal)
            finally:
                release_stream()
            return
        with self._short_deadline(stream, headers) as left:
            await request_handler(
                self.mapping,
                stream,
                split_binary_lists(left),
                self.codec,
                self.status_details_codec,
                self.dispatch,
                release_stream,
            )

    @contextmanager
    def _short_deadline(self, stream: Stream, headers: Headers) -> Iterator[Headers]:
        """Watch the time of a request if it is short; return the headers that are left then."""
        seconds = _timeout_seconds(headers)
        if seconds is None or seconds >= _SHORT_SECONDS:
            yield headers
            return
        timer = self.loop.call_later(seconds, _end, stream)
        try:
            yield [(name, value) for name, value in headers if name != "grpc-timeout"]
        finally:
            timer.cancel()


def _waits(stream: Stream) -> bool:
    return isinstance(stream, _Stream) and stream.waiting


def _end(stream: Stream) -> None:
    if stream.wrapper is not None:
        stream.wrapper.cancel(TimeoutError("Deadline exceeded"))


def _refusal(headers: Headers) -> tuple[Status, str] | None:
    problem = header_problem(headers)
    if problem is not None:
        return Status.INVALID_ARGUMENT, problem
    seconds = _timeout_seconds(headers)
    if seconds is not None and seconds < _NO_SECONDS:
        return Status.DEADLINE_EXCEEDED, "the time for the request was over at once"
    return None


async def _refuse(stream: Stream, status: Status, problem: str) -> None:
    await stream.send_headers(
        [
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("grpc-status", str(status.value)),
            ("grpc-message", problem),
        ],
        end_stream=True,
    )
    if stream.closable:
        stream.reset_nowait()


def header_problem(headers: Headers) -> str | None:
    """Say what is wrong with request headers on which grpclib would fall silent."""
    names = {name for name, _ in headers}
    for name in (":method", ":path"):
        if name not in names:
            return f"the {name} header is missing"
    for name, value in headers:
        if name == "grpc-timeout" and not _TIMEOUT.fullmatch(value):
            return "the grpc-timeout header is not 1 to 8 digits and a unit"
        if name.endswith("-bin") and not all(map(_is_base64, value.split(","))):
            return "a header that ends in -bin is not base64"
    return None


def _timeout_seconds(headers: Headers) -> float | None:
    """Return how long a request may take, the shortest where it says so more than once."""
    times = (_TIMEOUT.fullmatch(value) for name, value in headers if name == "grpc-timeout")
    return min((int(m[1]) * _SECONDS[m[2]] for m in times if m), default=None)


def _is_base64(value: str) -> bool:
    text = value.strip()
    try:
        b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (Base64Error, ValueError):
        return False
    return True
