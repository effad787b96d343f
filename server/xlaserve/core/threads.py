"""What threads do for the event loop, and how it hears of the end."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

_GIVEN_AHEAD = 2
"""What a thread of the host is given at once: the next begins while the event loop has not heard
of the end of the one before."""


class Cancellable(Protocol):
    """Work that can be called off."""

    def cancel(self) -> object:
        """Call it off, if that is still possible."""
        ...


class _Handed(Generic[T]):
    """A call for a thread, whose result is for one who takes it away."""

    __slots__ = ("_call", "_results")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T | BaseException] = []

    def __call__(self) -> None:
        """Call, in the thread; raises nothing."""
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._results.append(error)

    def take(self) -> T | BaseException:
        """Return once what the call returned or raised, or that it was called off."""
        return self._results.pop() if self._results else asyncio.CancelledError()


def hand_over(
    pool: Executor,
    call: Callable[[], T],
    over: Callable[[T | BaseException], None],
    loop: asyncio.AbstractEventLoop,
) -> "Future[None]":
    """Call in a thread of a pool, and let go of the result, which is for `over` on the event loop.

    The thread would keep the result of a future for a while after others were told of it; and what
    a model computed is memory that has to be free when its unload is answered. Raises RuntimeError
    where no thread can be started.
    """
    handed = _Handed(call)
    running = pool.submit(handed)
    running.add_done_callback(lambda _: loop.call_soon_threadsafe(lambda: over(handed.take())))
    return running


def settle(answer: "asyncio.Future[T]", found: T | BaseException) -> None:
    """Give a future what it waits for, unless nobody does any more."""
    if answer.done():
        return
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def settled(answer: "asyncio.Future[T]", work: Cancellable) -> T:
    """Return or raise what a future is given; who stops waiting for it calls the work off."""
    try:
        return await answer
    finally:
        work.cancel()


class HostJob:
    """Something that a thread of the host does, or that waits for one."""

    __slots__ = ("_call", "_over", "_threads", "_work")

    def __init__(
        self,
        threads: "HostThreads",
        call: Callable[[], T],
        over: Callable[[T | BaseException], None],
    ) -> None:
        self._threads = threads
        self._call: Callable[[], object] | None = call
        self._over: Callable[[Any], None] | None = over
        self._work: Future[None] | None = None

    def cancel(self) -> bool:
        """Call it off, unless a thread has begun; `over` hears of it later."""
        return self._threads.forget(self) if self._work is None else self._work.cancel()

    @property
    def waits(self) -> bool:
        """Tell whether no thread has begun."""
        work = self._work
        return self._over is not None and not (work and (work.running() or work.done()))

    def begin(self, pool: Executor, ended: Callable[["HostJob", object], None]) -> None:
        """Give it to a thread; `ended` is called on the event loop with what came of it."""
        assert self._call is not None
        loop = asyncio.get_running_loop()
        self._work = hand_over(pool, self._call, partial(ended, self), loop)

    def end(self, result: object) -> None:
        """Tell what came of it."""
        over = self._over
        # Else they hold one another, and the inputs, until garbage is collected.
        self._over = self._call = self._work = None
        if over is not None:
            over(result)


class HostThreads:
    """The threads that compute on the host, and what waits for them, in order. Of the event loop.

    It does not all wait in line behind the threads: while the event loop is busy they could end
    any number of executions, and the outputs would pile up.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "execute")
        self._most = threads * _GIVEN_AHEAD
        self._given = 0
        self._waiting: deque[HostJob] = deque()

    def start(self, call: Callable[[], T], over: Callable[[T | BaseException], None]) -> HostJob:
        """Have something computed, in the order of the calls.

        `over` is called on the event loop with what it returned or raised, or with CancelledError;
        not within this call. Raises RuntimeError where no thread can be started, or none any more.
        """
        job = HostJob(self, call, over)
        if self._given < self._most:
            self._give(job)
        else:
            self._waiting.append(job)
        return job

    async def run(self, call: Callable[[], T]) -> T:
        """Have something computed, and return or raise what it does."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await settled(future, self.start(call, partial(settle, future)))

    def forget(self, job: HostJob) -> bool:
        """Call off a job that waits for a thread; tell whether it did."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        asyncio.get_running_loop().call_soon(job.end, asyncio.CancelledError())
        return True

    def close(self) -> None:
        """End the threads once they have done what they began; the rest is called off."""
        while self._waiting:
            self.forget(self._waiting[0])
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _give(self, job: HostJob) -> None:
        job.begin(self._pool, self._ended)
        self._given += 1

    def _ended(self, job: HostJob, result: object) -> None:
        self._given -= 1
        # Before the answer: a thread may have nothing to do.
        while self._waiting and self._given < self._most:
            following = self._waiting.popleft()
            try:
                self._give(following)
            except RuntimeError as error:
                following.end(error)
        job.end(result)


class DeviceThreads:
    """The two threads of a device: one gives it work, the other waits for what it computes.

    Both take one after the other, as the device does: its work has one order, and no outputs wait
    behind those of work that comes later. Of the event loop.
    """

    def __init__(self, device: str) -> None:
        self.in_flight = 0
        """What it was given to do and is not over, of all models; counted by who gives it."""
        self._dispatch = ThreadPoolExecutor(1, f"dispatch {device}")
        self._fetch = ThreadPoolExecutor(1, f"fetch {device}")

    def start(
        self,
        dispatch: Callable[[], Callable[[], T]],
        dispatched: Callable[[], None],
        over: Callable[[T | BaseException], None],
    ) -> "Future[Callable[[], T]]":
        """Give the device some work: `dispatch` does, and returns what waits for the end of it.

        Then `dispatched` is called on the event loop, and in the end `over`; that alone where
        nothing was dispatched, because it failed or was called off.
        """
        loop = asyncio.get_running_loop()

        def ended(dispatching: "Future[Callable[[], T]]") -> None:
            failure = _failure(dispatching)
            if failure is not None:
                loop.call_soon_threadsafe(over, failure)
                return
            loop.call_soon_threadsafe(dispatched)
            # From here, not from the loop: that may be busy, and this keeps the order.
            try:
                hand_over(self._fetch, dispatching.result(), over, loop)
            except RuntimeError as error:  # no thread can be started
                loop.call_soon_threadsafe(over, error)

        dispatching = self._dispatch.submit(dispatch)
        dispatching.add_done_callback(ended)
        return dispatching

    def close(self) -> None:
        """End the threads once the device has; work that it was not given is called off."""
        self._dispatch.shutdown(wait=True, cancel_futures=True)
        self._fetch.shutdown(wait=True)


def _failure(work: "Future[T]") -> BaseException | None:
    return asyncio.CancelledError() if work.cancelled() else work.exception()
