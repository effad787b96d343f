"""The thread of one replica of a Python model, which calls all its methods."""

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
    """A thread that runs a model's code."""

    @property
    def name(self) -> str:
        """Return the name of the thread."""
        ...

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call; it must not raise."""
        ...

    def close(self) -> None:
        """Stop the thread after its queued calls; does not wait."""
        ...


class PlainThread:
    """Runs queued calls one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: shutdown does not wait for model code that does not return.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call."""
        self._calls.put(call)

    def close(self) -> None:
        """Stop the thread after its queued calls."""
        self._calls.put(None)

    def _run(self) -> None:
        get = self._calls.get
        while (call := get()) is not None:
            try:
                call()
            except BaseException as error:
                # Calls must not raise; if one does, the queued ones still run.
                _log.error("call from model thread failed", thread=self.name, exc_info=error)
            del call


class LoopThread:
    """A thread with an event loop, on which a model's coroutines run concurrently."""

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
        """Run a coroutine as a task on the loop."""

        def begin() -> None:
            task = self._loop.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.submit(begin)

    def close(self) -> None:
        """Stop the loop and cancel its remaining tasks."""
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
        """Run the loop until it is stopped; False if it must be restarted because a task raised."""
        try:
            self._loop.run_forever()
        except BaseException as error:
            _log.error("model task lost", thread=self.name, exc_info=error)
            return False
        return True


_CANCEL_SECONDS = 1.0
"""Timeout for cancelled coroutines to finish when a model is unloaded, in seconds."""


def wait_for(thread: CodeThread, call: Callable[[], T], seconds: float | None = None) -> T:
    """Run a call in a model's thread, and return its result or raise its exception. Blocks.

    Raises TimeoutError after `seconds`; the thread continues with the call.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread.submit(run)
    return future.result(seconds)
