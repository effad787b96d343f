"""Calls with time limits, each on a thread that is abandoned beyond its limit.

A thread that computes in XLA cannot be stopped; the caller can only stop waiting for it.
"""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from xlaserve.concurrency.joining import joined
from xlaserve.errors.panics import answerable

T = TypeVar("T")


class Overdue(Exception):
    """A call exceeded its time limit and was abandoned."""


class Beat:
    """The time of a call's last progress, by a monotonic clock; set by the call's thread."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at: float | None = None
        """Time of the last progress; None until the thread starts."""

    def __call__(self) -> None:
        """Report progress."""
        self.at = time.monotonic()


class LimitedCall(Generic[T]):
    """A call that waits for a slot and then runs on its own thread."""

    def __init__(self, threads: "LimitedThreads", call: Callable[[], T], beat: Beat) -> None:
        self.future: Future[T] = Future()
        """Receives the result of the call, even after the time limit."""
        self.call: Callable[[], T] | None = call
        """The function to call; None once the thread has started."""
        self.beat = beat
        self._threads = threads

    def cancel(self) -> bool:
        """Cancel the call and drop its callbacks, unless its thread has started."""
        cancelled = self.future.cancel()
        if cancelled:
            # The queue keeps this object, which must not keep a model alive.
            self.call = None
        return cancelled

    def abandon(self) -> None:
        """Release the call's slot; the thread keeps running."""
        self._threads.abandon(self)

    async def within(self, seconds: float) -> T:
        """Return the call's result; raises Overdue after this many seconds without progress.

        A caller that stops waiting must cancel or abandon the call.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        self.future.add_done_callback(partial(_tell, loop, ended))
        while not self.future.done():
            left = seconds if self.beat.at is None else self.beat.at + seconds - time.monotonic()
            if left <= 0:
                self.abandon()
                raise Overdue
            await asyncio.wait([ended], timeout=left)
        return self.future.result()

    def whenever(self, then: Callable[[], None]) -> None:
        """Call `then` on the event loop when the call ends."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        ended.add_done_callback(lambda _: then())
        self.future.add_done_callback(partial(_tell, loop, ended))


def _tell(
    loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[None]", work: "Future[Any]"
) -> None:
    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the event loop is closed, so no caller is waiting
        return


class LimitedThreads:
    """Runs a limited number of concurrent calls, first come first served, each on a new thread."""

    def __init__(self, name: str, slots: int) -> None:
        self._name = name
        self._free = slots
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._waiting: deque[LimitedCall[Any]] = deque()
        self._running: dict[LimitedCall[Any], threading.Thread] = {}
        self._abandoned: dict[LimitedCall[Any], threading.Thread] = {}
        self._numbers = itertools.count()

    @property
    def abandoned(self) -> int:
        """Return the number of abandoned calls that are still running."""
        return len(self._abandoned)

    def start(self, call: Callable[[], T], beat: Beat | None = None) -> LimitedCall[T]:
        """Queue a call for the next free slot. Its future gets RuntimeError if no thread starts."""
        work = LimitedCall(self, call, beat or Beat())
        with self._lock:
            self._waiting.append(work)
            self._fill()
        return work

    def abandon(self, work: LimitedCall[Any]) -> None:
        """Release the slot of an unfinished call."""
        with self._lock:
            thread = self._running.pop(work, None)
            if thread is not None:
                self._abandoned[work] = thread
                self._free += 1
                self._fill()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Add a slot within a block, while the holder of a slot waits for another call."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, slots: int) -> None:
        with self._lock:
            self._free += slots
            self._fill()

    def close(self, seconds: float | None = None) -> bool:
        """Cancel queued calls, and wait up to this many seconds for calls that are not abandoned.

        Returns whether no thread is left.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            running = list(self._running.values())
        for work in waiting:
            work.cancel()
        return joined(running, seconds) and not self._abandoned

    def _fill(self) -> None:
        while self._free > 0 and self._waiting:
            work = self._waiting.popleft()
            if not work.future.set_running_or_notify_cancel():
                continue
            name = f"{self._name}_{next(self._numbers)}"
            # Daemon: the process may exit while the call is running.
            thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            self._free -= 1
            self._running[work] = thread
            try:
                thread.start()
            except RuntimeError as error:  # no thread could be started
                del self._running[work]
                self._free += 1
                work.future.set_exception(error)

    def _run(self, work: LimitedCall[T]) -> None:
        call, work.call = work.call, None
        assert call is not None
        work.beat()
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            failure = answerable(error)
        del call
        with self._lock:
            if self._running.pop(work, None) is not None:
                self._free += 1
            self._abandoned.pop(work, None)
            self._fill()
        if failure is None:
            work.future.set_result(result)  # type: ignore[arg-type]
        else:
            work.future.set_exception(failure)
