"""Flow control of incoming data: the windows granted to a client (RFC 9113, 5.2, 6.9)."""

from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.frames import DEFAULT_WINDOW, MAX_WINDOW, ErrorCode, window_update
from xlaserve.grpc.http2.limits import Http2Limits
from xlaserve.grpc.http2.sending import Sender
from xlaserve.grpc.http2.states import State
from xlaserve.grpc.http2.stream import ServerStream


class ReceiveWindows:
    """The receive window of a connection, and window updates for its streams.

    Invariant: every byte of a DATA frame's payload, padding included, is passed to `charge`
    exactly once, even if its stream is closed (RFC 9113 6.9.1). Otherwise the client's window
    would shrink by each missed byte until the connection stalls.
    """

    def __init__(self, limits: Http2Limits, sender: Sender) -> None:
        self._full = limits.connection_window_bytes
        self.low = limits.connection_window_bytes >> 1
        """Low watermark: below it the connection window is restored to its full size."""
        self.left = limits.connection_window_bytes
        """Bytes of DATA that the client may still send on the connection."""
        self.stream_bytes = limits.stream_window_bytes
        """Initial window of a stream in bytes, as announced in our SETTINGS."""
        self._sender = sender

    def first_update(self) -> bytes:
        """Return the WINDOW_UPDATE that enlarges the initial connection window (RFC 9113 6.9.2).

        Empty if the default window suffices: an increment of 0 would be an error.
        """
        increment = self._full - DEFAULT_WINDOW
        return window_update(0, increment) if increment else b""

    def charge(self, count: int) -> None:
        """Subtract DATA from the connection window; restore the window when it gets low."""
        self.left -= count
        if self.left < self.low:
            self.widen()

    def widen(self) -> None:
        """Restore the connection window; raise ConnectionFailure if the client exceeded it."""
        if self.left < 0:  # RFC 9113 6.9.1
            raise ConnectionFailure(
                ErrorCode.FLOW_CONTROL_ERROR, "connection flow-control window exceeded"
            )
        self._sender.write(window_update(0, self._full - self.left))
        self.left = self._full

    def grant(self, stream: ServerStream, wanted: int) -> None:
        """Let the client send at least `wanted` more bytes on a stream (RFC 9113 6.9)."""
        window = min(max(wanted, self.stream_bytes), MAX_WINDOW)
        low = stream.recv_window < wanted or stream.recv_window < self.stream_bytes >> 1
        if low and stream.state is State.OPEN:  # otherwise the client has sent everything
            self._sender.write(window_update(stream.id, window - stream.recv_window))
            stream.recv_window = window
            self._sender.wake()
