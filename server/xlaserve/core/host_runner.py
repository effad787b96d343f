"""Executions on the host: where the event loop is, or in a thread."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from xlaserve.core.batching import Ended, Executed, Tensors, Waiting, pack
from xlaserve.core.registry import Instance
from xlaserve.core.threads import HostJob, HostThreads
from xlaserve.models.loaded import LoadedModel, Value

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
    call: Callable[[int], Executed | BaseException],
    ended: Ended,
) -> HostJob:
    """Run a call in a thread, for the replica with the least to do, whose index it takes.

    `ended` is called on the event loop. The thread is a user of the instance: it may outlive
    requests that were cancelled. Raises RuntimeError where there is no thread.
    """
    replica = instance.replicas.take()

    def over(result: Executed | BaseException) -> None:
        instance.replicas.leave(replica)
        instance.release()
        ended(result)

    try:
        job = threads.start(partial(call, replica), over)
    except RuntimeError:
        instance.replicas.leave(replica)
        raise
    instance.acquire()
    return job


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
        inline_seconds: float,
        now_ns: Callable[[], int],
    ) -> None:
        self._instance = instance
        self._model = model
        self._threads = threads
        self._inline_seconds = inline_seconds
        self._now_ns = now_ns
        self.lanes = model.replicas

    def run(self, requests: Sequence[Waiting], freed: Callable[[], None], ended: Ended) -> None:
        """Start a batch; both are called once it is over, perhaps before this returns."""
        rows = sum([request.rows for request in requests])
        execute = partial(self._executed, requests, rows)

        def over(result: Executed | BaseException) -> None:
            freed()
            ended(result)

        if self._model.expected_seconds(rows) <= self._inline_limit(len(requests)):
            replica = self._instance.replicas.take()
            result = execute(replica)
            self._instance.replicas.leave(replica)
            over(result)
        else:
            in_thread(self._threads, self._instance, execute, over)

    def _inline_limit(self, requests: int) -> float:
        """Return how long a batch may keep the event loop: as long as its requests one by one."""
        return min(requests, _INLINE_REQUESTS) * self._inline_seconds

    def _executed(
        self, requests: Sequence[Waiting], rows: int, replica: int
    ) -> Executed | BaseException:
        return executed(self._now_ns, partial(self._execute, requests, rows, replica))

    def _execute(self, requests: Sequence[Waiting], rows: int, replica: int) -> Mapping[str, Value]:
        inputs = pack(requests, self._model.padded_rows(rows))
        return self._model.execute(inputs, replica=replica)
