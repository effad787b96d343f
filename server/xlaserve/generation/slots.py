"""The generation thread of a model: schedules requests to slots and steps them."""

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
    """Steps all requests that have a slot together, on a separate thread.

    A free slot goes to the oldest waiting request of the best priority, or to one passed over too
    often. If no slot is free, a request of lower priority is preempted: it goes to the front of its
    level, and later continues after the tokens that it has generated.
    """

    def __init__(self, model: str, info: GenerationInfo, programs: Programs) -> None:
        self._model = model
        self._programs = programs
        self.counts = GenerationCounts(info.slots, info.slots * info.max_length)
        self._batch = Batch(info, programs, self.counts, self._pause)
        self._waiting: list[Running] = []
        self._changed = threading.Condition()
        """Guards the queue, the pauses, and `_is_closing`."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"generate {model}", daemon=True)
        self._thread.start()

    # --- on any thread ---

    def add(self, running: Running) -> None:
        """Queue a request for a slot. The caller must register `withdraw` with `when_cancelled`."""
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
        """Tell whether a request of a priority level would preempt a running one."""
        with self._changed:
            as_good = sum(running.level <= level for running in self._waiting)
            return sum(1 for _ in self._batch.yielding(level)) > as_good

    def close(self) -> None:
        """Fail the remaining requests, and wait until the thread has ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def withdraw(self, request: ModelRequest) -> None:
        """Remove a cancelled request; if it has a slot, it leaves before the next step."""
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

    # --- on the generation thread ---

    def _run(self) -> None:
        while self._wait():
            begun, busy = time.perf_counter_ns(), self._programs.busy_ns
            try:
                self._turn()
            except BaseException as error:
                self._recover(answerable(error))
            took = time.perf_counter_ns() - begun
            self.counts.host_ns += took - (self._programs.busy_ns - busy)
        for running in self._remove_all():
            self._fail(running, ModelFailed(self._model, "it was unloaded"))

    def _turn(self) -> None:
        batch = self._batch
        batch.leave_cancelled()
        while (running := self._next()) is not None:
            batch.admit(running)
        batch.prefill()
        batch.step()

    def _wait(self) -> bool:
        """Wait for work; return False when closing."""
        with self._changed:
            while not self._is_closing and not self._has_work():
                self._changed.wait()
            return not self._is_closing

    def _has_work(self) -> bool:
        return self._batch.may_begin(self._waiting) or self._batch.has_work

    def _next(self) -> Running | None:
        """Dequeue the next request, or return None if none gets a slot."""
        # Under the lock, so that a request cancelled meanwhile is found in the queue or in a slot.
        with self._changed:
            return self._batch.take_next(self._waiting)

    def _pause(self, running: Running) -> None:
        resume = partial(self._resume, running)
        if running.growth is None:
            running.request.when_writable(resume)
        else:
            running.growth.add_done_callback(lambda _: resume())

    def _remove_all(self) -> list[Running]:
        """Remove and return all requests, including queued ones."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        return [*self._batch.take_all(), *waiting]

    def _recover(self, error: Exception) -> None:
        """Fail all requests after a device error, and reset the cache."""
        structlog.get_logger("generation").error(
            "generator step failed, with every request of the model",
            model=self._model,
            error=repr(error),
        )
        failure: Exception = ModelFailed(self._model, f"a step failed: {error}")
        try:
            raise_if_exhausted(self._model, error)
        except Exception as exhausted:
            failure = exhausted
        for running in self._remove_all():
            self._fail(running, failure)
        try:
            self._programs.reset()
        except BaseException as again:
            # The next step will fail as well, and retry the reset.
            structlog.get_logger("generation").error(
                "generator cache not recreated", model=self._model, error=repr(again)
            )

    def _fail(self, running: Running, error: Exception) -> None:
        running.request.fail(error)
        running.freed()
