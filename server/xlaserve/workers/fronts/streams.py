"""Flow control for response streams from the engine to a front end.

The engine sends responses to a request up to a limit of unacknowledged responses or bytes, and then
pauses the producer. A response is acknowledged once the client's stream can accept another one, so
a slow client delays only its own responses.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from xlaserve.serving.infer_call import InferCall

MOST_ANSWERS: Final = 16
"""Maximum number of unacknowledged responses to a request."""
MOST_BYTES: Final = 256 << 10
"""Maximum size of unacknowledged responses; a single larger response may be sent alone."""


class Window:
    """Responses to a request that were sent to the front end and not acknowledged."""

    __slots__ = ("_sent", "bytes", "counted")

    def __init__(self) -> None:
        self._sent: deque[tuple[int, int]] = deque()
        self.bytes = 0
        self.counted = 0
        """Bytes of these responses that are charged to the ledger."""

    @property
    def is_open(self) -> bool:
        """Tell whether another response may be sent."""
        return len(self._sent) < MOST_ANSWERS and self.bytes < MOST_BYTES

    def send(self, size: int, counted: int) -> None:
        """Record a response of this size, of which `counted` bytes are charged."""
        self._sent.append((size, counted))
        self.bytes += size
        self.counted += counted

    def take(self, answers: int) -> int:
        """Remove the oldest responses as acknowledged; return their charged bytes.

        Raises IndexError if fewer responses were sent.
        """
        released = 0
        for _ in range(answers):
            size, counted = self._sent.popleft()
            self.bytes -= size
            released += counted
        self.counted -= released
        return released


class Taking:
    """Responses to a request that a front end wrote to its client but has not acknowledged."""

    __slots__ = ("_answers", "_bytes", "_call", "_say")

    def __init__(self, call: InferCall, say: Callable[[int], None]) -> None:
        """`say(n)` tells the engine that n more responses have been written to the client."""
        self._call = call
        self._say = say
        self._answers = 0
        self._bytes = 0

    def wrote(self, size: int) -> None:
        """Record a response; it is acknowledged when the stream can accept another."""
        self._answers += 1
        self._bytes += size
        self._take()

    def _take(self) -> None:
        call = self._call
        if call.has_ended:
            return
        # Acknowledge at half the window, so that the engine need not pause while the client reads.
        if 2 * self._answers < MOST_ANSWERS and 2 * self._bytes < MOST_BYTES:
            return
        if not call.is_writable:
            call.on_writable = self._take
            call.holds_anything = True
            return
        answers, self._answers, self._bytes = self._answers, 0, 0
        self._say(answers)
