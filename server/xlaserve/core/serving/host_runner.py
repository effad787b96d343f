"""Executions on the host: where the event loop is, or in a thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

from xlaserve.core.residence.registry import Instance
from xlaserve.core.serving.batching import Ended, Executed, Tensors, Waiting, pack
from xlaserve.core.threads.host import HostJob, HostThreads
from xlaserve.models.loaded import Executable, LoadedModel, Value

T = TypeVar("T")

_INLINE_REQUESTS = 4
"""A batch counts as so many requests at most when it is decided where it runs: it takes the place
of more executions, but nothing else has a turn meanwhile. A thread would cost it some 100 us."""


def executed(
    now_ns: Callable[[], int], call: Callable[[], Mapping[str, Value]]
) -> Executed | BaseException:
    """Run a call, and return what it gave or raised, and when."""
    begun = now_ns()
    try:
        outputs = call()
    except Exception as error:
        return error
    # What is asked to stay on the device is for nobody who takes it for host arrays.
    return Executed(cast(Tensors, outputs), begun, now_ns())


def in_thread(
    threads: HostThreads,
    instance: Instance,
    call: Callable[[int], T],
    ended: Callable[[T | BaseException], None],
) -> HostJob:
    """Run a call in a thread, for the replica with the least to do, whose index it takes.

    `ended` is called on the event loop. The thread is a user of the instance: it may outlive
    requests that were cancelled. Raises RuntimeError where there is no thread.
    """
    replica = instance.replicas.take()

    def over(result: T | BaseException) -> None:
        instance.replicas.leave(replica)
        instance.release()
        ended(result)

    try:
        job = threads.start(partial(call, replica), over, instance.model)
    except RuntimeError:
        instance.replicas.leave(replica)
        raise
    instance.acquire()
    return job


class Overran(Protocol):
    """Is told of an execution that kept the event loop for longer than it may."""

    def __call__(
        self,
        instance: Instance,
        executable: Executable,
        inputs: Mapping[str, Value],
        seconds: float,
        limit: float,
    ) -> None:
        """Do something about it; the inputs may be gone once this returns."""
        ...


@dataclass(frozen=True, slots=True)
class Inline:
    """What may be executed on the event loop."""

    seconds: float
    """The most that one request may take there."""
    overran: Overran


class HostRunner:
    """Runs the batches of one instance, one for each replica of its model at a time.

    On the host: where the event loop is, or in a thread.
    """

    is_inline = True

    def __init__(
        self,
        instance: Instance,
        model: LoadedModel,
        threads: HostThreads,
        inline: Inline,
        now_ns: Callable[[], int],
    ) -> None:
        self._instance = instance
        self._model = model
        self._threads = threads
        self._inline = inline
        self._now_ns = now_ns
        self.lanes = model.replicas

    def run(self, requests: Sequence[Waiting], freed: Callable[[], None], ended: Ended) -> None:
        """Start a batch; both are called once it is over, perhaps before this returns."""
        rows = sum([request.rows for request in requests])

        def over(result: Executed | BaseException) -> None:
            freed()
            ended(result)

        limit = self._inline_limit(len(requests))
        if self._instance.is_inline and self._model.expected_seconds(rows) <= limit:
            over(self._run_inline(requests, rows, limit))
        else:
            execute = partial(self._executed, requests, rows)
            in_thread(self._threads, self._instance, execute, over)

    def _run_inline(
        self, requests: Sequence[Waiting], rows: int, limit: float
    ) -> Executed | BaseException:
        replica = self._instance.replicas.take()
        begun = self._now_ns()
        result = self._executed(requests, rows, replica)
        seconds = (self._now_ns() - begun) / 1e9
        self._instance.replicas.leave(replica)
        if seconds > limit:
            inputs = pack(requests, self._model.padded_rows(rows))
            self._inline.overran(self._instance, self._model, inputs, seconds, limit)
        return result

    def _inline_limit(self, requests: int) -> float:
        """Return how long a batch may keep the event loop: as long as its requests one by one."""
        return min(requests, _INLINE_REQUESTS) * self._inline.seconds

    def _executed(
        self, requests: Sequence[Waiting], rows: int, replica: int
    ) -> Executed | BaseException:
        return executed(self._now_ns, partial(self._execute, requests, rows, replica))

    def _execute(self, requests: Sequence[Waiting], rows: int, replica: int) -> Mapping[str, Value]:
        inputs = pack(requests, self._model.padded_rows(rows))
        return self._model.execute(inputs, replica=replica)
