"""The open and closed streams of one connection (RFC 9113, 5.1)."""

from collections import deque
from dataclasses import dataclass

from xlaserve.grpc.http2.errors import ConnectionFailure, StreamFailure
from xlaserve.grpc.http2.flow_control import ReceiveWindows
from xlaserve.grpc.http2.frames import DEFAULT_WINDOW, MAX_WINDOW, ErrorCode, rst_stream
from xlaserve.grpc.http2.headers import Head
from xlaserve.grpc.http2.limits import Conduct, Http2Limits
from xlaserve.grpc.http2.sending import Sender
from xlaserve.grpc.http2.states import NEXT, REACTION_CODES, STREAM_ERRORS, Input, Reaction, State
from xlaserve.grpc.http2.stream import Buffer, Route, ServerStream
from xlaserve.net.ledger import Account

_REMEMBERED = 1024
"""Maximum number of reset streams, and of gaps between stream ids, remembered per connection."""
ANSWERED_SECONDS = 5.0
"""Delay before the server resets a stream that it answered before the end of the request (RFC 9113
8.1). Most clients end the request themselves once they have read the status. An immediate
RST_STREAM would lose responses: HAProxy drops a response followed by one, and reports CANCELLED."""


@dataclass(slots=True)
class _Answered:
    """A stream that was answered before the client ended its request."""

    until: float
    """Time at which the stream is reset."""
    window: int
    """Bytes that the client may still send; the window is not enlarged."""


class Streams:
    """Opens streams, advances their states, and releases everything when they are closed.

    Invariant: a stream is in `open` from its HEADERS until it has been answered, closed or reset;
    when it is removed, its bytes in the ledger are released.
    """

    def __init__(
        self,
        limits: Http2Limits,
        account: Account,
        conduct: Conduct,
        sender: Sender,
        windows: ReceiveWindows,
    ) -> None:
        self.account = account
        self.now = conduct.now
        self.open: dict[int, ServerStream] = {}
        self.highest = 0
        """The highest stream id that the client has used."""
        self.partial: ServerStream | None = None
        """The stream of the incomplete DATA frame; None if there is none or it was closed."""
        self.tick = 0
        self.peer_window = DEFAULT_WINDOW
        self.stream_window = limits.stream_window_bytes
        self.max_streams = limits.max_streams
        """Maximum number of open streams (RFC 9113 5.1.2)."""
        self.answered: dict[int, _Answered] = {}
        """The streams in HALF_CLOSED_LOCAL, in the order in which they will be reset."""
        self._most_answered = limits.max_streams
        self._conduct = conduct
        self.sender = sender
        self._windows = windows
        self._gaps: deque[tuple[int, int]] | None = None
        """Ranges of stream ids that the client skipped, as (first, last); None if there are none.
        """
        self._reset: dict[int, None] = {}
        """The streams that the server reset recently."""
        self.uncounted = 0
        """Bytes charged to streams during this read; `settle` adds them to the ledger."""

    # --- opening ---

    def take_id(self, stream_id: int) -> None:
        """Record the id of a new stream; lower unused ids count as closed (RFC 9113 5.1.1)."""
        if stream_id > self.highest + 2:
            if self._gaps is None:
                self._gaps = deque(maxlen=_REMEMBERED)
            self._gaps.append((self.highest + 1, stream_id - 2))
        self.highest = stream_id

    def add(self, stream_id: int, head: Head[Route], happening: Input) -> ServerStream:
        """Open a stream after `take_id`; `happening` is HEADERS or HEADERS_END."""
        stream = ServerStream(self, stream_id, head, happening)
        self.open[stream_id] = stream
        return stream

    # --- state transitions ---

    def advance(self, stream_id: int, happening: Input) -> ServerStream | None:
        """Advance a stream's state and return the stream, or None to ignore the frame.

        Raises StreamFailure or ConnectionFailure for a frame that the state does not allow.
        """
        stream = self.open.get(stream_id)
        if stream is None:
            state = self.state_of(stream_id)
            reaction = NEXT[state][happening]
            if state is State.HALF_CLOSED_LOCAL and type(reaction) is State:
                self._end_answered(stream_id, happening, reaction)
                return None
        else:
            reaction = stream.advance(happening)
            if type(reaction) is State:
                return stream
            state = stream.state
        if reaction is Reaction.IGNORE:
            self._conduct.count_control()
            return None
        if state is State.CLOSED and happening <= Input.HEADERS_END and self._skipped(stream_id):
            reaction = Reaction.CONNECTION_PROTOCOL_ERROR  # RFC 9113 5.1.1: ids only grow
        assert reaction in REACTION_CODES, (state, happening)
        text = f"{happening.name} on stream {stream_id}, which is {state.name}"
        code = REACTION_CODES[reaction]  # type: ignore[index]
        if reaction in STREAM_ERRORS:
            raise StreamFailure(stream_id, code, text)  # RFC 9113 5.4.2
        raise ConnectionFailure(code, text)  # RFC 9113 5.4.1

    def state_of(self, stream_id: int) -> State:
        """Return the state of a stream that is not in `open` (RFC 9113 5.1, 5.1.1)."""
        if stream_id in self._reset:
            return State.RESET
        if stream_id in self.answered:
            return State.HALF_CLOSED_LOCAL
        if not stream_id & 1 or stream_id > self.highest:
            return State.IDLE
        return State.CLOSED

    def _skipped(self, stream_id: int) -> bool:
        return any(first <= stream_id <= last for first, last in self._gaps or ())

    # --- closing ---

    def fail(self, failure: StreamFailure) -> None:
        """Reset a stream because of a client error (RFC 9113 5.4.2)."""
        stream = self.open.get(failure.stream_id)
        if stream is None and self.state_of(failure.stream_id) is State.IDLE:
            # RST_STREAM is not allowed on an idle stream; clients treat it as a connection error
            # (RFC 9113 6.4).
            raise ConnectionFailure(failure.code, failure.reason)  # RFC 9113 5.4.1
        if stream is not None:
            stream.advance(Input.SEND_RST)
            self._discard(stream)
            stream.cancel(failure.reason)
        self.write_reset(failure.stream_id, failure.code)
        self._conduct.count_reset()

    def write_reset(self, stream_id: int, code: ErrorCode) -> None:
        """Send RST_STREAM, and remember to ignore further frames of the stream (RFC 9113 5.1)."""
        self.sender.write(rst_stream(stream_id, code))
        self.answered.pop(stream_id, None)
        if len(self._reset) >= _REMEMBERED:
            del self._reset[next(iter(self._reset))]
        self._reset[stream_id] = None

    def reset_stream(self, stream: ServerStream, code: ErrorCode) -> None:
        """Send RST_STREAM and close the stream, unless it was answered or is closed."""
        if self.open.get(stream.id) is not stream:
            return
        stream.advance(Input.SEND_RST)
        self._discard(stream)
        self.write_reset(stream.id, code)
        self.sender.wake()

    def cut_off(self, stream: ServerStream, reason: str) -> None:
        """Reset a stream whose client does not read the response, and cancel its call."""
        self.reset_stream(stream, ErrorCode.ENHANCE_YOUR_CALM)
        stream.cancel(reason)

    def complete(self, stream: ServerStream) -> None:
        """Close a stream after a frame with END_STREAM was sent on it.

        If the client has not ended its request, it gets ANSWERED_SECONDS to do so.
        """
        reached = stream.advance(Input.SEND_END)
        if reached is not State.CLOSED:
            assert reached is State.HALF_CLOSED_LOCAL, (stream.state, stream.id)
            if len(self.answered) >= self._most_answered:
                self.write_reset(next(iter(self.answered)), ErrorCode.NO_ERROR)
            until = self.now() + ANSWERED_SECONDS
            self.answered[stream.id] = _Answered(until, stream.recv_window)
        self._discard(stream)

    # --- streams answered before the end of the request: further DATA is dropped ---

    def _end_answered(self, stream_id: int, happening: Input, reached: State) -> None:
        """Handle a frame for a stream that was already answered."""
        if reached is not State.HALF_CLOSED_LOCAL:
            # The regular end of the request, once per stream; not counted as a control frame.
            del self.answered[stream_id]
        elif happening is not Input.DATA:
            self._conduct.count_control()

    def drop(self, stream_id: int, length: int, padding: int) -> None:
        """Drop a DATA frame of a stream that was already answered, but check its window."""
        answered = self.answered.get(stream_id)
        if answered is None:
            return
        answered.window -= length
        if answered.window < 0:  # RFC 9113 6.9.1
            self.fail(
                StreamFailure(
                    stream_id, ErrorCode.FLOW_CONTROL_ERROR, "flow-control window exceeded"
                )
            )
        elif padding == length:  # RFC 9113 10.5
            self._conduct.count_control()

    def reset_answered(self) -> None:
        """Reset streams whose requests were answered ANSWERED_SECONDS ago (RFC 9113 8.1)."""
        if not self.answered:
            return
        now = self.now()
        for stream_id in [i for i, answered in self.answered.items() if answered.until <= now]:
            self.write_reset(stream_id, ErrorCode.NO_ERROR)

    def reset_by_client(self, stream_id: int, code: int) -> None:
        """Close a stream that the client has reset, and cancel its call (RFC 9113 5.4.2, 6.4)."""
        stream = self.advance(stream_id, Input.RST_STREAM)
        if stream is not None:
            self._discard(stream)
            stream.cancel(f"the client reset the stream, error code {code}")
            self._conduct.count_reset()

    def close_all(self, reason: str) -> list[deque[Buffer]]:
        """Close all streams and cancel their calls: the connection ends.

        Return the unsent buffers, for the caller to free in small steps.
        """
        unsent = []
        self.answered.clear()
        for stream in tuple(self.open.values()):
            stream.advance(Input.CONNECTION_END)
            if stream.pending:
                unsent.append(stream.pending)
            self._discard(stream)
            stream.cancel(reason)
        return unsent

    def _discard(self, stream: ServerStream) -> None:
        """Release the memory of a closed stream, and its bytes in the ledger."""
        self.open.pop(stream.id, None)
        if stream.reader is not None:
            stream.reader = None
        if stream.charged:
            self.account.release(stream.charged)
            stream.charged = 0
        if self.partial is stream:
            self.partial = None
        if stream.pending is not None:
            self.sender.discard(stream)

    # --- ledger: `hold` and `reserve` charge all message bytes, `_discard` releases them ---

    def hold(self, stream: ServerStream, count: int) -> None:
        """Add bytes to those held in the ledger for a stream; a negative count releases bytes.

        This has no effect once the stream is closed: its bytes are released already.
        """
        if self.open.get(stream.id) is stream:
            stream.charged += count
            if count >= 0:
                self.account.hold(count)
            else:
                self.account.release(-count)

    def settle(self) -> None:
        """Add the bytes of short messages to the ledger, in one step for a whole read."""
        count, self.uncounted = self.uncounted, 0
        self.account.hold(count)

    def reserve(self, stream: ServerStream, count: int) -> bool:
        """Reserve bytes in the ledger for a stream; false if there is no memory for them."""
        if self.open.get(stream.id) is not stream:
            return True
        if not self.account.reserve(count):
            return False
        stream.charged += count
        return True

    # --- windows ---

    def grant(self, stream: ServerStream, wanted: int) -> None:
        """Let the client send at least `wanted` more bytes on a stream."""
        self._windows.grant(stream, wanted)

    def change_peer_window(self, window: int, widest: int) -> None:
        """Apply a new initial window size to open and future streams (RFC 9113 6.9.2).

        A SETTINGS frame may contain thousands of values. To visit the streams only once, `window`
        is the last of them and `widest` the largest, which must not overflow any stream's window.
        """
        change = window - self.peer_window
        most = MAX_WINDOW - (widest - self.peer_window)
        for stream in self.open.values():
            if stream.send_window > most:  # RFC 9113 6.9.2
                raise ConnectionFailure(
                    ErrorCode.FLOW_CONTROL_ERROR,
                    f"flow-control window overflow on stream {stream.id}",
                )
            stream.send_window += change
        self.peer_window = window
