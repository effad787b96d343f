"""The way from threads that answer by themselves to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident


class Outbox:
    """Calls things on the event loop, in the order in which threads post them.

    One wake-up of the loop serves all that was posted until it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._gathering: set[int] = set()
        """Threads that wake the loop once they have posted everything."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Wake the event loop once for all that this thread posts meanwhile, at the end.

        To wake it gives up Python's lock, and a thread has it again once the loop waits: one that
        posts more would wait for that before each step of its own.
        """
        thread = get_ident()
        self._gathering.add(thread)
        try:
            yield
        finally:
            self._gathering.discard(thread)
            if self._posted and not self._is_waking:
                self._wake()

    def post(self, call: Callable[[], None]) -> None:
        """Schedule a callback on the event loop, from any thread."""
        self._posted.append(call)
        # Two threads may both wake it, which is harmless; that none does cannot be: `_deliver`
        # clears the mark before it looks.
        if not self._is_waking and get_ident() not in self._gathering:
            self._wake()

    def _wake(self) -> None:
        self._is_waking = True
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_waking = False
        posted = self._posted
        left = len(posted)
        try:
            while left:
                left -= 1
                posted.popleft()()
        finally:
            if posted and not self._is_waking:
                # More came meanwhile: others have a turn before it. Or one raised: the rest is not
                # its own.
                self._is_waking = True
                self._loop.call_soon(self._deliver)
