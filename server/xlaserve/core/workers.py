"""The threads that wait and compute, so that the event loop does neither."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_DISK_THREADS = 2
_COMPILE_THREADS = 2
"""A shape of one model is compiled while another model's takes its time."""


class Workers:
    """Named pools: loading, compiling what loads leave and what requests ask for, executing, and
    waiting for disk and memory."""

    def __init__(self, *, load_threads: int, execute_threads: int) -> None:
        executing = execute_threads or max(1, (os.cpu_count() or 2) - 1)
        self._load = ThreadPoolExecutor(load_threads, "load")
        self._execute = ThreadPoolExecutor(executing, "execute")
        self._disk = ThreadPoolExecutor(_DISK_THREADS, "disk")
        self._finish = ThreadPoolExecutor(1, "finish")
        self._compile = ThreadPoolExecutor(_COMPILE_THREADS, "compile")

    def load(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start a load; the caller waits for it or is told when it ends."""
        return self._load.submit(call, *args, **kwargs)

    def execute(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start a computation, in the order of the calls."""
        return self._execute.submit(call, *args, **kwargs)

    def finish(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start what nobody waits for, one after the other."""
        return self._finish.submit(call, *args, **kwargs)

    def compile(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start what a request waits for before it can be executed."""
        return self._compile.submit(call, *args, **kwargs)

    async def wait(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that waits for the disk or for memory, and return its result."""
        return await asyncio.wrap_future(self._disk.submit(call, *args, **kwargs))

    def close(self) -> None:
        """End the threads once their work is done; nothing that still waits is started."""
        compiling: tuple[Executor, ...] = (self._finish, self._load, self._compile)
        pools = (*compiling, self._execute, self._disk)
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)
