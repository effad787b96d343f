"""Threads that execute on the CPU, scheduled fairly between models."""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from xlaserve.concurrency.completion import settle, settled
from xlaserve.concurrency.joining import joined
from xlaserve.errors.panics import answerable

T = TypeVar("T")

AHEAD = 2
"""Executions per thread whose completions may be pending before the threads pause."""

_NONE = object()


class HostJob:
    """A call that is queued for, or running on, a host thread.

    The threads own the job until it is complete. Its completion callback must not refer to the job:
    the reference cycle would keep inputs and results alive until the next garbage collection.
    """

    __slots__ = ("__weakref__", "_call", "_completion", "_result", "_threads", "loop", "model")

    def __init__(
        self,
        threads: "HostThreads",
        model: Hashable,
        call: Callable[[], T],
        completion: Callable[[T | BaseException], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = model
        """Key for fair scheduling: jobs with equal keys share one queue."""
        self._threads = threads
        self._call: Callable[[], object] | None = call
        self._completion: Callable[[Any], None] | None = completion
        self._result: object = None

    def cancel(self) -> bool:
        """Cancel the job unless a thread has started it; `completion` later gets CancelledError."""
        return self._threads.cancel(self)

    @property
    def waits(self) -> bool:
        """Tell whether the job is still queued."""
        return self._call is not None

    def take(self) -> Callable[[], object]:
        """Return the call and mark the job as started."""
        call, self._call = self._call, None
        assert call is not None
        return call

    def run(self, call: Callable[[], object]) -> None:
        """Run the call on a thread and keep its result for `complete`; never raises."""
        try:
            self._result = call()
        except BaseException as error:
            self._result = answerable(error)

    def complete(self, failure: BaseException | None = None) -> None:
        """Call the completion callback with the result or error."""
        # Drop the job's references: a thread may keep the job a moment longer, and the callback
        # refers to the model.
        result, self._result = self._result, None
        completion, self._completion = self._completion, None
        assert completion is not None
        completion(failure or result)


class HostThreads:
    """The threads that compute on the CPU, with fair queueing between models.

    Models are served round-robin; jobs of one model start in order. A model that computes for long
    does not block others: regular threads serve every model, and a spare thread serves a model for
    which no thread is computing.

    Backpressure: threads pause while the event loop is busy. Otherwise they could complete any
    number of executions, and their outputs would accumulate.
    """

    def __init__(self, threads: int, spare: int = 0) -> None:
        self._threads = threads
        self._most = threads + spare
        self._lock = threading.Lock()
        """Guards the fields below; never held during a computation."""
        self._waiting: dict[Hashable, deque[HostJob]] = {}
        """Queued jobs by model, the next model first. Queues are never empty."""
        self._computing: Counter[Hashable] = Counter()
        self._busy = 0
        """The total of `_computing`."""
        self._uncompleted = 0
        """Number of executions whose completions are queued on the event loop."""
        self._idle = 0
        """Number of threads that are waiting on `_wake`."""
        self._waking = 0
        """Number of threads that were woken or started but have not looked for work yet. At most
        one: it wakes the next, so that there are never more threads than jobs."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._closed = False

    def start(
        self,
        call: Callable[[], T],
        completion: Callable[[T | BaseException], None],
        model: Hashable = None,
    ) -> HostJob:
        """Enqueue a call for a model; calls of one model start in order.

        `completion` is later called on the event loop with the result or exception, or with
        CancelledError; never within this call. Raises RuntimeError if no thread can be started.
        """
        job = HostJob(self, model, call, completion)
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot execute after shutdown")
            self._waiting.setdefault(model, deque()).append(job)
            if self._may_start(model) and not self._waking:
                try:
                    self._wake_one()
                except RuntimeError:  # no thread could be started
                    if not self._started:
                        self._dequeue(job)
                        raise
        return job

    @property
    def is_idle(self) -> bool:
        """Tell whether no job is running or queued."""
        with self._lock:
            return not self._busy and not self._waiting

    async def run(self, call: Callable[[], T], model: Hashable = None) -> T:
        """Run a call when it is the model's turn; return its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await settled(future, self.start(call, partial(settle, future), model))

    def cancel(self, job: HostJob) -> bool:
        """Cancel a queued job; tell whether it was still queued."""
        with self._lock:
            if not job.waits or job not in self._waiting.get(job.model, ()):
                return False
            self._dequeue(job)
        job.loop.call_soon(job.complete, asyncio.CancelledError())
        return True

    def close(self, seconds: float | None = None) -> bool:
        """Stop the threads after their running jobs; cancel queued jobs.

        Waits at most this many seconds. Returns whether all threads have ended.
        """
        with self._lock:
            self._closed = True
            waiting = [job for jobs in self._waiting.values() for job in jobs]
        for job in waiting:
            self.cancel(job)
        for _ in self._started:
            self._wake.put(None)
        return joined(self._started, seconds)

    # --- while holding the lock ---

    def _may_start(self, model: Hashable) -> bool:
        if self._uncompleted >= self._threads * AHEAD or self._busy >= self._most:
            return False
        return self._busy < self._threads or not self._computing[model]

    def _start_next(self) -> HostJob | None:
        """Dequeue the next job and count it as running; None if no job may start."""
        model = next(filter(self._may_start, self._waiting), _NONE)
        if model is _NONE:
            return None
        jobs = self._waiting.pop(model)
        job = jobs.popleft()
        if jobs:
            self._waiting[model] = jobs
        self._busy += 1
        self._computing[model] += 1
        return job

    def _ended(self, job: HostJob) -> None:
        self._busy -= 1
        self._uncompleted += 1
        self._computing[job.model] -= 1
        if not self._computing[job.model]:
            del self._computing[job.model]

    def _dequeue(self, job: HostJob) -> None:
        jobs = self._waiting[job.model]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.model]

    def _wake_if_needed(self) -> None:
        if not self._waking and any(map(self._may_start, self._waiting)):
            # If no thread can be started, the existing threads do the work.
            with suppress(RuntimeError):
                self._wake_one()

    def _wake_one(self) -> None:
        if self._idle:
            self._idle -= 1
            self._waking += 1
            self._wake.put(None)
        elif len(self._started) < self._most:
            name = f"execute_{len(self._started)}"
            # Daemon: a call that hangs must not keep the process from exiting.
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            thread.start()
            self._waking += 1
            self._started.append(thread)

    # --- methods called by the host threads ---

    def _serve(self) -> None:
        ended, comes = None, True
        while True:
            with self._lock:
                if comes:
                    self._waking -= 1
                    comes = False
                if ended is not None:
                    self._ended(ended)
                    ended = None
                job = self._start_next()
                if job is not None:
                    self._wake_if_needed()
                elif self._closed:
                    return
                else:
                    self._idle += 1
            if job is None:
                self._wake.get()
                comes = True
                continue
            ended = job
            job.run(job.take())
            with suppress(RuntimeError):  # the event loop is closed
                job.loop.call_soon_threadsafe(self._complete, job)
            # Ownership of the result has passed to the event loop.
            del job

    # --- on the event loop ---

    def _complete(self, job: HostJob) -> None:
        with self._lock:
            self._uncompleted -= 1
            # Before the completion, so that an idle thread starts without delay.
            self._wake_if_needed()
        job.complete()
