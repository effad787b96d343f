"""Streams of answers from the engine to a front end, with flow control.

The engine sends answers to a request until a limit of unacknowledged answers or bytes; then their
producer pauses. An answer is acknowledged once the client's stream can take another one: a slow
client holds back only its own answers.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from xlaserve.serving.infer_call import InferCall

MOST_ANSWERS: Final = 16
"""Answers to one request that are sent and not taken."""
MOST_BYTES: Final = 256 << 10
"""Bytes of those; one answer may be longer, and is sent by itself."""


class Window:
    """Answers to one request that the engine has sent, and its front end has not taken."""

    __slots__ = ("_sent", "bytes", "counted")

    def __init__(self) -> None:
        self._sent: deque[tuple[int, int]] = deque()
        self.bytes = 0
        self.counted = 0
        """Bytes among them that the ledger counts with the request."""

    @property
    def is_open(self) -> bool:
        """Tell whether another answer may be sent."""
        return len(self._sent) < MOST_ANSWERS and self.bytes < MOST_BYTES

    def send(self, size: int, counted: int) -> None:
        """Record an answer of this many bytes, of which the ledger counts some."""
        self._sent.append((size, counted))
        self.bytes += size
        self.counted += counted

    def take(self, answers: int) -> int:
        """Return what the ledger counts for the oldest answers, which are taken.

        Raises IndexError where so many were not sent.
        """
        released = 0
        for _ in range(answers):
            size, counted = self._sent.popleft()
            self.bytes -= size
            released += counted
        self.counted -= released
        return released


class Taking:
    """Answers to one request that a front end has written, and has not said to be taken."""

    __slots__ = ("_answers", "_bytes", "_call", "_say")

    def __init__(self, call: InferCall, say: Callable[[int], None]) -> None:
        """`say` tells the engine of so many answers."""
        self._call = call
        self._say = say
        self._answers = 0
        self._bytes = 0

    def wrote(self, size: int) -> None:
        """Record an answer; it is taken once the stream takes another."""
        self._answers += 1
        self._bytes += size
        self._take()

    def _take(self) -> None:
        call = self._call
        if call.has_ended:
            return
        # Half of what the engine may be ahead: it need not pause while the client reads.
        if 2 * self._answers < MOST_ANSWERS and 2 * self._bytes < MOST_BYTES:
            return
        if not call.is_writable:
            call.on_writable = self._take
            call.holds_anything = True
            return
        answers, self._answers, self._bytes = self._answers, 0, 0
        self._say(answers)
