"""The threads that wait and compute, so that the event loop does neither."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from xlaserve.core.threads import DeviceThreads, HostThreads

P = ParamSpec("P")
T = TypeVar("T")

_LEAST_THREADS = 2
"""Execute where a machine has one core or two: they share it better than they wait in line."""
_DISK_THREADS = 2
_COMPILE_THREADS = 2
"""A shape of one model is compiled while another model's takes its time."""


class Workers:
    """Named pools: loading, compiling what loads leave and what requests ask for, executing, and
    waiting for disk and memory. Each accelerator has threads of its own."""

    def __init__(
        self, *, load_threads: int, execute_threads: int, spare_execute_threads: int = 0
    ) -> None:
        executing = execute_threads or max(_LEAST_THREADS, (os.cpu_count() or 2) - 1)
        self._load = ThreadPoolExecutor(load_threads, "load")
        self.host = HostThreads(executing, spare_execute_threads)
        """Executes on the host."""
        self._disk = ThreadPoolExecutor(_DISK_THREADS, "disk")
        self._finish = ThreadPoolExecutor(1, "finish")
        self._compile = ThreadPoolExecutor(_COMPILE_THREADS, "compile")
        self._devices: dict[str, DeviceThreads] = {}

    def load(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start a load; the caller waits for it or is told when it ends."""
        return self._load.submit(call, *args, **kwargs)

    def device(self, queue: str) -> DeviceThreads:
        """Return the threads for a line of work on accelerators (Dispatching.queues)."""
        if queue not in self._devices:
            self._devices[queue] = DeviceThreads(queue)
        return self._devices[queue]

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
        for pool in (self._finish, self._load, self._compile):
            pool.shutdown(wait=True, cancel_futures=True)
        self.host.close()
        self._disk.shutdown(wait=True, cancel_futures=True)
        for threads in self._devices.values():
            threads.close()
