"""Parses received bytes into frames and dispatches them (RFC 9113 4)."""

from collections.abc import Callable

from xlaserve.grpc.http2.control_frames import ControlFrames
from xlaserve.grpc.http2.data_frames import RUN_BYTES, DataFrames, padding_of
from xlaserve.grpc.http2.errors import ConnectionFailure, StreamFailure
from xlaserve.grpc.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    MAX_STREAM_ID,
    PADDED,
    PREFACE,
    SETTINGS,
    SMALLEST_MAX_FRAME,
    ErrorCode,
)
from xlaserve.grpc.http2.header_frames import HeaderFrames
from xlaserve.grpc.http2.headers import HARD_FACTOR
from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.http2.messages import UnaryReader
from xlaserve.grpc.http2.streams import Streams

RECEIVE_BYTES = 1 << 18
"""Maximum bytes per read from a socket."""
TURN_SECONDS = 0.003
"""Time for which a connection handles frames before it yields to others. The clock is checked only
now and then, so a turn can overrun, by the work between two checks or one long header block; it
never takes more than 5 ms."""
_LONG_BLOCK_SECONDS = 0.002
"""A header block longer than _LONG_BLOCK_BYTES is left to the next turn if less time than this
remains: decoding 64 KB of rare Huffman symbols takes nearly as long."""
_LONG_BLOCK_BYTES = SMALLEST_MAX_FRAME

_WORK_BETWEEN_LOOKS = 64
"""Units of work between two checks of the clock: four requests, each executed immediately."""
_WORK_OF_A_REQUEST = 16
_BYTES_OF_WORK = 16
"""Bytes of a header or control frame that count as one unit of work."""
_MAX_CONTROL_BYTES = SMALLEST_MAX_FRAME
"""Maximum length of a control frame. RFC 9113 4.2 allows longer ones, but nobody needs them."""
_DIRECT_BYTES = 1 << 14
"""If at least this much of a DATA frame is missing, it is received directly into the buffer of its
message."""
_LEFT_BYTES = 1 << 14
"""An incomplete DATA frame up to this length, within a message, is handled only once it is
complete: that is faster than copying it in parts."""

_UNKNOWN = 0
_CONTROL: tuple[Callable[[ControlFrames, int, int, memoryview], None], ...] = (
    ControlFrames.unknown,
    ControlFrames.unknown,
    ControlFrames.priority,
    ControlFrames.rst_stream,
    ControlFrames.settings,
    ControlFrames.push_promise,
    ControlFrames.ping,
    ControlFrames.goaway,
    ControlFrames.window_update,
)
"""Handlers indexed by frame type (RFC 9113 6); DATA and HEADERS are handled elsewhere."""


class ReceiveBuffer:
    """The receive buffer shared by an event loop's connections.

    Sharing is safe because each connection parses its bytes, or copies them, before the next read.
    """

    def __init__(self) -> None:
        # Twice the size of a read: the start of an incomplete frame is copied in front of it.
        self.octets = bytearray(2 * RECEIVE_BYTES)
        self.view = memoryview(self.octets)


class FrameReader:
    """Splits received bytes into frames and passes each to its handler.

    An incomplete frame is kept in `_left`, except for DATA: its payload is delivered in chunks
    and, once the message has a buffer, received directly into that (zero-copy).
    """

    def __init__(
        self,
        limits: Http2Limits,
        buffer: ReceiveBuffer,
        streams: Streams,
        frames: tuple[DataFrames, HeaderFrames, ControlFrames],
        now: Callable[[], float],
    ) -> None:
        self._max_work = limits.max_work
        self._max_frame = limits.max_frame_bytes
        self._max_block = limits.max_header_bytes * HARD_FACTOR
        self._buffer = buffer
        self._streams = streams
        self._data, self._headers, self._control = frames
        self._now = now
        self._left = b""
        """Received bytes not parsed yet: part of an incomplete frame, or left over from a turn."""
        self._have = 0
        """Length of `_left` as copied to the buffer, in front of the space returned last."""
        self._lent = 0
        """Length of the space returned last."""
        self._until = 0.0
        """Time at which the current turn ends; 0 between turns."""
        self._greeted = False
        """Whether the client's preface was received."""
        self._payload_left = 0
        """Missing payload bytes of the current DATA frame, without padding."""
        self._skip = 0
        """Number of bytes to drop: padding, and frames of unknown type."""
        self._direct = False
        """Whether the next bytes are received directly into the message of `Streams.partial`."""

    # --- interface for the asyncio protocol ---

    def space(self) -> memoryview:
        """Return the buffer for the next read.

        May be called several times without a `received` in between: over TLS an event loop asks
        for the buffer whenever bytes arrive, and reports them only when a record is complete.
        """
        if self._direct:
            stream = self._streams.partial
            space = stream.reader.space() if stream is not None else None  # type: ignore[union-attr]
            if space is not None:
                self._lent = self._payload_left
                return space[: self._payload_left]
            self._direct = False
        self._lent = RECEIVE_BYTES
        left = self._left
        if left:
            # Keep `_left`: other connections may overwrite the buffer before `received`.
            self._have = len(left)
            self._buffer.view[: self._have] = left
            return self._buffer.view[self._have : self._have + RECEIVE_BYTES]
        self._have = 0
        return self._buffer.view[:RECEIVE_BYTES]

    def received(self, count: int) -> bool:
        """Parse `count` bytes of the space; false if the turn is over and others should run first.

        Bytes may then be left to parse. If a read fills the space, uvloop reads up to 32 times
        before it serves other sockets; these reads share one turn.
        """
        if not self._until:
            self._until = self._now() + TURN_SECONDS
        done = True
        if self._direct:
            self._received_directly(count)
        else:
            done = self._parse(self._have + count)
        if done and count == self._lent and self._now() < self._until:
            return True
        self._until = 0.0
        return done and count < self._lent

    def discard(self) -> None:
        """Drop the incomplete frame: the connection ends."""
        self._left = b""

    # --- parser loop ---

    def _parse(self, end: int) -> bool:
        octets, view = self._buffer.octets, self._buffer.view
        position = 0 if self._greeted else self._preface(end)
        if not self._greeted:
            self._left = bytes(view[:end])
            return True
        begun = position
        streams = self._streams.open
        data, headers, control = self._data, self._headers, self._control
        max_frame = self._max_frame
        until = self._until
        work_left = self._max_work
        work = min(work_left, _WORK_BETWEEN_LOOKS)
        while True:
            if self._payload_left or self._skip:
                position = self._rest_of_frame(view, position, end)
                if self._payload_left or self._skip:
                    break
            if end - position < HEADER_BYTES:
                break
            high, low, kind, flags, stream_id = HEADER.unpack_from(octets, position)
            length = high << 8 | low
            stream_id &= MAX_STREAM_ID  # RFC 9113 4.1: the reserved bit is ignored
            start = position + HEADER_BYTES
            stop = start + length
            if length > max_frame:  # RFC 9113 4.2
                raise ConnectionFailure(
                    ErrorCode.FRAME_SIZE_ERROR,
                    f"expected frames of at most {max_frame} bytes, got {length}",
                )
            if not control.settled and (kind != SETTINGS or flags & ACK):  # RFC 9113 3.4
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")
            if headers.open_block and (
                kind != CONTINUATION or stream_id != headers.open_block
            ):  # RFC 9113 4.3, 6.10
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "expected CONTINUATION")
            if kind == DATA:
                stream = streams.get(stream_id)
                if (
                    stream is not None
                    and stop <= end
                    and flags <= END_STREAM
                    and (
                        (stream.fresh and data.whole_message(stream, view, start, stop, flags))
                        or (start == stop and flags and data.empty_end(stream))
                        or (not flags and data.next_message(stream, view, start, stop))
                    )
                ):
                    position = stop
                elif flags & PADDED and length and start == end:
                    break  # wait for the byte with the padding length
                elif (
                    stop > end
                    and length <= _LEFT_BYTES
                    and stream is not None
                    and isinstance(stream.reader, UnaryReader)
                ):
                    break
                else:
                    following = 0
                    if stream is not None and not flags and RUN_BYTES <= length <= end - start:
                        following = data.run(stream, octets, view, (start, stop, end))
                    position = following or self._data_frame(
                        flags, stream_id, view, (start, stop, end)
                    )
            else:
                if stop > end or length > SMALLEST_MAX_FRAME:
                    if self._skips(kind, length):
                        self._skip = length
                        position = start
                        continue
                    if stop > end:
                        break
                if (
                    (length > _LONG_BLOCK_BYTES or kind == CONTINUATION)
                    and position > begun
                    and self._waits(length)
                ):
                    self._left = bytes(view[position:end])
                    return False
                position = stop
                try:
                    if kind == HEADERS:
                        work -= _WORK_OF_A_REQUEST + length // _BYTES_OF_WORK
                        if flags != END_HEADERS or not headers.open_next(
                            stream_id, view[start:stop].tobytes()
                        ):
                            headers.headers(flags, stream_id, view[start:stop])
                    else:
                        work -= length // _BYTES_OF_WORK
                        if kind == CONTINUATION:
                            headers.continuation(flags, stream_id, view[start:stop])
                        else:
                            handle = _CONTROL[kind if kind < CONTINUATION else _UNKNOWN]
                            handle(control, flags, stream_id, view[start:stop])
                except StreamFailure as failure:
                    self._streams.fail(failure)
            work -= 1
            if work <= 0 and position < end:
                work_left += work - min(work_left, _WORK_BETWEEN_LOOKS)
                if work_left <= 0 or self._now() >= until:
                    self._left = bytes(view[position:end])
                    return False
                work = min(work_left, _WORK_BETWEEN_LOOKS)
        self._left = bytes(view[position:end]) if position < end else b""
        return True

    def _preface(self, end: int) -> int:
        length = min(end, len(PREFACE))
        if self._buffer.octets[:length] != PREFACE[:length]:  # RFC 9113 3.4
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "expected the HTTP/2 preface")
        if length < len(PREFACE):
            return 0
        self._greeted = True
        return length

    def _skips(self, kind: int, length: int) -> bool:
        """Tell whether to skip a long or incomplete frame; raise if it is too long to buffer.

        Complete frames get the same check, so that the limit does not depend on how the bytes
        happen to be split into reads.
        """
        if kind > CONTINUATION:
            self._control.unknown(0, 0, self._buffer.view[:0])
            return True
        longest = self._max_block if kind in {HEADERS, CONTINUATION} else _MAX_CONTROL_BYTES
        if length > min(longest, RECEIVE_BYTES // 2):  # RFC 9113 10.5, 10.5.1
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, f"a frame of type {kind} is too long: {length} bytes"
            )
        return False

    def _waits(self, length: int) -> bool:
        """Tell whether a header block, with `length` more bytes, is left to the next turn."""
        return (
            self._headers.block_bytes + length > _LONG_BLOCK_BYTES
            and self._now() >= self._until - _LONG_BLOCK_SECONDS
        )

    # --- DATA frames, complete or not ---

    def _data_frame(
        self, flags: int, stream_id: int, view: memoryview, frame: tuple[int, int, int]
    ) -> int:
        """Handle a DATA frame that may be incomplete; return the position to continue at."""
        start, stop, end = frame
        length = stop - start
        padding = padding_of(length, view, start) if flags & PADDED else 0
        ends = bool(flags & END_STREAM)
        stream = self._data.accept(flags, stream_id, length, padding)
        payload = length - padding
        start += bool(padding)
        if stop <= end:
            if stream is not None:
                if payload:
                    self._data.deliver(stream, view[start : start + payload], 0)
                if ends:
                    stream.end_request()
            return stop
        self._streams.partial, self._payload_left = stream, payload
        if stream is not None:
            stream.arriving = ends
        self._skip = padding - 1 if padding else 0
        if not payload:
            self._payload_ended()
        return start

    def _rest_of_frame(self, view: memoryview, position: int, end: int) -> int:
        if self._payload_left:
            count = min(end - position, self._payload_left)
            stream = self._streams.partial
            self._payload_left -= count
            if stream is not None and count:
                self._data.deliver(stream, view[position : position + count], self._payload_left)
            position += count
            if self._payload_left:
                self._direct = self._may_receive_directly()
                return position
            self._payload_ended()
        count = min(end - position, self._skip)
        self._skip -= count
        return position + count

    def _payload_ended(self) -> None:
        stream, self._streams.partial = self._streams.partial, None
        if stream is not None and stream.arriving:
            stream.arriving = False
            stream.end_request()

    def _may_receive_directly(self) -> bool:
        stream = self._streams.partial
        if stream is None or self._payload_left < _DIRECT_BYTES:
            return False
        reader = stream.reader
        if not isinstance(reader, UnaryReader):
            return False
        # If the frame is longer than the rest of the message, the reader has to check it.
        space = reader.space()
        return space is not None and len(space) >= self._payload_left

    def _received_directly(self, count: int) -> None:
        self._payload_left -= count
        stream = self._streams.partial
        if stream is None:
            self._direct = False  # the stream was closed in the meantime
        else:
            reader: UnaryReader = stream.reader  # type: ignore[assignment]
            reader.filled += count
        if not self._payload_left:
            self._direct = False
            self._payload_ended()
