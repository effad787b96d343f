"""Answers out: frames within both windows, round robin, the rest parked (RFC 9113 5.2, 6.9)."""

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
"""DATA that is made ready to be written at once; the rest follows when that has left."""

_JOINED_BYTES = SMALLEST_MAX_FRAME
"""An answer that is not larger is joined, which is quicker than to write its parts. Each of them
fits into a frame then, whatever the client takes (RFC 9113 4.2)."""

_TABLE_OF_0 = b"\x20"
"""Dynamic Table Size Update to 0 (RFC 7541 6.3)."""

_MOST_KEPT = 2
"""Parked bytes are copied where they keep alive an array of more than so many times their size."""


class Sender:
    """Turns answers into frames, as fast as the client takes them.

    Invariant: `parked` of each stream is its `unsent`, and both are in the ledger, whenever a
    method returns; `blocked` has the streams with unsent bytes, and no other.
    """

    def __init__(self, account: Account, conduct: Conduct, on_output: Callable[[], None]) -> None:
        """`on_output` is called when there is output though nothing was received."""
        self._on_output = on_output
        self.receives = False
        """Whether frames are being handled: the output is written after that."""
        self._account = account
        self._conduct = conduct
        self.blocked: dict[int, ServerStream] = {}
        """The streams with unsent bytes, in the order of their next turn."""
        self.output: list[Buffer] = []
        """Frames to be written."""
        self.output_bytes = 0
        """DATA among them."""
        self.window = DEFAULT_WINDOW
        self.max_frame = SMALLEST_MAX_FRAME
        self.paused = False
        """Whether the transport has asked for no more: backpressure of its client."""
        self._has_table = True
        """Whether the client may take the encoder's table, which is never used, for one of 4096."""
        self._table_update = b""
        """Instruction in front of the next header block."""

    # --- answers ---

    def answer(
        self, stream: ServerStream, head: bytes, parts: Sequence[Buffer], size: int, trailers: bytes
    ) -> bool:
        """Send a whole answer; false, and nothing is sent, when it may not be parked."""
        if (
            len(head) + size + len(trailers) > _JOINED_BYTES
            or size > self.window
            or size > stream.send_window
            or self.paused
            or self._table_update
        ):
            return self._long_answer(stream, head, parts, size, trailers)
        if (stream.state is not State.HALF_CLOSED_REMOTE or stream.ending) and not stream.open:
            return True  # the stream is closed
        self.window -= size
        number = stream.id
        output = self.output
        # Output that waits has been announced, or leaves when all frames were handled.
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
        """Tell whether this many bytes leave at once, or may be held."""
        # However wide the windows are, more than a flush waits for the transport.
        blocked = self.paused or size > min(self.window, stream.send_window, FLUSH_BYTES)
        return not blocked or self._account.allows(size)

    def wake(self) -> None:
        """Have the output written, unless that happens anyway when all frames were handled."""
        if not self.receives:
            self._on_output()

    def headers(self, stream: ServerStream, block: bytes, *, end: bool) -> None:
        """Send a header block; trailers wait for the DATA in front of them (8.1)."""
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
        """Write a block as HEADERS and as many CONTINUATION frames as it takes (6.10)."""
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
        """Send DATA; false, and nothing is sent, when it may not be parked."""
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
        """Send a frame that nothing holds back: what `_park` comes to, without parking.

        False, and nothing is sent, where a part of it might wait.
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
        is_first = not output and not self.receives  # as in `answer`
        output.append(b"".join((HEADER.pack(size >> 8, size & 0xFF, DATA, 0, stream.id), *parts)))
        self.output_bytes += size
        self._conduct.served += 1
        if is_first:
            self._on_output()
        return True

    # --- parking: `_count` alone changes the ledger ---

    def _park(self, stream: ServerStream, parts: Sequence[Buffer], size: int) -> None:
        if stream.pending is None:
            stream.pending = deque()
        # A slice of a view costs nothing, one of bytes copies them.
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
        """Tell whether nothing of a stream leaves before its client does something."""
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
        """Charge the pending bytes of a stream."""
        change, stream.parked = size - stream.parked, size
        if change > 0:
            self._account.hold(change, Kind.ANSWERS)
        elif change:
            self._account.release(-change, Kind.ANSWERS)

    def _send(self, stream: ServerStream, most: int) -> None:
        """Frame the pending data of a stream, while windows and its turn allow."""
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
        """Return the streams whose own window has held back the rest since a tick (5.2)."""
        return [s for s in self.blocked.values() if s.send_window <= 0 and s.tick < since]

    @property
    def is_held_back(self) -> bool:
        """Tell whether something waits for the window of the connection."""
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
        """Send pending data, stream by stream in turn, as far as the windows allow."""
        moved = True
        while moved and self.blocked and self.window > 0 and not self._full:
            moved = False
            self._pump_long()
            for stream in tuple(self.blocked.values()):
                if stream.send_window > 0 and stream.unsent:
                    if self._full or self.window <= 0:
                        return
                    # Its next turn is after all others, also when the window ends this round.
                    self.blocked.pop(stream.id, None)
                    self._send(stream, self.max_frame)
                    self._keep(stream)
                    moved = True

    def _pump_long(self) -> None:
        """Send frames of long parts as `_send` and `_keep` would, up to the first other turn.

        Each leaves its stream more to send and both windows open: nothing ends, and nothing waits.
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
        """Return the pending output, and clear it."""
        output = self.output
        self.output = []
        self.output_bytes = 0
        return output

    # --- the end of a stream ---

    def discard(self, stream: ServerStream) -> None:
        """Drop the pending data of a closed stream, and notify the writer that waits for it."""
        self.blocked.pop(stream.id, None)
        self._count(stream, 0)
        stream.unsent = 0
        stream.pending = None
        stream.trailers = None
        if stream.on_sent is not None:
            stream.on_sent()

    # --- windows ---

    def widen(self, increment: int) -> bool:
        """Widen the window of the connection; false when it gets too wide (6.9.1)."""
        self.window += increment
        return self.window <= MAX_WINDOW

    def give_up_table(self) -> None:
        """Say in front of the next header block that the encoder's table is of 0 bytes (4.3.1).

        A client that makes the table smaller than it was ends the connection for a block without
        that. Once is enough: there is nothing smaller.
        """
        if self._has_table:
            self._has_table = False
            self._table_update = _TABLE_OF_0

    def write(self, frame: bytes) -> None:
        """Send a frame that no window holds back (6.9)."""
        self.output.append(frame)


def _detached(part: Buffer) -> Buffer:
    """Return a part that keeps no array alive which is much larger than itself.

    A row of a batch is a view of an array that has the rows of all the others.
    """
    array = part.obj if isinstance(part, memoryview) else None
    kept = getattr(getattr(array, "base", None), "nbytes", 0)
    # Not the size of the part, which is what is left of it: the rest of a long answer is no row.
    own = getattr(array, "nbytes", 0)
    return memoryview(bytes(part)) if kept > _MOST_KEPT * own else part
