"""Fair turns of callers on one thread: the one that has used least is next."""

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
    """What callers wait for, in order for each of them. Its methods may be called in any thread.

    However much one has wait and however long that takes, another one waits for what has begun.
    Who comes begins with as much as who has taken least of those that wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[T]] = {}
        """By caller; no queue is empty."""
        self._taken: dict[str, int] = {}
        """What callers have taken, as long as they wait, or somebody else does."""

    def add(self, caller: str, item: T) -> None:
        """Have an item wait behind those of its caller."""
        with self._lock:
            if caller not in self._waiting:
                least = min(map(self._taken.__getitem__, self._waiting), default=0)
                self._taken[caller] = max(self._taken.get(caller, 0), least)
            self._waiting.setdefault(caller, deque()).append(item)

    def count(self, caller: str) -> int:
        """Return how many items of a caller wait."""
        with self._lock:
            return len(self._waiting.get(caller, ()))

    def take(self) -> tuple[str, T]:
        """Remove the next item, and return it behind its caller; there has to be one."""
        with self._lock:
            caller = min(self._waiting, key=self._taken.__getitem__)
            items = self._waiting[caller]
            item = items.popleft()
            if not items:
                del self._waiting[caller]
            return caller, item

    def charge(self, caller: str, cost: int) -> None:
        """Record what an item of a caller took."""
        with self._lock:
            if self._waiting:
                self._taken[caller] = self._taken.get(caller, 0) + cost
            else:
                self._taken.clear()


class CallerThread:
    """A thread that makes calls one after another, taking turns among the callers.

    It begins with the first call. Its methods may be called in any thread.
    """

    def __init__(
        self, name: str, model: str = "", waiting: int = DEFAULT_TEXT_LIMITS.waiting
    ) -> None:
        """`name` is what the thread does for a model, which errors name.

        So many calls of one caller may be `waiting`.
        """
        self._model, self._most = model, waiting
        self._thread = ThreadPoolExecutor(1, f"{name} {model}".rstrip())
        self._waiting: Charged[Callable[[], None]] = Charged()
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, caller: str, call: Callable[[], T]) -> "Future[T]":
        """Queue a call in its caller's turn.

        Raises TooManyTexts where too many of its calls wait, and RuntimeError once it is closed.
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
        """End the thread, behind what it was given."""
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
    # Whatever it is, somebody waits for it.
    except BaseException as error:
        future.set_exception(answerable(error))
    else:
        future.set_result(found)
