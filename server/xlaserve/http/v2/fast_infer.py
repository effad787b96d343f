"""V2 inference without a coroutine: answered immediately or by callback."""

import asyncio
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

from xlaserve.errors.panics import ENDS
from xlaserve.http.json.json_tensors import JsonRules
from xlaserve.http.messages import JOINED_BYTES, Answered, HttpResponse
from xlaserve.http.threads import INLINE_BYTES, OffLoop
from xlaserve.http.v2.infer_request import read_infer_request
from xlaserve.http.v2.infer_response import most_json_bytes, output_bytes, write_infer_answer
from xlaserve.net.ledger import Account
from xlaserve.serving.call import NO_HEADERS, NOBODY, Headers, Peer
from xlaserve.serving.call_record import attach
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferRequest, InferResponse, Pending


class Target(NamedTuple):
    """The inference target given by a header block."""

    model: str
    version: str
    length: int | None
    """Bytes of JSON before the binary tensors; None if the whole body is JSON."""


class FastInfer:
    """Answers small inference requests, which are decoded on the event loop."""

    def __init__(
        self,
        engine: Engine,
        gates: Gates,
        threads: OffLoop,
        *,
        max_json_depth: int,
        json_rules: JsonRules,
    ) -> None:
        self._engine = engine
        self._gates = gates
        self._threads = threads
        self._max_json_depth = max_json_depth
        self.json_rules = json_rules

    # Positional arguments: a call with keywords takes twice as long.
    def begin(  # noqa: PLR0917
        self,
        target: Target,
        body: memoryview,
        done: Answered,
        headers: Headers = NO_HEADERS,
        peer: Peer = NOBODY,
        opened_ns: int = 0,
    ) -> HttpResponse | Pending:
        """Answer a body immediately or by callback; raises the same errors as the handler."""
        call = FastInferCall(self, target, done, headers, peer)
        call.opened_ns = opened_ns
        name, version, length = target
        try:
            self._gates.admit(call)
            record = call.record
            if record is not None:
                # Inlined `CallRecord.received` for the only body: a method call would double the
                # cost.
                record.bytes_in = len(body)
                record.received_ns = perf_counter_ns()
            found = self._engine.find(call, name, version)
            inference = read_infer_request(
                found[1].info, name, version, body, length, max_depth=self._max_json_depth
            )
        except ENDS:
            raise
        except BaseException as error:
            call.end(error)  # counts as a failure of the model, if the model was found
            attach(call.record, error)
            raise
        call.request = inference
        self._engine.begin(call, inference, found)
        answer = call.answer_at_once
        if answer is None:
            call.is_waited_for = True
            return call
        if isinstance(answer, BaseException):
            attach(call.record, answer)
            raise answer
        return answer

    def answer_later(
        self, request: InferRequest, response: InferResponse, account: Account | None
    ) -> "asyncio.Task[HttpResponse]":
        """Serialize a response in a thread."""
        write = partial(write_infer_answer, request, response, self.json_rules)
        made = most_json_bytes(response, request, self.json_rules)
        return asyncio.ensure_future(
            self._threads.write(output_bytes(response), write, account, made)
        )


_SURELY_SHORT_BYTES = JOINED_BYTES // 32
"""Tensors up to this size give short responses: JSON expands an element at most sixfold."""
_OF_MODEL = "POST /v2/models/{model}/infer"
_OF_VERSION = "POST /v2/models/{model}/versions/{version}/infer"


class FastInferCall(InferCall):
    """An inference whose response goes to the connection by callback."""

    request: InferRequest
    is_waited_for = False
    """Whether `begin` has returned, so that the response must be passed to the callback."""
    answer_at_once: HttpResponse | BaseException | None = None
    """The response, if it was available before `begin` returned."""
    _writing: "asyncio.Task[HttpResponse] | None" = None

    @property
    def method(self) -> str:  # type: ignore[override]
        """Return the request line; computed on demand, because few observers read it."""
        return _OF_VERSION if self.version else _OF_MODEL

    def __init__(
        self, fast_infer: FastInfer, target: Target, done: Answered, headers: Headers, peer: Peer
    ) -> None:
        self.model, self.version, _ = target
        self._fast_infer = fast_infer
        self._done = done
        self.headers = headers
        self.peer = peer

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Send the response; a large one is serialized in a thread."""
        size = output_bytes(response)
        if size > INLINE_BYTES:
            self.notifies_later = True
            self._writing = self._fast_infer.answer_later(self.request, response, self.peer.account)
            self._writing.add_done_callback(self._written)
            return
        answer: HttpResponse | BaseException
        try:
            answer = write_infer_answer(self.request, response, self._fast_infer.json_rules)
            if size > _SURELY_SHORT_BYTES:
                self._admit(answer)
            record = self.record
            if record is not None:
                # Inlined `CallRecord.sent` for the only response: a method call would double the
                # cost.
                record.bytes_out = answer.size
                record.written_ns = perf_counter_ns()
        except ENDS:
            raise
        except BaseException as error:
            self.outcome = answer = error
        if self.is_waited_for:
            if isinstance(answer, BaseException):
                attach(self.record, answer)
            self._done(answer)
        else:
            self.answer_at_once = answer

    def refuse(self, error: BaseException) -> None:
        """Answer with an error."""
        self._tell(error)

    def cancel(self, reason: str = "") -> None:
        """End the call without a response."""
        super().cancel(reason)
        if self._writing is not None:
            self._writing.cancel()
            self.end(asyncio.CancelledError(reason))

    def _written(self, writing: "asyncio.Task[HttpResponse]") -> None:
        if self.is_cancelled:
            return
        try:
            answer = writing.result()
            self._admit(answer)
        except BaseException as error:  # every error must be answered: the client waits
            self._tell(error)
            self.end(error)
        else:
            if self.record is not None:
                self.record.sent(answer.size)
            self._tell(answer)
            self.end()

    def _admit(self, answer: HttpResponse) -> None:
        """Check that memory for a response is available; raises BudgetExhausted.

        The connection charges the response afterwards.
        """
        account, size = self.peer.account, answer.size
        if account is not None and size > JOINED_BYTES and not account.allows(size):
            raise account.refusal("the answer", size)

    def _tell(self, answer: HttpResponse | BaseException) -> None:
        if self.is_waited_for:
            if isinstance(answer, BaseException):
                attach(self.record, answer)
            self._done(answer)
        else:
            self.answer_at_once = answer
