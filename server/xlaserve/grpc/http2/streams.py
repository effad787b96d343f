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
"""Streams that we reset, of which frames may still be on their way; and gaps between ids."""
ANSWERED_SECONDS = 5.0
"""Seconds that a client has to end a request that was answered before its end, until RST_STREAM
tells it to (RFC 9113 8.1). HAProxy drops the answers that a RST_STREAM follows at once, and tells
their client CANCELLED. Clients that have read the status end their request by themselves."""


@dataclass(slots=True)
class _Answered:
    """A stream that was answered, and that its client has not ended."""

    until: float
    """When it is reset."""
    window: int
    """Bytes that the client may still send; it is granted no more."""


class Streams:
    """Opens streams, takes their steps through the table, and keeps nothing of those closed.

    Invariant: a stream is in `open` from its HEADERS until it was answered, is CLOSED or RESET, and
    what it holds of the ledger is released as it leaves.
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
        """The highest stream that the client has opened."""
        self.partial: ServerStream | None = None
        """The stream of the DATA frame that has not come whole, unless it was closed meanwhile."""
        self.tick = 0
        self.peer_window = DEFAULT_WINDOW
        self.stream_window = limits.stream_window_bytes
        self.max_streams = limits.max_streams
        """Streams that the client may have open (5.1.2)."""
        self._answered: dict[int, _Answered] = {}
        """Those that are HALF_CLOSED_LOCAL, in the order in which they are reset."""
        self._most_answered = limits.max_streams
        self._conduct = conduct
        self.sender = sender
        self._windows = windows
        self._gaps: deque[tuple[int, int]] | None = None
        """Ids that the client has skipped, from and to; None for none."""
        self._reset: dict[int, None] = {}
        """The streams that we have reset lately."""
        self.uncounted = 0
        """Bytes that were charged to streams in this read, and that `settle` has yet to hold."""

    # --- opening ---

    def take_id(self, stream_id: int) -> None:
        """Take an id above all others for a new stream: those below it are closed (5.1.1)."""
        if stream_id > self.highest + 2:
            if self._gaps is None:
                self._gaps = deque(maxlen=_REMEMBERED)
            self._gaps.append((self.highest + 1, stream_id - 2))
        self.highest = stream_id

    def add(self, stream_id: int, head: Head[Route], happening: Input) -> ServerStream:
        """Open a stream, whose id was taken, by its HEADERS or HEADERS_END."""
        stream = ServerStream(self, stream_id, head, happening)
        self.open[stream_id] = stream
        return stream

    # --- steps ---

    def advance(self, stream_id: int, happening: Input) -> ServerStream | None:
        """Take a step of a stream, and return it; None where the frame is to be ignored (5.1).

        Raises what the table says of a frame that may not come.
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
            reaction = Reaction.CONNECTION_PROTOCOL_ERROR  # 5.1.1: ids only grow
        assert reaction in REACTION_CODES, (state, happening)
        text = f"{happening.name} on stream {stream_id}, which is {state.name}"
        code = REACTION_CODES[reaction]  # type: ignore[index]
        if reaction in STREAM_ERRORS:
            raise StreamFailure(stream_id, code, text)  # 5.4.2
        raise ConnectionFailure(code, text)  # 5.4.1

    def state_of(self, stream_id: int) -> State:
        """Return the state of a stream that is not open (5.1, 5.1.1)."""
        if stream_id in self._reset:
            return State.RESET
        if stream_id in self._answered:
            return State.HALF_CLOSED_LOCAL
        if not stream_id & 1 or stream_id > self.highest:
            return State.IDLE
        return State.CLOSED

    def _skipped(self, stream_id: int) -> bool:
        return any(first <= stream_id <= last for first, last in self._gaps or ())

    # --- closing ---

    def fail(self, failure: StreamFailure) -> None:
        """Reset a stream for an error of its client (5.4.2)."""
        stream = self.open.get(failure.stream_id)
        if stream is None and self.state_of(failure.stream_id) is State.IDLE:
            # 6.4: no RST_STREAM on an idle stream; its client would end the connection for it.
            raise ConnectionFailure(failure.code, failure.reason)  # 5.4.1
        if stream is not None:
            stream.advance(Input.SEND_RST)
            self._discard(stream)
            stream.cancel(failure.reason)
        self.write_reset(failure.stream_id, failure.code)
        self._conduct.count_reset()

    def write_reset(self, stream_id: int, code: ErrorCode) -> None:
        """Send a RST_STREAM, and remember that what comes for the stream is ignored (5.1)."""
        self.sender.write(rst_stream(stream_id, code))
        self._answered.pop(stream_id, None)
        if len(self._reset) >= _REMEMBERED:
            del self._reset[next(iter(self._reset))]
        self._reset[stream_id] = None

    def reset_stream(self, stream: ServerStream, code: ErrorCode) -> None:
        """Close a stream at once with a RST_STREAM, unless it was answered or is closed."""
        if self.open.get(stream.id) is not stream:
            return
        stream.advance(Input.SEND_RST)
        self._discard(stream)
        self.write_reset(stream.id, code)
        self.sender.wake()

    def cut_off(self, stream: ServerStream, reason: str) -> None:
        """Reset a stream whose client does not read, and cancel its call (7)."""
        self.reset_stream(stream, ErrorCode.ENHANCE_YOUR_CALM)
        stream.cancel(reason)

    def complete(self, stream: ServerStream) -> None:
        """Take the step of a frame with END_STREAM that was sent, and keep nothing of the stream.

        Where the client has yet to end its request, it has some time to do so.
        """
        reached = stream.advance(Input.SEND_END)
        if reached is not State.CLOSED:
            assert reached is State.HALF_CLOSED_LOCAL, (stream.state, stream.id)
            if len(self._answered) >= self._most_answered:
                self.write_reset(next(iter(self._answered)), ErrorCode.NO_ERROR)
            until = self.now() + ANSWERED_SECONDS
            self._answered[stream.id] = _Answered(until, stream.recv_window)
        self._discard(stream)

    # --- answered early: later DATA is dropped, within the window that the client has ---

    def _end_answered(self, stream_id: int, happening: Input, reached: State) -> None:
        """Take a step of a stream that was answered."""
        if reached is not State.HALF_CLOSED_LOCAL:
            # Once for each stream, as its end would have come: it counts as none of the rest.
            del self._answered[stream_id]
        elif happening is not Input.DATA:
            self._conduct.count_control()

    def drop(self, stream_id: int, length: int, padding: int) -> None:
        """Charge a DATA frame to a stream that was answered, if it is to one."""
        answered = self._answered.get(stream_id)
        if answered is None:
            return
        answered.window -= length
        if answered.window < 0:  # 6.9.1
            self.fail(
                StreamFailure(
                    stream_id, ErrorCode.FLOW_CONTROL_ERROR, "flow-control window exceeded"
                )
            )
        elif padding == length:  # 10.5
            self._conduct.count_control()

    def reset_answered(self) -> None:
        """Have the clients stop that go on with requests which were answered a while ago (8.1)."""
        if not self._answered:
            return
        now = self.now()
        for stream_id in [i for i, answered in self._answered.items() if answered.until <= now]:
            self.write_reset(stream_id, ErrorCode.NO_ERROR)

    def reset_by_client(self, stream_id: int, code: int) -> None:
        """Close a stream that the client has reset, and cancel its call (5.4.2, 6.4)."""
        stream = self.advance(stream_id, Input.RST_STREAM)
        if stream is not None:
            self._discard(stream)
            stream.cancel(f"the client reset the stream, error code {code}")
            self._conduct.count_reset()

    def close_all(self, reason: str) -> list[deque[Buffer]]:
        """Close every stream, and cancel its call: the connection ends.

        Return the unsent buffers: freeing them all at once may take long.
        """
        unsent = []
        self._answered.clear()
        for stream in tuple(self.open.values()):
            stream.advance(Input.CONNECTION_END)
            if stream.pending:
                unsent.append(stream.pending)
            self._discard(stream)
            stream.cancel(reason)
        return unsent

    def _discard(self, stream: ServerStream) -> None:
        """Keep nothing of a stream that is closed: neither memory nor bytes of the ledger."""
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

    # --- bytes of messages: `hold` and `reserve` charge all of them, `_discard` releases them ---

    def hold(self, stream: ServerStream, count: int) -> None:
        """Count this many more bytes that are held for a stream, or fewer, until it is closed."""
        if self.open.get(stream.id) is stream:
            stream.charged += count
            if count >= 0:
                self.account.hold(count)
            else:
                self.account.release(-count)

    def settle(self) -> None:
        """Hold what short messages were charged with: once for all of a read."""
        count, self.uncounted = self.uncounted, 0
        self.account.hold(count)

    def reserve(self, stream: ServerStream, count: int) -> bool:
        """Count this many bytes for a stream that are to come; false where there is no memory."""
        if self.open.get(stream.id) is not stream:
            return True
        if not self.account.reserve(count):
            return False
        stream.charged += count
        return True

    # --- windows ---

    def grant(self, stream: ServerStream, wanted: int) -> None:
        """Let the client send at least this many more bytes on a stream."""
        self._windows.grant(stream, wanted)

    def change_peer_window(self, window: int, widest: int) -> None:
        """Change what the client takes of each stream, open or to come (6.9.2).

        `widest` is the largest window on the way to this one: a client may send thousands of
        values in a frame, and the streams are gone through once.
        """
        change = window - self.peer_window
        most = MAX_WINDOW - (widest - self.peer_window)
        for stream in self.open.values():
            if stream.send_window > most:  # 6.9.2
                raise ConnectionFailure(
                    ErrorCode.FLOW_CONTROL_ERROR,
                    f"flow-control window overflow on stream {stream.id}",
                )
            stream.send_window += change
        self.peer_window = window
