"""Work stealing: queued batches of a busy worker, executed by an idle one."""

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
"""How much longer a batch has to take for each byte of its inputs. To put them together, to copy
them and to bring the outputs back took 1.6 ns a byte of both workers (perceptron, 100 KB)."""


class Helpers(Protocol):
    """Other workers of the server, as stations see them."""

    @property
    def least_seconds(self) -> float:
        """Return the shortest batch worth offloading."""
        ...

    @property
    def most_bytes(self) -> int:
        """Return the maximum input bytes of a batch: they are copied on the event loop."""
        ...

    @property
    def are_idle(self) -> bool:
        """Tell whether at least one of them would execute a batch now."""
        ...

    def serve(self, instance: Served, model: LoadedModel, work: HostWork) -> None:
        """Execute other workers' batches for an instance until it leaves."""
        ...

    def execute(
        self,
        instance: Served,
        requests: Sequence[InferCall],
        ended: Ended,
        refused: Callable[[], None],
    ) -> bool:
        """Offload a batch to one of them; false if none is idle.

        Either `ended` is called with its outcome, or `refused` where it was not begun; neither
        within this call.
        """
        ...


class OffloadingRunner:
    """Runs batches at home, and by an idle worker where every lane is busy (a Runner).

    A batch leaves only where as many requests wait as are executed: a shorter queue is the next
    batch at home, and larger ones are cheaper.
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
        """Requests executed or queued for a thread in this worker."""
        self._resume: Callable[[], None] = lambda: None
        self.lanes = within.lanes
        self.is_inline = within.is_inline

    def gathered(self, batcher: Batcher) -> Batcher:
        """Return the batcher of this runner; another worker may be idle again."""
        self._resume = batcher.resume
        return batcher

    def overtakes(self, queue: RequestQueue) -> Callable[[], bool]:
        """Return a function that tells whether another worker gets the next batch of a queue."""
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
        """Start a batch; one that another worker executes takes no lane."""
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
        else:  # it began something else in this moment
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
            # Nobody may wait for ever, whatever kept the batch from starting.
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
