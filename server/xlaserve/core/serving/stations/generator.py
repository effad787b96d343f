"""Models that give any number of answers to one request (a Station)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from xlaserve.core.serving.answers import answer_last, deliver, respond
from xlaserve.core.serving.infer_call import Executed, InferCall
from xlaserve.core.serving.stations.host import HostWork
from xlaserve.core.serving.stations.station import Served, Working
from xlaserve.core.threads.completion import settle, settled
from xlaserve.errors import Unsupported
from xlaserve.models.loaded import Generating
from xlaserve.tensors import Tensor


class Generator:
    """Computes one answer after the other in threads, as quickly as the client reads them."""

    def __init__(
        self, instance: Served, model: Generating, work: HostWork, now_ns: Callable[[], int]
    ) -> None:
        self._instance = instance
        self._model = model
        self.work = work
        self._now_ns = now_ns

    @property
    def pending(self) -> int:
        """Return how many answers wait for a thread."""
        return self.work.pending

    def begin(self, call: InferCall) -> None:
        """Start a task that answers; raises Unsupported where a call can have one answer only."""
        if not call.takes_many:
            raise Unsupported("one answer of a model that gives many (its answers are a stream)")
        call.submitted_ns = self._now_ns()
        generating = asyncio.ensure_future(self._generate(call))
        call.wait_at(Working(generating))
        generating.add_done_callback(partial(_end, call))

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: no call waits."""
        return ()

    async def _generate(self, call: InferCall) -> Executed:
        """Answer a call until the model has no more."""
        begun = self._now_ns()
        # A user of its own: it may just be about to begin an answer when its call is cancelled.
        self._instance.acquire()
        try:
            answers = self._model.generate(call.inputs)
            while (outputs := await self._compute(partial(next, answers, None))) is not None:
                call.answer(respond(call, outputs), last=False)
                # Backpressure: nothing is computed that the client cannot be sent.
                await call.writable()
        finally:
            self._instance.release()
        return Executed({}, begun, self._now_ns(), call.rows)

    async def _compute(
        self, step: Callable[[], Mapping[str, Tensor] | None]
    ) -> Mapping[str, Tensor] | None:
        computed: asyncio.Future[Mapping[str, Tensor] | None]
        computed = asyncio.get_running_loop().create_future()
        job = self.work.in_thread(lambda replica: step(), partial(settle, computed))
        return await settled(computed, job)


def _end(call: InferCall, generating: "asyncio.Task[Executed]") -> None:
    if generating.cancelled():
        deliver([call], asyncio.CancelledError())
    elif (error := generating.exception()) is not None:
        deliver([call], error)
    else:
        # Only now it is known that the one before was the last one with outputs.
        answer_last(call, generating.result())
