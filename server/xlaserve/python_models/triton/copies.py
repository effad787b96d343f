"""A replica of a TritonPythonModel."""

import inspect
from collections.abc import Sequence
from typing import Any

from xlaserve.errors.code import ModelFailed
from xlaserve.python_models.copies import UNLOAD_SECONDS, Freed
from xlaserve.python_models.failures import failure, failure_of_code
from xlaserve.python_models.outputs import OutputCheck
from xlaserve.python_models.readiness import CodeReadiness
from xlaserve.python_models.threads import CodeThread, LoopThread, PlainThread, wait_for
from xlaserve.python_models.triton.messages import ServedRequest, error_code
from xlaserve.python_models.triton.outputs import GivenOutputs
from xlaserve.python_models.triton.responses import InferenceResponse
from xlaserve.runtime.calls import computing
from xlaserve.runtime.handling import ModelRequest
from xlaserve.runtime.loaded import ModelInfo


class TritonCopy:
    """Calls the `execute` of a TritonPythonModel instance in its thread."""

    def __init__(
        self,
        model: Any,
        args: dict[str, str],
        replica: int,
        info: ModelInfo,
        *,
        is_iterative: bool = False,
        given: GivenOutputs | None = None,
    ) -> None:
        """`is_iterative` tells whether the code may reschedule requests.

        `given` accepts outputs that do not match the configuration; with None they are errors.
        """
        self._model = model
        self._args = args
        self.name = args["model_name"]
        self.version = int(args["model_version"])
        self.is_decoupled = info.is_decoupled
        self.is_iterative = is_iterative
        batched = bool(info.max_batch_size)
        self._check = OutputCheck(self.name, info.outputs, batched=batched, converts=True)
        self._checked = self._check.checked if given is None else given.checked
        title = f"python {self.name} {replica}"
        self._loop = LoopThread(title) if inspect.iscoroutinefunction(model.execute) else None
        self._thread: CodeThread = self._loop or PlainThread(title)
        is_ready = getattr(model, "is_ready", None)
        self.readiness = None if is_ready is None else CodeReadiness(self.name, is_ready)

    def load(self) -> None:
        """Call `initialize`, if the class defines it."""
        initialize = getattr(self._model, "initialize", None)
        if initialize is not None:
            wait_for(self._thread, lambda: initialize(dict(self._args)))

    def handle(
        self, requests: Sequence[ModelRequest], freed: Freed, *, together: bool = True
    ) -> None:
        """Call `execute` once with all requests, or once per request."""
        parts = [requests] if together else [[request] for request in requests]
        if self._loop is not None:
            self._loop.start(lambda: self._handle_async(parts, freed))
        else:
            self._thread.submit(lambda: self._handle(parts, freed))

    def close(self) -> None:
        """Call `finalize`, if the class defines it, then stop the thread."""
        finalize = getattr(self._model, "finalize", None)
        try:
            if finalize is not None:
                wait_for(self._thread, finalize, UNLOAD_SECONDS)
        except BaseException as error:
            failure(self.name, error, "finalize")
        self._thread.close()

    def answer(self, request: ModelRequest, response: InferenceResponse, *, last: bool) -> None:
        """Send a response of the code; one with an error fails the request."""
        try:
            outputs = self._outputs(request, response)
            parameters = self._check.parameters(response.given_parameters, {})
        except BaseException as error:
            request.fail(failure(self.name, error))
            return
        request.answer(outputs, last=last, parameters=parameters)

    # --- runs in the model's thread ---

    def _handle(self, parts: Sequence[Sequence[ModelRequest]], freed: Freed) -> None:
        try:
            for requests in parts:
                self._execute(requests)
        finally:
            freed()

    def _execute(self, requests: Sequence[ModelRequest]) -> None:
        served = self._served(requests)
        try:
            if served:
                with computing(served[0][0]):
                    self._take(served, self._model.execute([one for _, one in served]))
        except BaseException as error:
            self._fail(served, error)

    async def _handle_async(self, parts: Sequence[Sequence[ModelRequest]], freed: Freed) -> None:
        try:
            for requests in parts:
                await self._execute_async(requests)
        finally:
            freed()

    async def _execute_async(self, requests: Sequence[ModelRequest]) -> None:
        served = self._served(requests)
        try:
            if served:
                with computing(served[0][0]):
                    self._take(served, await self._model.execute([one for _, one in served]))
        except BaseException as error:
            self._fail(served, error)

    def _served(self, requests: Sequence[ModelRequest]) -> list[tuple[ModelRequest, ServedRequest]]:
        served = []
        for request in requests:
            if not request.is_cancelled:
                request.begin()
                served.append((request, ServedRequest(request, self)))
        return served

    def _take(self, served: Sequence[tuple[ModelRequest, ServedRequest]], given: Any) -> None:
        """Answer requests with the list that `execute` returned."""
        if self.is_decoupled:
            self._take_nothing(served, given)
            return
        if given is None:
            given = [None] * len(served)
        if not isinstance(given, list | tuple) or len(given) != len(served):
            count = len(given) if isinstance(given, list | tuple) else type(given).__name__
            raise ModelFailed(
                self.name, f"execute: expected a list of {len(served)} responses, got {count}"
            )
        for (request, one), response in zip(served, given, strict=True):
            self._take_one(request, one, response)

    def _take_nothing(
        self, served: Sequence[tuple[ModelRequest, ServedRequest]], given: Any
    ) -> None:
        if given is not None:
            got = type(given).__name__
            raise ModelFailed(self.name, f"execute is decoupled: expected None, got {got}")
        for request, one in served:
            if one.is_again:
                one.go_on()
            elif one.sender is None:
                request.fail(ModelFailed(self.name, "execute requested no response sender"))

    def _take_one(self, request: ModelRequest, one: ServedRequest, response: Any) -> None:
        if one.is_again:
            if response is None:
                one.go_on()
                return
            reason = "execute: expected None for a rescheduled request, got a response"
            request.fail(ModelFailed(self.name, reason))
        elif isinstance(response, InferenceResponse) and one.close_unused_sender():
            self.answer(request, response, last=True)
        elif response is None and one.is_open:
            request.later()
        elif response is not None or one.sender is None:
            got = "another through its sender" if one.sender else type(response).__name__
            reason = f"execute: expected an InferenceResponse for each request, got {got}"
            request.fail(ModelFailed(self.name, reason))

    def _outputs(self, request: ModelRequest, response: InferenceResponse) -> Any:
        error = response.error()
        if error is not None:
            raise failure_of_code(self.name, error_code(error), error.message())
        found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        return self._checked(found, request.outputs, request.rows)

    def _fail(
        self, served: Sequence[tuple[ModelRequest, ServedRequest]], error: BaseException
    ) -> None:
        answer = failure(self.name, error, "execute")
        for request, one in served:
            if one.sender is not None:
                one.sender.is_closed = True
            request.fail(answer, whole=len(served) > 1)
