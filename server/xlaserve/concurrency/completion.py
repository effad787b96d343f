"""Results of threads, handed over to the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, Protocol, TypeVar

from xlaserve.errors.panics import answerable

T = TypeVar("T")


class Cancellable(Protocol):
    """Work that can be cancelled."""

    def cancel(self) -> object:
        """Cancel it, if possible."""
        ...


class _Handed(Generic[T]):
    """A call for a thread; its result is taken once, and not kept."""

    __slots__ = ("_calls", "_results")

    def __init__(self, call: Callable[[], T]) -> None:
        self._calls = [call]
        self._results: list[T | BaseException] = []

    def __call__(self) -> None:
        """Run the call in the thread, and drop it; raises nothing."""
        try:
            self._results.append(self._calls.pop()())
        except BaseException as error:
            self._results.append(answerable(error))

    def take(self) -> T | BaseException:
        """Return or raise the outcome of the call once, or CancelledError."""
        return self._results.pop() if self._results else asyncio.CancelledError()


def hand_over(
    pool: Executor,
    call: Callable[[], T],
    completion: Callable[[T | BaseException], None],
    loop: asyncio.AbstractEventLoop,
) -> "Future[None]":
    """Run a call in a pool thread and pass its result to `completion` on the event loop.

    A thread of a pool keeps the call, and the future its result, until the next call. But the
    program of a model and its outputs are memory that has to be free when its unload is answered.
    Raises RuntimeError where no thread can be started.
    """
    handed = _Handed(call)
    running = pool.submit(handed)
    running.add_done_callback(
        lambda _: loop.call_soon_threadsafe(lambda: completion(handed.take()))
    )
    return running


def settle(answer: "asyncio.Future[T]", found: T | BaseException) -> None:
    """Complete a future with a result or an exception, unless it is done."""
    if answer.done():
        return
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def settled(answer: "asyncio.Future[T]", work: Cancellable) -> T:
    """Await a future's result; cancel the work when the caller is cancelled."""
    try:
        return await answer
    finally:
        work.cancel()
