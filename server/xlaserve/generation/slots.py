"""The slots of a generator: its thread gives each request tokens until it is done."""

import threading
import time
from functools import partial

import structlog

from xlaserve.errors.code import ModelFailed
from xlaserve.errors.panics import answerable
from xlaserve.generation.batch import Batch
from xlaserve.generation.programs import Programs
from xlaserve.generation.running import Running
from xlaserve.runtime.failures import raise_if_exhausted
from xlaserve.runtime.generator.counts import GenerationCounts
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.runtime.handling import ModelRequest


class Slots:
    """Steps all requests that have a slot together, in a thread of its own.

    A request that waits is given the first slot that is free: the oldest of the best priority, or
    one that was passed over too often. Where none is free, a worse request gives up its slot, goes
    to the front of its level, and begins once more behind the tokens that it was given.
    """

    def __init__(self, model: str, info: GenerationInfo, programs: Programs) -> None:
        self._model = model
        self._programs = programs
        self.counts = GenerationCounts(info.slots, info.slots * info.max_length)
        self._batch = Batch(info, programs, self.counts, self._pause)
        self._waiting: list[Running] = []
        self._changed = threading.Condition()
        """Lock of queue, pauses and end."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"generate {model}", daemon=True)
        self._thread.start()

    # --- in any thread ---

    def add(self, running: Running) -> None:
        """Queue a request for a slot. Its `when_cancelled` must be `withdraw`."""
        with self._changed:
            is_closing, is_cancelled = self._is_closing, running.request.is_cancelled
            if not is_closing and not is_cancelled:
                self._waiting.append(running)
                self._changed.notify()
        if is_cancelled:
            running.request.end()
            running.freed()
        elif is_closing:
            self._fail(running, ModelFailed(self._model, "it is being unloaded"))

    def yields_to(self, level: int) -> bool:
        """Tell whether another request of a level would preempt one."""
        with self._changed:
            as_good = sum(running.level <= level for running in self._waiting)
            return sum(1 for _ in self._batch.yielding(level)) > as_good

    def close(self) -> None:
        """Fail the remaining requests, and wait for the thread to end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def withdraw(self, request: ModelRequest) -> None:
        """Drop a cancelled request; one with a slot leaves before the next step."""
        with self._changed:
            running = next((one for one in self._waiting if one.request is request), None)
            if running is not None:
                self._waiting.remove(running)
            self._changed.notify()
        if running is not None:
            running.request.end()
            running.freed()

    def _resume(self, running: Running) -> None:
        with self._changed:
            running.is_paused = False
            self._changed.notify()

    # --- in the thread ---

    def _run(self) -> None:
        while self._wait():
            begun, busy = time.perf_counter_ns(), self._programs.busy_ns
            try:
                self._turn()
            except BaseException as error:
                self._recover(answerable(error))
            took = time.perf_counter_ns() - begun
            self.counts.host_ns += took - (self._programs.busy_ns - busy)
        for running in self._taken():
            self._fail(running, ModelFailed(self._model, "it was unloaded"))

    def _turn(self) -> None:
        batch = self._batch
        batch.leave_cancelled()
        while (running := self._next()) is not None:
            batch.admit(running)
        batch.prefill()
        batch.step()

    def _wait(self) -> bool:
        """Wait for work; False at the end."""
        with self._changed:
            while not self._is_closing and not self._has_work():
                self._changed.wait()
            return not self._is_closing

    def _has_work(self) -> bool:
        return self._batch.may_begin(self._waiting) or self._batch.has_work

    def _next(self) -> Running | None:
        """Dequeue the next request; None if none gets a slot."""
        # Held all the while: one that is cancelled meanwhile is found where it waits by then.
        with self._changed:
            return self._batch.take_next(self._waiting)

    def _pause(self, running: Running) -> None:
        running.request.when_writable(partial(self._resume, running))

    def _taken(self) -> list[Running]:
        """Remove all requests, queued ones too."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        return [*self._batch.take_all(), *waiting]

    def _recover(self, error: Exception) -> None:
        """Fail all requests with an error of the device, and begin with an empty cache."""
        structlog.get_logger("generation").error(
            "generator step failed, with every request of the model",
            model=self._model,
            error=repr(error),
        )
        told: Exception = ModelFailed(self._model, f"a step failed: {error}")
        try:
            raise_if_exhausted(self._model, error)
        except Exception as exhausted:
            told = exhausted
        for running in self._taken():
            self._fail(running, told)
        try:
            self._programs.reset()
        except BaseException as again:
            # The next step fails as this one did, and tries once more.
            structlog.get_logger("generation").error(
                "generator cache not recreated", model=self._model, error=repr(again)
            )

    def _fail(self, running: Running, error: Exception) -> None:
        running.request.fail(error)
        running.freed()
