"""Limits per connection, in frames and bytes, and detection of abusive clients."""

from collections.abc import Callable
from dataclasses import dataclass

from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

FRAMES_FOR_AN_ANSWER = 4
"""Extra control frames allowed per response frame sent: clients acknowledge received frames."""
MAX_REFUSALS = 10_000
"""Maximum requests per time window that get only an error status, beyond the number answered. Not a
setting: only an overloaded server refuses a correct client this often, and it also answers some
requests. No request is lost when the limit is exceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """The limits of each connection, from the settings."""

    max_message_bytes: int = 64 << 20
    max_streams: int = 256
    max_header_bytes: int = 16 << 10
    max_frame_bytes: int = 1 << 20
    """Maximum frame length that our SETTINGS announce; only DATA frames get that long."""
    stream_window_bytes: int = 1 << 20
    """Receive window of a stream in bytes until the length of its message is known."""
    connection_window_bytes: int = 16 << 20
    max_resets: int = 200
    """Maximum streams per time window that client errors or the client's RST_STREAM end."""
    max_control_frames: int = 2000
    """Maximum control frames and empty frames per time window."""
    max_refusals: int = MAX_REFUSALS
    """Maximum refused requests per time window, beyond the number answered."""
    window_seconds: float = 30.0
    preface_seconds: float = 5.0
    message_seconds: float = 30.0
    answer_seconds: float = 120.0
    """Seconds after which a stream is reset if its client reads nothing of a pending response."""
    max_work: int = 1024
    """Maximum frames handled in one turn. A request counts as sixteen frames, plus one for every
    sixteen bytes of its header block."""
    compress_answers: bool = True
    """Whether to compress responses to clients that compress their requests."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The objects shared by all connections of a server."""

    ledger: Ledger
    """Accounts for the memory of messages, pending responses and incomplete header blocks."""
    memory: MessageMemory
    """Memory pool for long messages."""


class Conduct:
    """Counts events that are rare with well-behaved clients; ends abusive connections.

    The counts restart with each time window. The limits grow with the number of response frames
    sent in the window: cancelling a tenth of a million requests is acceptable.
    """

    __slots__ = (
        "_begun",
        "_limits",
        "_served",
        "control",
        "now",
        "on_refusals",
        "refusals",
        "resets",
        "served",
    )

    def __init__(self, limits: Http2Limits, now: Callable[[], float]) -> None:
        self._limits = limits
        self.now = now
        self._begun = now()
        self._served = 0
        self.control = 0
        self.resets = 0
        self.refusals = 0
        self.on_refusals: Callable[[], None] | None = None
        """Called when too many requests were refused."""
        self.served = 0
        """Number of response frames sent."""

    def count_control(self) -> None:
        """Count a control frame or empty frame; raise ConnectionFailure if there are too many."""
        self.control += 1
        if self.control > self._limits.max_control_frames:
            allowed = self._limits.max_control_frames + FRAMES_FOR_AN_ANSWER * self._served_now()
            self._judge(self.control, allowed, "control frames (max_control_frames)")

    def count_reset(self) -> None:
        """Count a stream that was reset; raise ConnectionFailure if there are too many."""
        self.resets += 1
        if self.resets > self._limits.max_resets:
            allowed = self._limits.max_resets + self._served_now()
            self._judge(self.resets, allowed, "stream resets (max_stream_resets)")

    def count_refusal(self) -> None:
        """Count a request answered with only an error status; call `on_refusals` if too many.

        No ConnectionFailure is raised, because the client has not violated HTTP/2.
        """
        self.refusals += 1
        if (
            self.refusals > self._limits.max_refusals + self._served_now()
            and not self._begins_anew()
            and self.on_refusals is not None
        ):
            self.on_refusals()

    def _served_now(self) -> int:
        return self.served - self._served

    def _judge(self, counted: int, allowed: int, what: str) -> None:
        if counted <= allowed:
            return
        if not self._begins_anew():
            seconds = self._limits.window_seconds
            text = f"too many {what}: {counted} in {seconds:g} seconds"
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, text)

    def _begins_anew(self) -> bool:
        """Reset the counts and return true if the time window has passed."""
        now = self.now()
        if now - self._begun < self._limits.window_seconds:
            return False
        self._begun = now
        self._served = self.served
        self.control = self.resets = self.refusals = 1
        return True
