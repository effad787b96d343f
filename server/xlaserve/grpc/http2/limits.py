"""Limits of what one client may ask of the server, in frames and bytes."""

from collections.abc import Callable
from dataclasses import dataclass

from xlaserve.grpc.http2.errors import ConnectionFailure
from xlaserve.grpc.http2.frames import ErrorCode
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory

FRAMES_FOR_AN_ANSWER = 4
"""Control frames that each frame of an answer allows beyond the limit: a client acknowledges
what it receives."""
MAX_REFUSALS = 10_000
"""Requests that may get a status and nothing else in a window of time, beyond those that got an
answer. Not a setting: a correct client is refused this often only by an overloaded server, which
answers some of its requests; and no request is lost by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """The limits of each connection; every one is a setting."""

    max_message_bytes: int = 64 << 20
    max_streams: int = 256
    max_header_bytes: int = 16 << 10
    max_frame_bytes: int = 1 << 20
    """Longest DATA frame that we ask for; other frames are never that long."""
    stream_window_bytes: int = 1 << 20
    """Window of a stream in bytes until the length of its message is known."""
    connection_window_bytes: int = 16 << 20
    max_resets: int = 200
    """Streams that may end with a RST_STREAM, of either side, in a window of time."""
    max_control_frames: int = 2000
    """Frames that carry nothing, in a window of time."""
    max_refusals: int = MAX_REFUSALS
    """Requests that may be refused in a window of time beyond those answered."""
    window_seconds: float = 30.0
    preface_seconds: float = 5.0
    message_seconds: float = 30.0
    answer_seconds: float = 120.0
    """Seconds within which a client has to read some more of an answer that waits for it."""
    max_work: int = 1024
    """Frames that are handled in one pass; a request counts as sixteen of them, and its header
    block, where it has to be decoded, as one more for each sixteen bytes."""
    compress_answers: bool = True
    """Whether answers are compressed for clients that compress their requests."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts shared by a server's connections."""

    ledger: Ledger
    """Account of what they hold: messages, pending answers, header blocks in progress."""
    memory: MessageMemory
    """Pool of memory for long messages."""


class Conduct:
    """Counts what a well-behaved client does seldom, and ends the connection of one that is not.

    Counts start again with each window of time. They grow with the answers that the client got in
    it: one that cancels a tenth of a million requests behaves.
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
        """Frames of answers that were sent."""

    def count_control(self) -> None:
        """Count a frame that carries nothing; raises ConnectionFailure when there are too many."""
        self.control += 1
        if self.control > self._limits.max_control_frames:
            allowed = self._limits.max_control_frames + FRAMES_FOR_AN_ANSWER * self._served_now()
            self._judge(self.control, allowed, "control frames (max_control_frames)")

    def count_reset(self) -> None:
        """Count a stream that was reset; raises ConnectionFailure when there are too many."""
        self.resets += 1
        if self.resets > self._limits.max_resets:
            allowed = self._limits.max_resets + self._served_now()
            self._judge(self.resets, allowed, "stream resets (max_stream_resets)")

    def count_refusal(self) -> None:
        """Count a request that was answered with a status alone; tell when there are too many.

        The client has done nothing wrong in terms of HTTP/2, so that no stream is cut off.
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
        """Count from the start where the window of time has passed; false where it has not."""
        now = self.now()
        if now - self._begun < self._limits.window_seconds:
            return False
        self._begun = now
        self._served = self.served
        self.control = self.resets = self.refusals = 1
        return True
