"""Execution on the host: on the event loop or on threads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

from xlaserve.concurrency.host import HostJob, HostThreads
from xlaserve.errors.panics import ENDS, answerable
from xlaserve.runtime.loaded import Executable, LoadedModel, Value
from xlaserve.serving.answers import answer_now
from xlaserve.serving.infer_call import Ended, Executed, InferCall, Tensors
from xlaserve.serving.stations.batching import pack
from xlaserve.serving.stations.by_itself import ByItself
from xlaserve.serving.stations.health import Health, Watch
from xlaserve.serving.stations.replicas import Replicas
from xlaserve.serving.stations.station import Served

T = TypeVar("T")

_INLINE_REQUESTS = 4
"""A batch on the event loop may take as long as this many single calls. On a thread it would take
about 100 us longer, but leave the loop free.
"""

_SECOND_NS = 1e9


class HostWork:
    """The executions of one instance on host threads; passed on when its station is replaced."""

    def __init__(
        self,
        instance: Served,
        threads: HostThreads,
        replicas: int,
        now_ns: Callable[[], int],
        watch: Watch | None = None,
    ) -> None:
        """If `watch` is None, executions have no time limit."""
        self.instance = instance
        self.watch = watch or Watch(Health(0))
        """Watches the executions of the instance."""
        self._threads = threads
        self._now_ns = now_ns
        self.replicas = Replicas(replicas)
        """Assigns executions to replicas."""
        self._jobs: WeakKeyDictionary[HostJob, int] = WeakKeyDictionary()
        """Submission times of jobs whose completion has not reached the event loop. Weak keys: the
        threads own the jobs.
        """

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of executions waiting for a thread."""
        return (since for job, since in self._jobs.items() if job.waits)

    def start(self, executable: Executable, call: InferCall, ended: Ended) -> HostJob:
        """Execute one call on a thread.

        Raises RuntimeError if no thread can be started, and ExecutionStalled while an execution is
        stalled.
        """
        self.watch.check()
        inputs, resident = call.inputs, call.resident

        def run(replica: int) -> Executed | BaseException:
            execute = partial(executable.execute, inputs, resident=resident, replica=replica)
            return executed(self._now_ns, execute)

        return self.in_thread(run, ended, since_ns=call.submitted_ns)

    def in_thread(
        self,
        call: Callable[[int], T],
        ended: Callable[[T | BaseException], None],
        *,
        since_ns: int = 0,
    ) -> HostJob:
        """Run a function on a thread with the index of the least busy replica as its argument.

        `since_ns` is the submission time of its oldest request; 0 for now. `ended` is called on the
        event loop with the result, or with ExecutionStalled if the function does not return. The
        thread counts as a user of the instance, since it may outlive cancelled calls. Raises
        RuntimeError if no thread can be started.
        """
        replica, instance, watch = self.replicas.take(), self.instance, self.watch

        def over(result: T | BaseException) -> None:
            self.replicas.leave(replica)
            instance.release()
            if watch.over(execution, result):
                ended(result)

        try:
            job = self._threads.start(partial(call, replica), over, instance.model)
        except RuntimeError:
            self.replicas.leave(replica)
            raise
        # A weak reference to the job: its completion callback refers to the execution.
        execution = watch.begin(partial(_has_begun, ref(job)), ended)
        self._jobs[job] = since_ns or self._now_ns()
        instance.acquire()
        return job


def _has_begun(found: "ReferenceType[HostJob]") -> bool:
    job = found()
    return job is None or not job.waits


def executed(
    now_ns: Callable[[], int], call: Callable[[], Mapping[str, Value]]
) -> Executed | BaseException:
    """Run a function; return its outputs with begin and end time, or its error."""
    begun = now_ns()
    try:
        outputs = call()
    except BaseException as error:
        return answerable(error)
    # Resident outputs are device arrays; only ensemble steps request them.
    return Executed(cast(Tensors, outputs), begun, now_ns())


class Overran(Protocol):
    """Called when an execution has blocked the event loop for too long."""

    def __call__(
        self,
        work: HostWork,
        executable: Executable,
        inputs: Mapping[str, Value],
        seconds: float,
        limit: float,
    ) -> None:
        """Handle an overrun; the inputs are only valid during this call."""
        ...


@dataclass(frozen=True, slots=True)
class InlineLimit:
    """Time limit of executions on the event loop."""

    seconds: float
    """Limit for one call."""
    overran: Overran


class Inline:
    """Executes quick calls on the event loop, and others on threads (a Station)."""

    def __init__(
        self,
        model: LoadedModel,
        slower: ByItself,
        work: HostWork,
        limit: InlineLimit,
        now_ns: Callable[[], int],
    ) -> None:
        self._model = model
        self._slower = slower
        self.work = work
        self._limit = limit
        self._seconds = limit.seconds
        self._now_ns = now_ns

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of executions waiting for a thread."""
        return self._slower.pending_since()

    def begin(self, call: InferCall, slower: Callable[[InferCall], None] | None = None) -> None:
        """Execute a call immediately if the warm-up measured its bucket as quick.

        Otherwise pass it to `slower`, or execute it on a thread if that is None.
        """
        model, now_ns, seconds = self._model, self._now_ns, self._seconds
        if model.expected_seconds(call.rows) > seconds:
            (slower or self._slower.begin)(call)
            return
        begun = now_ns()
        if not call.submitted_ns:
            call.submitted_ns = begun
        try:
            outputs: Any = model.execute(call.inputs, resident=call.resident)
        except ENDS:
            raise
        except BaseException as error:
            self.work.watch.saw(error)
            raise
        ended = now_ns()
        if ended - begun > seconds * _SECOND_NS:
            took = (ended - begun) / _SECOND_NS
            self._limit.overran(self.work, model, call.inputs, took, seconds)
        answer_now(call, Executed(outputs, begun, ended))

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: no calls are queued here."""
        return ()


class HostRunner:
    """Executes batches on the host, one per replica at a time (a Runner)."""

    def __init__(
        self,
        model: LoadedModel,
        work: HostWork,
        limit: InlineLimit | None,
        now_ns: Callable[[], int],
    ) -> None:
        """If `limit` is None, nothing is executed on the event loop."""
        self._model = model
        self._work = work
        self._limit = limit
        self._now_ns = now_ns
        self.lanes = model.replicas
        self.is_inline = limit is not None

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Start a batch; both callbacks run on completion, perhaps before this returns."""
        rows, limit = sum([call.rows for call in requests]), self._limit

        def over(result: Executed | BaseException) -> None:
            freed()
            ended(result)

        # The sum of the calls' own limits, of at most `_INLINE_REQUESTS` calls.
        most = 0.0 if limit is None else min(len(requests), _INLINE_REQUESTS) * limit.seconds
        if limit is not None and self._model.expected_seconds(rows) <= most:
            over(self._run_inline(requests, rows, most, limit.overran))
        else:
            self._work.watch.check()
            execute = partial(self._executed, requests, rows)
            self._work.in_thread(execute, over, since_ns=requests[0].submitted_ns)

    def _run_inline(
        self, requests: Sequence[InferCall], rows: int, most: float, overran: Overran
    ) -> Executed | BaseException:
        replica = self._work.replicas.take()
        begun = self._now_ns()
        result = self._executed(requests, rows, replica)
        seconds = (self._now_ns() - begun) / _SECOND_NS
        self._work.replicas.leave(replica)
        if isinstance(result, BaseException):
            self._work.watch.saw(result)
        if seconds > most:
            inputs = pack(requests, self._model.padded_rows(rows))
            overran(self._work, self._model, inputs, seconds, most)
        return result

    def _executed(
        self, requests: Sequence[InferCall], rows: int, replica: int
    ) -> Executed | BaseException:
        return executed(self._now_ns, partial(self._execute, requests, rows, replica))

    def _execute(
        self, requests: Sequence[InferCall], rows: int, replica: int
    ) -> Mapping[str, Value]:
        inputs = pack(requests, self._model.padded_rows(rows))
        return self._model.execute(inputs, replica=replica)
