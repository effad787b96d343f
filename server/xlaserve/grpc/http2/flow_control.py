"""Flow control of incoming data: the windows granted to a client (RFC 9113, 5.2, 6.9)."""

from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.frames import DEFAULT_WINDOW, MAX_WINDOW, ErrorCode, window_update
from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.http2.sending import Sender
from xlaserve.grpc.http2.states import State
from xlaserve.grpc.http2.stream import ServerStream


class ReceiveWindows:
    """The window of a connection, and the widening of those of its streams.

    Invariant: every byte of a DATA frame, its padding and the length of that included, passes
    `charge` once (6.9.1), whatever becomes of its stream. Else the client's window shrinks with
    every byte that was left out, until it stalls on a connection that seems well.
    """

    def __init__(self, limits: Http2Limits, sender: Sender) -> None:
        self._full = limits.connection_window_bytes
        self.low = limits.connection_window_bytes >> 1
        """The watermark under which the window is widened to the full one."""
        self.left = limits.connection_window_bytes
        """Bytes of DATA that the client may send before it is widened."""
        self.stream_bytes = limits.stream_window_bytes
        """Window of a new stream in bytes, as our SETTINGS say."""
        self._sender = sender

    def first_update(self) -> bytes:
        """Return the WINDOW_UPDATE that widens the first window of a connection (6.9.2).

        Empty where there is nothing to add: an increment of 0 would be an error (6.9).
        """
        increment = self._full - DEFAULT_WINDOW
        return window_update(0, increment) if increment else b""

    def charge(self, count: int) -> None:
        """Take bytes of DATA from the window of the connection, and widen it when it gets low."""
        self.left -= count
        if self.left < self.low:
            self.widen()

    def widen(self) -> None:
        """Widen the window of the connection to the full one; past its end is an error."""
        if self.left < 0:  # 6.9.1
            raise ConnectionFailure(
                ErrorCode.FLOW_CONTROL_ERROR, "connection flow-control window exceeded"
            )
        self._sender.write(window_update(0, self._full - self.left))
        self.left = self._full

    def grant(self, stream: ServerStream, wanted: int) -> None:
        """Let the client send at least this many more bytes on a stream (6.9)."""
        window = min(max(wanted, self.stream_bytes), MAX_WINDOW)
        low = stream.recv_window < wanted or stream.recv_window < self.stream_bytes >> 1
        if low and stream.state is State.OPEN:  # else nothing more is to come
            self._sender.write(window_update(stream.id, window - stream.recv_window))
            stream.recv_window = window
            self._sender.wake()
