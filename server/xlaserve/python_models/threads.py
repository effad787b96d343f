"""The thread of one copy of a Python model: it makes all calls."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import structlog

T = TypeVar("T")

_log = structlog.get_logger("python")


class CodeThread(Protocol):
    """A thread that runs the code of a model."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function after all earlier ones; it must not raise."""
        ...

    def close(self) -> None:
        """End the thread after its queued calls; does not wait."""
        ...


class PlainThread:
    """Calls one thing after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The end of the process does not wait for code that does not end.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function after all earlier ones."""
        self._calls.put(call)

    def close(self) -> None:
        """End the thread after its queued calls."""
        self._calls.put(None)

    def _run(self) -> None:
        get = self._calls.get
        while (call := get()) is not None:
            try:
                call()
            except BaseException as error:
                # It is to raise nothing; those who wait behind it are answered all the same.
                _log.error("call of a model thread failed", thread=self.name, exc_info=error)
            del call


class LoopThread:
    """Has an event loop of its own, away from the server's: coroutines run side by side on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Schedule a callback on the loop."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine beside others."""

        def begin() -> None:
            task = self._loop.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.submit(begin)

    def close(self) -> None:
        """End the loop, with what still runs on it."""
        self.submit(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._has_run():
                pass
            left = [task for task in asyncio.all_tasks(self._loop) if task.cancel()]
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_SECONDS))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _has_run(self) -> bool:
        """Run the loop; false if a model's task ended it, while the others continue."""
        try:
            self._loop.run_forever()
        except BaseException as error:
            _log.error("a task of a model was lost", thread=self.name, exc_info=error)
            return False
        return True


_CANCEL_SECONDS = 1.0
"""Seconds that coroutines of a model are waited for which are cancelled with its unload."""


def wait_for(thread: CodeThread, call: Callable[[], T], seconds: float | None = None) -> T:
    """Run something in the thread, and return or raise what it does. Blocks.

    Raises TimeoutError after this many seconds; the thread goes on.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread.submit(run)
    return future.result(seconds)
