"""A replica of a Python model: an instance of the author's class, and its thread."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from xlaserve.python_models.author import Answer, PythonModel, Request
from xlaserve.python_models.contents import Contents
from xlaserve.python_models.context import Context
from xlaserve.python_models.failures import failure
from xlaserve.python_models.inputs import on_host
from xlaserve.python_models.outputs import OutputCheck
from xlaserve.python_models.readiness import CodeReadiness
from xlaserve.python_models.threads import CodeThread, LoopThread, PlainThread, wait_for
from xlaserve.runtime.calls import begin_computing, computing, end_computing
from xlaserve.runtime.handling import ModelRequest
from xlaserve.runtime.loaded import ModelInfo

Freed: TypeAlias = Callable[[], None]
"""Called when a replica can take more requests."""

UNLOAD_SECONDS = 30.0
"""Timeout of a model's `unload`, in seconds; its thread is then abandoned."""

_NONE = object()


class Copy(Protocol):
    """A replica of a Python model."""

    def load(self) -> None:
        """Prepare the replica. Blocks; exceptions of the model's code propagate."""
        ...

    def handle(
        self, requests: Sequence[ModelRequest], freed: Freed, *, together: bool = True
    ) -> None:
        """Execute requests, as one batch or one by one, and call `freed` when ready for more.

        Returns immediately.
        """
        ...

    def close(self) -> None:
        """Clean up. Blocks; never raises."""
        ...


def is_async(method: Callable[..., Any]) -> bool:
    """Tell whether a method is a coroutine function or an async generator."""
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def is_generator(method: Callable[..., Any]) -> bool:
    """Tell whether a method is a generator, so the model is decoupled."""
    return inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)


def takes_request(kind: type[PythonModel]) -> bool:
    """Tell whether a model's `infer` takes a Request as second argument."""
    return len(inspect.signature(kind.infer).parameters) > len(("self", "inputs"))


class OwnCopy:
    """A replica of a PythonModel."""

    def __init__(
        self, model: PythonModel, context: Context, info: ModelInfo, *, is_batched: bool
    ) -> None:
        self._model = model
        self._context = context
        self._name = context.model
        self._is_batched = is_batched
        batched = bool(info.max_batch_size)
        self._check = OutputCheck(self._name, info.outputs, batched=batched, converts=model.decoded)
        self._contents = (
            Contents(self._name, info.outputs, context.parameters) if model.decoded else None
        )
        self._infer: Callable[..., Any] = model.infer
        self._takes_request = takes_request(type(model))
        title = f"python {self._name} {context.replica}"
        self._loop = LoopThread(title) if is_async(model.infer) else None
        self._thread: CodeThread = self._loop or PlainThread(title)
        self._run = self._chosen(model.infer)
        is_asked = type(model).is_ready is not PythonModel.is_ready
        self.readiness = CodeReadiness(self._name, model.is_ready) if is_asked else None

    def _chosen(self, infer: Callable[..., Any]) -> Callable[[ModelRequest], Any]:
        if inspect.isasyncgenfunction(infer):
            return self._stream_async
        if inspect.iscoroutinefunction(infer):
            return self._answer_async
        return self._stream if inspect.isgeneratorfunction(infer) else self._answer

    def load(self) -> None:
        """Call the model's `load` in its thread."""
        wait_for(self._thread, lambda: self._model.load(self._context))

    def handle(
        self, requests: Sequence[ModelRequest], freed: Freed, *, together: bool = True
    ) -> None:
        """Execute requests one by one, or as a batch if the model is batched."""
        if self._loop is not None:
            self._loop.start(lambda: self._handle_async(requests, freed))
        else:
            self._thread.submit(partial(self._handle, requests, freed))

    def close(self) -> None:
        """Call the model's `unload`, then stop its thread."""
        try:
            wait_for(self._thread, self._model.unload, UNLOAD_SECONDS)
        except BaseException as error:
            failure(self._name, error, "unload")
        self._thread.close()

    # --- runs in the model's thread ---

    def _handle(self, requests: Sequence[ModelRequest], freed: Freed) -> None:
        try:
            wanted = [request for request in requests if not request.is_cancelled]
            if self._is_batched and len(wanted) > 1:
                self._answer_together(wanted)
            else:
                for request in wanted:
                    # `computing` written out: a context manager costs two calls per request.
                    token = begin_computing(request)
                    try:
                        self._run(request)
                    finally:
                        end_computing(token)
        finally:
            freed()

    async def _handle_async(self, requests: Sequence[ModelRequest], freed: Freed) -> None:
        try:
            for request in requests:
                if not request.is_cancelled:
                    with computing(request):
                        await self._run(request)
        finally:
            freed()

    def _arguments(self, request: ModelRequest) -> tuple[Any, ...]:
        request.begin()
        inputs: Any = on_host(request.inputs)
        if self._contents is not None:
            inputs = self._contents.decoded(request, inputs)
        if not self._takes_request:
            return (inputs,)
        of_tensors = request.tensor_parameters
        return inputs, Request(
            request.id, request.outputs, request.parameters, request, *of_tensors
        )

    def _give(self, request: ModelRequest, given: object, *, last: bool = True) -> None:
        answer = given if isinstance(given, Answer) else None
        outputs = given if answer is None else answer.outputs
        if self._contents is not None:
            answer = self._contents.encoded(request, answer or Answer(outputs))
            outputs = answer.outputs
        checked = self._check.checked(outputs, request.outputs, request.rows)
        if answer is None:
            request.answer(checked, last=last)
            return
        parameters = self._check.parameters(answer.parameters, answer.output_parameters)
        request.answer(checked, last=last, parameters=parameters)

    def _fail(self, request: ModelRequest, error: BaseException) -> None:
        request.fail(failure(self._name, error))

    def _answer(self, request: ModelRequest) -> None:
        try:
            self._give(request, self._infer(*self._arguments(request)))
        except BaseException as error:
            self._fail(request, error)

    async def _answer_async(self, request: ModelRequest) -> None:
        try:
            self._give(request, await self._infer(*self._arguments(request)))
        except BaseException as error:
            self._fail(request, error)

    def _answer_together(self, requests: Sequence[ModelRequest]) -> None:
        """Execute requests as one batch, and split the outputs by request."""
        try:
            for request in requests:
                request.begin()
            rows = sum(request.rows for request in requests)
            parts = [on_host(request.inputs) for request in requests]
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            names = list(dict.fromkeys(n for request in requests for n in request.outputs))
            with computing(requests[0]):
                given = self._infer(joined)
            parameters = None
            if isinstance(given, Answer):
                parameters = self._check.parameters(given.parameters, given.output_parameters)
                given = given.outputs
            outputs = self._check.checked(given, names, rows)
        except BaseException as error:
            answer = failure(self._name, error)
            for request in requests:
                request.fail(answer, whole=True)
            return
        start = 0
        for request in requests:
            end = start + request.rows
            own = {name: outputs[name][start:end] for name in request.outputs}
            request.answer(own, parameters=parameters)
            start = end

    def _stream(self, request: ModelRequest) -> None:
        """Send the answers of a generator, pausing it while the client does not read.

        The thread executes other requests meanwhile.
        """
        try:
            answers: Iterator[object] = self._infer(*self._arguments(request))
        except BaseException as error:
            self._fail(request, error)
            return
        self._go_on(request, answers)

    def _go_on(self, request: ModelRequest, answers: Iterator[Any]) -> None:
        try:
            if request.is_cancelled:
                _closed(answers)
                return
            with computing(request):
                given = next(answers, _NONE)
            if given is _NONE:
                request.end()
                return
            self._give(request, given, last=False)
        except BaseException as error:
            _closed(answers)
            self._fail(request, error)
            return
        step = self._step(request, answers)
        if request.is_writable:
            step()
        else:
            request.when_writable(step)

    def _step(self, request: ModelRequest, answers: Iterator[Any]) -> Callable[[], None]:
        return lambda: self._thread.submit(lambda: self._go_on(request, answers))

    async def _stream_async(self, request: ModelRequest) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(self._infer(*self._arguments(request))) as answers:
                async for given in answers:
                    if request.is_cancelled:
                        return
                    self._give(request, given, last=False)
                    if not request.is_writable:
                        resumed = asyncio.Event()
                        request.when_writable(partial(_set_soon, loop, resumed))
                        await resumed.wait()
            request.end()
        except BaseException as error:
            self._fail(request, error)


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(event.set)


def _closed(answers: Iterator[Any]) -> None:
    close = getattr(answers, "close", None)
    if close is not None:
        close()
