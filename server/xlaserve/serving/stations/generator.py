"""The station of decoupled models, which give any number of answers to one request."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import structlog

from xlaserve.errors import DeadlineExceeded, Decoupled, ExecutionStalled
from xlaserve.errors.panics import ENDS, answerable
from xlaserve.runtime.loaded import Answer, Answers, Generating
from xlaserve.runtime.stepping import Stepping
from xlaserve.serving.answers import answer_last, deliver, respond
from xlaserve.serving.call import outside_call
from xlaserve.serving.infer_call import Ended, Executed, InferCall
from xlaserve.serving.made_arrays import reserve_made
from xlaserve.serving.stations.ahead import Ahead, Computed
from xlaserve.serving.stations.batching import Batcher
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.replicas import Replicas
from xlaserve.serving.stations.station import Served
from xlaserve.serving.stations.together import Together
from xlaserve.serving.stations.unending import Unending

_SECOND_MICROSECONDS = 1e6
_LONGEST_MICROSECONDS = 10**13
"""Timeouts longer than this (four months) are clamped to it."""


class Job(Protocol):
    """A scheduled computation of answers."""

    def cancel(self) -> bool:
        """Cancel unless the computation has begun; `computed` is called in either case."""
        ...


class Computing(Protocol):
    """Schedules the computation of a request's next answers on a thread."""

    def start(self, waiting: "Generation", /) -> Job:
        """Start computing, then call `computed` on the event loop; raises RuntimeError."""
        ...

    def pending_since(self) -> Iterator[int]:
        """Yield the time at which each answer began to wait for a thread."""
        ...


class Alone:
    """Computes the answers of each request separately (a Computing)."""

    def __init__(self, work: HostWork) -> None:
        self._work = work

    def start(self, waiting: "Generation", /) -> Job:
        """Compute on any idle thread."""
        return self._work.in_thread(waiting.compute, waiting.computed)

    def pending_since(self) -> Iterator[int]:
        """Yield the time at which each answer began to wait for a thread."""
        return self._work.pending_since()


class Generator:
    """Computes answers one after the other on threads, at the client's pace."""

    def __init__(
        self,
        instance: Served,
        model: Generating,
        work: HostWork,
        now_ns: Callable[[], int],
        computing: Computing | None = None,
    ) -> None:
        """`computing` is given for models that compute answers of several requests together."""
        self.computing = computing or Alone(work)
        self.instance = instance
        self.model = model
        self.work = work
        self.now_ns = now_ns
        self.replicas = Replicas(model.replicas)
        """Assigns a replica to each request, which computes all of its answers."""
        self._unending = Unending(instance)
        self.queue: Batcher | None = None
        """The request queue, if the configuration has queue policies."""

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued requests and of answers waiting for a thread."""
        if self.queue is not None:
            yield from self.queue.pending_since()
        yield from self.computing.pending_since()

    def begin(self, call: InferCall) -> None:
        """Answer a call until the model has no more answers.

        Raises Decoupled if the client accepts only one answer, BudgetExhausted, and RuntimeError if
        no thread can be started.
        """
        if not call.takes_many:
            raise Decoupled(self.instance.model)
        reserve_made(call, self.instance.info.state_bytes, "the state of the model")
        call.submitted_ns = self.now_ns()
        if self.queue is None:
            self.run(call)
        else:
            self.queue.submit(call)
        self._unending.add(call)
        self._expire_in_time(call)

    @property
    def lanes(self) -> int:
        """Return the maximum of concurrent requests, for the request queue."""
        model = self.model
        if isinstance(self.computing, Together) and isinstance(model, Stepping):
            return model.replicas * model.most_together
        return model.replicas

    def run(self, call: InferCall, over: Callable[[], None] = lambda: None) -> None:
        """Start answering a call; `over` is called when the next request may start.

        Raises RuntimeError if no thread can be started, and ExecutionStalled while an execution is
        stalled.
        """
        Generation(self, call, over).start()

    def _expire_in_time(self, call: InferCall) -> None:
        """Expire a call after the time given by its `timeout` parameter.

        The deadline of a stream covers all of its requests; this timeout is the request's own.
        """
        timeout = call.parameters.get("timeout", 0)
        if isinstance(timeout, int) and timeout and not call.has_ended:
            expire = partial(call.fail, DeadlineExceeded())
            loop = asyncio.get_running_loop()
            seconds = min(timeout, _LONGEST_MICROSECONDS) / _SECOND_MICROSECONDS
            call.hold(loop.call_later(seconds, expire, context=outside_call()).cancel)

    def retire(self) -> Sequence[InferCall]:
        """Return the queued calls."""
        return () if self.queue is None else self.queue.retire()


class GeneratorRunner:
    """Starts the requests of a queue one by one (a Runner)."""

    is_inline = False

    def __init__(self, station: Generator) -> None:
        self._station = station
        self.lanes = station.lanes

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Start a request; `freed` is called when it ends."""
        (call,) = requests
        call.place = None
        try:
            self._station.run(call, freed)
        except ENDS:
            raise
        except BaseException as error:  # the request has already released its lane
            ended(error)


class Generation:
    """The answers to one call (a Holder).

    At any time exactly one thing drives it: a job on a thread, or the callback of a client that
    must read first. The driver checks whether the call has ended, and then closes the answers.
    """

    def __init__(self, station: Generator, call: InferCall, over: Callable[[], None]) -> None:
        self._station = station
        self._over = over
        self.call = call
        self._begun_ns = station.now_ns()
        self.replica = station.replicas.take()
        """Index of the replica that computes all answers."""
        self._start = partial(
            station.model.generate, call.inputs, call.parameters, replica=self.replica
        )
        self.answers: Answers | None = None
        """Iterator over the answers; None before a thread opens it and after it is closed. Belongs
        to the computing thread."""
        self._ready = Computed()
        """Computed answers that have not been written."""
        self.ahead = Ahead(call)
        """Prefetch limit."""
        self._job: Job | None = None
        # Keep the instance open: the answers may be closed only after the call has ended.
        station.instance.acquire()

    def start(self) -> None:
        """Start computing the first answer.

        Raises RuntimeError if no thread can be started, and ExecutionStalled while an execution is
        stalled.
        """
        try:
            self._station.work.watch.check()
            self._job = self._station.computing.start(self)
        except (RuntimeError, ExecutionStalled):
            self._finish()
            raise
        self.call.wait_at(self)

    def leave(self, call: InferCall) -> None:
        """Stop computing for an ended call."""
        if self._job is not None:
            self._job.cancel()

    # --- on the event loop ---

    def computed(self, found: Computed | BaseException) -> None:
        """Receive computed answers, or the error that prevented the computation, and continue."""
        self._job = None
        if isinstance(found, Computed):
            self._ready = found
            self._go_on()
        elif self.call.has_ended:
            self._close()
        else:
            self._finish()
            deliver([self.call], found)

    def _go_on(self) -> None:
        """Write answers, or compute more, while the client reads (backpressure)."""
        call, ready = self.call, self._ready
        while not call.has_ended:
            if ready.is_done and not ready.answers:
                self._finish()
                if ready.error is not None:
                    deliver([call], ready.error)
                else:
                    # Only now is the previous answer known to be the last one with outputs.
                    answer_last(call, self._executed())
                return
            if not call.is_writable:
                self.ahead.pause()
                call.on_writable = self._go_on
                call.holds_anything = True
                return
            if not ready.answers:
                self._compute()
                return
            if self._answer(ready.answers.popleft()):
                return
        self._close()

    def _compute(self) -> None:
        self.ahead.grow()
        try:
            self._job = self._station.computing.start(self)
        except RuntimeError as error:
            self._finish()
            deliver([self.call], error)

    def _answer(self, found: Answer) -> bool:
        """Write an answer; return whether it was the last one."""
        call = self.call
        try:
            response = respond(call, found.outputs)
            if not found.is_last:
                call.answer(response, last=False)
                return False
        except ENDS:
            raise
        except BaseException as error:
            # The outputs contradict the model's metadata, or the answer cannot be written.
            deliver([call], error)
            return False
        self._report(self._ready.error)
        self._finish()
        answer_last(call, self._executed(), response)
        return True

    def _executed(self) -> Executed:
        return Executed({}, self._begun_ns, self._station.now_ns(), self.call.rows)

    def _close(self) -> None:
        """Close the answers on a thread; skip closing if no thread can be started."""
        if self.answers is None:
            self._finish()
            return
        try:
            self._station.work.in_thread(lambda replica: self._end(), self._closed)
        except RuntimeError:
            self._finish()

    def _closed(self, problem: BaseException | None) -> None:
        self._finish()
        self._report(problem)

    def _report(self, problem: BaseException | None) -> None:
        if problem is not None:
            structlog.get_logger("generator").warning(
                "abandoned answers not closed",
                model=self._station.instance.model,
                error=repr(problem),
            )

    def _finish(self) -> None:
        # References to this object may outlive the call and must not keep tensors alive.
        del self._start
        self.answers = None
        self._ready = Computed()
        self._station.replicas.leave(self.replica)
        self._over()
        self._station.instance.release()

    # --- on a thread ---

    def compute(self, replica: int) -> Computed:
        """Return the next answer, and further ones if they are quick; raises nothing."""
        computed = Computed()
        try:
            if not self._fill(computed, self.opened()):
                return computed
        except BaseException as error:
            computed.error = answerable(error)
        self.close_answers(computed)
        return computed

    def opened(self) -> Answers:
        """Return the model's answers, opening them if necessary."""
        if self.answers is None:
            self.answers = self._start()
        return self.answers

    def _fill(self, computed: Computed, answers: Answers) -> bool:
        """Compute answers until a limit is reached; return whether they are complete."""
        now_ns = self._station.now_ns
        until = Ahead.until(now_ns())
        while (found := next(answers, None)) is not None:
            computed.add(found)
            if found.is_last:
                break
            if not self.ahead.allows(computed) or now_ns() >= until:
                return False
        return True

    def close_answers(self, computed: Computed) -> None:
        """Mark the answers as complete, and close them."""
        computed.is_done = True
        try:
            self._end()
        except BaseException as error:
            computed.error = computed.error or answerable(error)

    def _end(self) -> None:
        answers, self.answers = self.answers, None
        if answers is not None:
            answers.close()
