"""The dispatch and fetch threads of an accelerator."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from xlaserve.concurrency.completion import hand_over
from xlaserve.concurrency.joining import ended
from xlaserve.errors.panics import answerable

T = TypeVar("T")


class DeviceThreads:
    """Two threads per device: one dispatches executions, the other waits for their completion.

    Each thread handles calls in order, like the device, which executes in order of dispatch.
    Outputs therefore never wait behind work that was dispatched later. Used on the event loop only.
    """

    def __init__(self, device: str) -> None:
        self.in_flight = 0
        """Number of executions in flight, of all models; incremented by the dispatcher."""
        self._dispatch = ThreadPoolExecutor(1, f"dispatch {device}")
        self._fetch = ThreadPoolExecutor(1, f"fetch {device}")

    def start(
        self,
        dispatch: Callable[[], Callable[[], T]],
        dispatched: Callable[[], None],
        completion: Callable[[T | BaseException], None],
    ) -> "Future[Callable[[], T]]":
        """Run `dispatch` on the dispatch thread; it returns a function that waits for completion.

        After a successful dispatch, `dispatched` is called on the event loop, and finally
        `completion`. If the dispatch failed or was cancelled, only `completion` is called.
        """
        loop = asyncio.get_running_loop()

        def ended(dispatching: "Future[Callable[[], T]]") -> None:
            failure = _failure(dispatching)
            if failure is not None:
                loop.call_soon_threadsafe(completion, failure)
                return
            loop.call_soon_threadsafe(dispatched)
            # Enqueue from this thread rather than from the event loop, which may be busy; this also
            # keeps the order.
            try:
                hand_over(self._fetch, dispatching.result(), completion, loop)
            except RuntimeError as error:  # no thread could be started
                loop.call_soon_threadsafe(completion, error)

        dispatching = self._dispatch.submit(dispatch)
        dispatching.add_done_callback(ended)
        return dispatching

    def close(self, seconds: float | None = None) -> bool:
        """Stop the threads after the executions in flight; cancel undispatched work.

        Waits at most this many seconds per thread; returns whether both have ended.
        """
        return ended(self._dispatch, seconds) and ended(self._fetch, seconds)


def _failure(work: "Future[T]") -> BaseException | None:
    if work.cancelled():
        return asyncio.CancelledError()
    error = work.exception()
    return None if error is None else answerable(error)
