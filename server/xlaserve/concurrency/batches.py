"""A thread that processes batches of items in the background."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")

_log = structlog.get_logger("threads")


class BatchThread(Generic[T]):
    """Calls `work` with batches in its own thread, without blocking their producers.

    The thread starts with the first batch. It is a daemon: work that blocks for ever keeps neither
    the server nor its end waiting.
    """

    def __init__(self, name: str, work: Callable[[Sequence[T]], None], max_items: int) -> None:
        """At most `max_items` are queued."""
        self._name = name
        self._work = work
        self._max_items = max_items
        self._queue: SimpleQueue[tuple[Sequence[T], int] | Callable[[], None] | None] = (
            SimpleQueue()
        )
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def free(self) -> int:
        """Return the free capacity of the queue."""
        return self._max_items - self._waiting

    def put(self, items: Sequence[T], count: int | None = None) -> None:
        """Hand over items; the caller has seen that there is room for them (`free`).

        They count as `count` items, where each of them stands for several.
        """
        weight = len(items) if count is None else count
        with self._lock:
            self._waiting += weight
        self._hand_over((items, weight))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, after the queued items."""
        self._hand_over(function)

    def close(self, seconds: float) -> bool:
        """End the thread after its queued work, waiting up to this long; return whether it ended.

        Return whether it has ended.
        """
        thread = self._thread
        if thread is None:
            return True
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        thread.join(seconds)
        return not thread.is_alive()

    def _hand_over(self, item: tuple[Sequence[T], int] | Callable[[], None]) -> None:
        if self._is_closed:
            return
        self._queue.put(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if callable(item):
                    item()
                else:
                    self._work(item[0])
            except BaseException as error:
                # One batch that cannot be worked off must not end the thread.
                _log.error("batch lost", thread=self._name, exc_info=error)
            finally:
                if not callable(item):
                    with self._lock:
                        self._waiting -= item[1]
                del item
