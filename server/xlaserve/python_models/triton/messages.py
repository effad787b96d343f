"""`pb_utils.InferenceRequest` and `InferenceResponseSender`."""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from xlaserve.errors import XlaserveError
from xlaserve.errors.code import ModelFailed
from xlaserve.python_models.inputs import on_host
from xlaserve.python_models.triton.errors import CODES, TritonError, TritonModelException
from xlaserve.python_models.triton.responses import (
    InferenceResponse,
    ResponseIterator,
    failed_response,
    response_of,
)
from xlaserve.python_models.triton.tensor import Tensor
from xlaserve.runtime.calls import Arrays, Calls, NestedRequest, current_request
from xlaserve.runtime.handling import ModelRequest
from xlaserve.tensors import Parameter

RESPONSE_COMPLETE_FINAL = 1
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2
FLAG_SEQUENCE_START = 1
FLAG_SEQUENCE_END = 2

_OWN_PARAMETERS = frozenset(
    (
        *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout"),
        *("binary_data_output", "triton_enable_empty_final_response"),
    )
)
"""Request parameters that the protocol itself uses."""


class InferenceTrace:
    """The trace of a request. Nested calls are traced automatically, with or without it."""

    def get_context(self) -> None:
        """Return None: model code cannot access the server's spans."""


class InferenceRequest:
    """A request to this model, or one that its code creates to call another model."""

    calls: Calls | None = None
    """Calls other models; set in a subclass per model."""

    def __init__(  # noqa: PLR0917 - Triton's order of arguments
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str | bytes = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: object = None,
        trace: object = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._outputs = list(requested_output_names)
        self._model = model_name.decode() if isinstance(model_name, bytes) else model_name
        self._version = model_version
        self._flags = flags
        self._timeout = timeout
        self._parameters = dict(parameters or {})

    # --- accessors ---

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return self._inputs

    def request_id(self) -> str:
        """Return the request id."""
        return self._id

    def correlation_id(self) -> int | str:
        """Return the sequence id, or 0 if the request belongs to no sequence."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """Return the names of the requested outputs."""
        return self._outputs

    def set_requested_output_names(self, names: Sequence[str]) -> None:
        """Set the names of the requested outputs."""
        self._outputs = list(names)

    def model_name(self) -> str:
        """Return the name of the model."""
        return self._model

    def model_version(self) -> int:
        """Return the requested version, or -1 for any."""
        return self._version

    def flags(self) -> int:
        """Return the flags that mark the start and end of a sequence."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags that mark the start and end of a sequence."""
        self._flags = flags

    def timeout(self) -> int:
        """Return the timeout in microseconds, or 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters)

    def preferred_memory(self) -> None:
        """Return None: outputs are always in host memory."""

    def trace(self) -> InferenceTrace:
        """Return the trace, which may be passed to a request created here."""
        return InferenceTrace()

    def is_cancelled(self) -> bool:
        """Return False: a request created by the model is never cancelled."""
        return False

    def get_response_sender(self) -> "InferenceResponseSender":
        """Raise TritonModelException: a request created by the model has no response sender."""
        raise TritonModelException("a request created by a model has no response sender")

    def set_release_flags(self, flags: int) -> None:
        """Raise TritonModelException: a request created by the model cannot be rescheduled."""
        raise TritonModelException("a request created by a model cannot be rescheduled")

    # --- calls to other models ---

    def exec(self, decoupled: bool = False) -> Any:
        """Return the model's response, or an iterator of responses if `decoupled`. Blocks.

        A failed call returns a response with an error.
        """
        if decoupled:
            return ResponseIterator(self._calls.stream(self._nested_request(), current_request()))
        try:
            return response_of(
                self._calls.infer(self._nested_request(), current_request()).result()
            )
        except XlaserveError as error:
            return failed_response(error)

    def async_exec(self, decoupled: bool = False) -> Any:
        """Send the request, and return an awaitable with the result of `exec`."""
        if decoupled:
            found: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            found.set_result(self.exec(decoupled=True))
            return found
        begun = asyncio.wrap_future(self._calls.infer(self._nested_request(), current_request()))
        return _answered(begun)

    @property
    def _calls(self) -> Calls:
        if self.calls is None:
            raise TritonModelException("other models can only be called inside a server")
        return self.calls

    def _nested_request(self) -> NestedRequest:
        if not self._model:
            raise TritonModelException("model_name: expected the name of a model, got none")
        parameters = dict(self._parameters)
        if self._correlation_id:
            parameters["sequence_id"] = self._correlation_id
            parameters["sequence_start"] = bool(self._flags & FLAG_SEQUENCE_START)
            parameters["sequence_end"] = bool(self._flags & FLAG_SEQUENCE_END)
        return NestedRequest(
            self._model,
            {tensor.name(): tensor.as_numpy() for tensor in self._inputs},
            str(self._version) if self._version > 0 else "",
            self._outputs,
            self._id,
            parameters,
            self._timeout / 1e6,
        )


class Answering(Protocol):
    """The replica that a response sender belongs to."""

    name: str
    version: int
    is_decoupled: bool
    is_iterative: bool

    def answer(self, request: ModelRequest, response: InferenceResponse, *, last: bool) -> None:
        """Answer a request."""
        ...


class ServedRequest(InferenceRequest):
    """A request from a client."""

    def __init__(self, request: ModelRequest, owner: Answering) -> None:
        given = request.parameters
        self._request = request
        self._owner = owner
        self._id = request.id
        self._outputs = list(request.outputs)
        self._model = owner.name
        self._version = owner.version
        self._correlation_id: Any = given.get("sequence_id", 0) if given else 0
        self._flags = (
            FLAG_SEQUENCE_START * bool(given.get("sequence_start"))
            + FLAG_SEQUENCE_END * bool(given.get("sequence_end"))
            if given
            else 0
        )
        self._timeout: Any = given.get("timeout", 0) if given else 0
        self._tensors: list[Tensor] | None = None
        self.sender: InferenceResponseSender | None = None
        self.is_again = False
        """Whether the code has asked to execute the request again."""

    def inputs(self) -> list[Tensor]:
        """Return the input tensors; the model may modify them."""
        if self._tensors is None:
            self._tensors = [
                Tensor(name, array if array.flags.writeable else array.copy())
                for name, array in on_host(self._request.inputs).items()
            ]
        return self._tensors

    def parameters(self) -> str:
        """Return the parameters as JSON, without the protocol's own parameters."""
        own = {n: v for n, v in self._request.parameters.items() if n not in _OWN_PARAMETERS}
        return json.dumps(own)

    def is_cancelled(self) -> bool:
        """Tell whether the client has cancelled or abandoned the request."""
        return self._request.is_cancelled

    def get_response_sender(self) -> "InferenceResponseSender":
        """Return the response sender; the same object until the request is rescheduled."""
        if self.sender is None:
            self.sender = InferenceResponseSender(self._request, self._owner)
        return self.sender

    def set_release_flags(self, flags: int) -> None:
        """Choose whether the request is rescheduled (RESCHEDULE) after this execution.

        Raises TritonModelException if the model has no iterative sequences.
        """
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"set_release_flags: expected {RELEASE_ALL} (ALL) or {RELEASE_RESCHEDULE} "
                f"(RESCHEDULE), got {flags}"
            )
        if flags == RELEASE_RESCHEDULE and not self._owner.is_iterative:
            raise TritonModelException(
                "rescheduling needs sequence_batching.iterative_sequence: true in the configuration"
            )
        self.is_again = flags == RELEASE_RESCHEDULE

    def go_on(self) -> None:
        """Reschedule the request, unless the code has sent its final response."""
        if self.sender is not None:
            if self.sender.is_closed:
                return
            self.sender.is_closed = True
        self._request.again()

    @property
    def is_open(self) -> bool:
        """Tell whether the code holds a sender that has sent nothing yet."""
        return self.sender is not None and self.sender.is_unused

    def close_unused_sender(self) -> bool:
        """Close the response sender, if any; return False if it has already been used."""
        return self.sender is None or self.sender.close_unused()

    def exec(self, decoupled: bool = False) -> Any:
        """Raise TritonModelException: only requests created by the model can be executed."""
        raise TritonModelException(
            "a client's request cannot be executed: create a new InferenceRequest"
        )

    def async_exec(self, decoupled: bool = False) -> Any:
        """Raise TritonModelException: only requests created by the model can be executed."""
        raise TritonModelException(
            "a client's request cannot be executed: create a new InferenceRequest"
        )


class InferenceResponseSender:
    """Sends the responses to one request, from any thread."""

    def __init__(self, request: ModelRequest, owner: "Answering") -> None:
        self._request = request
        self._owner = owner
        self._has_answered = False
        self.is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. The final flag marks the last one, and may also be sent alone.

        Blocks while the client does not read (backpressure). Raises TritonModelException if the
        model may send no more responses.
        """
        is_last = bool(flags & RESPONSE_COMPLETE_FINAL)
        if self.is_closed:
            raise TritonModelException("the response sender has sent the final flag already")
        if response is None and not is_last:
            raise TritonModelException("expected a response, or the final flag")
        if response is not None and self._has_answered and not self._owner.is_decoupled:
            raise TritonModelException("expected one response, since the model is not decoupled")
        self.is_closed = is_last
        if response is not None:
            self._has_answered = True
            last = is_last or not self._owner.is_decoupled
            self._owner.answer(self._request, response, last=last)
        elif self._owner.is_decoupled:
            self._request.end()
        elif not self._has_answered:
            self._request.fail(ModelFailed(self._owner.name, "it sent only the final flag"))
        if not is_last and not self._request.is_writable:
            resumed = threading.Event()
            self._request.when_writable(resumed.set)
            resumed.wait()

    @property
    def is_unused(self) -> bool:
        """Tell whether the sender is open and has sent nothing."""
        return not (self._has_answered or self.is_closed)

    def close_unused(self) -> bool:
        """Close the sender if it is unused; return False if it has already been used."""
        is_unused = self.is_unused
        self.is_closed = self.is_closed or is_unused
        return is_unused

    def is_cancelled(self) -> bool:
        """Tell whether the client has cancelled or abandoned the request."""
        return self._request.is_cancelled

    def __del__(self) -> None:
        if not self.is_closed:
            reason = "its response sender was dropped without the final flag"
            self._request.fail(ModelFailed(self._owner.name, reason))


def error_code(error: TritonError) -> str:
    """Return our name of a Triton error code."""
    return CODES[error.code()]


async def _answered(begun: "asyncio.Future[Arrays]") -> InferenceResponse:
    try:
        return response_of(await begun)
    except XlaserveError as error:
        return failed_response(error)
