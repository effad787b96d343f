"""A minimal gRPC client that repeats one unary request.

With a general-purpose client, the client would be the bottleneck. This one only reads the status of
each answer and the size of its message (gRPC over HTTP/2; RFC 9113).
"""

import asyncio
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from grpclib.const import Status
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError

from xlaserve.bench.errors import ServerUnreachable
from xlaserve.bench.load import OK, Load
from xlaserve.grpc.http2 import frames
from xlaserve.grpc.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEADER_BYTES,
    NUMBER,
    PADDED,
    SETTING,
    SETTINGS_ACK,
    Setting,
    frame_header,
)

_RENEW_BYTES = 1 << 24
"""Number of received bytes after which a WINDOW_UPDATE is sent for the connection."""
_LARGEST_FRAME = 1 << 20
"""Maximum length of frames sent, even if the server allows longer ones."""
_MAX_INPUT = 1 << 20
"""Maximum length of received frames and header blocks; anything longer is an error."""
_KNOWN_BLOCKS = 256
"""Maximum number of header blocks whose status is cached, since answers often repeat them."""
_PREFIX_BYTES = 5
"""Length of the prefix of a gRPC message."""


@dataclass(frozen=True, slots=True)
class GrpcRequest:
    """A serialized unary call."""

    authority: str
    path: str
    message: bytes
    """The serialized message, without gRPC's length prefix."""
    scheme: str = "http"
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers that authenticate the caller."""

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Return the headers of the call (gRPC over HTTP/2, Requests)."""
        return [
            (":method", "POST"),
            (":scheme", self.scheme),
            (":path", self.path),
            (":authority", self.authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *self.credentials.items(),
        ]


@dataclass(slots=True)
class _Stream:
    started: float
    window: int
    """The stream's send window in bytes."""
    sent: int = 0
    received: int = 0
    status: str = "no status"


class GrpcConnection(asyncio.Protocol):
    """One connection; the future `ready` is done when the server's SETTINGS have arrived."""

    def __init__(self, url: str, request: GrpcRequest, load: Load) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.max_streams = frames.MAX_STREAM_ID
        """Maximum number of concurrent streams that the server allows."""
        self._url, self._load = url, load
        self._headers = request.headers
        self._body = memoryview(b"\0" + NUMBER.pack(len(request.message)) + request.message)
        self._streams: dict[int, _Stream] = {}
        self._unsent: dict[int, _Stream] = {}
        """Calls whose message is not completely sent because of the server's flow control."""
        self._next_stream = 1
        self._window = self._stream_window = frames.DEFAULT_WINDOW
        self._frame_bytes = frames.SMALLEST_MAX_FRAME
        self._encoder, self._decoder = Encoder(), Decoder()
        self._encoded = b""
        self._statuses: dict[bytes, str | None] = {}
        self._block: tuple[int, bytes] = (0, b"")
        """Flags and start of an incomplete header block, which CONTINUATION frames complete."""
        self._input = bytearray()
        self._output: list[bytes | memoryview] = []
        self._unrenewed = 0
        self._reading = False
        self._transport: asyncio.Transport | None = None

    # --- interface for `Load` ---

    def request(self) -> None:
        """Send the request on a new stream."""
        number, self._next_stream = self._next_stream, self._next_stream + 2
        stream = _Stream(self._load.clock(), self._stream_window)
        if self._transport is None or number > frames.MAX_STREAM_ID:
            self._load.lost(stream.started, "connection closed")
            return
        self._streams[number] = stream
        block = self._header_block()
        self._output += (frame_header(len(block), frames.HEADERS, END_HEADERS, number), block)
        self._send_message(number, stream)
        if not self._reading:
            self._flush()

    def close(self) -> None:
        """Close the connection without reporting the requests in flight to the load."""
        self._streams.clear()
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- interface for asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and SETTINGS.

        The dynamic table is disabled, so that equal answers have equal header blocks.
        """
        self._transport = cast("asyncio.Transport", transport)
        wanted = {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        }
        self._output += (
            frames.PREFACE,
            frames.settings(wanted),
            frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW),
        )
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report all requests in flight to the load as lost."""
        self._fail("connection closed")

    def data_received(self, data: bytes) -> None:
        """Handle all complete frames, then write all replies together."""
        self._input += data
        self._reading = True
        try:
            self._read_frames()
        except (ValueError, IndexError, struct.error, HPACKError) as error:
            self._fail(f"not HTTP/2: {error}")
        finally:
            self._reading = False
        self._flush()

    # --- receiving ---

    def _read_frames(self) -> None:
        data, position = self._input, 0
        while len(data) - position >= HEADER_BYTES:
            kind, flags = data[position + 3], data[position + 4]
            size = data[position] << 16 | data[position + 1] << 8 | data[position + 2]
            if not self.ready.done() and kind != frames.SETTINGS:
                raise ValueError("the first frame is not SETTINGS")
            if size > _MAX_INPUT:
                raise ValueError(f"expected frames of at most {_MAX_INPUT} bytes, got {size}")
            start = position + HEADER_BYTES
            if start + size > len(data):
                break
            number = NUMBER.unpack_from(data, position + 5)[0] & frames.MAX_STREAM_ID
            position = start + size
            if kind == frames.DATA:
                self._data(flags, number, size)
            elif (read := _READERS.get(kind)) is not None:
                read(self, flags, number, bytes(data[start:position]))
        del data[:position]

    def _data(self, flags: int, number: int, size: int) -> None:
        self._unrenewed += size
        if self._unrenewed > _RENEW_BYTES:
            self._output.append(frames.window_update(0, self._unrenewed))
            self._unrenewed = 0
        stream = self._streams.get(number)
        if stream is not None:
            stream.received += size
            if flags & END_STREAM:
                self._answered(number, stream)

    def _header_frame(self, flags: int, number: int, payload: bytes) -> None:
        self._block = (flags, _unpadded(flags, payload))
        self._header_fragment(flags, number)

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        first, begun = self._block
        if len(begun) + len(payload) > _MAX_INPUT:
            raise ValueError("unterminated headers")
        self._block = (first, begun + payload)
        self._header_fragment(flags, number)

    def _header_fragment(self, flags: int, number: int) -> None:
        if not flags & END_HEADERS:
            return
        first, block = self._block
        # Decode the block even if the stream is unknown, to keep the decoder's table in sync.
        status = self._status_of(block)
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.status = status or stream.status
        if first & END_STREAM:
            self._answered(number, stream)

    def _status_of(self, block: bytes) -> str | None:
        if block in self._statuses:
            return self._statuses[block]
        table = self._decoder.header_table
        empty = not table.dynamic_entries
        headers = {_text(name): _text(value) for name, value in self._decoder.decode(block)}
        status = _status(headers)
        if empty and not table.dynamic_entries:
            if len(self._statuses) == _KNOWN_BLOCKS:
                self._statuses.clear()
            self._statuses[block] = status
        return status

    def _settings(self, flags: int, _: int, payload: bytes) -> None:
        if flags & ACK:
            return
        settings = dict(SETTING.iter_unpack(payload))
        self.max_streams = settings.get(Setting.MAX_CONCURRENT_STREAMS, self.max_streams)
        frame_bytes = settings.get(Setting.MAX_FRAME_SIZE, self._frame_bytes)
        self._frame_bytes = min(frame_bytes, _LARGEST_FRAME)
        window = settings.get(Setting.INITIAL_WINDOW_SIZE, self._stream_window)
        for stream in self._unsent.values():
            stream.window += window - self._stream_window
        self._stream_window = window
        if Setting.HEADER_TABLE_SIZE in settings:
            size = min(settings[Setting.HEADER_TABLE_SIZE], self._encoder.header_table_size)
            self._encoder.header_table_size, self._encoded = size, b""
        self._output.append(SETTINGS_ACK)
        if not self.ready.done():
            self.ready.set_result(None)
        self._send_more()

    def _ping(self, flags: int, _: int, payload: bytes) -> None:
        if not flags & ACK:
            self._output.append(frames.ping_ack(payload))

    def _reset(self, _: int, number: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.status = f"stream reset, code {NUMBER.unpack(payload)[0]}"
            self._answered(number, stream)

    def _going_away(self, _flags: int, _number: int, payload: bytes) -> None:
        self._fail(f"connection ended by the server, code {NUMBER.unpack_from(payload, 4)[0]}")

    def _widen(self, _: int, number: int, payload: bytes) -> None:
        more = NUMBER.unpack(payload)[0]
        if not number:
            self._window += more
        elif number in self._unsent:
            self._unsent[number].window += more
        self._send_more()

    def _answered(self, number: int, stream: _Stream) -> None:
        del self._streams[number]
        self._unsent.pop(number, None)
        if stream.status == OK and stream.received < _PREFIX_BYTES:
            stream.status = "no message"
        self._load.answered(self, stream.started, stream.status)

    def _fail(self, reason: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ServerUnreachable(self._url, reason))
        lost, self._streams = self._streams, {}
        self.close()
        for stream in lost.values():
            self._load.lost(stream.started, reason)

    # --- sending ---

    def _header_block(self) -> bytes:
        if self._encoded:
            return self._encoded
        known = len(self._encoder.header_table.dynamic_entries)
        block = self._encoder.encode(self._headers)
        if known == len(self._encoder.header_table.dynamic_entries):
            self._encoded = block
        return block

    def _send_more(self) -> None:
        for number, stream in list(self._unsent.items()):
            self._send_message(number, stream)

    def _send_message(self, number: int, stream: _Stream) -> None:
        body = self._body
        while stream.sent < len(body):
            size = min(len(body) - stream.sent, self._frame_bytes, self._window, stream.window)
            if size <= 0:
                self._unsent[number] = stream
                return
            end = stream.sent + size
            flags = END_STREAM if end == len(body) else 0
            self._output += (
                frame_header(size, frames.DATA, flags, number),
                body[stream.sent : end],
            )
            stream.sent = end
            stream.window -= size
            self._window -= size
        self._unsent.pop(number, None)

    def _flush(self) -> None:
        if self._output and self._transport is not None:
            self._transport.writelines(self._output)
        self._output = []


_READERS: Mapping[int, Callable[[GrpcConnection, int, int, bytes], None]] = {
    frames.HEADERS: GrpcConnection._header_frame,
    frames.CONTINUATION: GrpcConnection._continuation,
    frames.SETTINGS: GrpcConnection._settings,
    frames.PING: GrpcConnection._ping,
    frames.RST_STREAM: GrpcConnection._reset,
    frames.GOAWAY: GrpcConnection._going_away,
    frames.WINDOW_UPDATE: GrpcConnection._widen,
}
"""Frame type -> handler, called with flags, stream id and payload."""


def _unpadded(flags: int, payload: bytes) -> bytes:
    """Return the header block fragment of a HEADERS frame (RFC 9113 6.2)."""
    start = 0
    end = len(payload)
    if flags & PADDED:
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    return payload[start:end]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _status(headers: Mapping[str, str]) -> str | None:
    """Return the name of the status in headers or trailers; None if a status is still to come."""
    number = headers.get("grpc-status")
    if number is not None:
        known = number.isdigit() and int(number) in {status.value for status in Status}
        return Status(int(number)).name if known else f"grpc-status {number[:16]}"
    http = headers.get(":status", "200")
    return None if http == "200" else f"HTTP {http[:16]}"
