"""Dispatches a model's executions to accelerators, with a bounded number in flight."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast
from weakref import ReferenceType, ref

from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.concurrency.device import DeviceThreads
from xlaserve.runtime.loaded import Dispatching, Executable, InFlight, LoadedModel
from xlaserve.serving.infer_call import Ended, Executed, InferCall, Tensors, User
from xlaserve.serving.stations.batching import pack
from xlaserve.serving.stations.health import Execution, Health, Watch

Dispatch: TypeAlias = Callable[[int], InFlight]
"""Starts an execution on a replica; called on the device's dispatch thread."""


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica and its executions in flight."""

    index: int
    threads: DeviceThreads
    in_flight: int = 0
    """Executions handed to the device's thread and not yet completed."""

    @property
    def load(self) -> tuple[int, int]:
        """Return the executions in flight on the replica's device: all models', this replica's."""
        return self.threads.in_flight, self.in_flight


class Job:
    """One execution, from submission to completion."""

    __slots__ = ("_dispatcher", "dispatch", "ended", "freed", "is_dispatched", "since_ns", "work")

    def __init__(
        self,
        dispatcher: "Dispatcher",
        dispatch: Dispatch,
        ended: Ended,
        freed: Callable[[], None] | None,
        since_ns: int,
    ) -> None:
        self._dispatcher = dispatcher
        self.since_ns = since_ns
        """Submission time of the oldest request in it."""
        self.dispatch = dispatch
        self.ended = ended
        self.freed = freed
        """Called when the next batch may be submitted; None if the job is not a batch."""
        self.is_dispatched = False
        self.work: ReferenceType[Future[Callable[[], Executed]]] | None = None
        """The dispatch; None before the job gets a slot. A weak reference: the thread owns the
        future, whose callback refers to the job.
        """

    def cancel(self) -> bool:
        """Cancel the job unless a thread has begun it; `ended` then gets CancelledError.

        Not for batches.
        """
        if self.work is None:
            return self._dispatcher.dequeue(self)
        work = self.work()
        return work is not None and work.cancel()


class Dispatcher:
    """Dispatches an instance's executions to its devices. Belongs to the event loop.

    In submission order, each execution goes to the replica with the least busy device; it waits
    while all replicas are full. Batches wait in the queue of their model instead, where they can
    still grow: the next one is requested only when the previous one has been dispatched and a slot
    is free.
    """

    def __init__(
        self,
        user: User,
        devices: Sequence[DeviceThreads],
        now_ns: Callable[[], int],
        in_flight: int = IN_FLIGHT,
        *,
        watch: Watch | None = None,
    ) -> None:
        """If `watch` is None, executions have no time limit."""
        self._user = user
        self._watch = watch or Watch(Health(0))
        self._replicas = [_Replica(index, threads) for index, threads in enumerate(devices)]
        self._now_ns = now_ns
        self._most = in_flight
        self._waiting: deque[Job] = deque()
        self._expected = len(devices)
        """Batches requested from the queue and not yet submitted."""
        self._held: deque[Callable[[], None]] = deque()
        """`freed` callbacks to be called when slots are free."""

    @property
    def lanes(self) -> int:
        """Return the number of batches that may be submitted initially."""
        return len(self._replicas)

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of executions waiting for a slot."""
        return (job.since_ns for job in self._waiting)

    def start(self, executable: Executable, call: InferCall, ended: Ended) -> Job:
        """Execute a single call."""
        dispatching, inputs, resident = executable.dispatching, call.inputs, call.resident
        assert dispatching is not None
        return self.submit(
            lambda replica: dispatching.dispatch(inputs, resident=resident, replica=replica),
            ended,
            since_ns=call.submitted_ns,
        )

    def submit(
        self,
        dispatch: Dispatch,
        ended: Ended,
        freed: Callable[[], None] | None = None,
        *,
        since_ns: int = 0,
    ) -> Job:
        """Submit an execution. A batch passes `freed`, called when the next batch may be submitted.

        `since_ns` is the submission time of its oldest request; 0 for now. Raises ExecutionStalled
        while an execution of the model is stalled.
        """
        self._watch.check()
        job = Job(self, dispatch, ended, freed, since_ns or self._now_ns())
        if freed is not None:
            self._expected -= 1
        self._waiting.append(job)
        self._go_on()
        return job

    def dequeue(self, job: Job) -> bool:
        """Cancel a job that waits for a slot; return whether it was waiting."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        job.ended(asyncio.CancelledError())
        return True

    def _go_on(self) -> None:
        """Fill the free slots with waiting jobs, then request batches for the remaining ones."""
        while self._waiting:
            free = [replica for replica in self._replicas if replica.in_flight < self._most]
            if not free:
                break
            self._start(self._waiting.popleft(), min(free, key=lambda replica: replica.load))
        while self._held and self._expected < self._free_slots():
            self._expected += 1
            self._held.popleft()()

    def _free_slots(self) -> int:
        """Return how many batches may be requested now."""
        free = sum(replica.in_flight < self._most for replica in self._replicas)
        # While single jobs wait, one batch may wait behind them.
        return free or bool(self._waiting)

    def _start(self, job: Job, replica: _Replica) -> None:
        replica.in_flight += 1
        replica.threads.in_flight += 1
        self._user.acquire()
        given_up = partial(self._given_up, job)
        execution = self._watch.begin(_begun, given_up, replica.threads)
        over = partial(self._over, job, replica, execution)
        try:
            work = replica.threads.start(
                partial(_dispatched, self._now_ns, job.dispatch, replica.index),
                partial(self._dispatched, job),
                over,
            )
            job.work = ref(work)
        except RuntimeError as error:  # the server is shutting down
            asyncio.get_running_loop().call_soon(over, error)

    def _dispatched(self, job: Job) -> None:
        job.is_dispatched = True
        self._expect_another(job)
        self._go_on()

    def _given_up(self, job: Job, error: BaseException) -> None:
        """Fail a stalled job and all jobs waiting for a slot."""
        failed = [job, *self._waiting]
        self._waiting.clear()
        for one in failed:
            if not one.is_dispatched:
                self._expect_another(one)
            one.freed = None
        # Batches requested now fail immediately, because `submit` raises.
        while self._held:
            self._expected += 1
            self._held.popleft()()
        for one in failed:
            ended, one.ended = one.ended, _ignore
            ended(error)

    def _over(
        self,
        job: Job,
        replica: _Replica,
        execution: Execution,
        result: Executed | BaseException,
    ) -> None:
        if not job.is_dispatched:
            self._expect_another(job)
        replica.in_flight -= 1
        replica.threads.in_flight -= 1
        self._user.release()
        # Before the answers are written, since clients may then send the next request immediately.
        self._go_on()
        if self._watch.over(execution, result):
            job.ended(result)

    def _expect_another(self, job: Job) -> None:
        if job.freed is not None:
            self._held.append(job.freed)


def _begun() -> bool:
    """Report an execution as begun; on a device, progress is measured by completions."""
    return True


def _ignore(result: Executed | BaseException) -> None:
    """Discard the result of an abandoned execution."""


def _dispatched(
    now_ns: Callable[[], int], dispatch: Dispatch, replica: int
) -> Callable[[], Executed]:
    """Start an execution, and return a function that waits for its result."""
    begun = now_ns()
    in_flight = dispatch(replica)

    def fetch() -> Executed:
        # Resident outputs are device arrays; only ensemble steps request them.
        return Executed(cast(Tensors, in_flight.fetch()), begun, now_ns())

    return fetch


class DeviceRunner:
    """Executes the batches of one instance on its devices (a Runner)."""

    is_inline = False

    def __init__(
        self, dispatcher: Dispatcher, model: LoadedModel, dispatching: Dispatching
    ) -> None:
        self.lanes = dispatcher.lanes
        self._dispatcher = dispatcher
        self._model = model
        self._dispatching = dispatching

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Submit a batch to the dispatcher."""
        dispatch, since_ns = partial(self._dispatch, requests), requests[0].submitted_ns
        self._dispatcher.submit(dispatch, ended, freed, since_ns=since_ns)

    def _dispatch(self, requests: Sequence[InferCall], replica: int) -> InFlight:
        if requests[0].resident:
            inputs = requests[0].inputs
            return self._dispatching.dispatch(inputs, resident=True, replica=replica)
        rows = self._model.padded_rows(sum([request.rows for request in requests]))
        return self._dispatching.dispatch(pack(requests, rows), replica=replica)
