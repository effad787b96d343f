"""One connection of a client: bytes in, bytes and requests out, and no I/O (RFC 9113)."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

from xlaserve.core.serving.ledger import Kind
from xlaserve.transport.http2.errors import ConnectionFailure, StreamFailure
from xlaserve.transport.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    LARGEST_MAX_FRAME,
    MAX_STREAM_ID,
    MAX_WINDOW,
    NUMBER,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    SETTINGS_ACK,
    SMALLEST_MAX_FRAME,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
    goaway,
    ping_ack,
    rst_stream,
    settings,
    window_update,
)
from xlaserve.transport.http2.headers import HARD_FACTOR, Head, HeaderReader
from xlaserve.transport.http2.limits import Conduct, Http2Limits, Shared
from xlaserve.transport.http2.messages import (
    PREFIX,
    PREFIX_BYTES,
    Problem,
    StreamingReader,
    UnaryReader,
)
from xlaserve.transport.http2.sending import Sender
from xlaserve.transport.http2.states import NEXT, REACTION_CODES, Input, Reaction, State
from xlaserve.transport.http2.stream import Buffer, Route, ServerStream

RECEIVE_BYTES = 1 << 18
"""Bytes that are read from a socket at once."""

_HEAD = Head[Route]
_WORK_OF_A_REQUEST = 16
_DIRECT_BYTES = 1 << 14
"""From how much on the rest of a DATA frame is received where its message will stay."""
_LEFT_BYTES = 1 << 14
"""How long a frame with more of a message may be to wait until it has come whole: to be received
behind what has come of it is quicker than to be taken in parts."""
_RUN_BYTES = 1 << 12
"""How long the frames are that are taken in one go: a read has so few of them that they count as
one in the work of a pass."""
_ON_ITSELF = 0x100
"""Among the flags of HEADERS: the stream depends on itself (RFC 7540, 5.3.1)."""
_REMEMBERED = 1024
"""Streams that we reset, of which frames may still be on their way; and gaps between ids."""


class ReceiveBuffer:
    """Where all connections of an event loop receive: each reads at once what it was given."""

    def __init__(self) -> None:
        # Twice, for the beginning of a frame that an earlier read has left.
        self.octets = bytearray(2 * RECEIVE_BYTES)
        self.view = memoryview(self.octets)


class ServerConnection:
    """The protocol of one connection, between the bytes of its socket and the routes."""

    def __init__(
        self,
        limits: Http2Limits,
        router: Callable[[_HEAD], Route],
        shared: Shared,
        *,
        wake: Callable[[], None] = lambda: None,
        buffer: ReceiveBuffer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called when there is output though nothing was received."""
        self.limits = limits
        self.tick = 0
        self.streams: dict[int, ServerStream] = {}
        self._router = router
        self.account = shared.ledger.open()
        self._ledger = shared.ledger
        self._allocate = shared.memory.take
        self._conduct = Conduct(limits, now)
        self._sender = Sender(self.account, self._conduct, self._ended, wake)
        self._header_reader: HeaderReader[Route] = HeaderReader(limits.max_header_bytes)
        self.peer_window = DEFAULT_WINDOW
        self.stream_window = limits.stream_window_bytes
        self._recv_window = limits.connection_window_bytes
        self._low_window = limits.connection_window_bytes >> 1
        self._buffer = buffer or ReceiveBuffer()
        self._left = b""
        """What was received of a frame that has not come whole."""
        self._have = 0
        self._greeted = False
        """Whether the preface has come."""
        self._settled = False
        """Whether the SETTINGS behind it have."""
        self._highest = 0
        """The highest stream that the client has opened."""
        self._gaps: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Ids that the client has skipped, from and to."""
        self._reset: dict[int, None] = {}
        """The streams that we have reset lately."""
        self._block: list[bytes] = []
        self._block_stream = 0
        """The stream whose header block goes on in CONTINUATION frames."""
        self._block_flags = 0
        self._block_bytes = 0
        self.block_tick = 0
        self._data_stream: ServerStream | None = None
        self._data_left = 0
        """Bytes of the DATA frame that have not come yet; without its padding."""
        self._data_ends = False
        self._skip = 0
        """Bytes to be dropped: padding, and frames of types that nobody knows."""
        self._direct: UnaryReader | None = None
        self.failed: ConnectionFailure | None = None
        """Why the connection ends; a GOAWAY says so in the output."""
        self.client_leaves = False
        """Whether the client has sent a GOAWAY."""

    # --- as the shell calls it ---

    def start(self) -> None:
        """Send our settings, which come before anything else (RFC 9113, 3.4)."""
        limits = self.limits
        self._sender.write(
            settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                    Setting.MAX_FRAME_SIZE: limits.max_frame_bytes,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
                }
            )
            + window_update(0, limits.connection_window_bytes - DEFAULT_WINDOW)
        )

    def receive_buffer(self) -> memoryview:
        """Return where to put what comes next; `received` says that it has come.

        Asking again changes nothing: over TLS an event loop asks whenever bytes come, and says
        nothing as long as they are no whole record; without TLS it may have been woken for nothing.
        """
        if self._direct is not None:
            space = self._direct.space()
            assert space is not None
            return space[: self._data_left]
        left = self._left
        if left:
            # Kept: until `received` is called others may receive into the same buffer.
            self._have = len(left)
            self._buffer.view[: self._have] = left
            return self._buffer.view[self._have : self._have + RECEIVE_BYTES]
        self._have = 0
        return self._buffer.view[:RECEIVE_BYTES]

    def received(self, count: int) -> bool:
        """Handle so many bytes in the buffer; false when some are left for another pass."""
        if self.failed is not None:
            return True
        self._sender.receives = True
        try:
            if self._direct is not None:
                self._received_directly(count)
                return True
            return self._parse(self._have + count)
        except ConnectionFailure as failure:
            self._fail(failure)
            return True
        finally:
            self._sender.receives = False

    def proceed(self) -> bool:
        """Go on with what an earlier pass has left; false as for `received`."""
        self.receive_buffer()
        return self.received(0)

    def receive(self, data: bytes) -> None:
        """Handle bytes, all of them and however many."""
        view = memoryview(data)
        while view and self.failed is None:
            space = self.receive_buffer()
            count = min(len(space), len(view))
            space[:count] = view[:count]
            view = view[count:]
            done = self.received(count)
            while not done:
                done = self.proceed()

    @property
    def output(self) -> bool:
        """Tell whether there is something to write."""
        return bool(self._sender.output)

    def take_output(self) -> list[Buffer]:
        """Return what is to be written next; `pump` makes more where there is."""
        return self._sender.take()

    def pump(self) -> None:
        """Make more output, where answers wait and windows allow it."""
        self._sender.pump()

    def pause(self) -> None:
        """Make no more DATA: the transport has enough."""
        self._sender.paused = True

    def resume(self) -> None:
        """Make DATA again."""
        self._sender.paused = False
        self._sender.pump()

    def go_away(self) -> None:
        """Ask the client to open no more streams; those on their way are still served."""
        self._sender.write(goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR))

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Say which streams were served (RFC 9113, 6.8); the connection is to be closed then."""
        if self.failed is None:
            self._fail(ConnectionFailure(code, reason))

    def lost(self) -> None:
        """Cancel what is being answered: the connection is gone."""
        if self.failed is None:
            self.failed = ConnectionFailure(ErrorCode.NO_ERROR, "the connection is closed")
        self._drop_streams("the connection is closed")
        self.account.close()

    def sweep(self, ticks_for_a_message: int) -> None:
        """Look for what takes too long; called at even intervals."""
        self.tick += 1
        oldest = self.tick - ticks_for_a_message
        if self._block_stream and self.block_tick < oldest:
            self.end(ErrorCode.ENHANCE_YOUR_CALM, "a header block did not come to its end")
            return
        late = [s for s in self.streams.values() if not s.begun and s.tick < oldest]
        for stream in late:
            self._begin(stream, Problem.LATE)

    @property
    def greeted(self) -> bool:
        """Tell whether the client has begun to speak HTTP/2."""
        return self._settled

    # --- frames ---

    def _parse(self, end: int) -> bool:
        octets, view = self._buffer.octets, self._buffer.view
        position = 0 if self._greeted else self._preface(end)
        if not self._greeted:
            self._left = bytes(view[:end])
            return True
        work = self.limits.max_work
        max_frame = self.limits.max_frame_bytes
        streams = self.streams
        while True:
            if self._data_left or self._skip:
                position = self._rest_of_frame(view, position, end)
                if self._data_left or self._skip:
                    break
            if end - position < HEADER_BYTES:
                break
            high, low, kind, flags, stream_id = HEADER.unpack_from(octets, position)
            length = high << 8 | low
            stream_id &= MAX_STREAM_ID
            start = position + HEADER_BYTES
            stop = start + length
            if length > max_frame:
                raise ConnectionFailure(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes, at most {max_frame}"
                )
            if not self._settled and (kind != SETTINGS or flags & ACK):
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")
            if self._block_stream and (kind != CONTINUATION or stream_id != self._block_stream):
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "expected CONTINUATION")
            if kind == DATA:
                stream = streams.get(stream_id)
                if (
                    stream is not None
                    and stop <= end
                    and flags <= END_STREAM
                    and (
                        (stream.fresh and self._whole_message(stream, view[start:stop], flags))
                        or (start == stop and flags and self._empty_end(stream))
                    )
                ):
                    position = stop
                elif flags & PADDED and length and start == end:
                    break  # the length of the padding has not come
                elif (
                    stop > end
                    and length <= _LEFT_BYTES
                    and stream is not None
                    and isinstance(stream.reader, UnaryReader)
                ):
                    break
                else:
                    following = 0
                    if stream is not None and not flags and _RUN_BYTES <= length <= end - start:
                        following = self._more_of_message(stream, start, stop, end)
                    position = following or self._data(view, flags, stream_id, start, stop, end)
            else:
                if stop > end:
                    if self._too_long(kind, length):
                        self._skip = length
                        position = start
                        continue
                    break
                position = stop
                try:
                    if kind == HEADERS:
                        work -= _WORK_OF_A_REQUEST
                        if flags != END_HEADERS or not self._known(stream_id, view[start:stop]):
                            self._on_headers(view, flags, stream_id, start, stop)
                    elif kind <= CONTINUATION:
                        _HANDLERS[kind](self, view, flags, stream_id, start, stop)
                    else:
                        self._conduct.count_control()  # unknown types are ignored (5.5)
                except StreamFailure as failure:
                    self._stream_failed(failure)
            work -= 1
            if work <= 0 and position < end:
                self._left = bytes(view[position:end])
                return False
        self._left = bytes(view[position:end]) if position < end else b""
        return True

    # Nearly every request is HEADERS with a block that was seen before, and one DATA frame with all
    # of a message, or many of them. These take them past the rules that cannot apply; all else goes
    # the long way, which comes to the same.

    def _known(self, stream_id: int, block: memoryview) -> bool:
        """Open a stream for headers that were seen before; false when it is not as simple."""
        head = self._header_reader.seen(bytes(block))
        if (
            head is None
            or stream_id != self._highest + 2
            or len(self.streams) >= self.limits.max_streams
        ):
            return False
        route = head.route
        if route is None or not route.message_first:
            return False
        self._highest = stream_id
        self.streams[stream_id] = ServerStream(self, self._sender, stream_id, head)
        return True

    def _whole_message(self, stream: ServerStream, chunk: memoryview, flags: int) -> bool:
        """Take a message that is one frame; false when it is not as simple."""
        size = len(chunk)
        expected = stream.head.content_length
        if (
            not PREFIX_BYTES <= size < stream.recv_window
            or (expected is not None and expected != size)
            or size - PREFIX_BYTES > self.limits.max_message_bytes
            or self._ledger.is_pressed
        ):
            return False
        flag, length = PREFIX.unpack_from(chunk)
        if length != size - PREFIX_BYTES or flag > 1:
            return False
        self._recv_window -= size
        if self._recv_window < self._low_window:
            self._widen_connection()
        stream.fresh = False
        stream.message = chunk[PREFIX_BYTES:].tobytes()
        stream.compressed = flag == 1
        if flags:
            self._begin_whole(stream)
            if stream.call is not None:
                self.hold(stream, size)  # it waits: what is answered at once is not counted
        else:
            stream.recv_window -= size
            stream.received = size
            self.hold(stream, size)
        return True

    # Most clients put 16 KB into a frame: 64 MB have four thousand of them. The function is this
    # long to spare calls.
    def _more_of_message(self, stream: ServerStream, start: int, stop: int, end: int) -> int:
        """Take frames that go on with a long message; return where the next one begins, or 0."""
        reader = stream.reader
        if not isinstance(reader, UnaryReader) or stream.begun:
            return 0
        whole, filled = reader.whole, reader.filled
        if whole is None:
            return 0
        # The last byte of the window is left to the other way, which grants more.
        most = min(reader.length, filled + stream.recv_window - 1)
        expected = stream.head.content_length
        if expected is not None:
            most = min(most, filled + expected - stream.received)
        octets, view = self._buffer.octets, self._buffer.view
        max_frame = self.limits.max_frame_bytes
        same = octets[start - 6 : start]  # type, flags and stream
        position = 0
        while (after := filled + stop - start) <= most:
            whole[filled:after] = view[start:stop]
            filled = after
            position = stop
            if end - stop < HEADER_BYTES or octets[stop + 3 : stop + 9] != same:
                break
            length = octets[stop] << 16 | octets[stop + 1] << 8 | octets[stop + 2]
            start = stop + HEADER_BYTES
            stop = start + length
            if stop > end or not _RUN_BYTES <= length <= max_frame:
                break
        count = filled - reader.filled
        reader.filled = filled
        stream.received += count
        stream.recv_window -= count
        self._recv_window -= count
        if self._recv_window < self._low_window:
            self._widen_connection()
        return position

    def _empty_end(self, stream: ServerStream) -> bool:
        """Begin a request whose end comes in a frame of its own; false when it has no message."""
        if stream.message is None or stream.begun:
            return False
        self._begin_whole(stream)
        return True

    def _begin_whole(self, stream: ServerStream) -> None:
        stream.state = State.HALF_CLOSED_REMOTE
        stream.begun = True
        stream.head.route.begin(stream)  # type: ignore[union-attr]

    def _preface(self, end: int) -> int:
        length = min(end, len(PREFACE))
        if self._buffer.octets[:length] != PREFACE[:length]:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "not the preface of HTTP/2")
        if length < len(PREFACE):
            return 0
        self._greeted = True
        return length

    def _too_long(self, kind: int, length: int) -> bool:
        """Tell whether a frame is to be skipped; raises for one that could never be right."""
        if kind > CONTINUATION:
            self._conduct.count_control()
            return True
        if kind in {HEADERS, CONTINUATION}:
            longest = self.limits.max_header_bytes * HARD_FACTOR
        else:
            longest = SMALLEST_MAX_FRAME
        if length > min(longest, RECEIVE_BYTES // 2):
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, f"{length} bytes in a frame of type {kind}"
            )
        return False

    # --- DATA ---

    def _data(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int, end: int
    ) -> int:
        """Handle a DATA frame, of which there may be only the beginning; return the position."""
        length = stop - start
        self._recv_window -= length
        if self._recv_window < self._low_window:
            self._widen_connection()
        padding = 0
        if flags & PADDED:
            if not length:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "padded DATA without a length")
            padding = view[start] + 1
            start += 1
            if padding > length:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
        payload = length - padding
        try:
            stream = self._accept_data(flags, stream_id, length, payload)
        except StreamFailure as failure:
            self._stream_failed(failure)
            stream = None
        ends = bool(flags & END_STREAM)
        if stop <= end:
            if stream is not None:
                self._whole_data(stream, view[start : start + payload], ends=ends)
            return stop
        self._data_stream, self._data_left, self._data_ends = stream, payload, ends
        self._skip = padding - 1 if padding else 0
        if not payload:
            self._data_ended()
        return start

    def _accept_data(
        self, flags: int, stream_id: int, length: int, payload: int
    ) -> ServerStream | None:
        """Return the stream if it takes the data. Raises what is wrong with it."""
        happening = Input.DATA_END if flags & END_STREAM else Input.DATA
        stream = self.streams.get(stream_id)
        if stream is None:
            self._conduct.count_control()
            self._react(self._state_of(stream_id), happening, stream_id)
            return None
        following = NEXT[stream.state][happening]
        if following < 0:
            self._react(stream.state, happening, stream_id)
            return None
        stream.recv_window -= length
        if stream.recv_window < 0:
            raise StreamFailure(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "past the window")
        stream.received += payload
        expected = stream.head.content_length
        if expected is not None and (
            stream.received > expected or (flags & END_STREAM and stream.received < expected)
        ):
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "not the content-length")
        if not payload and not flags & END_STREAM:
            self._conduct.count_control()
        stream.state = cast(State, following)
        stream.fresh = False
        return stream

    def _whole_data(self, stream: ServerStream, chunk: memoryview, *, ends: bool) -> None:
        if len(chunk):
            self._payload(stream, chunk)
        if ends:
            self._client_ended(stream)

    def _rest_of_frame(self, view: memoryview, position: int, end: int) -> int:
        if self._data_left:
            count = min(end - position, self._data_left)
            stream = self._data_stream
            self._data_left -= count
            if stream is not None:
                self._payload(stream, view[position : position + count])
            position += count
            if self._data_left:
                self._receive_directly()
                return position
            self._data_ended()
        count = min(end - position, self._skip)
        self._skip -= count
        return position + count

    def _data_ended(self) -> None:
        stream, self._data_stream = self._data_stream, None
        if stream is not None and self._data_ends:
            self._client_ended(stream)

    def _receive_directly(self) -> None:
        stream = self._data_stream
        if stream is None or self._data_left < _DIRECT_BYTES:
            return
        reader = stream.reader
        if isinstance(reader, UnaryReader):
            space = reader.space()
            # With more in the frame than in the message the reader has to see it.
            if space is not None and len(space) >= self._data_left:
                self._direct = reader

    def _received_directly(self, count: int) -> None:
        reader = self._direct
        assert reader is not None
        reader.filled += count
        self._data_left -= count
        if not self._data_left or self._data_stream is None:
            self._direct = None
        if not self._data_left:
            self._data_ended()

    def _payload(self, stream: ServerStream, chunk: memoryview) -> None:
        """Give a stream a part of its message."""
        if stream.problem is not None or stream.state is State.CLOSED:
            return
        reader = stream.reader
        if reader is None:
            if stream.begun:
                return  # who answers it does not read
            if stream.message is not None:
                self._begin(stream, Problem.SECOND)
                return
            place = stream.head.route.place if stream.head.route else None
            reader = stream.reader = UnaryReader(
                self.limits.max_message_bytes, place, self._allocate
            )
        problem = reader.feed(chunk) or self._charge(stream, reader, len(chunk))
        if problem is not None:
            self._begin(stream, problem)
            return
        # The rest of its frame is within the window already. One byte more: without a window most
        # clients do not send the empty frame that ends a request either.
        wanted = reader.missing - self._data_left + 1
        if wanted > stream.recv_window:
            self.grant(stream, wanted)

    def _charge(
        self, stream: ServerStream, reader: UnaryReader | StreamingReader, count: int
    ) -> Problem | None:
        """Count what came, and what its message is to have with it; NO_ROOM where that is none.

        Of a unary request all is reserved as soon as its length is known: then it can always
        come to its end, whatever others do. Of a streaming one what its method has asked for is.
        """
        if isinstance(reader, UnaryReader):
            if stream.charged or reader.length <= 0 or self.reserve(stream, reader.length):
                return None
            return Problem.NO_ROOM
        ahead = min(count, stream.reserved)
        stream.reserved -= ahead
        self.hold(stream, count - ahead)
        return None

    def _client_ended(self, stream: ServerStream) -> None:
        reader = stream.reader
        if isinstance(reader, UnaryReader):
            if not stream.begun:
                problem = reader.end()
                if problem is None:
                    stream.message = reader.message()
                    stream.compressed = reader.compressed
                self._begin(stream, problem)
        elif reader is not None:
            reader.on_data()
        elif not stream.begun:
            self._begin(stream, Problem.NONE if stream.message is None else None)
        if stream.state is State.CLOSED:
            self._forget(stream)

    def _begin(self, stream: ServerStream, problem: Problem | None) -> None:
        stream.begun = True
        stream.fresh = False
        if problem is not None:
            stream.problem = problem
            stream.message = None
        route = stream.head.route
        assert route is not None
        route.begin(stream)

    def _widen_connection(self) -> None:
        if self._recv_window < 0:
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "past the connection's window")
        full = self.limits.connection_window_bytes
        self._sender.write(window_update(0, full - self._recv_window))
        self._recv_window = full

    def grant(self, stream: ServerStream, wanted: int) -> None:
        """Let the client send at least so many bytes more on a stream."""
        window = min(max(wanted, self.limits.stream_window_bytes), MAX_WINDOW)
        low = stream.recv_window < wanted or stream.recv_window < self.stream_window >> 1
        if low and not stream.ended_by_client:
            self._sender.write(window_update(stream.id, window - stream.recv_window))
            stream.recv_window = window
            self._sender.wake()

    # --- HEADERS and CONTINUATION ---

    def _on_headers(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        if not stream_id & 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"a request on stream {stream_id}")
        if flags & (PADDED | HAS_PRIORITY):
            padding = 0
            if stop - start < bool(flags & PADDED) + 5 * bool(flags & HAS_PRIORITY):
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "HEADERS that end early")
            if flags & PADDED:
                padding = view[start]
                start += 1
            if flags & HAS_PRIORITY:
                if NUMBER.unpack_from(view, start)[0] & MAX_STREAM_ID == stream_id:
                    flags |= _ON_ITSELF
                start += 5
            stop -= padding
            if stop < start:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
        block = bytes(view[start:stop])
        if not flags & END_HEADERS:
            self._block = [block]
            self._block_stream = stream_id
            self._block_flags = flags
            self._hold_block(len(block))
            self.block_tick = self.tick
            return
        self._header_block(stream_id, block, flags)

    def _on_continuation(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        if not self._block_stream:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block.append(bytes(view[start:stop]))
        self._hold_block(self._block_bytes + stop - start)
        if self._block_bytes > self.limits.max_header_bytes * HARD_FACTOR:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, "too many bytes of headers (max_header_bytes)"
            )
        if not flags & END_HEADERS:
            self._conduct.count_control()
            return
        block, self._block = b"".join(self._block), []
        self._block_stream = 0
        self._hold_block(0)
        self._header_block(stream_id, block, self._block_flags)

    def _hold_block(self, size: int) -> None:
        """Count the header block in progress, which has come so far."""
        change, self._block_bytes = size - self._block_bytes, size
        if change > 0:
            self.account.hold(change, Kind.AHEAD)
        else:
            self.account.release(-change, Kind.AHEAD)

    def _header_block(self, stream_id: int, block: bytes, flags: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._trailers(stream, block, flags)
            return
        head = self._header_reader.seen(block) or self._header_reader.read(block)
        happening = Input.HEADERS_END if flags & END_STREAM else Input.HEADERS
        if stream_id <= self._highest:
            self._react(self._state_of(stream_id), happening, stream_id)
            return
        if stream_id > self._highest + 2:
            self._gaps.append((self._highest + 1, stream_id - 2))
        self._highest = stream_id
        if len(self.streams) >= self.limits.max_streams:
            self._conduct.count_control()
            self._write_reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        problem = "it depends on itself" if flags & _ON_ITSELF else head.problem
        if problem is not None:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, problem)
        route = head.route
        if route is None:
            route = head.route = self._router(head)
        stream = self.streams[stream_id] = ServerStream(self, self._sender, stream_id, head)
        if flags & END_STREAM:
            stream.state = State.HALF_CLOSED_REMOTE
            if head.content_length:
                raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "not the content-length")
            self._begin(stream, Problem.NONE if route.message_first else None)
        elif not route.message_first:
            self._begin(stream, None)

    def _trailers(self, stream: ServerStream, block: bytes, flags: int) -> None:
        problem = self._header_reader.read_trailers(block)
        happening = Input.HEADERS_END if flags & END_STREAM else Input.HEADERS
        following = NEXT[stream.state][happening]
        if following < 0:
            self._react(stream.state, happening, stream.id)
            return
        expected = stream.head.content_length
        if problem is None and expected is not None and stream.received != expected:
            problem = "not the content-length"
        if flags & _ON_ITSELF:
            problem = "it depends on itself"
        if problem is not None:
            raise StreamFailure(stream.id, ErrorCode.PROTOCOL_ERROR, problem)
        stream.state = cast(State, following)
        self._client_ended(stream)

    # --- the other frames ---

    def _on_priority(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        self._conduct.count_control()
        if not stream_id:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if stop - start != 5:
            raise StreamFailure(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has five bytes")
        if NUMBER.unpack_from(view, start)[0] & MAX_STREAM_ID == stream_id:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "it depends on itself")

    def _on_rst_stream(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        if stop - start != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has four bytes")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._conduct.count_control()
            self._react(self._state_of(stream_id), Input.RST_STREAM, stream_id)
            return
        code = NUMBER.unpack_from(view, start)[0]
        stream.state = State.CLOSED
        self._forget(stream)
        _cancel(stream, f"the client reset the stream, error code {code}")
        self._conduct.count_reset()

    def _on_settings(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        if stream_id:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if stop > start:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "an ACK with settings")
            self._conduct.count_control()
            return
        if (stop - start) % SETTING.size:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "half a setting")
        if self._settled:
            self._conduct.count_control()
        self._settled = True
        for number, value in SETTING.iter_unpack(view[start:stop]):
            self._setting(number, value)
        self._sender.write(SETTINGS_ACK)
        self._sender.pump()

    def _setting(self, number: int, value: int) -> None:
        if number == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value}")
            change = value - self.peer_window
            self.peer_window = value
            for stream in self.streams.values():
                stream.send_window += change
                if stream.send_window > MAX_WINDOW:
                    raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window too wide")
        elif number == Setting.MAX_FRAME_SIZE:
            if not SMALLEST_MAX_FRAME <= value <= LARGEST_MAX_FRAME:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes")
            self._sender.max_frame = value
        elif number == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")

    def _on_push_promise(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _on_ping(self, view: memoryview, flags: int, stream_id: int, start: int, stop: int) -> None:
        if stream_id:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if stop - start != 8:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "PING has eight bytes")
        self._conduct.count_control()
        if not flags & ACK:
            self._sender.write(ping_ack(bytes(view[start:stop])))

    def _on_goaway(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        if stream_id:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if stop - start < 8:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has eight bytes or more")
        self._conduct.count_control()
        self.client_leaves = True

    def _on_window_update(
        self, view: memoryview, flags: int, stream_id: int, start: int, stop: int
    ) -> None:
        if stop - start != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has four bytes")
        self._conduct.count_control()
        increment = NUMBER.unpack_from(view, start)[0] & MAX_STREAM_ID
        if not stream_id:
            if not increment:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a window widened by 0")
            if not self._sender.widen(increment):
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window too wide")
            self._sender.pump()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._react(self._state_of(stream_id), Input.WINDOW_UPDATE, stream_id)
            return
        if not increment:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "a window widened by 0")
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise StreamFailure(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "a window too wide")
        self._sender.pump()

    # --- the states of streams ---

    def _state_of(self, stream_id: int) -> State:
        """Return the state of a stream that is not open."""
        if stream_id in self._reset:
            return State.RESET
        if not stream_id & 1 or stream_id > self._highest:
            return State.IDLE
        return State.CLOSED

    def _react(self, state: State, happening: Input, stream_id: int) -> None:
        """Do what the table says of something that is no step to another state."""
        reaction = NEXT[state][happening]
        if reaction is Reaction.IGNORE:
            self._conduct.count_control()
            return
        if state is State.CLOSED and happening <= Input.HEADERS_END and self._skipped(stream_id):
            reaction = Reaction.CONNECTION_PROTOCOL_ERROR  # ids only grow (RFC 9113, 5.1.1)
        assert isinstance(reaction, Reaction), (state, happening)
        text = f"{happening.name} on stream {stream_id}, which is {state.name}"
        if reaction in {Reaction.STREAM_CLOSED, Reaction.MALFORMED}:
            raise StreamFailure(stream_id, REACTION_CODES[reaction], text)
        raise ConnectionFailure(REACTION_CODES[reaction], text)

    def _skipped(self, stream_id: int) -> bool:
        return any(first <= stream_id <= last for first, last in self._gaps)

    def _stream_failed(self, failure: StreamFailure) -> None:
        stream = self.streams.get(failure.stream_id)
        if stream is not None:
            stream.state = State.RESET
            self._forget(stream)
            _cancel(stream, failure.reason)
        self._write_reset(failure.stream_id, failure.code)
        self._conduct.count_reset()

    def _write_reset(self, stream_id: int, code: ErrorCode) -> None:
        self._sender.write(rst_stream(stream_id, code))
        if len(self._reset) >= _REMEMBERED:
            del self._reset[next(iter(self._reset))]
        self._reset[stream_id] = None

    def _ended(self, stream: ServerStream) -> None:
        """Take note that all of an answer was sent."""
        if stream.state is not State.CLOSED:
            # Nobody reads the rest of the request: the client may stop (RFC 9113, 8.1).
            stream.state = State.RESET
            self._write_reset(stream.id, ErrorCode.NO_ERROR)
        self._forget(stream)

    def _forget(self, stream: ServerStream) -> None:
        self.streams.pop(stream.id, None)
        if stream.charged:
            self.account.release(stream.charged)
            stream.charged = 0
        if self._data_stream is stream:
            self._data_stream = None
        if stream.pending is not None or stream.on_sent is not None:
            self._sender.forget(stream)

    # --- as streams call it ---

    def hold(self, stream: ServerStream, count: int) -> None:
        """Count so many bytes more that are held for a stream, or fewer, until it is over."""
        if self.streams.get(stream.id) is stream:
            stream.charged += count
            if count >= 0:
                self.account.hold(count)
            else:
                self.account.release(-count)

    def reserve(self, stream: ServerStream, count: int) -> bool:
        """Count so many bytes for a stream that are to come; false where there is no memory."""
        if self.streams.get(stream.id) is not stream:
            return True
        if not self.account.reserve(count):
            return False
        stream.charged += count
        return True

    def reset_stream(self, stream: ServerStream, code: ErrorCode) -> None:
        """End a stream at once."""
        if stream.state in {State.CLOSED, State.RESET}:
            return
        stream.state = State.RESET
        self._forget(stream)
        self._write_reset(stream.id, code)
        self._sender.wake()

    # --- the end ---

    def _fail(self, failure: ConnectionFailure) -> None:
        self.failed = failure
        self._drop_streams(failure.reason)
        self._sender.write(goaway(self._highest, failure.code, failure.reason))

    def _drop_streams(self, reason: str) -> None:
        for stream in tuple(self.streams.values()):
            stream.state = State.CLOSED
            self._forget(stream)
            _cancel(stream, reason)


_HANDLERS: Mapping[int, Callable[[ServerConnection, memoryview, int, int, int, int], None]] = (
    MappingProxyType(
        {
            PRIORITY: ServerConnection._on_priority,
            RST_STREAM: ServerConnection._on_rst_stream,
            SETTINGS: ServerConnection._on_settings,
            PUSH_PROMISE: ServerConnection._on_push_promise,
            PING: ServerConnection._on_ping,
            GOAWAY: ServerConnection._on_goaway,
            WINDOW_UPDATE: ServerConnection._on_window_update,
            CONTINUATION: ServerConnection._on_continuation,
        }
    )
)
"""What handles each frame of a known type but DATA and HEADERS."""


def _cancel(stream: ServerStream, reason: str) -> None:
    call, stream.call = stream.call, None
    if call is not None:
        call.cancel(reason)
