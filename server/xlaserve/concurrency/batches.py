"""A background thread that processes items in batches."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")

_log = structlog.get_logger("threads")


class BatchThread(Generic[T]):
    """Calls `work` with batches on its own thread, so that producers do not block.

    The thread starts with the first batch. It is a daemon thread, so that `work` that hangs does
    not keep the process from exiting.
    """

    def __init__(self, name: str, work: Callable[[Sequence[T]], None], max_items: int) -> None:
        """`max_items` limits the queue."""
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
        """Enqueue items; the caller has checked `free`.

        `count` is the number of items to count towards the limit, if each of them stands for
        several.
        """
        weight = len(items) if count is None else count
        with self._lock:
            self._waiting += weight
        self._hand_over((items, weight))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the thread, after all queued items."""
        self._hand_over(function)

    def close(self, seconds: float) -> bool:
        """Stop the thread after its queued work, waiting up to this many seconds.

        Returns whether the thread has ended.
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
                # An error in one batch must not end the thread.
                _log.error("batch lost", thread=self._name, exc_info=error)
            finally:
                if not callable(item):
                    with self._lock:
                        self._waiting -= item[1]
                del item
