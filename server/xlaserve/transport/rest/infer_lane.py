"""V2 inference without a coroutine: one request is begun, and answered at once or called back."""

import asyncio
from functools import partial

from xlaserve.core.serving.call import NO_HEADERS, NOBODY, Headers, Operation, Peer
from xlaserve.core.serving.engine import Engine
from xlaserve.core.serving.gates import Gates
from xlaserve.core.serving.inference import InferRequest, InferResponse, Pending
from xlaserve.transport.rest.calls import HttpCall
from xlaserve.transport.rest.infer_request import read_infer_request
from xlaserve.transport.rest.infer_response import output_bytes, write_infer_answer
from xlaserve.transport.rest.messages import Answered, HttpResponse
from xlaserve.transport.rest.threads import INLINE_BYTES, OffLoop


class InferLane:
    """Answers the bodies of inference requests that are small enough to be read at once."""

    def __init__(
        self,
        engine: Engine,
        gates: Gates,
        threads: OffLoop,
        *,
        max_json_depth: int,
        strict_json: bool,
    ) -> None:
        self._engine = engine
        self._gates = gates
        self._threads = threads
        self._max_json_depth = max_json_depth
        self._strict_json = strict_json

    def begin(  # noqa: PLR0917
        self,
        name: str,
        version: str,
        length: int | None,
        body: memoryview,
        done: Answered,
        headers: Headers = NO_HEADERS,
        peer: Peer = NOBODY,
    ) -> HttpResponse | Pending:
        """Answer a body at once, or call back; raises what the handler would raise."""
        gated = HttpCall(Operation.INFER, {"model": name, "version": version}, headers, peer)
        try:
            self._gates.admit(gated)
            return self._begin(name, version, length, body, gated, done)
        except Exception as error:
            gated.end(error)
            raise

    def _begin(  # noqa: PLR0917
        self,
        name: str,
        version: str,
        length: int | None,
        body: memoryview,
        gated: HttpCall,
        done: Answered,
    ) -> HttpResponse | Pending:
        engine = self._engine
        info = engine.info(name, version)
        try:
            inference = read_infer_request(
                info, name, version, body, length, max_depth=self._max_json_depth
            )
        except Exception:
            # It is counted as a failure of the model.
            with engine.require(name, version):
                raise
        call = _Call(self, inference, gated, done)
        begun = engine.begin(inference, call)
        if type(begun) is InferResponse:
            answer = self.answer(inference, begun)
            if answer is not None:
                gated.end()
                return answer
            call.write(begun)
        else:
            call.pending = begun  # type: ignore[assignment]
        return call

    def answer(self, request: InferRequest, response: InferResponse) -> HttpResponse | None:
        """Write a response; None for one that takes too long. Raises as `write_infer_answer`."""
        if output_bytes(response) > INLINE_BYTES:
            return None
        return write_infer_answer(request, response, strict=self._strict_json)

    def answer_later(
        self, request: InferRequest, response: InferResponse
    ) -> "asyncio.Task[HttpResponse]":
        """Write a response in a thread."""
        write = partial(write_infer_answer, request, response, strict=self._strict_json)
        return asyncio.ensure_future(self._threads.run(output_bytes(response), write))


class _Call:
    """A request that waits for its answer."""

    __slots__ = ("_done", "_gated", "_lane", "_request", "pending")

    def __init__(
        self, lane: InferLane, request: InferRequest, gated: HttpCall, done: Answered
    ) -> None:
        self._gated = gated
        self._lane = lane
        self._request = request
        self._done = self._ended(done)
        self.pending: Pending | asyncio.Task[HttpResponse] | None = None

    def __call__(self, result: InferResponse | BaseException) -> None:
        """Take what the engine answers."""
        self.pending = None
        if type(result) is not InferResponse:
            self._done(result)  # type: ignore[arg-type]
            return
        try:
            answer = self._lane.answer(self._request, result)
        except Exception as error:
            self._done(error)
            return
        if answer is None:
            self.write(result)
        else:
            self._done(answer)

    def _ended(self, done: Answered) -> Answered:
        def ended(result: HttpResponse | BaseException) -> None:
            self._gated.end(result if isinstance(result, BaseException) else None)
            done(result)

        return ended

    def write(self, response: InferResponse) -> None:
        """Write a large response while others are served."""
        writing = self._lane.answer_later(self._request, response)
        writing.add_done_callback(self._written)
        self.pending = writing

    def _written(self, writing: "asyncio.Task[HttpResponse]") -> None:
        if self.pending is None:
            return
        self.pending = None
        try:
            answer = writing.result()
        except (Exception, asyncio.CancelledError) as error:
            self._done(error)
        else:
            self._done(answer)

    def cancel(self) -> None:
        """Forget it: nobody wants the answer."""
        self._gated.cancel()
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()
