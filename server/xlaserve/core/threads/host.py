"""The threads that execute on the host, in fair turns between models."""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from xlaserve.core.threads.completion import settle, settled
from xlaserve.core.threads.joining import joined

T = TypeVar("T")

_AHEAD = 2
"""How many executions of each thread the event loop may not have heard the end of when the next
begins."""

_NONE = object()


class HostJob:
    """Something that a thread of the host does, or that waits for one."""

    __slots__ = ("_call", "_over", "_result", "_threads", "loop", "model")

    def __init__(
        self,
        threads: "HostThreads",
        model: Hashable,
        call: Callable[[], T],
        over: Callable[[T | BaseException], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = model
        """Whose work it is; equal for what is to share the threads of one."""
        self._threads = threads
        self._call: Callable[[], object] | None = call
        self._over: Callable[[Any], None] | None = over
        self._result: object = None

    def cancel(self) -> bool:
        """Call it off, unless a thread has begun; `over` hears of it later."""
        return self._threads.forget(self)

    @property
    def waits(self) -> bool:
        """Tell whether no thread has begun."""
        return self._call is not None

    def take(self) -> Callable[[], object]:
        """Return what a thread is to call; it does not wait from then on."""
        call, self._call = self._call, None
        assert call is not None
        return call

    def run(self, call: Callable[[], object]) -> None:
        """Call, in a thread, and keep the result for `end` alone; raises nothing."""
        try:
            self._result = call()
        except BaseException as error:
            self._result = error

    def end(self, failure: BaseException | None = None) -> None:
        """Tell what came of it: the result of the call, or why there was none."""
        over, result = self._over, failure or self._result
        # Else they hold one another, and the inputs, until garbage is collected.
        self._over = self._call = self._result = None
        if over is not None:
            over(result)


class HostThreads:
    """The threads that compute on the host, and what waits for them.

    Models have their turns one after the other; what is done for one model is begun in order.
    However long one model computes, others are computed meanwhile: all threads but the spare ones
    are for everybody, and a spare one is for a model for which no thread computes.

    Threads do not run ahead of the event loop: while it is busy they could end any number of
    executions, and the outputs would pile up.
    """

    def __init__(self, threads: int, spare: int = 0) -> None:
        self._threads = threads
        self._most = threads + spare
        self._lock = threading.Lock()
        """Held for what follows, by the event loop and the threads; never while one computes."""
        self._waiting: dict[Hashable, deque[HostJob]] = {}
        """By model; the model whose turn is next comes first. No queue is empty."""
        self._computing: Counter[Hashable] = Counter()
        self._busy = 0
        """The sum of those."""
        self._unheard = 0
        """Executions that are over, of which the event loop has not heard."""
        self._idle = 0
        """Threads that wait on `_wake` and are not woken."""
        self._coming = 0
        """Threads that are woken or started and have not looked for work yet. There is one at most:
        it wakes the next, so that no more are started than there is work for."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._closed = False

    def start(
        self,
        call: Callable[[], T],
        over: Callable[[T | BaseException], None],
        model: Hashable = None,
    ) -> HostJob:
        """Have something computed for a model, in the order of the calls.

        `over` is called on the event loop with what it returned or raised, or with CancelledError;
        not within this call. Raises RuntimeError where no thread can be started, or none any more.
        """
        job = HostJob(self, model, call, over)
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot execute after shutdown")
            self._waiting.setdefault(model, deque()).append(job)
            if self._may_begin(model) and not self._coming:
                try:
                    self._wake_one()
                except RuntimeError:  # no thread can be started
                    if not self._started:
                        self._drop(job)
                        raise
        return job

    async def run(self, call: Callable[[], T]) -> T:
        """Have something computed, and return or raise what it does."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await settled(future, self.start(call, partial(settle, future)))

    def forget(self, job: HostJob) -> bool:
        """Call off a job that waits for a thread; tell whether it did."""
        with self._lock:
            if not job.waits or job not in self._waiting.get(job.model, ()):
                return False
            self._drop(job)
        job.loop.call_soon(job.end, asyncio.CancelledError())
        return True

    def close(self, seconds: float | None = None) -> bool:
        """End the threads once they have done what they began; what waits is called off.

        Waits for so many seconds at most. Return whether all have ended.
        """
        with self._lock:
            self._closed = True
            waiting = [job for jobs in self._waiting.values() for job in jobs]
        for job in waiting:
            self.forget(job)
        for _ in self._started:
            self._wake.put(None)
        return joined(self._started, seconds)

    # --- with the lock held ---

    def _may_begin(self, model: Hashable) -> bool:
        if self._unheard >= self._threads * _AHEAD or self._busy >= self._most:
            return False
        return self._busy < self._threads or not self._computing[model]

    def _next(self) -> HostJob | None:
        """Begin the job whose turn it is, if there is one, and a thread for it."""
        model = next(filter(self._may_begin, self._waiting), _NONE)
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
        self._unheard += 1
        self._computing[job.model] -= 1
        if not self._computing[job.model]:
            del self._computing[job.model]

    def _drop(self, job: HostJob) -> None:
        jobs = self._waiting[job.model]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.model]

    def _wake_if_needed(self) -> None:
        if not self._coming and any(map(self._may_begin, self._waiting)):
            # Without another thread those that there are do the work.
            with suppress(RuntimeError):
                self._wake_one()

    def _wake_one(self) -> None:
        if self._idle:
            self._idle -= 1
            self._coming += 1
            self._wake.put(None)
        elif len(self._started) < self._most:
            name = f"execute_{len(self._started)}"
            # Whoever ends the process does not wait for what does not end.
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            thread.start()
            self._coming += 1
            self._started.append(thread)

    # --- in the threads ---

    def _serve(self) -> None:
        ended, comes = None, True
        while True:
            with self._lock:
                if comes:
                    self._coming -= 1
                    comes = False
                if ended is not None:
                    self._ended(ended)
                    ended = None
                job = self._next()
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
                job.loop.call_soon_threadsafe(self._heard, job)
            # What it computed is for the event loop alone from here on.
            del job

    # --- on the event loop ---

    def _heard(self, job: HostJob) -> None:
        with self._lock:
            self._unheard -= 1
            # Before the answer: a thread may have nothing to do.
            self._wake_if_needed()
        job.end()
