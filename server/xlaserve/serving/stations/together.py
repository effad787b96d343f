"""Next answers of several requests, computed in one execution (continuous batching)."""

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
    """A request whose next answer is asked for."""

    @property
    def call(self) -> InferCall:
        """Return the call that is answered."""
        ...

    @property
    def replica(self) -> int:
        """Return what computes all its answers."""
        ...

    @property
    def ahead(self) -> Ahead:
        """Return how much may be computed before its client is asked whether it reads."""
        ...

    @property
    def answers(self) -> Answers | None:
        """Return its answers; None before the first."""
        ...

    def opened(self) -> Answers:
        """Return its answers, begun by now. Called in a thread."""
        ...

    def close_answers(self, computed: Computed) -> None:
        """Note the end of the answers, and close them. Called in a thread."""
        ...

    def computed(self, found: Computed | BaseException) -> None:
        """Take answers or an error. Called on the event loop."""
        ...


def gathering(
    model: Generating, work: HostWork, now_ns: Callable[[], int], *, batching: bool
) -> "Together | None":
    """Return the shared steps of a model; None if each request is stepped alone."""
    return Together(model, work, now_ns) if batching and isinstance(model, Stepping) else None


class Together:
    """Gathers requests whose next answer is asked for, for one execution of a replica at a time.

    Those that come while one is computed are in the next one, whatever step each of them is at.
    Those at their first step are apart from those that go on, which need not begin anything.
    """

    def __init__(self, model: Stepping, work: HostWork, now_ns: Callable[[], int]) -> None:
        self._work = work
        self._lines = [Line(model, work, now_ns) for _ in range(model.replicas)]

    def start(self, waiting: Waiting) -> "Ticket":
        """Compute the next answers of a request, for its `computed`."""
        line = self._lines[waiting.replica]
        line.add(waiting)
        return Ticket(line, waiting)

    def pending_since(self) -> Iterator[int]:
        """Yield since when each answer waits for an execution, and each execution for a thread."""
        for line in self._lines:
            yield from line.pending_since()
        yield from self._work.pending_since()


class Ticket:
    """A request that waits for its next answer."""

    def __init__(self, line: "Line", waiting: Waiting) -> None:
        self._line = line
        self._waiting = waiting

    def cancel(self) -> bool:
        """Cancel it, unless its step was begun; its `computed` gets CancelledError later."""
        return self._line.cancel(self._waiting)


class Line:
    """The requests of one replica whose next answer is asked for."""

    def __init__(self, model: Stepping, work: HostWork, now_ns: Callable[[], int]) -> None:
        self._model = model
        self._work = work
        self._now_ns = now_ns
        self._pending: dict[Waiting, int] = {}
        """Since when each waits, in the order in which they came."""
        self._is_busy = False
        """Whether an execution is running or about to start."""
        self._apart = Apart(lambda: (one.call for one in self._pending))

    def add(self, waiting: Waiting) -> None:
        """Enqueue a request; it is executed with all that come in the same pass of the loop."""
        now = self._pending[waiting] = self._now_ns()
        if self._apart:
            self._apart.mark(waiting.call, now)
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._begin)

    def pending_since(self) -> Iterator[int]:
        """Yield since when each request waits."""
        return iter(self._pending.values())

    def cancel(self, waiting: Waiting) -> bool:
        """Dequeue a request; false where its step was begun."""
        if self._pending.pop(waiting, None) is None:
            return False
        cancelled = asyncio.CancelledError()
        asyncio.get_running_loop().call_soon(waiting.computed, cancelled)
        return True

    def _begin(self) -> None:
        """Start the next execution, if anybody waits for one."""
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
        """Dequeue the first request, and later ones that can be executed with it."""
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
        """Have those computed by themselves for a while that failed the others of an execution."""
        if all(computed.error is not None for computed in found):
            return
        for waiting, computed in zip(taken, found, strict=True):
            if computed.has_failed_alone:
                self._apart.add(waiting.call, self._now_ns())

    # --- in a thread ---

    def _compute(self, taken: Sequence[Waiting], replica: int) -> Sequence[Computed]:
        """Compute an answer for each request, and more where they take next to no time."""
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
        """Compute for each request by itself, so that those alone fail that are at fault.

        One that was given answers before the others failed goes on with them next time.
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
    """Return the client whose requests alone one is computed with; None for those of all others."""
    return client_of(waiting.call) if waiting.call.is_apart else None


def _is_opened(waiting: Waiting, computed: Computed) -> bool:
    """Start the answers of a request; return false if that failed it."""
    try:
        waiting.opened()
    except BaseException as error:
        computed.error = answerable(error)
        return False
    return True
