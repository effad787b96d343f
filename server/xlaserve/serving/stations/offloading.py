"""Work stealing: idle workers execute queued batches of busy ones."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from xlaserve.errors.panics import ENDS
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.serving.infer_call import Ended, Executed, InferCall
from xlaserve.serving.stations.batching import Batcher, RequestQueue, Runner
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.station import Served

_SECONDS_PER_BYTE = 1e-8
"""A batch must take this much longer per byte of its inputs to be worth offloading.
Packing, copying and returning the outputs cost both workers 1.6 ns per byte (perceptron, 100 KB).
"""


class Helpers(Protocol):
    """The other workers, as seen by stations."""

    @property
    def least_seconds(self) -> float:
        """Return the minimum execution time of a batch worth offloading."""
        ...

    @property
    def most_bytes(self) -> int:
        """Return the maximum input bytes of a batch, since they are copied on the event loop."""
        ...

    @property
    def are_idle(self) -> bool:
        """Tell whether at least one other worker is idle."""
        ...

    def serve(self, instance: Served, model: LoadedModel, work: HostWork) -> None:
        """Execute other workers' batches on an instance until it is unloaded."""
        ...

    def execute(
        self,
        instance: Served,
        requests: Sequence[InferCall],
        ended: Ended,
        refused: Callable[[], None],
    ) -> bool:
        """Offload a batch to an idle worker; return False if there is none.

        Either `ended` is called with the outcome, or `refused` if the worker has not begun it; both
        only after this has returned.
        """
        ...


class OffloadingRunner:
    """Executes batches locally, or on an idle worker if all lanes are busy (a Runner).

    A batch is offloaded only if at least as many requests are queued as are being executed: a
    shorter queue becomes the next local batch, and large batches are more efficient.
    """

    def __init__(
        self, within: Runner, instance: Served, model: LoadedModel, helpers: Helpers
    ) -> None:
        self._within = within
        self._instance = instance
        self._model = model
        self._helpers = helpers
        self._lanes_taken = 0
        self._requests = 0
        """Requests that this worker is executing or has queued for a thread."""
        self._resume: Callable[[], None] = lambda: None
        self.lanes = within.lanes
        self.is_inline = within.is_inline

    def gathered(self, batcher: Batcher) -> Batcher:
        """Attach the batcher, to be resumed when another worker may be idle again; return it."""
        self._resume = batcher.resume
        return batcher

    def overtakes(self, queue: RequestQueue) -> Callable[[], bool]:
        """Return a function that tells whether the next batch of a queue may be offloaded."""
        return partial(self._is_offered, queue)

    def _is_offered(self, queue: RequestQueue) -> bool:
        pending = len(queue)
        if self._lanes_taken < self.lanes or pending < self._requests or not pending:
            return False
        return self._helpers.are_idle and self._is_worthwhile(queue, pending)

    def _is_worthwhile(self, queue: RequestQueue, pending: int) -> bool:
        first, limit = next(iter(queue)), max(1, self._model.batch_limit)
        requests = min(pending, max(1, limit // max(1, first.rows)))
        size = sum([tensor.nbytes for tensor in first.inputs.values()])
        if requests * size > self._helpers.most_bytes:
            return False
        least = self._helpers.least_seconds + requests * size * _SECONDS_PER_BYTE
        return self._model.expected_seconds(requests * first.rows) >= least

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Start a batch locally, or offload it, which takes no lane."""
        if self._lanes_taken < self.lanes:
            self._lanes_taken += 1
            try:
                self._run_at_home(requests, partial(self._free_lane, freed), ended)
            except ENDS:
                raise
            except BaseException:
                self._lanes_taken -= 1
                raise
            return
        over, refused = partial(self._over, ended), partial(self._refused, requests, ended)
        if self._helpers.execute(self._instance, requests, over, refused):
            freed()
        else:  # the other worker has just become busy
            self._run_at_home(requests, freed, ended)

    def _free_lane(self, freed: Callable[[], None]) -> None:
        self._lanes_taken -= 1
        freed()

    def _over(self, ended: Ended, result: Executed | BaseException) -> None:
        ended(result)
        self._resume()

    def _refused(self, requests: Sequence[InferCall], ended: Ended) -> None:
        try:
            self._run_at_home(requests, lambda: None, ended)
        except ENDS:
            raise
        except BaseException as error:
            # Every call must end, whatever prevented the batch from starting.
            ended(error)

    def _run_at_home(
        self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended
    ) -> None:
        count = len(requests)

        def left() -> None:
            self._requests -= count
            freed()

        self._requests += count
        try:
            self._within.run(requests, left, ended)
        except ENDS:
            raise
        except BaseException:
            self._requests -= count
            raise
