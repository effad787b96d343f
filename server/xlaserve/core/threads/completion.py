"""Results of threads, handed over to the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Cancellable(Protocol):
    """Work that can be called off."""

    def cancel(self) -> object:
        """Call it off, if that is still possible."""
        ...


class _Handed(Generic[T]):
    """A call for a thread, whose result is for one who takes it away."""

    __slots__ = ("_calls", "_results")

    def __init__(self, call: Callable[[], T]) -> None:
        self._calls = [call]
        self._results: list[T | BaseException] = []

    def __call__(self) -> None:
        """Call, in the thread, and let go of what was called; raises nothing."""
        try:
            self._results.append(self._calls.pop()())
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

    The thread would keep the call, and the result of a future, for a while after others were told
    of it; and the program of a model, and what it computed, are memory that has to be free when its
    unload is answered. Raises RuntimeError where no thread can be started.
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
