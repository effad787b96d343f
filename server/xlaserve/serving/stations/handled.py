"""The station of models that answer requests from their own threads."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain

from xlaserve.errors import BudgetExhausted, Decoupled
from xlaserve.errors.code import ModelFailed
from xlaserve.errors.panics import ENDS
from xlaserve.runtime.handling import AnswerParameters, Handling, Sender, Slotted, TensorParameters
from xlaserve.serving.answers import answer_last, deliver, respond
from xlaserve.serving.call import Call
from xlaserve.serving.infer_call import Ended, Executed, InferCall
from xlaserve.serving.made_arrays import reserve_made
from xlaserve.serving.stations.batching import Batcher
from xlaserve.serving.stations.deadlock import Waits
from xlaserve.serving.stations.direct import DirectQueue
from xlaserve.serving.stations.outbox import Outbox
from xlaserve.serving.stations.replicas import Replicas
from xlaserve.serving.stations.station import Served
from xlaserve.serving.stations.unending import Unending
from xlaserve.tensors import Parameter, Tensor, specs_of

AHEAD = 32
"""Executions handed to a copy in advance: waking its thread may cost more than an execution."""

_QUICK_NS = 2_000_000
"""Upper bound of a quick execution, which includes waiting for the GIL."""

WINDOW = 16
"""Unwritten answers per request after which the model must pause."""


class Handed:
    """Queues calls and hands them to the copies of their model (a Station)."""

    def __init__(
        self, instance: Served, runner: "CopiesRunner", queue: Batcher | DirectQueue, waits: Waits
    ) -> None:
        self._instance = instance
        self._runner = self.copies = runner
        self._is_decoupled = runner.model.is_decoupled
        self._unending = Unending(instance) if self._is_decoupled else None
        if runner.model.info.is_lenient and not self._is_decoupled:
            runner.on_late = Unending(instance).add
        self._queue = queue
        if isinstance(queue, DirectQueue):
            runner.on_over = queue.hand_on
        self._waits = waits

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of calls waiting for a copy."""
        return chain(self._queue.pending_since(), self._runner.pending_since())

    def begin(self, call: InferCall) -> None:
        """Enqueue a call; raises Overloaded, or Decoupled if the client accepts only one answer."""
        if isinstance(self._runner.model, Slotted):
            many = call.takes_many and not call.wants_whole
            call.chosen = self._runner.model.choose_outputs(call.chosen, many=many)
            self._hold_text(call, self._runner.model.text_bytes(call.inputs))
        elif self._is_decoupled and not call.takes_many:
            raise Decoupled(self._instance.model)
        self._queue.submit(call)
        if self._unending is not None:
            self._unending.add(call)
        if call.parent is not None:
            self._waits.watch(call, self._runner)

    def _hold_text(self, call: InferCall, size: int) -> None:
        """Charge the prompt text of a call until the model begins it; raises BudgetExhausted."""
        account = call.peer.account
        if account is None or not size:
            return
        account.take("the tokens of a prompt", size)
        held, also = [size], call.on_begun

        def release() -> None:
            if held:
                account.release(held.pop())

        def begun() -> None:
            self._runner.post(release)
            if also is not None:
                also()

        call.hold(release)
        call.on_begun = begun

    def retire(self) -> Sequence[InferCall]:
        """Start nothing more; return the queued calls."""
        return self._queue.retire()


class CopiesRunner:
    """Hands batches to the copies of a model (a Runner).

    Copies get executions in advance, so that their threads need not wait for the event loop between
    two; with several copies, only while executions are quick. If a queue policy decides about
    order, timeouts or batches (`is_ruled`), copies get only what they can begin immediately,
    because the policy cannot reach executions that have been handed over.
    """

    is_inline = False

    def __init__(
        self,
        instance: Served,
        model: Handling,
        outbox: Outbox,
        now_ns: Callable[[], int],
        *,
        is_ruled: bool = False,
    ) -> None:
        self._instance = instance
        self.model = model
        self._is_ruled = is_ruled
        self._slots_ahead = model.ahead if isinstance(model, Slotted) else 0
        self._outbox = outbox
        self.post = outbox.post
        """Schedules a callback on the event loop; callable from any thread."""
        self._now_ns = now_ns
        self._replicas = Replicas(model.replicas)
        self.lanes = model.replicas * model.concurrency
        self._in_flight = 0
        self._exchanges: set[Exchange] = set()
        """Exchanges currently with the copies."""
        self._owed: list[Callable[[], None]] = []
        """`freed` callbacks that are still to be called."""
        self._calls_others = False
        """Whether the model's code calls other models; then executions handed over in advance would
        wait.
        """
        self._recent_ns = _QUICK_NS
        """Moving average of the execution time."""
        self._ahead, self.group = 0, 1
        self._look_ahead()
        self.on_late: Callable[[InferCall], None] = lambda call: None
        """Called with calls that the code answers after their execution."""
        self.on_over: Callable[[], None] = self._free
        """Called when a copy has completed an execution."""

    @property
    def executing(self) -> Mapping[InferCall, bool]:
        """Return the calls handed to copies, and whether the code has begun each of them."""
        return {exchange.call: bool(exchange.begun_ns) for exchange in self._exchanges}

    @property
    def computing(self) -> Sequence[InferCall]:
        """Return the calls that the model's code is working on.

        Among executions handed over together, earlier ones may have ended long ago.
        """
        return [one.call for one in self._exchanges if one.begun_ns and not one.has_ended]

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of calls handed over in advance and not yet begun."""
        return (one.call.submitted_ns for one in self._exchanges if not one.begun_ns)

    def yields_to(self, level: int) -> bool:
        """Tell whether the full model would preempt a request for one of this priority.

        At most one additional request per slot is accepted, since each preempts one that has a
        slot.
        """
        most = 2 * self.lanes + self._slots_ahead
        if not isinstance(self.model, Slotted) or self._in_flight >= most:
            return False
        return self.model.yields_to(level)

    @property
    def room(self) -> int:
        """Return how many more executions may be handed over now."""
        return max(0, max(self.lanes, self._ahead) - self._in_flight)

    def _look_ahead(self) -> None:
        """Decide how many executions to hand over in advance: to all copies, and to one."""
        replicas = self.model.replicas
        if self._is_ruled:
            self._ahead = 0
        elif self._slots_ahead:
            self._ahead = self.lanes + self._slots_ahead
        else:
            # With several copies, a call that waits for one could be executed by another.
            may_wait = replicas == 1 or self._recent_ns < _QUICK_NS
            self._ahead = replicas * AHEAD if may_wait and not self._calls_others else 0
        self.group = max(1, self._ahead // replicas) if self.model.concurrency == 1 else 1

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Hand a batch to the least busy copy; its calls are answered one by one."""
        self._owed.append(freed)
        self.hand(requests, together=True, ended=ended)
        self._free()

    def hand(
        self, calls: Sequence[InferCall], *, together: bool = False, ended: Ended | None = None
    ) -> None:
        """Hand calls to the least busy copy, as one execution each or all `together`."""
        count = 1 if together else len(calls)
        replica = self._replicas.take(count)
        self._instance.acquire()
        self._in_flight += count
        handed = exchanges(calls, self._outbox, self._now_ns, together=together)
        self._exchanges.update(handed)
        over = partial(self._outbox.post, partial(self._over, replica, count, handed, ended))
        self.model.handle(replica, handed, over, together=together)

    def _over(
        self, replica: int, count: int, handed: Sequence["Exchange"], ended: Ended | None
    ) -> None:
        self._replicas.leave(replica, count)
        self._in_flight -= count
        self._exchanges.difference_update(handed)
        did_call, was_quick = self._calls_others, self._recent_ns < _QUICK_NS
        if not did_call:
            nested = [exchange.call.nested for exchange in handed]
            self._calls_others = nested.count(None) < len(nested)
        if not self.model.is_decoupled:
            for exchange in handed:
                if not exchange.has_ended:
                    exchange.check_answered()
                if exchange.is_late and not exchange.call.has_ended:
                    self.on_late(exchange.call)
        took = (handed[-1].ended_ns - handed[0].begun_ns) if handed[0].begun_ns else 0
        self._recent_ns += (max(took, 0) // count - self._recent_ns) // 4
        if self._calls_others is not did_call or (self._recent_ns < _QUICK_NS) is not was_quick:
            self._look_ahead()
        self.on_over()
        if ended is not None and (failed := failure_of(handed)) is not None:
            ended(failed)
        self._instance.release()

    def _free(self) -> None:
        """Call `freed` for as many batches as copies may have in advance."""
        most_owed = max(0, self._in_flight - max(0, self._ahead - self.lanes))
        while len(self._owed) > most_owed:
            self._owed.pop()()


def exchanges(
    calls: Sequence[InferCall], outbox: Outbox, now_ns: Callable[[], int], *, together: bool
) -> "list[Exchange]":
    """Wrap calls as exchanges, executed together or one by one."""
    is_shared = together and len(calls) > 1
    if is_shared or len(calls) > 1 or calls[0].companions:
        accompany(calls, is_shared=is_shared)
    return [Exchange(call, outbox, now_ns, is_shared=is_shared) for call in calls]


def accompany(calls: Sequence[InferCall], *, is_shared: bool) -> None:
    """Make calls companions of each other if they share an execution; else clear companions."""
    companions = tuple([weakref.ref[Call](call) for call in calls]) if is_shared else ()
    for call in calls:
        call.companions = companions


def failure_of(handed: "Sequence[Exchange]") -> BaseException | None:
    """Return the error of an execution that failed as a whole, or None."""
    if len(handed) == 1:
        return handed[0].failure
    return next((one.failure for one in handed if one.has_failed_with_others), None)


class Exchange:
    """One call, as seen by its model (a ModelRequest)."""

    __slots__ = (
        "_answers",
        "_has_answered",
        "_is_shared",
        "_lock",
        "_now_ns",
        "_outbox",
        "_resume",
        "begun_ns",
        "call",
        "ended_ns",
        "failure",
        "has_ended",
        "has_failed",
        "has_failed_with_others",
        "inputs",
        "is_again",
        "is_late",
        "outputs",
        "rows",
    )

    def __init__(
        self,
        call: InferCall,
        outbox: Outbox,
        now_ns: Callable[[], int],
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_shared` says that other calls are executed with this one."""
        self.call = call
        self._is_shared = is_shared
        self._has_answered = False
        self.failure: BaseException | None = None
        """The model's error."""
        self.has_failed_with_others = False
        """Whether the shared execution failed before this call was answered; the caller then
        retries the call by itself.
        """
        self._outbox = outbox
        self._now_ns = now_ns
        self.inputs = call.inputs
        self.rows = call.rows
        """Number of rows of the inputs."""
        specs = call.instance.info.outputs if call.chosen is None else call.chosen
        self.outputs = [spec.name for spec in specs]
        self.begun_ns = self.ended_ns = 0
        self.has_ended = False
        """Whether the model has finished with the call; set on its thread."""
        self.has_failed = False
        """Whether the model failed or gave no answer."""
        self.is_again = False
        """Whether the model has rescheduled the request."""
        self.is_late = False
        """Whether the model has announced an answer after its execution."""
        self._answers = 0
        """Answers sent to the event loop and not yet written."""
        self._resume: Callable[[], None] | None = None
        self._lock = threading.Lock()
        """Guards `_answers` and `_resume`."""

    # --- called by the model on its threads ---

    @property
    def id(self) -> str:
        """Return the id of the request."""
        return self.call.id

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Return the parameters of the request."""
        return self.call.parameters

    @property
    def tensor_parameters(self) -> TensorParameters:
        """Return the parameters of single tensors."""
        return self.call.tensor_parameters

    @property
    def sender(self) -> Sender:
        """Return the request's sender, submission time, and whether several answers are
        accepted.
        """
        call = self.call
        takes_many = call.takes_many and not call.wants_whole
        return Sender(call.submitted_ns, call.owner, takes_many, call.caller)

    @property
    def is_cancelled(self) -> bool:
        """Tell whether the request has been abandoned."""
        return self.call.has_ended

    @property
    def is_writable(self) -> bool:
        """Tell whether the model may send another answer."""
        return self._answers < WINDOW or self.call.has_ended

    def begin(self) -> None:
        """Record the begin time, and notify `on_begun`."""
        self.begun_ns = self._now_ns()
        if self.call.on_begun is not None:
            self.call.on_begun()

    def charge(self, what: str, size: int) -> None:
        """Charge the client's connection for memory until the call ends."""
        self._outbox.post(partial(self._charge, what, size))

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Send an answer; the last one ends the request."""
        self.ended_ns = self._now_ns()
        self._has_answered = True
        if last:
            self.has_ended = True
        else:
            with self._lock:
                self._answers += 1
        self._outbox.post(partial(self._write, outputs, last, parameters))

    def gathered(self) -> AbstractContextManager[None]:
        """Collect this thread's answers; wake the event loop once, at the end of the block."""
        return self._outbox.gathered()

    def again(self) -> None:
        """Finish this execution and reschedule the request (iterative sequences)."""
        self.has_ended = self.is_again = True
        self.ended_ns = self._now_ns()

    def later(self) -> None:
        """Announce that the answer comes after this execution."""
        self.is_late = True

    def end(self) -> None:
        """End the request; its answers have already been sent."""
        self.has_ended = True
        self.ended_ns = self._now_ns()
        self._outbox.post(self._finish)

    def fail(self, error: BaseException, *, whole: bool = False) -> None:
        """Fail the request; with `whole`, leave it for a retry if it shares the execution."""
        self.failure = error
        self.has_failed_with_others = whole and self._is_shared and not self._has_answered
        self.has_ended = self.has_failed = True
        self.ended_ns = self._now_ns()
        if not self.has_failed_with_others:
            self._outbox.post(partial(deliver, [self.call], error))

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, when the model may send another answer or the call has ended."""
        with self._lock:
            if not self.is_writable:
                self._resume = resume
                return
        resume()

    # --- on the event loop ---

    def when_cancelled(self, leave: Callable[[], None]) -> None:
        """Call `leave` when the call ends for any reason, or immediately if it has ended."""
        self.call.hold(leave)

    def check_answered(self) -> None:
        """Fail a call if the model has returned without answering it."""
        if self.is_late:
            return
        self.has_failed = self.has_failed or not self.has_ended
        if not self.has_ended and not self.call.has_ended:
            deliver([self.call], ModelFailed(self.call.found.model, "its code returned no answer"))

    def _charge(self, what: str, size: int) -> None:
        if not self.call.has_ended:
            try:
                reserve_made(self.call, size, what)
            except BudgetExhausted as error:
                deliver([self.call], error)

    def _write(
        self, outputs: Mapping[str, Tensor], last: bool, parameters: AnswerParameters | None
    ) -> None:
        call = self.call
        if call.has_ended:
            self._written()
            return
        try:
            if call.instance.info.is_lenient:
                call.chosen = specs_of(outputs)
            response = respond(call, outputs, parameters)
            if not last:
                call.answer(response, last=False)
        except ENDS:
            raise
        except BaseException as error:
            deliver([call], error)
            self._written()
            return
        if last:
            executed = Executed({}, self.begun_ns or self.ended_ns, self.ended_ns, call.rows)
            answer_last(call, executed, response)
            return
        if call.is_writable or call.has_ended:
            self._written()
        else:
            call.on_writable = self._written
            call.holds_anything = True

    def _written(self) -> None:
        """Let the model continue: its answers have been written, or the client has disconnected."""
        with self._lock:
            self._answers = 0
            resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    def _finish(self) -> None:
        begun_ns = self.begun_ns or self.ended_ns
        answer_last(self.call, Executed({}, begun_ns, self.ended_ns, self.call.rows))
