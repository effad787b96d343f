"""Models that give any number of answers to one request (a Station)."""

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
"""Four months: longer timeouts are treated as none."""


class Job(Protocol):
    """Answers to be computed."""

    def cancel(self) -> bool:
        """Cancel it unless it was begun; `Generation.computed` is called in any case."""
        ...


class Computing(Protocol):
    """Has the next answers of a request computed in a thread."""

    def start(self, waiting: "Generation", /) -> Job:
        """Compute, and call `computed` on the event loop. Raises RuntimeError without a thread."""
        ...

    def pending_since(self) -> Iterator[int]:
        """Yield since when each answer waits for a thread."""
        ...


class Alone:
    """Computes each request's answers separately (a Computing)."""

    def __init__(self, work: HostWork) -> None:
        self._work = work

    def start(self, waiting: "Generation", /) -> Job:
        """Compute in any idle thread."""
        return self._work.in_thread(waiting.compute, waiting.computed)

    def pending_since(self) -> Iterator[int]:
        """Yield since when each answer waits for a thread."""
        return self._work.pending_since()


class Generator:
    """Computes answers in threads, one after the other, at the client's pace."""

    def __init__(
        self,
        instance: Served,
        model: Generating,
        work: HostWork,
        now_ns: Callable[[], int],
        computing: Computing | None = None,
    ) -> None:
        """`computing` is for models that compute answers of several requests together."""
        self.computing = computing or Alone(work)
        self.instance = instance
        self.model = model
        self.work = work
        self.now_ns = now_ns
        self.replicas = Replicas(model.replicas)
        """Shares the requests: all answers to one are computed by one replica."""
        self._unending = Unending(instance)
        self.queue: Batcher | None = None
        """Queued requests, if the configuration has queue rules."""

    def pending_since(self) -> Iterator[int]:
        """Yield since when each request waits, and each answer for a thread."""
        if self.queue is not None:
            yield from self.queue.pending_since()
        yield from self.computing.pending_since()

    def begin(self, call: InferCall) -> None:
        """Answer a call until the model has no more.

        Raises Decoupled where the client can be given one answer only, BudgetExhausted, and
        RuntimeError where there is no thread.
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
        """Return the maximum of concurrent requests, if they queue."""
        model = self.model
        if isinstance(self.computing, Together) and isinstance(model, Stepping):
            return model.replicas * model.most_together
        return model.replicas

    def run(self, call: InferCall, over: Callable[[], None] = lambda: None) -> None:
        """Begin with the answers to a call; `over` is called when another may take its place.

        Raises RuntimeError where there is no thread, ExecutionStalled while others do not end.
        """
        Generation(self, call, over).start()

    def _expire_in_time(self, call: InferCall) -> None:
        """End a call when the answers to it have taken as long as its `timeout` says.

        The deadline of a stream is that of all its requests: this is a request's own.
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
    """Begins with the requests of a queue one by one (a Runner)."""

    is_inline = False

    def __init__(self, station: Generator) -> None:
        self._station = station
        self.lanes = station.lanes

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Start a request, answered alone; `freed` is called at its end."""
        (call,) = requests
        call.place = None
        try:
            self._station.run(call, freed)
        except ENDS:
            raise
        except BaseException as error:  # it has been given up, and its place with it
            ended(error)


class Generation:
    """The answers to one call (its Place).

    There is always one thing that goes on with it, and only one: a job in a thread, or the callback
    of a client that has to read first. Whichever it is looks whether the call has ended meanwhile;
    the answers are closed then.
    """

    def __init__(self, station: Generator, call: InferCall, over: Callable[[], None]) -> None:
        self._station = station
        self._over = over
        self.call = call
        """The call."""
        self._begun_ns = station.now_ns()
        self.replica = station.replicas.take()
        """The program that computes all answers."""
        self._start = partial(
            station.model.generate, call.inputs, call.parameters, replica=self.replica
        )
        self.answers: Answers | None = None
        """None until a thread has begun, and once they are closed. Of the thread that computes."""
        self._ready = Computed()
        """Computed answers that were not written yet."""
        self.ahead = Ahead(call)
        """Limit of answers computed in one go."""
        self._job: Job | None = None
        # A user of its own: the answers may be closed a while after the call has ended.
        station.instance.acquire()

    def start(self) -> None:
        """Start computing the first answer.

        Raises RuntimeError where there is no thread, ExecutionStalled while others do not end.
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
        """Take computed answers, or the reason why no thread ran, and continue."""
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
                    # Only now it is known that the one before was the last one with outputs.
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
        """Write an answer, and tell whether it is known to have been the last one."""
        call = self.call
        try:
            response = respond(call, found.outputs)
            if not found.is_last:
                call.answer(response, last=False)
                return False
        except ENDS:
            raise
        except BaseException as error:
            # Outputs that are not what the model promised, or an answer that cannot be written.
            deliver([call], error)
            return False
        self._report(self._ready.error)
        self._finish()
        answer_last(call, self._executed(), response)
        return True

    def _executed(self) -> Executed:
        return Executed({}, self._begun_ns, self._station.now_ns(), self.call.rows)

    def _close(self) -> None:
        """Close the answers in a thread; without a thread, do nothing."""
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
        # Later references to this object must keep no tensors alive.
        del self._start
        self.answers = None
        self._ready = Computed()
        self._station.replicas.leave(self.replica)
        self._over()
        self._station.instance.release()

    # --- in a thread ---

    def compute(self, replica: int) -> Computed:
        """Return the next answer, and following quick ones; raises nothing."""
        computed = Computed()
        try:
            if not self._fill(computed, self.opened()):
                return computed
        except BaseException as error:
            computed.error = answerable(error)
        self.close_answers(computed)
        return computed

    def opened(self) -> Answers:
        """Return the answers, begun by now."""
        if self.answers is None:
            self.answers = self._start()
        return self.answers

    def _fill(self, computed: Computed, answers: Answers) -> bool:
        """Compute answers, and tell whether they are complete."""
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
        """Note the end of the answers, and close them."""
        computed.is_done = True
        try:
            self._end()
        except BaseException as error:
            computed.error = computed.error or answerable(error)

    def _end(self) -> None:
        answers, self.answers = self.answers, None
        if answers is not None:
            answers.close()
