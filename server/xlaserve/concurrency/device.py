"""The two threads of an accelerator."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from xlaserve.concurrency.completion import hand_over
from xlaserve.concurrency.joining import ended
from xlaserve.errors.panics import answerable

T = TypeVar("T")


class DeviceThreads:
    """The two threads of a device: one dispatches work, the other waits for its completion.

    Both take one call after the other, as the device does: its work has one order, and no output
    suffers head-of-line blocking by work that came later. Used from the event loop only.
    """

    def __init__(self, device: str) -> None:
        self.in_flight = 0
        """Executions of all models in flight; the dispatcher that starts one counts it."""
        self._dispatch = ThreadPoolExecutor(1, f"dispatch {device}")
        self._fetch = ThreadPoolExecutor(1, f"fetch {device}")

    def start(
        self,
        dispatch: Callable[[], Callable[[], T]],
        dispatched: Callable[[], None],
        completion: Callable[[T | BaseException], None],
    ) -> "Future[Callable[[], T]]":
        """Give the device some work: `dispatch` does, and returns what waits for the end of it.

        Then `dispatched` is called on the event loop, and in the end `completion`; that alone where
        nothing was dispatched, because it failed or was cancelled.
        """
        loop = asyncio.get_running_loop()

        def ended(dispatching: "Future[Callable[[], T]]") -> None:
            failure = _failure(dispatching)
            if failure is not None:
                loop.call_soon_threadsafe(completion, failure)
                return
            loop.call_soon_threadsafe(dispatched)
            # From here, not from the loop: that may be busy, and this keeps the order.
            try:
                hand_over(self._fetch, dispatching.result(), completion, loop)
            except RuntimeError as error:  # no thread can be started
                loop.call_soon_threadsafe(completion, error)

        dispatching = self._dispatch.submit(dispatch)
        dispatching.add_done_callback(ended)
        return dispatching

    def close(self, seconds: float | None = None) -> bool:
        """End the threads after the work in flight; cancel undispatched work.

        Waits at most this many seconds, for each; return whether both have ended.
        """
        return ended(self._dispatch, seconds) and ended(self._fetch, seconds)


def _failure(work: "Future[T]") -> BaseException | None:
    if work.cancelled():
        return asyncio.CancelledError()
    error = work.exception()
    return None if error is None else answerable(error)
