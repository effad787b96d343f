"""One client connection: bytes in, bytes and requests out, no I/O (RFC 9113)."""

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
    """The protocol of one connection, between the bytes of its socket and the routes.

    Invariant: once `failed` is set no stream is open, and nothing that is received is looked at.
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
        """`wake` is called when there is output though nothing was received."""
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
        """Knows whether the client has greeted, and whether it leaves."""
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
        """Returns the next output to write; `pump` produces more, if any."""
        self.pump = self._sender.pump
        """Produces more output from pending data, as far as windows allow."""
        self.blocked = self._sender.blocked
        """The streams with pending data: without any, `pump` produces nothing."""
        self.failed: ConnectionFailure | None = None
        """Why the connection ends; also sent as a GOAWAY."""
        self.unsent: list[deque[Buffer]] = []
        """Buffers that were still to be sent when it ended; the shell lets go of them in parts. The
        ledger counts it no more."""
        self.leaves = False
        """Whether the client knows which streams are the last ones."""
        self._last_stream = MAX_STREAM_ID
        """Last stream that a GOAWAY of ours has named; no later one names a higher one (6.8)."""

    # --- bytes in ---

    def start(self) -> None:
        """Send our settings, which come before anything else (RFC 9113 3.4)."""
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
        """Handle this many bytes in the buffer; false when some are left for another pass."""
        if self.failed is not None:
            return True
        self._sender.receives = True
        try:
            return self._reader.received(count)
        except ConnectionFailure as failure:
            # Another one: its traceback would keep the frames of these calls, and so the stream.
            self._fail(ConnectionFailure(failure.code, failure.reason))
            return True
        finally:
            self._sender.receives = False
            if self._streams.uncounted:
                self._streams.settle()

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

    # --- bytes out ---

    @property
    def output(self) -> bool:
        """Tell whether there is something to write."""
        return bool(self._sender.output)

    def pause(self) -> None:
        """Make no more DATA: backpressure of the transport."""
        self._sender.paused = True

    def resume(self) -> None:
        """Make DATA again."""
        self._sender.paused = False
        self._sender.pump()

    @property
    def frames_sent(self) -> int:
        """Return how many frames of answers were made so far."""
        return self._conduct.served

    @property
    def is_held_back(self) -> bool:
        """Tell whether answers wait for the window of the connection (5.2, 6.9)."""
        return self._sender.is_held_back

    # --- the life of the connection ---

    @property
    def preface_seconds(self) -> float:
        """Return how long the client may take to send its preface."""
        return self._limits.preface_seconds

    @property
    def greeted(self) -> bool:
        """Tell whether the client has sent its preface, and the SETTINGS behind it (3.4)."""
        return self.control.settled

    def sweep(self, ticks_for_a_message: int, ticks_for_an_answer: int) -> None:
        """End what has taken too long; called at even intervals."""
        streams = self._streams
        streams.tick += 1
        streams.reset_answered()
        oldest = streams.tick - ticks_for_a_message
        if self._headers.open_block and self._headers.open_since < oldest:  # 10.5.1
            self.end(ErrorCode.ENHANCE_YOUR_CALM, "incomplete header block")
            return
        expired = [s for s in streams.open.values() if not s.begun and s.tick < oldest]
        for stream in expired:
            stream.begin(Problem.EXPIRED)
        for stream in self._sender.stalled(streams.tick - ticks_for_an_answer):
            streams.cut_off(stream, "the client does not read the answer")

    def go_away(self) -> None:
        """Ask the client to open no more streams; those on their way are still served (6.8).

        Once it has answered the PING behind that, all of them are there, and `leave` follows.
        """
        if self.leaves or self.failed is not None:
            return  # a later GOAWAY must not name a later stream (6.8)
        self.control.on_round_trip = self.leave
        self._sender.write(goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR) + ping(ROUND_TRIP))

    def leave(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Tell the client which streams are the last ones; later ones are refused (6.8, 8.7)."""
        if self.leaves or self.failed is not None:
            return
        self.leaves = True
        self.control.on_round_trip = None
        self._streams.max_streams = 0
        self._write_goaway(code, reason)

    def _is_refused_too_often(self) -> None:
        # Its other streams are served to their end: it may be a proxy of many clients.
        text = f"more than {self._limits.max_refusals} requests were refused"
        self.leave(ErrorCode.ENHANCE_YOUR_CALM, text)

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Say which streams were served (6.8); the connection is to be closed then."""
        if self.failed is None:
            self._fail(ConnectionFailure(code, reason))

    def lost(self) -> None:
        """Cancel all calls in flight: the connection is gone."""
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
        # Streams opened behind an earlier GOAWAY were refused: their client may send them again.
        self._last_stream = min(self._last_stream, self._streams.highest)
        self._sender.write(goaway(self._last_stream, code, reason))

    def _discard(self, reason: str) -> None:
        """Keep nothing that was received: neither requests nor what has come in part."""
        self.unsent += self._streams.close_all(reason)
        self._headers.discard()
        self._reader.discard()
