"""DATA frames: flow control, validation, reassembly into messages (RFC 9113 6.1)."""

from xlaserve.grpc.http2.errors import ConnectionFailure, StreamFailure
from xlaserve.grpc.http2.flow_control import ReceiveWindows
from xlaserve.grpc.http2.frames import (
    DATA,
    END_STREAM,
    HEADER,
    HEADER_BYTES,
    MAX_STREAM_ID,
    ErrorCode,
)
from xlaserve.grpc.http2.limits import Conduct, Http2Limits, Shared
from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES, Problem, StreamingReader, UnaryReader
from xlaserve.grpc.http2.states import Input, State
from xlaserve.grpc.http2.stream import ServerStream
from xlaserve.grpc.http2.streams import Streams

RUN_BYTES = 1 << 12
"""Minimum length of the frames that `DataFrames.run` handles. One read contains few frames this
long, so a whole run counts as one frame toward the work limit of a turn."""


class DataFrames:
    """Delivers the payload of DATA frames, complete or in chunks, to their streams' messages."""

    def __init__(
        self,
        limits: Http2Limits,
        shared: Shared,
        streams: Streams,
        windows: ReceiveWindows,
        conduct: Conduct,
    ) -> None:
        self._max_message_bytes = limits.max_message_bytes
        self._max_frame_bytes = limits.max_frame_bytes
        self._ledger = shared.ledger
        self._allocate = shared.memory.take
        self._streams = streams
        self._windows = windows
        self._conduct = conduct

    # Fast paths for the common shapes of requests. They skip checks that cannot fail in these
    # cases and never reject a frame: everything else goes through `accept` and `deliver`, which
    # give the same result.

    def whole_message(
        self, stream: ServerStream, view: memoryview, start: int, stop: int, flags: int
    ) -> bool:
        """Fast path: take a message that consists of one frame; false if not applicable."""
        size = stop - start
        expected = stream.head.content_length
        if (
            not PREFIX_BYTES <= size < stream.recv_window
            or (expected is not None and expected != size)
            or size - PREFIX_BYTES > self._max_message_bytes
            or self._ledger.is_pressed
        ):
            return False
        flag, length = PREFIX.unpack_from(view, start)
        if length != size - PREFIX_BYTES or flag > 1:
            return False
        windows = self._windows
        windows.left -= size
        if windows.left < windows.low:
            windows.widen()
        stream.message = view[start + PREFIX_BYTES : stop].tobytes()
        if flag:
            stream.compressed = True
        stream.fresh = False
        if flags:
            stream.advance(Input.DATA_END)
            stream.begun = True
            stream.head.route.begin(stream)  # type: ignore[union-attr] # found before it was opened
            if stream.call is not None:
                # Bytes are charged only while the request is pending, not if it is already
                # answered.
                stream.charged = size
                self._streams.uncounted += size
        else:
            stream.recv_window -= size
            stream.received = size
            self._streams.hold(stream, size)
        return True

    def empty_end(self, stream: ServerStream) -> bool:
        """Fast path: handle an empty frame with END_STREAM after a complete message, else false."""
        if stream.message is None or stream.begun:
            return False
        stream.advance(Input.DATA_END)
        stream.begin()
        return True

    def next_message(self, stream: ServerStream, view: memoryview, start: int, stop: int) -> bool:
        """Fast path: take a streaming request's message of one frame; false if not applicable."""
        size = stop - start
        reader = stream.reader
        if (
            type(reader) is not StreamingReader
            or reader.received
            or stream.reserved
            or stream.state is not State.OPEN
            or not PREFIX_BYTES <= size < stream.recv_window
            or stream.head.content_length is not None
            or stream.problem is not None
            or size - PREFIX_BYTES > self._max_message_bytes
            or self._ledger.is_pressed
        ):
            return False
        if PREFIX.unpack_from(view, start) != (0, size - PREFIX_BYTES):
            return False
        windows = self._windows
        windows.left -= size
        if windows.left < windows.low:
            windows.widen()
        stream.recv_window -= size
        stream.received += size
        stream.charged += size
        self._streams.account.hold(size)
        reader.received += view[start:stop]
        reader.on_data()
        return True

    # Many clients send 16 KB frames and interleave those of several messages; 64 MB arrive in
    # four thousand frames. Everything is inlined here to save function calls.
    def run(
        self,
        stream: ServerStream | None,
        octets: bytearray,
        view: memoryview,
        frame: tuple[int, int, int],
    ) -> int:
        """Fast path: take consecutive frames that continue long messages.

        `frame` has the start and end of the first frame's payload, and the end of the read bytes.
        Return the position after the last frame taken, or 0 if none was.
        """
        start, stop, end = frame
        streams, max_frame = self._streams.open, self._max_frame_bytes
        left = self._windows.left
        position = total = 0
        while stream is not None:
            reader = stream.reader
            if type(reader) is not UnaryReader or stream.begun or (whole := reader.whole) is None:
                break
            filled = reader.filled
            # Never use up the window: then `deliver` handles the frame and grants more.
            most = min(reader.length, filled + stream.recv_window - 1, filled + left - total)
            expected = stream.head.content_length
            if expected is not None:
                most = min(most, filled + expected - stream.received)
            number, following = stream.id, 0
            while (after := filled + stop - start) <= most:
                whole[filled:after] = view[start:stop]
                filled = after
                position, following = stop, 0
                if end - stop < HEADER_BYTES:
                    break
                high, low, kind, flags, following = HEADER.unpack_from(octets, stop)
                start = stop + HEADER_BYTES
                stop = start + (high << 8 | low)
                is_plain = kind == DATA and not flags and stop <= end
                if not (is_plain and RUN_BYTES <= stop - start <= max_frame):
                    following = 0
                if following != number:
                    break
            else:
                following = 0  # the frame exceeds `most`: leave it to the general path
            count = filled - reader.filled
            reader.filled = filled
            stream.received += count
            stream.recv_window -= count
            total += count
            stream = streams.get(following & MAX_STREAM_ID)
        if total:
            self._windows.charge(total)
        return position

    # --- the general path ---

    def accept(self, flags: int, stream_id: int, length: int, padding: int) -> ServerStream | None:
        """Check a frame of `length` bytes; return its stream, or None to drop it (RFC 9113 6.1).

        `padding` counts the padding and its length byte.
        """
        self._windows.charge(length)
        if padding > length:  # RFC 9113 6.1
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "padding exceeds the frame")
        ends = flags & END_STREAM
        try:
            stream = self._streams.advance(stream_id, Input.DATA_END if ends else Input.DATA)
        except StreamFailure as failure:
            self._streams.fail(failure)
            return None
        if stream is None:
            self._streams.drop(stream_id, length, padding)
            return None
        stream.recv_window -= length
        if stream.recv_window < 0:  # RFC 9113 6.9.1
            self._fail(stream, ErrorCode.FLOW_CONTROL_ERROR, "flow-control window exceeded")
            return None
        stream.received += length - padding
        expected = stream.head.content_length
        if expected is not None and (
            stream.received > expected or (ends and stream.received < expected)
        ):  # RFC 9113 8.1.1
            self._fail(stream, ErrorCode.PROTOCOL_ERROR, "body size differs from content-length")
            return None
        if padding == length and not ends:  # RFC 9113 10.5
            self._conduct.count_control()
        stream.fresh = False
        return stream

    def _fail(self, stream: ServerStream, code: ErrorCode, reason: str) -> None:
        self._streams.fail(StreamFailure(stream.id, code, reason))

    def deliver(self, stream: ServerStream, chunk: memoryview, following: int) -> None:
        """Pass a chunk of a frame's payload to the stream's message.

        `following` bytes of the frame have not been received yet.
        """
        if stream.problem is not None:
            return
        reader = stream.reader
        if reader is None:
            if stream.begun:
                return  # the route does not read the request body
            if stream.message is not None:
                stream.begin(Problem.SECOND)
                return
            route = stream.head.route
            reader = stream.reader = UnaryReader(
                self._max_message_bytes, route.placement if route else None, self._allocate
            )
        problem = reader.feed(chunk) or self._hold(stream, reader, len(chunk))
        if problem is not None:
            stream.begin(problem)
            return
        # The rest of this frame is within the window already. Grant one extra byte: with a window
        # of 0, most clients do not even send the empty frame that ends a request.
        wanted = reader.missing - following + 1
        if wanted > stream.recv_window:
            self._windows.grant(stream, wanted)

    def _hold(
        self, stream: ServerStream, reader: UnaryReader | StreamingReader, count: int
    ) -> Problem | None:
        """Account for received bytes in the ledger; return NO_MEMORY if they do not fit.

        The whole message of a unary request is reserved as soon as its length is known, so that
        it can always be completed. For a streaming request, bytes that its method has already
        reserved are not counted again.
        """
        if isinstance(reader, UnaryReader):
            if stream.charged or reader.length <= 0:
                return None
            return None if self._streams.reserve(stream, reader.length) else Problem.NO_MEMORY
        ahead = min(count, stream.reserved)
        stream.reserved -= ahead
        self._streams.hold(stream, count - ahead)
        return None


def padding_of(length: int, view: memoryview, start: int) -> int:
    """Return the bytes of padding in a frame, the length byte included (RFC 9113 6.1)."""
    if not length:  # RFC 9113 4.2, 6.1
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "padded DATA without a length")
    return view[start] + 1
