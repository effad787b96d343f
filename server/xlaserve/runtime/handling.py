"""The interface of models that handle requests on their own threads."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from xlaserve.runtime.loaded import ModelInfo, Value
from xlaserve.tensors import Parameter, Tensor, TensorSpec

Parameters: TypeAlias = Mapping[str, Parameter]

_NONE: Mapping[str, Parameters] = MappingProxyType({})


class TensorParameters(NamedTuple):
    """Parameters of a request's input and output tensors, by tensor name."""

    inputs: Mapping[str, Parameters] = _NONE
    outputs: Mapping[str, Parameters] = _NONE
    """Parameters of the outputs that the client requested by name."""


class AnswerParameters(NamedTuple):
    """Parameters of an answer and of its output tensors."""

    answer: Parameters = MappingProxyType({})
    outputs: Mapping[str, Parameters] = _NONE


class Sender(NamedTuple):
    """A request's sender, for models that schedule requests themselves."""

    submitted_ns: int = 0
    """When the request was ready for execution (`time.perf_counter_ns`); 0 if no client sent it."""
    principal: str = ""
    """Name of the authenticated caller; empty for an anonymous one."""
    takes_many: bool = True
    """Whether the client accepts more than one answer."""
    caller: str = ""
    """Key for fair scheduling: the principal, or another identity of the client."""


NO_TENSOR_PARAMETERS = TensorParameters()
NO_SENDER = Sender()


@runtime_checkable
class SaysReady(Protocol):
    """A model whose code can report whether it is ready."""

    def ask_ready(self) -> "Sequence[Future[bool]]":
        """Start the readiness checks, which never fail; the model is ready if all return true."""
        ...


class ModelRequest(Protocol):
    """A request, as seen by its model; its methods may be called in any thread."""

    @property
    def id(self) -> str:
        """Return the id that the client sent, possibly empty."""
        ...

    @property
    def inputs(self) -> Mapping[str, Value]:
        """Return the inputs by name; the server has checked them against `info.inputs`."""
        ...

    @property
    def rows(self) -> int:
        """Return the number of rows; 1 without a batch dimension."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """Return the names of the requested outputs."""
        ...

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Return the request's parameters."""
        ...

    @property
    def tensor_parameters(self) -> TensorParameters:
        """Return the parameters of individual tensors."""
        ...

    @property
    def sender(self) -> Sender:
        """Return the caller."""
        ...

    @property
    def is_cancelled(self) -> bool:
        """Tell whether the client has cancelled or abandoned the request."""
        ...

    @property
    def is_writable(self) -> bool:
        """Tell whether the client can receive another answer now (backpressure)."""
        ...

    def begin(self) -> None:
        """Record the start time of the computation."""
        ...

    def charge(self, what: str, size: int) -> None:
        """Count memory against the client's limit until the request ends.

        If the limit does not allow it, the request fails soon afterwards.
        """
        ...

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Send an answer with the requested outputs; the last answer ends the request."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """Within this context, collect this thread's answers and deliver them together.

        For models that answer several requests in a loop: clients receive nothing before the
        context ends.
        """
        ...

    def again(self) -> None:
        """Reschedule the request as the next step of its iterative sequence."""
        ...

    def later(self) -> None:
        """Announce that the answer follows after this execution has returned."""
        ...

    def end(self) -> None:
        """End the request; all of its answers, if any, have been sent."""
        ...

    def fail(self, error: BaseException, *, whole: bool = False) -> None:
        """End the request with an error.

        `whole` means that the whole batch failed: the server then executes each unanswered request
        again, alone.
        """
        ...

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call back once when the client can receive another answer or has disconnected.

        The callback may run on any thread, possibly before this returns.
        """
        ...

    def when_cancelled(self, leave: Callable[[], None]) -> None:
        """Call back once, on the event loop, if the request is cancelled.

        Only the model that handles the request may call this, before its `handle` returns.
        """
        ...


class UnsentRequest:
    """A request that no client sent (a ModelRequest).

    Used for warm-up, and to notify a model that a sequence has expired.
    """

    id = ""
    is_cancelled = False
    is_writable = True
    tensor_parameters = NO_TENSOR_PARAMETERS
    sender = NO_SENDER
    call = None
    """Calls to other models are not part of any client's call."""

    def __init__(
        self,
        inputs: Mapping[str, Value],
        outputs: Sequence[str],
        *,
        rows: int = 1,
        parameters: Parameters = MappingProxyType({}),
        answered: Callable[[Mapping[str, Tensor]], None] | None = None,
        failed: Callable[[BaseException], None],
    ) -> None:
        """`on_answer` and `on_error` callbacks may be called from any thread."""
        self.inputs = inputs
        self.outputs = outputs
        self.rows = rows
        self.parameters = parameters
        self._answered = answered
        self._failed = failed
        self.is_late = False
        """Whether the answer may arrive after the execution has returned."""

    def begin(self) -> None:
        """Do nothing: the start time is not recorded."""

    def charge(self, what: str, size: int) -> None:
        """Do nothing: no client's limit applies."""

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Pass the answer to the callback, if there is one."""
        if self._answered is not None:
            self._answered(outputs)

    def gathered(self) -> AbstractContextManager[None]:
        """Do nothing: there is no event loop to wake."""
        return nullcontext()

    def again(self) -> None:
        """Do nothing: one execution is enough."""

    def later(self) -> None:
        """Record that the answer arrives later."""
        self.is_late = True

    def end(self) -> None:
        """Do nothing: no client is waiting."""

    def fail(self, error: BaseException, *, whole: bool = False) -> None:
        """Pass the error to the caller."""
        self._failed(error)

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call back immediately."""
        resume()

    def when_cancelled(self, leave: Callable[[], None]) -> None:
        """Do nothing: the request is never cancelled."""


@runtime_checkable
class Handling(Protocol):
    """A model that handles requests on its own threads."""

    @property
    def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        ...

    @property
    def concurrency(self) -> int:
        """Return the concurrent executions per replica; more than 1 only for coroutines."""
        ...

    @property
    def is_decoupled(self) -> bool:
        """Tell whether a request may get any number of answers."""
        ...

    @property
    def is_batched(self) -> bool:
        """Tell whether the model accepts several requests per execution."""
        ...

    def handle(
        self,
        replica: int,
        requests: Sequence[ModelRequest],
        freed: Callable[[], None],
        *,
        together: bool = True,
    ) -> None:
        """Pass requests to a replica, for one joint or several single executions; does not wait.

        `freed` is called from any thread when the replica can accept more requests. By then each
        request has been answered, unless the model is decoupled.
        """
        ...


@runtime_checkable
class Slotted(Handling, Protocol):
    """A model with slots for concurrent requests, which schedules them itself.

    If a client accepts only one answer, the model merges all answers into one.
    """

    @property
    def ahead(self) -> int:
        """Return how many requests may be queued beyond the slots."""
        ...

    def yields_to(self, level: int) -> bool:
        """Tell whether a request of this priority would preempt a running one."""
        ...

    def text_bytes(self, inputs: Mapping[str, Value]) -> int:
        """Return the memory in bytes needed to tokenize a request's text, or 0."""
        ...

    def choose_outputs(
        self, requested: tuple[TensorSpec, ...] | None, *, many: bool
    ) -> tuple[TensorSpec, ...]:
        """Return an answer's outputs: all of them, or the requested ones.

        Raises UnknownTensor for a requested output that the answer does not have.
        """
        ...
