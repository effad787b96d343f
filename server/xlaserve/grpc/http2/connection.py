"""The HTTP/2 state machine of one connection, without I/O (RFC 9113)."""

import time
from collections import deque
from collections.abc import Callable

from xlaserve.grpc.http2.control_frames import ROUND_TRIP, ControlFrames
from xlaserve.grpc.http2.data_frames import DataFrames
from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.flow_control import ReceiveWindows
from xlaserve.grpc.http2.frame_reader import RECEIVE_BYTES, FrameReader, ReceiveBuffer
from xlaserve.grpc.http2.frames import MAX_STREAM_ID, ErrorCode, Setting, goaway, ping, settings
from xlaserve.grpc.http2.header_frames import HeaderFrames, RequestRouter
from xlaserve.grpc.http2.limits import Conduct, Http2Limits, Shared
from xlaserve.grpc.http2.messages import Problem
from xlaserve.grpc.http2.sending import Sender
from xlaserve.grpc.http2.stream import Buffer
from xlaserve.grpc.http2.streams import Streams
from xlaserve.net.ledger import Account

__all__ = ["RECEIVE_BYTES", "ReceiveBuffer", "ServerConnection"]


class ServerConnection:
    """The server side of one connection: parses received bytes and passes requests to routes.

    Invariant: once `failed` is set, no stream is open and received bytes are ignored.
    """

    def __init__(
        self,
        limits: Http2Limits,
        router: RequestRouter,
        shared: Shared,
        *,
        account: Account | None = None,
        wake: Callable[[], None] = lambda: None,
        buffer: ReceiveBuffer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called when output becomes available outside `received`."""
        conduct = Conduct(limits, now)
        conduct.on_refusals = self._is_refused_too_often
        self._limits = limits
        self._conduct = conduct
        self.account = account or shared.ledger.open()
        self._sender = Sender(self.account, conduct, wake)
        self._windows = ReceiveWindows(limits, self._sender)
        self._streams = Streams(limits, self.account, conduct, self._sender, self._windows)
        self.streams = self._streams.open
        self._headers = HeaderFrames(limits, router, self._streams, conduct)
        self.control = ControlFrames(self._streams, self._sender, conduct)
        """Handles control frames; records the client's first SETTINGS and its GOAWAY."""
        self._reader = FrameReader(
            limits,
            buffer or ReceiveBuffer(),
            self._streams,
            (
                DataFrames(limits, shared, self._streams, self._windows, conduct),
                self._headers,
                self.control,
            ),
            now,
        )
        self.receive_buffer = self._reader.space
        """Returns the buffer for the next bytes; `received` reports how many came."""
        self.take_output = self._sender.take
        """Returns and clears the output to write; `pump` may then produce more."""
        self.pump = self._sender.pump
        """Produces more output from pending data, as far as the windows allow."""
        self.blocked = self._sender.blocked
        """The streams with pending data; `pump` does nothing if there are none."""
        self.failed: ConnectionFailure | None = None
        """The reason for which the connection ended, also sent in the GOAWAY."""
        self.unsent: list[deque[Buffer]] = []
        """Buffers unsent when the connection ended. `Http2Protocol` frees them in small steps; they
        are already released in the ledger."""
        self.leaves = False
        """Whether the final GOAWAY, which names the last stream, was sent."""
        self._last_stream = MAX_STREAM_ID
        """Last stream named in a GOAWAY; a later GOAWAY must not name a higher one (RFC 9113 6.8).
        """

    # --- receiving ---

    def start(self) -> None:
        """Send our SETTINGS, which must precede all other frames (RFC 9113 3.4)."""
        limits = self._limits
        self._sender.write(
            settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                    Setting.MAX_FRAME_SIZE: limits.max_frame_bytes,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
                }
            )
            + self._windows.first_update()
        )

    def received(self, count: int) -> bool:
        """Parse `count` bytes of the receive buffer.

        Return false if the limit of a turn, in time or in work, was reached; the caller then
        schedules `proceed`.
        """
        if self.failed is not None:
            return True
        self._sender.receives = True
        try:
            return self._reader.received(count)
        except ConnectionFailure as failure:
            # Keep a new exception: the traceback of this one keeps its frames, and so the stream,
            # alive.
            self._fail(ConnectionFailure(failure.code, failure.reason))
            return True
        finally:
            self._sender.receives = False
            if self._streams.uncounted:
                self._streams.settle()

    def proceed(self) -> bool:
        """Parse the bytes that the previous turn left; return false as `received` does."""
        self.receive_buffer()
        return self.received(0)

    def receive(self, data: bytes) -> None:
        """Parse all of `data`, in as many turns as necessary."""
        view = memoryview(data)
        while view and self.failed is None:
            space = self.receive_buffer()
            count = min(len(space), len(view))
            space[:count] = view[:count]
            view = view[count:]
            done = self.received(count)
            while not done:
                done = self.proceed()

    # --- sending ---

    @property
    def output(self) -> bool:
        """Tell whether there is output to write."""
        return bool(self._sender.output)

    def pause(self) -> None:
        """Stop producing DATA frames: the transport's write buffer is full."""
        self._sender.paused = True

    def resume(self) -> None:
        """Produce DATA frames again."""
        self._sender.paused = False
        self._sender.pump()

    @property
    def frames_sent(self) -> int:
        """Return the number of response frames produced so far."""
        return self._conduct.served

    @property
    def awaits_ends(self) -> bool:
        """Tell whether the client has yet to end a request that was answered (RFC 9113 8.1)."""
        return bool(self._streams.answered)

    @property
    def is_held_back(self) -> bool:
        """Tell whether the client's connection window blocks responses (RFC 9113 5.2, 6.9)."""
        return self._sender.is_held_back

    # --- timeouts and shutdown ---

    @property
    def preface_seconds(self) -> float:
        """Return the time limit for the client's preface."""
        return self._limits.preface_seconds

    @property
    def greeted(self) -> bool:
        """Tell whether the client has sent its preface and first SETTINGS (RFC 9113 3.4)."""
        return self.control.settled

    def sweep(self, ticks_for_a_message: int, ticks_for_an_answer: int) -> None:
        """Expire slow requests and reset streams whose client does not read the response.

        A request whose message is incomplete has no call yet, so its deadline is checked here.

        The server calls this at regular intervals; the limits are numbers of such calls.
        """
        streams = self._streams
        streams.tick += 1
        streams.reset_answered()
        oldest = streams.tick - ticks_for_a_message
        if self._headers.open_block and self._headers.open_since < oldest:  # RFC 9113 10.5.1
            self.end(ErrorCode.ENHANCE_YOUR_CALM, "incomplete header block")
            return
        now = self._conduct.now()
        for stream in [stream for stream in streams.open.values() if not stream.begun]:
            if stream.deadline is not None and stream.deadline <= now:
                stream.begin(Problem.LATE)
            elif stream.tick < oldest:
                stream.begin(Problem.EXPIRED)
        for stream in self._sender.stalled(streams.tick - ticks_for_an_answer):
            streams.cut_off(stream, "the client does not read the answer")

    def go_away(self) -> None:
        """Start a graceful shutdown: send a GOAWAY that still allows all streams, and a PING.

        When the client has acknowledged the PING, all streams that it opened before it read the
        GOAWAY are known, and `leave` sends the final GOAWAY (RFC 9113 6.8).
        """
        if self.leaves or self.failed is not None:
            return  # a later GOAWAY must not name a later stream (RFC 9113 6.8)
        self.control.on_round_trip = self.leave
        self._sender.write(goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR) + ping(ROUND_TRIP))

    def leave(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Send the final GOAWAY; later streams are refused (RFC 9113 6.8, 8.7)."""
        if self.leaves or self.failed is not None:
            return
        self.leaves = True
        self.control.on_round_trip = None
        self._streams.max_streams = 0
        self._write_goaway(code, reason)

    def _is_refused_too_often(self) -> None:
        # Open streams are still served: the client may be a proxy for many others.
        text = f"more than {self._limits.max_refusals} requests were refused"
        self.leave(ErrorCode.ENHANCE_YOUR_CALM, text)

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Send a GOAWAY and end all streams (RFC 9113 6.8); the caller closes the transport."""
        if self.failed is None:
            self._fail(ConnectionFailure(code, reason))

    def lost(self) -> None:
        """Cancel all calls and close the account: the transport is closed."""
        if self.failed is None:
            self.failed = ConnectionFailure(ErrorCode.NO_ERROR, "the connection is closed")
        self._discard("the connection is closed")
        self._sender.take()
        self.account.close()

    def _fail(self, failure: ConnectionFailure) -> None:
        self.failed = failure
        self._discard(failure.reason)
        self._write_goaway(failure.code, failure.reason)

    def _write_goaway(self, code: ErrorCode, reason: str) -> None:
        # Streams opened after an earlier GOAWAY were refused, so the client may retry them.
        self._last_stream = min(self._last_stream, self._streams.highest)
        self._sender.write(goaway(self._last_stream, code, reason))

    def _discard(self, reason: str) -> None:
        """Close all streams and drop incomplete frames and header blocks."""
        self.unsent += self._streams.close_all(reason)
        self._headers.discard()
        self._reader.discard()
