"""Batches of sequences on one replica, with one row per sequence."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from xlaserve.runtime.loaded import InFlight, Value
from xlaserve.runtime.sequential import SequentialModel, Step
from xlaserve.serving.infer_call import Ended, Executed, InferCall, Tensors
from xlaserve.serving.stations.dispatch import Dispatcher
from xlaserve.serving.stations.handled import Exchange, accompany, failure_of
from xlaserve.serving.stations.host import HostWork, executed
from xlaserve.serving.stations.outbox import Outbox
from xlaserve.serving.stations.station import Served
from xlaserve.tensors import Tensor


class Settle(Protocol):
    """Called when a call of a batch ends before the batch."""

    def __call__(self, call: InferCall, *, has_failed: bool) -> None:
        """Continue the sequence of the call."""
        ...


class Batch:
    """One batch; created on the event loop, and laid out on the executing thread."""

    def __init__(self, model: SequentialModel, calls: Sequence[InferCall], replica: int) -> None:
        self._model = model
        # Copied now: cancelling a call may clear its inputs.
        self._inputs = [call.inputs for call in calls]
        self._replica = replica
        self._is_batched = bool(model.info.max_batch_size)
        self._steps = [_step(call) for call in calls]
        for call in calls:
            assert call.turn is not None
            call.turn.is_begun = True
        if model.batching.is_direct and self._is_batched and model.batch_limit:
            self._rows: Sequence[int] = [step.slot for step in self._steps]
            """Row of each call in the batch."""
        else:
            self._rows = range(len(calls))

    def execute(self) -> Mapping[str, Tensor]:
        """Execute the batch; return outputs in the order of the calls."""
        inputs, steps = self._laid_out()
        return self._own(self._model.step(inputs, steps, replica=self._replica))

    def dispatch(self) -> InFlight:
        """Start the batch on an accelerator."""
        inputs, steps = self._laid_out()
        return _InFlight(self._model.dispatch_step(inputs, steps, replica=self._replica), self._own)

    def _laid_out(self) -> tuple[Tensors, Sequence[Step]]:
        given, steps = self._inputs, self._steps
        if not self._is_batched:
            return {name: _host(value) for name, value in given[0].items()}, steps
        count = self._model.padded_rows(max(self._rows) + 1)
        # Padding rows repeat the last request, because a loop in the model might not end on zeros.
        sources = [given[-1]] * count
        padded_steps = [Step(0, is_ready=False)] * count
        for row, own, step in zip(self._rows, given, steps, strict=True):
            sources[row], padded_steps[row] = own, step
        if count == 1:
            return {name: _host(value) for name, value in given[0].items()}, padded_steps
        inputs = {
            name: np.concatenate([_host(source[name]) for source in sources]) for name in given[0]
        }
        return inputs, padded_steps

    def _own(self, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the output rows of the calls, without padding."""
        if not self._is_batched:
            return outputs
        count = len(self._steps)
        if self._rows == range(count):
            return {name: output[:count] for name, output in outputs.items()}
        return {name: output[list(self._rows)] for name, output in outputs.items()}


class _InFlight:
    """A batch in flight (an InFlight)."""

    def __init__(
        self, inner: InFlight, own: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        self._inner = inner
        self._own = own

    def fetch(self) -> Mapping[str, Value]:
        """Wait for the outputs, and return the rows of the calls."""
        return self._own({name: _host(value) for name, value in self._inner.fetch().items()})


class HostSteps:
    """Executes one replica's batches on threads, one at a time (a Runner)."""

    lanes = 1
    is_inline = False

    def __init__(
        self, model: SequentialModel, work: HostWork, replica: int, now_ns: Callable[[], int]
    ) -> None:
        self._model = model
        self._work = work
        self._replica = replica
        self._now_ns = now_ns

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Start a batch; `freed` and `ended` are called on completion."""
        self._work.watch.check()
        batch = Batch(self._model, requests, self._replica)

        def over(result: Executed | BaseException) -> None:
            freed()
            ended(result)

        since_ns = requests[0].submitted_ns
        self._work.in_thread(
            lambda _: executed(self._now_ns, batch.execute), over, since_ns=since_ns
        )


class DeviceSteps:
    """Executes one replica's batches on its device, overlapping consecutive ones (a Runner)."""

    lanes = 1
    is_inline = False

    def __init__(self, model: SequentialModel, dispatcher: Dispatcher, replica: int) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._replica = replica

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Submit a batch to the dispatcher."""
        batch = Batch(self._model, requests, self._replica)
        dispatch, since_ns = partial(_dispatch, batch), requests[0].submitted_ns
        self._dispatcher.submit(dispatch, ended, freed, since_ns=since_ns)


class CopySteps:
    """Hands the requests of a batch to one copy of a Python model, with its controls (a Runner).

    The copy answers each request itself. The batch ends when the copy accepts another.
    """

    is_inline = False

    def __init__(
        self,
        instance: Served,
        model: SequentialModel,
        outbox: Outbox,
        replica: int,
        *,
        now_ns: Callable[[], int],
        settle: Settle,
        again: Callable[[InferCall], None],
    ) -> None:
        """`settle` gets the outcome of a call before its client; `again` gets rescheduled calls."""
        assert model.handling is not None
        self._settle = settle
        self._again = again
        self._is_iterative = model.batching.is_iterative
        self._current: dict[InferCall, Exchange | None] = {}
        """Unfinished calls with their exchanges; None between two steps of an iterative
        sequence.
        """
        self.lanes = model.handling.concurrency
        self._instance = instance
        self._model = model
        self._handling = model.handling
        self._outbox = outbox
        self._replica = replica
        self._now_ns = now_ns

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Hand over a batch; `freed` and `ended` are called when the copy accepts another."""
        # A failed iterative request is not retried: its sequence has ended.
        is_shared = len(requests) > 1 and not self._is_iterative
        accompany(requests, is_shared=len(requests) > 1)
        handed = [self._exchange(call, is_shared=is_shared) for call in requests]
        self._instance.acquire()
        over = partial(self._outbox.post, partial(self._over, handed, freed, ended))
        self._handling.handle(self._replica, handed, over)

    def _exchange(self, call: InferCall, *, is_shared: bool) -> Exchange:
        exchange = Exchange(call, self._outbox, self._now_ns, is_shared=is_shared)
        exchange.inputs = {**call.inputs, **self._model.controls([_step(call)])}
        assert call.turn is not None
        call.turn.is_begun = True
        is_first = call not in self._current
        self._current[call] = exchange
        if is_first:
            call.hold(partial(self._ended, call))
        return exchange

    def _ended(self, call: InferCall) -> None:
        """Settle a call, unless its client left before the model had finished with it."""
        exchange = self._current.pop(call, None)
        if exchange is None or not (exchange.has_ended or exchange.has_failed):
            return
        if self._is_iterative:
            self._end_sequence(call)
        else:
            self._settle(call, has_failed=exchange.has_failed)

    def _end_sequence(self, call: InferCall) -> None:
        """Settle a call that has no further step, which ends its iterative sequence."""
        turn = call.turn
        assert turn is not None
        if not turn.is_settled:
            turn.is_end = True
            self._settle(call, has_failed=False)

    def _go_on(self, exchange: Exchange) -> None:
        """Reschedule a call if its model asked for that."""
        call = exchange.call
        if not self._handling.is_decoupled:
            exchange.check_answered()
        if exchange.is_again and not call.has_ended:
            self._current[call] = None
            self._again(call)
        else:
            # A decoupled model may still send answers from its own threads.
            self._end_sequence(call)

    def _over(self, handed: Sequence[Exchange], freed: Callable[[], None], ended: Ended) -> None:
        for exchange in handed:
            if self._is_iterative:
                self._go_on(exchange)
                continue
            if exchange.has_failed_with_others:
                continue
            exchange.check_answered()
            turn = exchange.call.turn
            if exchange.has_failed and turn is not None and not turn.is_settled:
                self._settle(exchange.call, has_failed=True)
        self._instance.release()
        freed()
        failed = None if self._is_iterative else failure_of(handed)
        ended(failed or Executed({}, handed[0].begun_ns, handed[-1].ended_ns))


def _dispatch(batch: Batch, replica: int) -> InFlight:
    return batch.dispatch()


def _step(call: InferCall) -> Step:
    turn = call.turn
    assert turn is not None
    assert turn.seat is not None
    return Step(turn.seat.slot, turn.is_start, turn.is_end, turn.id)


def _host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
