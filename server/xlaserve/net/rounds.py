"""Checks all connections at regular intervals, a few per event loop iteration."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

C = TypeVar("C")

_CHECKS_PER_TURN = 64
"""Maximum connections checked per loop iteration; ten thousand would block it for 0.1 s."""


class Rounds(Generic[C]):
    """Calls a function for every connection of a server once per interval, until stopped."""

    def __init__(
        self,
        connections: Callable[[], Iterable[C]],
        check: Callable[[C], None],
        *,
        seconds: Callable[[], float],
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        """`seconds` returns the interval, before each round; `afterwards` is called after it.

        `check` may be called with a connection that was closed after the round began.
        """
        self._connections = connections
        self._check = check
        self._seconds = seconds
        self._afterwards = afterwards
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None
        self._left: list[C] = []
        self._due = 0.0

    @property
    def has_begun(self) -> bool:
        """Tell whether the rounds are running."""
        return self._next is not None

    def begin(self) -> None:
        """Start the rounds, or restart them with the current interval."""
        self.stop()
        self._due = self._loop.time() + self._seconds()
        self._next = self._loop.call_at(self._due, self._begin_round)

    def stop(self) -> None:
        """Stop the rounds."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _begin_round(self) -> None:
        # The interval is measured between the starts of two rounds, unless a round takes longer.
        self._due = self._loop.time() + self._seconds()
        self._left = list(self._connections())
        self._go_on()

    def _go_on(self) -> None:
        turn, self._left = self._left[:_CHECKS_PER_TURN], self._left[_CHECKS_PER_TURN:]
        self._next = (
            self._loop.call_soon(self._go_on)
            if self._left
            else self._loop.call_at(self._due, self._begin_round)
        )
        for connection in turn:
            self._check(connection)
        if not self._left:
            self._afterwards()
