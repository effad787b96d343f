"""Polls for the next request without sleeping while requests come in quick succession.

Waking a sleeping thread takes the operating system longer than the server needs for a small
request, and the thread resumes with cold CPU caches.
"""

import time
from collections.abc import Callable

QUICK_IN_A_ROW = 8
"""Number of consecutive arrivals within the polling time after which polling starts."""


class BusyPoll:
    """Keeps the event loop spinning for a moment after the requests of a connection are answered.

    One instance serves all connections. If nothing arrives in time, polling stops until several
    requests arrive in quick succession again, so a lightly loaded server does not poll at all.
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
        """Record that a connection received data."""
        now = self._now()
        self._in_a_row = self._in_a_row + 1 if now - self._arrived <= self._seconds else 0
        self._arrived = now

    def answered(self) -> None:
        """Start polling if requests are frequent: a connection has answered all its requests."""
        if self._in_a_row >= QUICK_IN_A_ROW and not self._polls:
            self._polls = True
            self._call_soon(self._poll)

    def _poll(self) -> None:
        if self._now() - self._arrived <= self._seconds:
            # The loop polls its sockets before it runs the next iteration's callbacks.
            self._call_soon(self._poll)
        else:
            self._polls = False
            self._in_a_row = 0
