"""The path from a model's own threads back to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident


class Outbox:
    """Runs callbacks on the event loop, in the order in which threads post them.

    One wake-up of the loop serves all callbacks posted until it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._gathering: set[int] = set()
        """Ids of threads that are inside `gathered`."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Wake the event loop once, at the end, for all callbacks that this thread posts.

        Waking the loop releases the GIL, and the thread gets it back only when the loop is idle:
        without this, a thread that posts several callbacks would wait for that each time.
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
        # Two threads may both wake the loop, which is harmless. A wake-up cannot be lost, because
        # `_deliver` clears the flag before it looks at the queue.
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
                # More callbacks were posted meanwhile, or one raised: run the rest in the next
                # iteration, so that others get their turn.
                self._is_waking = True
                self._loop.call_soon(self._deliver)
