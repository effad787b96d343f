"""How the requests of one loaded model are answered and counted out, those of a batch in one go."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from xlaserve.core.residence.registry import Instance, Model, Version
from xlaserve.core.serving.batching import Executed, Tensors, Waiting, split
from xlaserve.core.serving.inference import InferOutput, InferResponse
from xlaserve.tensors import TensorSpec


class Answers:
    """Tells the requests of one instance what became of them.

    Each was admitted and uses the instance; both end before anyone is told.
    """

    def __init__(
        self,
        model: Model,
        version: Version,
        instance: Instance,
        clock: Callable[[], int],
        now: Callable[[], int],
    ) -> None:
        self._model = model
        self._version = version
        self._instance = instance
        self._clock = clock
        self._now = now

    def deliver(self, requests: Sequence[Waiting], result: Executed | BaseException) -> None:
        """Answer the requests that ran together, or refuse them; not those that were cancelled."""
        if isinstance(result, BaseException):
            self._refuse(requests, result)
            return
        rows = sum([request.rows for request in requests])
        try:
            responses = list(self._responses(requests, result.outputs, rows))
        except Exception as error:
            # Outputs that are not what the model promised: nobody may wait for ever.
            self._refuse(requests, error)
            return
        wanted = [request for request in requests if request.done is not None]
        if not wanted:
            return
        for request in wanted:
            request.outcome = result
        self._version.statistics.succeeded_together(
            wanted, rows, (result.begun_ns, result.ended_ns), self._clock(), self._now()
        )
        self._leave(len(wanted))
        # Whoever is told may cancel others that are told after it.
        for request, response in zip(requests, responses, strict=True):
            done = request.done
            if done is not None:
                request.done = None
                try:
                    done(response)
                except Exception as error:
                    _report(error)

    def forget(self, request: Waiting) -> None:
        """Count a request that is not wanted any more."""
        self._fail(request, asyncio.CancelledError())
        self._leave(1)

    def _refuse(self, requests: Sequence[Waiting], error: BaseException) -> None:
        wanted = [request for request in requests if request.done is not None]
        for request in wanted:
            request.outcome = error
            self._fail(request, error)
        self._leave(len(wanted))
        for request in wanted:
            if request.done is not None:
                done, request.done = request.done, None
                try:
                    done(error)
                except Exception as raised:
                    _report(raised)

    def _fail(self, request: Waiting, error: BaseException) -> None:
        self._version.statistics.failed(error, self._clock() - request.started_ns)

    def _leave(self, count: int) -> None:
        self._instance.release(count)
        self._model.requests -= count

    def _responses(
        self, requests: Sequence[Waiting], outputs: Tensors, rows: int
    ) -> Iterator[InferResponse]:
        # By output and then by request: for each request that is a fourth of the other way round.
        columns = [
            map(
                InferOutput,
                repeat(spec.name),
                repeat(spec.datatype),
                split(outputs[spec.name], requests, rows),
            )
            for spec in self._instance.info.outputs
        ]
        name, number = self._model.name, self._version.number
        for request, found in zip(requests, zip(*columns, strict=True), strict=True):
            chosen = found if request.chosen is None else _chosen(found, request.chosen)
            yield InferResponse(name, number, request.id, chosen)


def _chosen(found: Sequence[InferOutput], specs: Sequence[TensorSpec]) -> tuple[InferOutput, ...]:
    by_name = {output.name: output for output in found}
    return tuple(by_name[spec.name] for spec in specs)


def _report(error: Exception) -> None:
    # The others of its batch are told all the same.
    asyncio.get_running_loop().call_exception_handler(
        {"message": "An answer could not be delivered", "exception": error}
    )
