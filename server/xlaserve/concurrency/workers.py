"""Thread pools for computing and blocking work."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import ParamSpec, TypeVar

from xlaserve.concurrency.abandoned import AbandonedWork
from xlaserve.concurrency.device import DeviceThreads
from xlaserve.concurrency.host import HostThreads
from xlaserve.concurrency.joining import ended
from xlaserve.concurrency.limited import Beat, LimitedCall, LimitedThreads
from xlaserve.errors.panics import answering

P = ParamSpec("P")
T = TypeVar("T")

_LEAST_THREADS = 2
"""Minimum number of computing threads, even on a single core: sharing a core is better than
queueing."""
DEFAULT_MAX_ABANDONED = 8
_DISK_THREADS = 2
_FETCH_THREADS = 8
"""Maximum number of concurrent store requests; the same applies to model fetches."""
_COMPILE_THREADS = 2
"""Number of on-demand compilations at the same time, so that models do not wait for each other."""


class Workers:
    """The server's thread pools.

    They run loads, background and on-demand compilations, executions on the CPU, and calls that
    block on disk or memory. Each accelerator has its own threads.
    """

    def __init__(
        self,
        *,
        load_threads: int,
        execute_threads: int,
        spare_execute_threads: int = 0,
        max_abandoned: int = DEFAULT_MAX_ABANDONED,
    ) -> None:
        executing = execute_threads or max(_LEAST_THREADS, (os.cpu_count() or 2) - 1)
        self.closed = False
        """Whether the pools are shutting down."""
        self.abandoned = AbandonedWork(max_abandoned)
        """Calls that were abandoned and still run on their threads."""
        self._load = LimitedThreads("load", load_threads)
        self.host = HostThreads(executing, spare_execute_threads)
        self._disk = ThreadPoolExecutor(_DISK_THREADS, "disk")
        self._fetch = ThreadPoolExecutor(_FETCH_THREADS, "remote")
        self._finish = LimitedThreads("finish", 1)
        self._compile = LimitedThreads("compile", _COMPILE_THREADS)
        self._devices: dict[str, DeviceThreads] = {}

    def load(self, call: Callable[[], T]) -> LimitedCall[T]:
        """Start a load on its own thread; the caller waits with a time limit."""
        return self._load.start(call)

    def lending_load(self) -> AbstractContextManager[None]:
        """Allow another load within a block in which one load waits for another."""
        return self._load.lending()

    def device(self, queue: str) -> DeviceThreads:
        """Return the threads for a dispatch queue (Dispatching.queues)."""
        if queue not in self._devices:
            self._devices[queue] = DeviceThreads(queue)
        return self._devices[queue]

    def finish(self, call: Callable[[], T], beat: Beat) -> LimitedCall[T]:
        """Start background work, one call at a time; `beat` reports progress."""
        return self._finish.start(call, beat)

    def compile(self, call: Callable[[], T]) -> LimitedCall[T]:
        """Start a compilation that a request waits for."""
        return self._compile.start(call)

    async def wait(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that blocks on disk or memory, and return its result."""
        return await asyncio.wrap_future(
            self._disk.submit(answering(partial(call, *args, **kwargs)))
        )

    def fetch(self, call: Callable[[], T]) -> "Future[T]":
        """Start a request to a store."""
        return self._fetch.submit(answering(call))

    async def fetch_for(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a request to a store, and return its result."""
        return await asyncio.wrap_future(
            self._fetch.submit(answering(partial(call, *args, **kwargs)))
        )

    def close(self, seconds: float | None = None) -> bool:
        """Stop all threads after their running work; cancel queued work.

        Waits at most this many seconds, but not for abandoned calls. Returns whether all threads
        have ended; remaining ones only end with the process.
        """
        self.closed = True
        until = None if seconds is None else time.monotonic() + seconds
        pools: list[Callable[[float | None], bool]] = [
            self._finish.close,
            self._load.close,
            self._compile.close,
            self.host.close,
            partial(ended, self._disk),
            partial(ended, self._fetch),
            *(threads.close for threads in self._devices.values()),
        ]
        left = [pool for pool in pools if not pool(_remaining(until))]
        return not left


def _remaining(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
