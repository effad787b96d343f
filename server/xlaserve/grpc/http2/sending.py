"""Sends responses within flow-control windows, round robin across streams (RFC 9113 6.9)."""

from collections import deque
from collections.abc import Callable, Sequence

from xlaserve.grpc.http2.frames import (
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    MAX_WINDOW,
    SMALLEST_MAX_FRAME,
    frame_header,
)
from xlaserve.grpc.http2.limits import Conduct
from xlaserve.grpc.http2.states import State
from xlaserve.grpc.http2.stream import Buffer, ServerStream
from xlaserve.net.ledger import Account, Kind

_LAST = END_HEADERS | END_STREAM
FLUSH_BYTES = 1 << 18
"""Bytes of DATA after which no more frames are produced until the output has been written."""

_JOINED_BYTES = SMALLEST_MAX_FRAME
"""Answers up to this length are joined into one buffer, which is faster than writing their parts.
Each part then fits into one frame of any client (RFC 9113 4.2)."""

_TABLE_OF_0 = b"\x20"
"""Dynamic Table Size Update to 0 (RFC 7541 6.3)."""

_MOST_KEPT = 2
"""A pending buffer is copied if its base array is more than this many times as large."""


class Sender:
    """Encodes responses as frames, as fast as flow control and the transport allow.

    Invariant, whenever a method returns: the ledger holds the `unsent` bytes of each stream, as
    `parked` records, and `blocked` has exactly the streams with unsent bytes.
    """

    def __init__(self, account: Account, conduct: Conduct, on_output: Callable[[], None]) -> None:
        """`on_output` is called when output becomes available outside of a read."""
        self._on_output = on_output
        self.receives = False
        """Whether received frames are being handled; the caller then writes the output itself."""
        self._account = account
        self._conduct = conduct
        self.blocked: dict[int, ServerStream] = {}
        """The streams with unsent bytes, in round-robin order."""
        self.output: list[Buffer] = []
        """Encoded frames to be written to the transport."""
        self.output_bytes = 0
        """Bytes of DATA in `output`."""
        self.window = DEFAULT_WINDOW
        self.max_frame = SMALLEST_MAX_FRAME
        self.paused = False
        """Whether the transport has paused writing (backpressure)."""
        self._has_table = True
        """Whether the client still assumes a dynamic table of 4096 bytes; the encoder uses none."""
        self._table_update = b""
        """Size update to send before the next header block, or empty."""

    # --- responses ---

    def answer(
        self, stream: ServerStream, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes
    ) -> bool:
        """Send a complete response; without memory for it, send nothing and return false."""
        if (
            len(head) + size + len(trailers) > _JOINED_BYTES
            or size > self.window
            or size > stream.send_window
            or self.paused
            or self._table_update
        ):
            return self._long_answer(stream, head, parts, size, trailers)
        if (stream.state is not State.HALF_CLOSED_REMOTE or stream.ending) and not stream.open:
            return True  # drop the response: the stream is closed
        self.window -= size
        number = stream.id
        output = self.output
        # Request a write only for the first output: after that one is already scheduled, and
        # during a read the caller writes anyway.
        is_first = not output and not self.receives
        output.append(
            b"".join(
                (
                    HEADER.pack(len(head) >> 8, len(head) & 0xFF, HEADERS, END_HEADERS, number),
                    head,
                    HEADER.pack(size >> 8, size & 0xFF, DATA, 0, number),
                    *parts,
                    HEADER.pack(len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, _LAST, number),
                    trailers,
                )
            )
        )
        self.output_bytes += size
        self._conduct.served += 1
        stream.owner.complete(stream)
        if is_first:
            self._on_output()
        return True

    def _long_answer(
        self, stream: ServerStream, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes
    ) -> bool:
        if not stream.open:
            return True
        if not self._may_park(stream, size):
            return False
        self.headers(stream, head, end=False)
        stream.trailers = trailers
        stream.ending = True
        self._park(stream, parts, size)
        self.wake()
        return True

    def _may_park(self, stream: ServerStream, size: int) -> bool:
        """Tell whether bytes can be sent immediately, or queued within the memory limit."""
        # A response longer than FLUSH_BYTES is queued even if the windows are large enough.
        blocked = self.paused or size > min(self.window, stream.send_window, FLUSH_BYTES)
        return not blocked or self._account.allows(size)

    def wake(self) -> None:
        """Schedule a write, unless one follows anyway because received frames are being handled."""
        if not self.receives:
            self._on_output()

    def headers(self, stream: ServerStream, block: bytes, *, end: bool) -> None:
        """Send a header block; trailers are queued after pending DATA (RFC 9113 8.1)."""
        if not stream.open:
            return
        if end and stream.pending:
            stream.trailers = block
            stream.ending = True
            return
        is_refused = end and not stream.headers_sent
        stream.headers_sent = True
        self._header_frames(stream.id, block, END_STREAM if end else 0)
        if end:
            stream.owner.complete(stream)
        if is_refused:
            self._conduct.count_refusal()
        self.wake()

    def _header_frames(self, stream_id: int, block: bytes, flags: int) -> None:
        """Write a header block as HEADERS and CONTINUATION frames (RFC 9113 6.10)."""
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
        first, rest = block[: self.max_frame], block[self.max_frame :]
        flags |= 0 if rest else END_HEADERS
        self.output += (frame_header(len(first), HEADERS, flags, stream_id), first)
        while rest:
            part, rest = rest[: self.max_frame], rest[self.max_frame :]
            flags = 0 if rest else END_HEADERS
            self.output += (frame_header(len(part), CONTINUATION, flags, stream_id), part)

    def data(self, stream: ServerStream, parts: Sequence[Buffer], size: int, *, end: bool) -> bool:
        """Send DATA, or return false and send nothing if there is no memory to queue it."""
        if not end and self.short_data(stream, parts, size):
            return True
        if not stream.open:
            return True
        if not self._may_park(stream, size):
            return False
        stream.ending = end
        self._park(stream, parts, size)
        self.wake()
        return True

    def short_data(self, stream: ServerStream, parts: Sequence[Buffer], size: int) -> bool:
        """Fast path: send one DATA frame that is not blocked; same result as `_park`.

        Return false, with nothing sent, if any part of it might have to be queued, or if the
        stream is closed.
        """
        if (
            not 0 < size <= _JOINED_BYTES
            or size > self.window
            or size > stream.send_window
            or self.output_bytes >= FLUSH_BYTES
            or (stream.state is not State.OPEN and stream.state is not State.HALF_CLOSED_REMOTE)
            or (stream.ending or stream.unsent or self.paused)
            or stream.on_sent is not None
        ):
            return False
        self.window -= size
        stream.send_window -= size
        stream.tick = stream.owner.tick
        output = self.output
        is_first = not output and not self.receives  # otherwise a write is scheduled already
        output.append(b"".join((HEADER.pack(size >> 8, size & 0xFF, DATA, 0, stream.id), *parts)))
        self.output_bytes += size
        self._conduct.served += 1
        if is_first:
            self._on_output()
        return True

    # --- pending data: `_count` alone changes the ledger ---

    def _park(self, stream: ServerStream, parts: Sequence[Buffer], size: int) -> None:
        if stream.pending is None:
            stream.pending = deque()
        # Use memoryviews: slicing bytes would copy them.
        views = (memoryview(part) for part in parts if len(part))
        if self._is_blocked(stream):
            stream.pending.extend(map(_detached, views))
        else:
            stream.pending.extend(views)
            stream.keeps_more = True
        if not stream.unsent:
            stream.tick = stream.owner.tick
        stream.unsent += size
        self._send(stream, size + 1)
        self._keep(stream)

    def _is_blocked(self, stream: ServerStream) -> bool:
        """Tell whether a stream can send nothing until its client reads or widens a window."""
        return self.paused or stream.send_window <= 0 or self.window <= 0

    def _keep(self, stream: ServerStream) -> None:
        if stream.unsent:
            self.blocked[stream.id] = stream
            if stream.keeps_more and self._is_blocked(stream):
                stream.pending = deque(map(_detached, stream.pending or ()))
                stream.keeps_more = False
        else:
            self.blocked.pop(stream.id, None)
        self._count(stream, stream.unsent)

    def _count(self, stream: ServerStream, size: int) -> None:
        """Set the number of bytes held in the ledger for a stream's pending data."""
        change, stream.parked = size - stream.parked, size
        if change > 0:
            self._account.hold(change, Kind.ANSWERS)
        elif change:
            self._account.release(-change, Kind.ANSWERS)

    def _send(self, stream: ServerStream, most: int) -> None:
        """Encode up to `most` bytes of a stream's pending data, as far as the windows allow."""
        pending = stream.pending
        assert pending is not None
        output = self.output
        flags = 0
        while stream.unsent and most > 0 and self.output_bytes < FLUSH_BYTES and not self.paused:
            size = min(stream.unsent, self.window, stream.send_window, self.max_frame, most)
            if size <= 0:
                return
            if size == stream.unsent and stream.ending and stream.trailers is None:
                flags = END_STREAM
            output.append(HEADER.pack(size >> 8, size & 0xFF, DATA, flags, stream.id))
            left = size
            while left:
                part = pending[0]
                if len(part) <= left:
                    output.append(pending.popleft())
                    left -= len(part)
                else:
                    output.append(part[:left])
                    pending[0] = part[left:]
                    left = 0
            self.window -= size
            stream.send_window -= size
            stream.unsent -= size
            most -= size
            self.output_bytes += size
            self._conduct.served += 1
            stream.tick = stream.owner.tick
        if not stream.unsent:
            self._sent(stream, ended=flags == END_STREAM)

    def stalled(self, since: int) -> list[ServerStream]:
        """Return the streams blocked by their own window since before a tick (RFC 9113 5.2)."""
        return [s for s in self.blocked.values() if s.send_window <= 0 and s.tick < since]

    @property
    def is_held_back(self) -> bool:
        """Tell whether the connection window blocks pending data."""
        return bool(self.blocked) and self.window <= 0

    def _sent(self, stream: ServerStream, *, ended: bool) -> None:
        if stream.ending:
            if stream.trailers is not None:
                self._header_frames(stream.id, stream.trailers, END_STREAM)
            elif not ended:
                self.output.append(frame_header(0, DATA, END_STREAM, stream.id))
            stream.owner.complete(stream)
        if stream.on_sent is not None:
            stream.on_sent()

    def pump(self) -> None:
        """Encode pending data round robin across streams, as far as the windows allow."""
        moved = True
        while moved and self.blocked and self.window > 0 and not self._full:
            moved = False
            self._pump_long()
            for stream in tuple(self.blocked.values()):
                if stream.send_window > 0 and stream.unsent:
                    if self._full or self.window <= 0:
                        return
                    # Move the stream to the end, even if the window ends this round.
                    self.blocked.pop(stream.id, None)
                    self._send(stream, self.max_frame)
                    self._keep(stream)
                    moved = True

    def _pump_long(self) -> None:
        """Fast path of `pump`: send full frames of long buffers, as `_send` and `_keep` would.

        It stops at the first stream that could finish or block with its next frame.
        """
        blocked, output, size = self.blocked, self.output, self.max_frame
        high, low = size >> 8, size & 0xFF
        sent, before = 0, -1
        while sent > before:
            before = sent
            for number, stream in tuple(blocked.items()):
                if stream.send_window <= 0:
                    continue
                pending = stream.pending
                if (
                    size >= min(self.window, stream.send_window)
                    or self.output_bytes >= FLUSH_BYTES
                    or not pending
                    or len(part := pending[0]) <= size
                ):
                    before = sent
                    break
                del blocked[number]
                blocked[number] = stream
                output += (HEADER.pack(high, low, DATA, 0, number), part[:size])
                pending[0] = part[size:]
                self.window -= size
                stream.send_window -= size
                stream.unsent -= size
                stream.parked -= size
                self.output_bytes += size
                self._conduct.served += 1
                stream.tick = stream.owner.tick
                sent += size
        if sent:
            self._account.release(sent, Kind.ANSWERS)

    @property
    def _full(self) -> bool:
        return self.paused or self.output_bytes >= FLUSH_BYTES

    def take(self) -> list[Buffer]:
        """Return the encoded output, and clear it."""
        output = self.output
        self.output = []
        self.output_bytes = 0
        return output

    # --- closing streams ---

    def discard(self, stream: ServerStream) -> None:
        """Drop the pending data of a closed stream, and call its `on_sent`."""
        self.blocked.pop(stream.id, None)
        self._count(stream, 0)
        stream.unsent = 0
        stream.pending = None
        stream.trailers = None
        if stream.on_sent is not None:
            stream.on_sent()

    # --- windows ---

    def widen(self, increment: int) -> bool:
        """Increase the connection's send window; false if it overflows (RFC 9113 6.9.1)."""
        self.window += increment
        return self.window <= MAX_WINDOW

    def give_up_table(self) -> None:
        """Announce an empty dynamic table before the next header block (RFC 9113 4.3.1).

        A client that reduces SETTINGS_HEADER_TABLE_SIZE ends the connection if the next block does
        not announce the smaller table. Once is enough, because no table is smaller than 0.
        """
        if self._has_table:
            self._has_table = False
            self._table_update = _TABLE_OF_0

    def write(self, frame: bytes) -> None:
        """Append a frame that is not subject to flow control (RFC 9113 6.9)."""
        self.output.append(frame)


def _detached(part: Buffer) -> Buffer:
    """Copy a buffer if it keeps a much larger array alive; otherwise return it unchanged.

    One row of a batch, for example, is a view of the array with all rows.
    """
    array = part.obj if isinstance(part, memoryview) else None
    kept = getattr(getattr(array, "base", None), "nbytes", 0)
    # Compare with the array of the view, not with `part`, from which sent bytes are sliced off.
    own = getattr(array, "nbytes", 0)
    return memoryview(bytes(part)) if kept > _MOST_KEPT * own else part
