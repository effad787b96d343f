"""The request queue of a model: dynamic batching with bounded queues.

The queue itself is independent of asyncio and clocks; `Batcher` supplies both.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from xlaserve.errors import Overloaded, QueueTimeout
from xlaserve.errors.panics import answerable
from xlaserve.runtime.wrappers.ragged import Parts
from xlaserve.serving.infer_call import Deliver, Ended, Executed, InferCall, Tensors
from xlaserve.serving.stations.apart import Apart, FailedBatch, may_be_repeated
from xlaserve.tensors import Tensor, aligned_bytes

_IN_PLACE_BYTES = 1 << 14
"""Smaller batches are not aligned: that would cost as much as XLA's copy of unaligned memory."""

APART_NS = 50_000
"""Gap between completion and next request above which they belong to different iterations."""

ALONE_IN_A_ROW = 3
"""Batches of a single request in a row after which the next request is expected to be alone too."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Dynamic batching policy of a queue (ModelDynamicBatching)."""

    max_requests: int
    """Maximum number of queued requests."""
    setting: str = "max_requests_per_model"
    """Setting that `max_requests` comes from, named in the text of Overloaded."""
    preferred_rows: tuple[int, ...] = ()
    """Batch sizes that start without waiting for the delay; ascending."""
    delay_ns: int = 0
    """How long a batch waits for more requests while a lane is free."""
    timeout_ns: int = 0
    """Queue timeout of requests; 0 for none."""
    timeouts_differ: bool = False
    """Whether a request may expire before earlier ones."""


class BatchQueue:
    """Queued requests in arrival order."""

    def __init__(
        self,
        model: str,
        policy: BatchPolicy,
        max_rows: Callable[[], int],
        fit: "Fit | None" = None,
    ) -> None:
        """`fit` selects the requests of a batch; None for `fitting`."""
        self._model = model
        self.policy = policy
        self._max_rows = max_rows
        self._fit = fit or fitting
        self._waiting: deque[InferCall] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[InferCall]:
        return iter(self._waiting)

    def add(self, request: InferCall) -> None:
        """Enqueue a request; raises Overloaded if the queue is full."""
        if len(self._waiting) >= self.policy.max_requests:
            raise Overloaded(self._model, self.policy.max_requests, self.policy.setting)
        self._waiting.append(request)

    def remove(self, request: InferCall) -> None:
        """Remove a cancelled request; does nothing if it has already left the queue."""
        try:
            self._waiting.remove(request)
        except ValueError:
            return

    def clear(self) -> list[InferCall]:
        """Remove and return all requests, in order."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def take(self, now_ns: int, *, others_first: bool = False) -> list[InferCall]:
        """Dequeue and return the next batch; an empty one if it should wait for more requests.

        The batch has the oldest request and later ones compatible with it, in order, up to
        `max_rows` rows; a larger request is a batch of its own.
        """
        if not self._waiting:
            return []
        chosen, full = self._fit(self._waiting, self._max_rows(), others_first)
        if not full and self.policy.delay_ns and not self._overdue(now_ns):
            rows = sum(request.rows for request in chosen)
            sizes = [size for size in self.policy.preferred_rows if size <= rows]
            if not sizes:
                return []
            chosen, _ = self._fit(self._waiting, sizes[-1], others_first)
        self._drop(chosen)
        return chosen

    def _overdue(self, now_ns: int) -> bool:
        return now_ns - self._waiting[0].submitted_ns >= self.policy.delay_ns

    def _drop(self, chosen: Sequence[InferCall]) -> None:
        waiting = self._waiting
        if len(chosen) == len(waiting):
            waiting.clear()
            return
        for request in chosen:
            if request is waiting[0]:
                waiting.popleft()
            else:  # requests of other shapes are between these
                waiting.remove(request)

    def expire(self, now_ns: int) -> list[InferCall]:
        """Dequeue and return expired requests."""
        expired = []
        while self.policy.timeout_ns and self._waiting and self._late(now_ns):
            expired.append(self._waiting.popleft())
        return expired

    def _late(self, now_ns: int) -> bool:
        return now_ns - self._waiting[0].submitted_ns >= self.policy.timeout_ns

    def timeout_ns(self, request: InferCall) -> int:
        """Return the queue timeout of a request; 0 if it has none."""
        return self.policy.timeout_ns

    def due_ns(self, *, could_leave: bool) -> int | None:
        """Return the time at which the queue must be checked again, or None.

        The batch delay is considered only if `could_leave`: a lane is free.
        """
        delay = self.policy.delay_ns if could_leave else 0
        waits = [wait for wait in (delay, self.policy.timeout_ns) if wait]
        if not self._waiting or not waits:
            return None
        return self._waiting[0].submitted_ns + min(waits)


Fit: TypeAlias = Callable[[Iterable[InferCall], int, bool], tuple[list[InferCall], bool]]
"""Selects requests for a batch of at most a number of rows, like `fitting`."""


def fitting(
    waiting: Iterable[InferCall], max_rows: int, others_first: bool = False
) -> tuple[list[InferCall], bool]:
    """Select the first request and those compatible with it; tell whether the batch is full.

    A request with device tensors is a batch of its own. `others_first` skips isolated requests
    while there are others.
    """
    requests = iter(waiting)
    first = next(requests)
    if first.is_apart and others_first:
        others = list(requests)
        first = next((one for one in others if not one.is_apart), first)
        requests = iter(others) if first.is_apart else iter(others[others.index(first) + 1 :])
    if first.resident:
        return [first], True
    chosen, rows, key = [first], first.rows, first.key
    for request in requests:
        if request.key != key:
            continue
        rows += request.rows
        if rows > max_rows:
            return chosen, True
        chosen.append(request)
    return chosen, rows >= max_rows


def pack(requests: Sequence[InferCall], rows: int) -> Tensors:
    """Concatenate the inputs of a batch, padded to `rows` by repeating its last row.

    Padding repeats a real row because a data-dependent loop in the model might not end on zeros.
    """
    if len(requests) == 1:
        return requests[0].inputs
    missing = rows - sum([request.rows for request in requests])
    packed = {}
    for name, first in requests[0].inputs.items():
        parts = [request.inputs[name] for request in requests]
        if missing:
            parts.append(np.broadcast_to(parts[-1][-1:], (missing, *first.shape[1:])))
        # Always fresh memory: XLA may read it in place until the outputs are ready.
        count = rows * (first.nbytes // len(first))
        if count < _IN_PLACE_BYTES or first.dtype.hasobject:
            packed[name] = np.concatenate(parts)
        else:
            whole = aligned_bytes(count).view(first.dtype).reshape(rows, *first.shape[1:])
            packed[name] = np.concatenate(parts, out=whole)
    return packed


def split(output: Tensor | Parts, requests: Sequence[InferCall], rows: int) -> Sequence[Tensor]:
    """Split an output into views of each request's rows."""
    if isinstance(output, Parts):
        return output.parts
    if len(requests) == 1:
        return [output]
    if rows == len(requests):
        # One row per request: numpy creates these views in half the time.
        return list(output[:rows, np.newaxis])
    parts = []
    start = 0
    for request in requests:
        end = start + request.rows
        parts.append(output[start:end])
        start = end
    return parts


class Runner(Protocol):
    """Executes batches."""

    @property
    def lanes(self) -> int:
        """Return the initial number of lanes."""
        ...

    @property
    def is_inline(self) -> bool:
        """Tell whether quick batches run on the event loop."""
        ...

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Start a batch; `freed` is called when another may start, `ended` on completion.

        Both are called on the event loop, perhaps before this returns; neither if this raises.
        """
        ...


class Clock(Protocol):
    """A clock with timers."""

    def now_ns(self) -> int:
        """Return the monotonic time in nanoseconds."""
        ...

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a callback after all currently ready ones."""
        ...

    def at(self, time_ns: int, call: Callable[[], None]) -> Callable[[], None]:
        """Schedule a callback; returns a function that cancels it."""
        ...


class RequestQueue(Protocol):
    """A queue of requests that forms batches."""

    @property
    def policy(self) -> BatchPolicy:
        """Return the queue's policy."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[InferCall]: ...

    def add(self, request: InferCall) -> None:
        """Enqueue a request; raises Overloaded if the queue is full."""
        ...

    def remove(self, request: InferCall) -> None:
        """Remove a cancelled request; does nothing if it has already left the queue."""
        ...

    def clear(self) -> list[InferCall]:
        """Remove and return all requests, in order."""
        ...

    def take(self, now_ns: int, *, others_first: bool = False) -> Sequence[InferCall]:
        """Dequeue and return the next batch; an empty one if it should wait for more requests.

        `others_first` skips isolated requests while there are others.
        """
        ...

    def expire(self, now_ns: int) -> Sequence[InferCall]:
        """Dequeue and return expired requests."""
        ...

    def due_ns(self, *, could_leave: bool) -> int | None:
        """Return the time at which the queue must be checked again, or None."""
        ...

    def timeout_ns(self, request: InferCall) -> int:
        """Return the queue timeout of a request; 0 if it has none."""
        ...


class Batcher:
    """Forms batches of one model's requests, and keeps its lanes busy.

    While a lane is free, the requests of one event-loop iteration leave together as a batch;
    otherwise they queue. If recent requests came one at a time, `is_alone` predicts that the next
    one need not wait for the end of the iteration.

    The requests of a failed batch are retried one by one, so that a request fails only through its
    own fault; `Apart` then temporarily isolates the clients of the faulty ones.
    """

    def __init__(
        self,
        queue: RequestQueue,
        runner: Runner,
        clock: Clock,
        deliver: Deliver,
        overtakes: Callable[[], bool] | None = None,
    ) -> None:
        """`overtakes` tells whether the next batch may start without a free lane."""
        self._queue = queue
        self._overtakes = overtakes
        self._policy = queue.policy
        self._runner = runner
        self._clock = clock
        self._now_ns = clock.now_ns
        self._deliver = deliver
        self._free = runner.lanes
        """Batches that may start; negative while batches run without a lane (see `overtakes`)."""
        self._may_pass = runner.is_inline and not queue.policy.delay_ns
        """Whether a request may bypass the queue."""
        self.in_a_row = 0
        """Batches of a single request in a row, each begun APART_NS after the last completion."""
        self._ended_ns = 0
        """Time of the last completion."""
        self._is_check_scheduled = False
        self._cancel_timer: Callable[[], None] | None = None
        self._apart = Apart(lambda: queue)
        self._again: deque[tuple[InferCall, FailedBatch]] = deque()
        """Requests of failed batches, to be retried next, one by one."""

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued requests."""
        yield from (request.submitted_ns for request in self._queue)
        yield from (request.submitted_ns for request, _ in self._again)

    def is_alone(self, now_ns: int) -> bool:
        """Tell whether a new request is likely to be the only one of its iteration."""
        return (
            self.in_a_row >= ALONE_IN_A_ROW
            and self._may_pass
            and now_ns - self._ended_ns > APART_NS
            and not self._queue
            and self._free == self._runner.lanes
        )

    def passed(self, now_ns: int) -> None:
        """Record the completion of a request that bypassed the queue."""
        self._ended_ns = now_ns

    def submit(self, request: InferCall) -> None:
        """Enqueue a request; raises Overloaded."""
        if not request.submitted_ns:
            request.submitted_ns = self._now_ns()
        if self._apart:
            self._apart.mark(request, request.submitted_ns)
        self._queue.add(request)
        request.place = self
        request.holds_anything = True
        if self._is_check_scheduled:
            return
        if self._may_start:
            self._check_soon()
        elif self._policy.timeouts_differ or (
            self._policy.timeout_ns and self._cancel_timer is None
        ):
            self._wake_later()

    def leave(self, call: InferCall) -> None:
        """Remove an ended call from the queue; does nothing if it has already left."""
        self._queue.remove(call)

    def retire(self) -> list[InferCall]:
        """Start no more batches; return the queued calls.

        Requests being retried after a failed batch are not returned; they end here.
        """
        if self._cancel_timer is not None:
            self._cancel_timer()
            self._cancel_timer = None
        return self._queue.clear()

    def resume(self) -> None:
        """Check the queue again, because the result of `overtakes` may have changed."""
        if len(self._queue):
            self._check_soon()

    @property
    def _may_start(self) -> bool:
        return self._free > 0 or (self._overtakes is not None and self._overtakes())

    def _check_soon(self) -> None:
        if not self._is_check_scheduled and self._may_start:
            self._is_check_scheduled = True
            self._clock.soon(self._check)

    def _check(self) -> None:
        self._is_check_scheduled = False
        now = self._now_ns()
        late = self._queue.expire(now)
        if late:
            self._refuse(late)
        if self._again and not self._others_go_first():
            self._start_again()
        elif self._may_start:
            try:
                requests = self._queue.take(now, others_first=self._apart.is_owed)
            except BaseException as error:  # if no batch can be formed, fail the queued calls
                self._deliver(self._queue.clear(), answerable(error))
                requests = ()
            if requests:
                apart = now - self._ended_ns > APART_NS
                self.in_a_row = self.in_a_row + 1 if apart and len(requests) == 1 else 0
                self._start(requests)
                # One batch per iteration, so that other models get their turn.
                if len(self._queue):
                    self._check_soon()
        self._wake_later()

    def _refuse(self, late: Sequence[InferCall]) -> None:
        if not self._policy.timeouts_differ:
            self._deliver(late, QueueTimeout(self._policy.timeout_ns // 1000))
            return
        for request in late:
            self._deliver([request], QueueTimeout(self._queue.timeout_ns(request) // 1000))

    def _others_go_first(self) -> bool:
        """Tell whether batches of other clients are due before retries of isolated requests."""
        if not (self._apart.is_owed and self._again[0][0].is_apart):
            return False
        return any(not one.is_apart for one in self._queue)

    def _start_again(self) -> None:
        """Retry the next request of a failed batch, if a lane is free."""
        while self._again and self._may_start:
            request, batch = self._again.popleft()
            if not request.has_ended:
                self._start([request], batch)
                break
            self._deliver([request], batch.error)
        if self._again or len(self._queue):
            self._check_soon()

    def _ended(
        self,
        requests: Sequence[InferCall],
        batch: FailedBatch | None,
        result: Executed | BaseException,
    ) -> None:
        """Answer a batch; if it failed as a whole, retry its requests one by one.

        `batch` is the failed batch of a retried request.
        """
        if len(requests) > 1 and isinstance(result, Exception) and may_be_repeated(result):
            failed = FailedBatch(requests, result)
            self._again.extend((request, failed) for request in requests)
            self._check_soon()
            return
        self._deliver(requests, result)
        if batch is not None:
            self._apart.repeated(requests[0], batch, result, self._now_ns())
        elif isinstance(result, Exception) and requests[0].is_apart:
            self._apart.add(requests[0], self._now_ns())

    def _start(self, requests: Sequence[InferCall], batch: FailedBatch | None = None) -> None:
        self._free -= 1
        if self._apart:
            self._apart.began(requests[0])
        for request in requests:
            if request.on_begun is not None:
                request.on_begun()
        freed = self._freed if batch is None else partial(self._freed_again, batch)
        ended = partial(self._ended, requests, batch)
        try:
            self._runner.run(requests, freed, ended)
        except BaseException as error:
            # Every call must end, whatever prevented the batch from starting.
            freed()
            ended(error)

    def _freed_again(self, batch: FailedBatch) -> None:
        # Judge once models that answer their own requests have done so, but before the next batch
        # is taken, which may have another request of the faulty client.
        self._clock.soon(lambda: self._apart.judge(batch, self._now_ns()))
        self._freed()

    def _freed(self) -> None:
        self._free += 1
        self._ended_ns = self._now_ns()
        if self._again or len(self._queue):
            self._check_soon()

    def _wake_later(self) -> None:
        if self._cancel_timer is not None:
            self._cancel_timer()
            self._cancel_timer = None
        due = self._queue.due_ns(could_leave=self._free > 0)
        if due is not None:
            self._cancel_timer = self._clock.at(due, self._wake)

    def _wake(self) -> None:
        self._cancel_timer = None
        self._check()
