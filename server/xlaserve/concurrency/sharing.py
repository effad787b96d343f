"""Single-flight tasks, coalesced calls, and locks by key."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CalledOff(Exception):
    """Raised to callers that share a task when the task is cancelled."""


def _any(key: Hashable) -> bool:
    return True


class _Flight(Generic[T]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: "asyncio.Task[T]") -> None:
        self.task = task
        self.waiters = 0


class SingleFlight(Generic[T]):
    """Callers with the same key share one task.

    If `abandonable`, the task is cancelled when its last caller leaves; otherwise it runs to
    completion.
    """

    def __init__(self, *, abandonable: bool) -> None:
        self._abandonable = abandonable
        self._flights: dict[Hashable, _Flight[T]] = {}
        self._closed: dict[asyncio.Task[T], Hashable] = {}
        """Running tasks that accept no further callers, with their keys."""

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Join the running task for this key, or start one."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.ensure_future(work()))
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled() and not _being_cancelled():
                raise CalledOff from None
            if self._abandonable and flight.waiters == 1 and not flight.task.done():
                # A later caller starts a new task instead of joining the cancelled one.
                self._leave(key, flight.task)
                flight.task.cancel()
                await asyncio.wait([flight.task])
            raise
        finally:
            flight.waiters -= 1

    def close(self, key: Hashable) -> None:
        """Let later callers with this key start a new task instead of joining the running one."""
        flight = self._flights.pop(key, None)
        if flight is not None:
            self._closed[flight.task] = key

    def cancel(self, of: Callable[[Hashable], bool] = _any) -> list["asyncio.Task[T]"]:
        """Cancel the tasks with matching keys and return them; their callers get CalledOff."""
        tasks = self._under_way(of)
        for task in tasks:
            task.cancel()
        return tasks

    async def call_off(self, of: Callable[[Hashable], bool] = _any) -> None:
        """Cancel the tasks with matching keys and wait for them; their callers get CalledOff."""
        if tasks := self.cancel(of):
            await asyncio.wait(tasks)

    async def over(self, of: Callable[[Hashable], bool]) -> None:
        """Wait until the running tasks with matching keys have ended."""
        if tasks := self._under_way(of):
            await asyncio.wait(tasks)

    def _under_way(self, of: Callable[[Hashable], bool]) -> list["asyncio.Task[T]"]:
        closed = [task for task, key in self._closed.items() if of(key)]
        return closed + [flight.task for key, flight in self._flights.items() if of(key)]

    def _leave(self, key: Hashable, task: "asyncio.Task[T]") -> None:
        self._closed.pop(task, None)
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]

    def _landed(self, key: Hashable, task: "asyncio.Task[T]") -> None:
        self._leave(key, task)
        if not task.cancelled():
            # Retrieve the exception: without callers, asyncio would report it as never retrieved.
            task.exception()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Turns:
    """A lock for each key, which exists while it is held or awaited."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    def is_free(self, key: Hashable) -> bool:
        """Tell whether the lock for a key is free and not awaited."""
        return key not in self._locks

    @asynccontextmanager
    async def of(self, key: Hashable) -> AsyncIterator[None]:
        """Hold the lock for a key within an `async with` block."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = lock, users - 1


class Coalesced:
    """Coalesces calls: one run of the work serves all callers that arrived before it started.

    A caller that arrives during a run waits for the next run, together with other such callers.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Return after a complete run of the work that started after this call."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run_after(self._running))
        await asyncio.shield(self._next)

    async def _run_after(self, running: "asyncio.Task[None] | None") -> None:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        await self._work()
