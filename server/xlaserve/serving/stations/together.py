"""Continuous batching: each execution computes the next answer of several requests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

from xlaserve.errors import ExecutionStalled
from xlaserve.errors.panics import answerable
from xlaserve.runtime.loaded import Answers, Generating
from xlaserve.runtime.stepping import Stepping
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.ahead import Ahead, Computed
from xlaserve.serving.stations.apart import Apart, client_of
from xlaserve.serving.stations.host import HostWork


class Waiting(Protocol):
    """A request that waits for its next answer."""

    @property
    def call(self) -> InferCall:
        """Return the call being answered."""
        ...

    @property
    def replica(self) -> int:
        """Return the index of the replica that computes all its answers."""
        ...

    @property
    def ahead(self) -> Ahead:
        """Return the prefetch limit."""
        ...

    @property
    def answers(self) -> Answers | None:
        """Return the model's answers; None before the first."""
        ...

    def opened(self) -> Answers:
        """Return the model's answers, opening them if necessary. Called on a thread."""
        ...

    def close_answers(self, computed: Computed) -> None:
        """Mark the answers as complete, and close them. Called on a thread."""
        ...

    def computed(self, found: Computed | BaseException) -> None:
        """Receive computed answers or an error. Called on the event loop."""
        ...


def gathering(
    model: Generating, work: HostWork, now_ns: Callable[[], int], *, batching: bool
) -> "Together | None":
    """Return the continuous batching of a model, or None if it steps each request separately."""
    return Together(model, work, now_ns) if batching and isinstance(model, Stepping) else None


class Together:
    """Computes next answers of several requests together, one execution per replica at a time.

    Requests that arrive during an execution join the next one, whatever step each of them is at.
    First steps are executed separately from later ones, which need no initialization.
    """

    def __init__(self, model: Stepping, work: HostWork, now_ns: Callable[[], int]) -> None:
        self._work = work
        self._lines = [Line(model, work, now_ns) for _ in range(model.replicas)]

    def start(self, waiting: Waiting) -> "Ticket":
        """Schedule a request's next answers, which are passed to its `computed`."""
        line = self._lines[waiting.replica]
        line.add(waiting)
        return Ticket(line, waiting)

    def pending_since(self) -> Iterator[int]:
        """Yield the start times of waits: answers for an execution, executions for a thread."""
        for line in self._lines:
            yield from line.pending_since()
        yield from self._work.pending_since()


class Ticket:
    """A request that waits for its next answer."""

    def __init__(self, line: "Line", waiting: Waiting) -> None:
        self._line = line
        self._waiting = waiting

    def cancel(self) -> bool:
        """Cancel the next step unless it has begun; `computed` then gets CancelledError."""
        return self._line.cancel(self._waiting)


class Line:
    """The queue of requests waiting for one replica."""

    def __init__(self, model: Stepping, work: HostWork, now_ns: Callable[[], int]) -> None:
        self._model = model
        self._work = work
        self._now_ns = now_ns
        self._pending: dict[Waiting, int] = {}
        """Waiting requests in arrival order, with their arrival times."""
        self._is_busy = False
        """Whether an execution is running or scheduled."""
        self._apart = Apart(lambda: (one.call for one in self._pending))

    def add(self, waiting: Waiting) -> None:
        """Enqueue a request; requests of one event-loop iteration are executed together."""
        now = self._pending[waiting] = self._now_ns()
        if self._apart:
            self._apart.mark(waiting.call, now)
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._begin)

    def pending_since(self) -> Iterator[int]:
        """Yield the time at which each request began to wait."""
        return iter(self._pending.values())

    def cancel(self, waiting: Waiting) -> bool:
        """Dequeue a request; return False if its step has begun."""
        if self._pending.pop(waiting, None) is None:
            return False
        cancelled = asyncio.CancelledError()
        asyncio.get_running_loop().call_soon(waiting.computed, cancelled)
        return True

    def _begin(self) -> None:
        """Start the next execution if any request waits."""
        while self._pending:
            taken = self._take()
            try:
                self._work.watch.check()
                self._work.in_thread(partial(self._compute, taken), partial(self._computed, taken))
            except (RuntimeError, ExecutionStalled) as error:
                for waiting in taken:
                    waiting.computed(error)
            else:
                return
        self._is_busy = False

    def _take(self) -> Sequence[Waiting]:
        """Dequeue the first request and later ones that can share its execution."""
        pending = list(self._pending)
        first = pending[0]
        if first.call.is_apart and self._apart.is_owed:
            first = next((one for one in pending if not one.call.is_apart), first)
        is_new = first.answers is None
        key = _kept_with(first)
        alike = (
            one for one in pending if (one.answers is None) is is_new and _kept_with(one) == key
        )
        taken = list(islice(alike, self._model.most_together))
        self._apart.began(first.call)
        for waiting in taken:
            del self._pending[waiting]
        return taken

    def _computed(
        self, taken: Sequence[Waiting], found: Sequence[Computed] | BaseException
    ) -> None:
        if not isinstance(found, BaseException):
            self._judge(taken, found)
        try:
            for number, waiting in enumerate(taken):
                waiting.computed(found if isinstance(found, BaseException) else found[number])
        finally:
            self._begin()

    def _judge(self, taken: Sequence[Waiting], found: Sequence[Computed]) -> None:
        """Isolate clients whose requests failed alone while others of the execution succeeded."""
        if all(computed.error is not None for computed in found):
            return
        for waiting, computed in zip(taken, found, strict=True):
            if computed.has_failed_alone:
                self._apart.add(waiting.call, self._now_ns())

    # --- on a thread ---

    def _compute(self, taken: Sequence[Waiting], replica: int) -> Sequence[Computed]:
        """Compute an answer for each request, and more if they are quick."""
        found = [Computed() for _ in taken]
        begun = [one for one in zip(taken, found, strict=True) if _is_opened(*one)]
        try:
            self._fill(begun)
        except BaseException as error:
            self._fill_one_by_one(begun, error)
        for waiting, computed in zip(taken, found, strict=True):
            if computed.is_over:
                waiting.close_answers(computed)
        return found

    def _fill_one_by_one(
        self, begun: Sequence[tuple[Waiting, Computed]], error: BaseException
    ) -> None:
        """Retry the requests of a failed execution one by one, so that only the faulty ones fail.

        A request that had got answers before the failure is skipped and continues in the next
        execution.
        """
        for one in begun:
            _, computed = one
            if len(begun) == 1:
                computed.error = answerable(error)
            elif not computed.answers and not computed.is_over:
                try:
                    self._fill([one])
                except BaseException as own:
                    computed.error, computed.has_failed_alone = answerable(own), True

    def _fill(self, begun: Sequence[tuple[Waiting, Computed]]) -> None:
        if not begun:
            return
        taken, found = zip(*begun, strict=True)
        rows, now_ns = [waiting.opened() for waiting in taken], self._now_ns
        until = Ahead.until(now_ns())
        goes_on = True
        while goes_on:
            for computed, answer in zip(found, self._model.advance(rows), strict=True):
                computed.add(answer)
            goes_on = now_ns() < until and all(
                not computed.is_over and waiting.ahead.allows(computed)
                for waiting, computed in zip(taken, found, strict=True)
            )


def _kept_with(waiting: Waiting) -> int | str | None:
    """Return the client of an isolated request, or None; equal results may share a step."""
    return client_of(waiting.call) if waiting.call.is_apart else None


def _is_opened(waiting: Waiting, computed: Computed) -> bool:
    """Open the answers of a request; return False if that fails."""
    try:
        waiting.opened()
    except BaseException as error:
        computed.error = answerable(error)
        return False
    return True
