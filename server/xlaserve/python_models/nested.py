"""Calls from Python models to other models, as part of the current request."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from xlaserve.errors import ModelNotFound, ModelNotReady, ShuttingDown
from xlaserve.errors.code import CancelledByModel
from xlaserve.errors.panics import ENDS
from xlaserve.runtime.calls import Arrays, Change, NestedRequest, Replies, answered
from xlaserve.serving.access.sight import without_hidden
from xlaserve.serving.call import Call, Operation
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import (
    DetailedResponse,
    InferRequest,
    InferResponse,
    RequestedOutput,
)
from xlaserve.serving.models_api import input_of
from xlaserve.serving.uses import note, use_of
from xlaserve.tensors import BYTES, Tensor, encoded_elements


class Nested(InferCall):
    """A call made by model code as part of another call; its answers go to a waiting thread."""

    def __init__(self, parent: InferCall | None, request: NestedRequest) -> None:
        self.asked_model = request.model
        self.waiting: Sequence[InferCall] = ()
        """The calls that wait for this nested call: model code may make one for a whole batch."""
        if parent is None:
            return
        self.parent = parent
        self.headers, self.peer = parent.headers, parent.peer
        self.principal = parent.principal
        self.waiting = _together(parent)
        self.deadline = _latest(self.waiting)
        # A waiting call's inputs may be volatile, and the code may have passed them on.
        self.is_volatile = any(one.is_volatile for one in self.waiting)
        for one in self.waiting:
            if one.nested is None:
                one.nested = set()
                one.hold(partial(_cancel_all, one))
            one.nested.add(self)

    def expire_within(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now, unless it is already earlier."""
        latest = asyncio.get_running_loop().time() + seconds
        self.deadline = latest if self.deadline is None else min(self.deadline, latest)

    def settle(self, error: BaseException) -> None:
        """Raise an error in the code that waits for the answer."""

    def refuse(self, error: BaseException) -> None:
        """Raise an error in the calling code, without the names of hidden models."""
        self.settle(without_hidden(self, error, (self.asked_model,)))

    def cancel(self, reason: str = "") -> None:
        """Cancel the call, and raise CancelledByModel in the code that waits for it."""
        super().cancel(reason)
        self.settle(CancelledByModel(self.asked_model, "the request was cancelled"))

    def release(self) -> None:
        """Release the call's resources, and remove it from its parents."""
        super().release()
        for one in self.waiting:
            if one.nested is not None:
                one.nested.discard(self)
        self.waiting = ()


class _One(Nested):
    def __init__(self, parent: InferCall | None, request: NestedRequest) -> None:
        super().__init__(parent, request)
        self.holds_anything = True
        self.future: Future[Arrays] = Future()

    def write(self, response: InferResponse, *, last: bool) -> None:
        if not self.future.done():
            self.future.set_result(_answered(response))

    def settle(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Many(Nested):
    takes_many = True

    def __init__(self, parent: InferCall | None, request: NestedRequest, replies: Replies) -> None:
        super().__init__(parent, request)
        self.holds_anything = True
        self._replies = replies

    @property
    def is_writable(self) -> bool:
        return not self._replies.is_full

    def write(self, response: InferResponse, *, last: bool) -> None:
        if response.outputs or not last:
            self._replies.put(_answered(response))
        if last:
            self._replies.is_end_empty = not response.outputs
            self._replies.end()

    def settle(self, error: BaseException) -> None:
        self._replies.end(error)


MakeChange: TypeAlias = Callable[[Change, Collection[str]], Awaitable[None]]
"""Loads or unloads a model; the second argument names the models whose requests wait for it."""


class NestedCalls:
    """Lets the code of a model call other models (Calls)."""

    def __init__(self, engine: Engine, gates: Gates) -> None:
        self._engine = engine
        self._gates = gates
        self._loop: asyncio.AbstractEventLoop | None = None
        self._make_change: MakeChange | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def bind(self, loop: asyncio.AbstractEventLoop, make_change: MakeChange) -> None:
        """Set the event loop and the function that changes models, before any model loads."""
        self._loop, self._make_change = loop, make_change

    def infer(self, request: NestedRequest, within: object) -> "Future[Arrays]":
        """Call a model for one answer."""
        answer: Future[Arrays] = Future()

        def begin() -> None:
            call = _One(_call_of(within), request)
            call.future = answer
            self._begin(call, request)

        if not self._post(begin):
            answer.set_exception(ShuttingDown())
        return answer

    def stream(
        self, request: NestedRequest, within: object, replies: Replies | None = None
    ) -> Replies:
        """Call a decoupled model; the answers are put into the returned `Replies`."""
        found = Replies() if replies is None else replies

        def begin() -> None:
            call = _Many(_call_of(within), request, found)
            found.on_taken = partial(self._post, call.resume)
            found.on_cancel = partial(self._post, call.cancel)
            # The caller may have cancelled before `on_cancel` was set.
            if found.is_cancelled:
                call.cancel()
            else:
                self._begin(call, request)

        if not self._post(begin):
            found.end(ShuttingDown())
        return found

    def change(self, change: Change, within: object) -> "Future[None]":
        """Load or unload a model; cancelled once all requests that wait for it have ended."""
        answer: Future[None] = Future()

        def begin() -> None:
            task = asyncio.ensure_future(self._change(change, _call_of(within), answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        if not self._post(begin):
            answer.set_exception(ShuttingDown())
        return answer

    async def _change(
        self, change: Change, parent: InferCall | None, answer: "Future[None]"
    ) -> None:
        call, waiting = Call(), {change.by}
        call.operation, call.model = Operation.MANAGE, change.model
        if parent is not None:
            call.parent, call.headers, call.peer = parent, parent.headers, parent.peer
            together = _together(parent)
            call.principal, call.deadline = parent.principal, _latest(together)
            task = asyncio.current_task()
            assert task is not None
            for one in together:
                waiting.update(_models_of(one))
                one.hold(partial(_cancel_change, change, task, answer, together))
        try:
            assert self._make_change is not None
            with self._gates.passing(call):
                await self._make_change(change, waiting)
        except asyncio.CancelledError:
            _settle(answer, CancelledByModel(change.model, "the request was cancelled"))
        except ENDS:
            raise
        except BaseException as error:
            _settle(answer, without_hidden(call, error, (change.model,)))
        else:
            _settle(answer)

    def is_ready(self, model: str, version: str, within: object) -> bool:
        """Tell whether a model can answer now. Blocks until the event loop has looked."""
        found: Future[bool] = Future()

        def resolve() -> None:
            instance: object = None
            try:
                instance = self._engine.resolve(model, version)[1]
            except (ModelNotFound, ModelNotReady):
                pass  # not ready, which `note` records below
            except ENDS:
                raise
            except BaseException as error:
                found.set_exception(error)
                return
            note(_call_of(within), [use_of(model, version, instance)])
            found.set_result(instance is not None)

        return self._post(resolve) and found.result()

    def _post(self, call: Callable[[], None]) -> bool:
        with suppress(RuntimeError):  # the event loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(call)
            return True
        return False

    def _begin(self, call: Nested, nested: NestedRequest) -> None:
        if call.parent is not None and _nobody_waits(call.waiting):
            call.cancel()
            return
        if nested.seconds:
            call.expire_within(nested.seconds)
        try:
            request = _request(nested)
        except ENDS:
            raise
        except BaseException as error:
            call.fail(error)
            return
        self._engine.begin(call, request)
        instance = call.instance if call.is_found else None
        note(call.parent, [use_of(nested.model, nested.version, instance)])


def _answered(response: InferResponse) -> Arrays:
    outputs = {output.name: output.data for output in response.outputs}
    if isinstance(response, DetailedResponse):
        return answered(outputs, response.parameters)
    return outputs


def _call_of(within: Any) -> InferCall | None:
    return None if within is None else within.call


def _models_of(call: Call | None) -> Iterator[str]:
    while call is not None:
        yield call.model
        call = call.parent


def _settle(answer: "Future[None]", error: BaseException | None = None) -> None:
    """Complete the future of a load or unload, unless its request has ended before."""
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)


def _together(call: InferCall) -> Sequence[InferCall]:
    """Return all calls of the batch that contains this call, including itself."""
    others = [one for ref in call.companions if isinstance(one := ref(), InferCall)]
    return others or [call]


def _latest(calls: Sequence[InferCall]) -> float | None:
    """Return the latest deadline, or None if any of the calls has none."""
    deadlines = [one.deadline for one in calls]
    return None if None in deadlines else max(filter(None, deadlines))


def _nobody_waits(calls: Sequence[InferCall]) -> bool:
    return all(one.has_ended for one in calls)


def _cancel_change(
    change: Change,
    task: "asyncio.Task[None]",
    answer: "Future[None]",
    waiting: Sequence[InferCall],
) -> None:
    if not answer.done() and _nobody_waits(waiting):
        # Settle first: cancelling a load may take time, if its code does not return.
        _settle(answer, CancelledByModel(change.model, "the request was cancelled"))
        task.cancel()


def _cancel_all(parent: InferCall) -> None:
    for call in tuple(parent.nested or ()):
        if not isinstance(call, Nested) or _nobody_waits(call.waiting):
            call.cancel("its calling request ended")


def _request(nested: NestedRequest) -> InferRequest:
    return InferRequest(
        nested.model,
        nested.version,
        nested.id,
        tuple(input_of(nested.model, n, _sendable(array)) for n, array in nested.inputs.items()),
        tuple(map(RequestedOutput, nested.outputs)),
        nested.parameters,
    )


def _sendable(array: Tensor) -> Tensor:
    """Return an array as a client would send it, with strings encoded as bytes."""
    if array.dtype.kind not in "OSU":
        return array
    elements = encoded_elements(array.astype(np.object_))
    return np.fromiter(elements, BYTES.dtype, len(elements)).reshape(array.shape)
