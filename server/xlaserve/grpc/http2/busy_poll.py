"""Polls for the next request without sleeping while requests come in quick succession.

To wake a thread takes the operating system longer than a small request takes us, and the caches of
its processor are cold then.
"""

import time
from collections.abc import Callable

QUICK_IN_A_ROW = 8
"""After so many that came in time the next is expected to do so too."""


class BusyPoll:
    """Keeps the event loop awake for a moment once all requests of a connection are answered.

    For all connections together. When nothing comes in time the processor sleeps again, until some
    have come quickly in a row: where requests are rare this costs nothing.
    """

    def __init__(
        self,
        seconds: float,
        call_soon: Callable[[Callable[[], None]], object],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds = seconds
        self._now = now
        self._call_soon = call_soon
        self._arrived = 0.0
        self._in_a_row = 0
        self._polls = False

    def arrived(self) -> None:
        """Know that something came."""
        now = self._now()
        self._in_a_row = self._in_a_row + 1 if now - self._arrived <= self._seconds else 0
        self._arrived = now

    def answered(self) -> None:
        """Know that a connection has nothing left to do but to wait."""
        if self._in_a_row >= QUICK_IN_A_ROW and not self._polls:
            self._polls = True
            self._call_soon(self._poll)

    def _poll(self) -> None:
        if self._now() - self._arrived <= self._seconds:
            # The loop looks at its sockets before it calls this again.
            self._call_soon(self._poll)
        else:
            self._polls = False
            self._in_a_row = 0
