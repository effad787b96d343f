"""Ragged batching: requests of different shapes in one execution (a Station)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import cast

from xlaserve.runtime.wrappers.ragged import Ragged
from xlaserve.serving.infer_call import Ended, Executed, InferCall, Tensors
from xlaserve.serving.stations.batching import Batcher, fitting
from xlaserve.serving.stations.host import HostWork, executed


def ragged_fitting(
    model: Ragged, waiting: Iterable[InferCall], max_rows: int, others_first: bool = False
) -> tuple[list[InferCall], bool]:
    """Return as many requests as fit, and whether the batch is full."""
    chosen, full = fitting(waiting, max_rows, others_first)
    count = max(1, model.fitting([call.inputs for call in chosen]))
    return chosen[:count], full or count < len(chosen)


class RaggedRunner:
    """Executes ragged batches on threads, one per replica at a time (a Runner)."""

    is_inline = False

    def __init__(
        self, model: Ragged, lanes: int, work: HostWork, now_ns: Callable[[], int]
    ) -> None:
        self._model = model
        self._work = work
        self._now_ns = now_ns
        self.lanes = lanes

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Start a batch; `freed` and `ended` are called on completion."""
        inputs = [call.inputs for call in requests]

        def execute(replica: int) -> Executed | BaseException:
            together = partial(self._model.together, inputs, replica=replica)
            return executed(self._now_ns, lambda: cast(Tensors, together()))

        def over(result: Executed | BaseException) -> None:
            freed()
            ended(result)

        self._work.in_thread(execute, over, since_ns=requests[0].submitted_ns)


class Gathered:
    """Batches calls of different shapes (a Station)."""

    def __init__(self, model: Ragged, batcher: Batcher, work: HostWork) -> None:
        self._model = model
        self._batcher = batcher
        self.work = work

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued calls and executions."""
        return chain(self._batcher.pending_since(), self.work.pending_since())

    def begin(self, call: InferCall) -> None:
        """Enqueue a call; raises Overloaded, or InvalidTensor if its inputs are too large."""
        self._model.check(call.inputs)
        self._batcher.submit(call)

    def retire(self) -> Sequence[InferCall]:
        """Start no more batches; return the queued calls."""
        return self._batcher.retire()
