"""Passes results from threads to the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, Protocol, TypeVar

from xlaserve.errors.panics import answerable

T = TypeVar("T")


class Cancellable(Protocol):
    """Work that can be cancelled."""

    def cancel(self) -> object:
        """Cancel the work, if possible."""
        ...


class _Handed(Generic[T]):
    """A call for a thread, whose result can be taken once and is not kept."""

    __slots__ = ("_calls", "_results")

    def __init__(self, call: Callable[[], T]) -> None:
        self._calls = [call]
        self._results: list[T | BaseException] = []

    def __call__(self) -> None:
        """Run the call, then drop the reference to it; never raises."""
        try:
            self._results.append(self._calls.pop()())
        except BaseException as error:
            self._results.append(answerable(error))

    def take(self) -> T | BaseException:
        """Return the result or exception of the call, once; or CancelledError if it did not run."""
        return self._results.pop() if self._results else asyncio.CancelledError()


def hand_over(
    pool: Executor,
    call: Callable[[], T],
    completion: Callable[[T | BaseException], None],
    loop: asyncio.AbstractEventLoop,
) -> "Future[None]":
    """Run a call on a pool thread and pass its result to `completion` on the event loop.

    A plain pool keeps the call in its thread, and the result in its future, until the next call.
    That would keep a model's program and outputs in memory after its unload was answered. Raises
    RuntimeError if no thread can be started.
    """
    handed = _Handed(call)
    running = pool.submit(handed)
    running.add_done_callback(
        lambda _: loop.call_soon_threadsafe(lambda: completion(handed.take()))
    )
    return running


def settle(answer: "asyncio.Future[T]", found: T | BaseException) -> None:
    """Set the result or exception of a future, unless it is already done."""
    if answer.done():
        return
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def settled(answer: "asyncio.Future[T]", work: Cancellable) -> T:
    """Await the result of a future; cancel the work if the caller is cancelled."""
    try:
        return await answer
    finally:
        work.cancel()
