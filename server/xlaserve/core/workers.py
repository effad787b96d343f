"""The threads that wait and compute, so that the event loop does neither."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_DISK_THREADS = 2
_COMPILE_THREADS = 2
"""A shape of one model is compiled while another model's takes its time."""


class Handed(Generic[T]):
    """A call for a thread, whose result is for one who takes it away.

    The thread would keep the result of a future for a while after others were told of it; and what
    a model computed is memory that has to be free when its unload is answered.
    """

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
            handed = Handed(dispatching.result())

            def fetched(fetching: "Future[None]") -> None:
                loop.call_soon_threadsafe(lambda: over(handed.take()))

            # From here, not from the loop: that may be busy, and this keeps the order.
            try:
                fetching = self._fetch.submit(handed)
            except RuntimeError as error:  # no thread can be started
                loop.call_soon_threadsafe(over, error)
            else:
                fetching.add_done_callback(fetched)

        dispatching = self._dispatch.submit(dispatch)
        dispatching.add_done_callback(ended)
        return dispatching

    def close(self) -> None:
        """End the threads once the device has; work that it was not given is called off."""
        self._dispatch.shutdown(wait=True, cancel_futures=True)
        self._fetch.shutdown(wait=True)


def when_done(running: "Future[T]", ended: Callable[["Future[T]"], None]) -> None:
    """Call `ended` on the event loop once work in a thread is over, or called off."""
    loop = asyncio.get_running_loop()
    running.add_done_callback(lambda done: loop.call_soon_threadsafe(ended, done))


def _failure(work: "Future[T]") -> BaseException | None:
    return asyncio.CancelledError() if work.cancelled() else work.exception()


class Workers:
    """Named pools: loading, compiling what loads leave and what requests ask for, executing, and
    waiting for disk and memory. Each accelerator has threads of its own."""

    def __init__(self, *, load_threads: int, execute_threads: int) -> None:
        executing = execute_threads or max(1, (os.cpu_count() or 2) - 1)
        self._load = ThreadPoolExecutor(load_threads, "load")
        self._execute = ThreadPoolExecutor(executing, "execute")
        self._disk = ThreadPoolExecutor(_DISK_THREADS, "disk")
        self._finish = ThreadPoolExecutor(1, "finish")
        self._compile = ThreadPoolExecutor(_COMPILE_THREADS, "compile")
        self._devices: dict[str, DeviceThreads] = {}

    def load(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start a load; the caller waits for it or is told when it ends."""
        return self._load.submit(call, *args, **kwargs)

    def execute(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start a computation, in the order of the calls."""
        return self._execute.submit(call, *args, **kwargs)

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
        compiling: tuple[Executor, ...] = (self._finish, self._load, self._compile)
        pools = (*compiling, self._execute, self._disk)
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)
        for threads in self._devices.values():
            threads.close()
