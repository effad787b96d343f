"""Fair scheduling of callers on one thread: the caller with the least usage is next."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from xlaserve.errors.language import TooManyTexts
from xlaserve.errors.panics import answerable
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS

T = TypeVar("T")


class Charged(Generic[T]):
    """A fair queue: first in, first out per caller, least usage first between callers. Thread-safe.

    However much one caller enqueues, others only wait for the item being executed. A caller that
    begins to wait has at least the usage of the least active waiting one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[T]] = {}
        """Queues by caller; none is empty."""
        self._taken: dict[str, int] = {}
        """Usage of callers; forgotten when no caller waits."""

    def add(self, caller: str, item: T) -> None:
        """Enqueue an item after others of its caller."""
        with self._lock:
            if caller not in self._waiting:
                least = min(map(self._taken.__getitem__, self._waiting), default=0)
                self._taken[caller] = max(self._taken.get(caller, 0), least)
            self._waiting.setdefault(caller, deque()).append(item)

    def count(self, caller: str) -> int:
        """Return the number of queued items of a caller."""
        with self._lock:
            return len(self._waiting.get(caller, ()))

    def take(self) -> tuple[str, T]:
        """Dequeue the next item, and return it with its caller; the queue must not be empty."""
        with self._lock:
            caller = min(self._waiting, key=self._taken.__getitem__)
            items = self._waiting[caller]
            item = items.popleft()
            if not items:
                del self._waiting[caller]
            return caller, item

    def charge(self, caller: str, cost: int) -> None:
        """Add to the usage of a caller."""
        with self._lock:
            if self._waiting:
                self._taken[caller] = self._taken.get(caller, 0) + cost
            else:
                self._taken.clear()


class CallerThread:
    """A thread that executes calls one at a time, fairly between callers. Thread-safe.

    The thread starts with the first call.
    """

    def __init__(
        self, name: str, model: str = "", waiting: int = DEFAULT_TEXT_LIMITS.waiting
    ) -> None:
        """`name` describes the thread's work for `model`, which errors name.

        `waiting` limits the queued calls per caller.
        """
        self._model, self._most = model, waiting
        self._thread = ThreadPoolExecutor(1, f"{name} {model}".rstrip())
        self._waiting: Charged[Callable[[], None]] = Charged()
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, caller: str, call: Callable[[], T]) -> "Future[T]":
        """Queue a call.

        Raises TooManyTexts if too many calls of the caller are queued, and RuntimeError after
        `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the thread has ended")
            if self._waiting.count(caller) >= self._most:
                raise TooManyTexts(self._model, self._most)
            self._waiting.add(caller, partial(_make, future, call))
            self._thread.submit(self._make_next)
        return future

    def close(self) -> None:
        """End the thread after its queued calls."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown()

    def _make_next(self) -> None:
        caller, make = self._waiting.take()
        begun_ns = time.perf_counter_ns()
        try:
            make()
        finally:
            self._waiting.charge(caller, time.perf_counter_ns() - begun_ns)


def _make(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = call()
    # Pass the error to the future, on which another thread waits.
    except BaseException as error:
        future.set_exception(answerable(error))
    else:
        future.set_result(found)
