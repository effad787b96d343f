"""The interface of models that handle requests in threads of their own."""

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
    """Parameters of a request's tensors, by tensor."""

    inputs: Mapping[str, Parameters] = _NONE
    outputs: Mapping[str, Parameters] = _NONE
    """Parameters of the outputs that the client asks for by name."""


class AnswerParameters(NamedTuple):
    """Parameters of an answer, and of its outputs by name."""

    answer: Parameters = MappingProxyType({})
    outputs: Mapping[str, Parameters] = _NONE


class Sender(NamedTuple):
    """The sender of a request as the server knows it, for models that serve many at once."""

    submitted_ns: int = 0
    """When it became ready for execution, by `time.perf_counter_ns`; 0 without a client."""
    principal: str = ""
    """The caller's name; empty for anybody."""
    takes_many: bool = True
    """Whether it accepts several answers."""
    caller: str = ""
    """Key of fair scheduling: the principal, or another identity of the client."""


NO_TENSOR_PARAMETERS = TensorParameters()
NO_SENDER = Sender()


@runtime_checkable
class SaysReady(Protocol):
    """A model whose code says whether it is ready."""

    def ask_ready(self) -> "Sequence[Future[bool]]":
        """Start readiness checks, which never fail; the model is ready if all return true."""
        ...


class ModelRequest(Protocol):
    """A request, as seen by its model; its methods may be called in any thread."""

    @property
    def id(self) -> str:
        """Return the client's id; may be empty."""
        ...

    @property
    def inputs(self) -> Mapping[str, Value]:
        """Return the inputs by name; they were checked against `info.inputs`."""
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
        """Return the parameters of single tensors in the request."""
        ...

    @property
    def sender(self) -> Sender:
        """Return the caller."""
        ...

    @property
    def is_cancelled(self) -> bool:
        """Tell whether the request was abandoned."""
        ...

    @property
    def is_writable(self) -> bool:
        """Tell whether the client may be sent another answer (backpressure)."""
        ...

    def begin(self) -> None:
        """Record the time: the model begins to compute."""
        ...

    def charge(self, what: str, size: int) -> None:
        """Charge its client for bytes until it ends; it fails, soon, without memory for them."""
        ...

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Answer with the requested outputs; the last answer ends the request."""
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
        """Announce that the answer follows after this execution."""
        ...

    def end(self) -> None:
        """End the request after all of its answers, possibly none."""
        ...

    def fail(self, error: BaseException, *, whole: bool = False) -> None:
        """End the request with an error.

        `whole` means that the error is of the whole batch: each request without an answer is
        executed again alone.
        """
        ...

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call back once when the client can receive another answer, or has left.

        In any thread, perhaps before this returns.
        """
        ...

    def when_cancelled(self, leave: Callable[[], None]) -> None:
        """Call back once when the request is cancelled, on the event loop; otherwise never.

        Only for who is handed a request, before it returns.
        """
        ...


class UnsentRequest:
    """A request that no client sent (a ModelRequest).

    A warm-up executes one; another tells a model that a sequence has expired.
    """

    id = ""
    is_cancelled = False
    is_writable = True
    tensor_parameters = NO_TENSOR_PARAMETERS
    sender = NO_SENDER
    call = None
    """Calls of other models are part of no client's call."""

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
        """Take callbacks for answers and the error, called in any thread."""
        self.inputs = inputs
        self.outputs = outputs
        self.rows = rows
        self.parameters = parameters
        self._answered = answered
        self._failed = failed
        self.is_late = False
        """Whether the answer may come after the execution."""

    def begin(self) -> None:
        """Do nothing: the start time is not recorded."""

    def charge(self, what: str, size: int) -> None:
        """Do nothing: no client holds it."""

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Pass an answer to the caller, or drop it."""
        if self._answered is not None:
            self._answered(outputs)

    def gathered(self) -> AbstractContextManager[None]:
        """Do nothing: there is no event loop to wake."""
        return nullcontext()

    def again(self) -> None:
        """Do nothing: a single execution suffices."""

    def later(self) -> None:
        """Record that the caller waits for the end."""
        self.is_late = True

    def end(self) -> None:
        """Do nothing: there is no waiting client."""

    def fail(self, error: BaseException, *, whole: bool = False) -> None:
        """Pass the error to the caller."""
        self._failed(error)

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call at once."""
        resume()

    def when_cancelled(self, leave: Callable[[], None]) -> None:
        """Do nothing: it is never cancelled."""


@runtime_checkable
class Handling(Protocol):
    """A model that handles requests in its own threads."""

    @property
    def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    @property
    def replicas(self) -> int:
        """Return the number of copies."""
        ...

    @property
    def concurrency(self) -> int:
        """Return the concurrent executions of each copy: more than 1 for coroutines."""
        ...

    @property
    def is_decoupled(self) -> bool:
        """Tell whether a request may get any number of answers."""
        ...

    @property
    def is_batched(self) -> bool:
        """Tell whether it takes several requests at once."""
        ...

    def handle(
        self,
        replica: int,
        requests: Sequence[ModelRequest],
        freed: Callable[[], None],
        *,
        together: bool = True,
    ) -> None:
        """Pass requests to a copy, for one joint or several single executions; does not wait.

        `freed` is called in any thread when it takes others; each request is answered by then,
        unless the model is decoupled.
        """
        ...


@runtime_checkable
class Slotted(Handling, Protocol):
    """A model with slots for concurrent requests, which schedules them itself.

    It puts all of its answers into one for a request that can be given no more.
    """

    @property
    def ahead(self) -> int:
        """Return how many requests it may queue beyond its slots."""
        ...

    def yields_to(self, level: int) -> bool:
        """Tell whether another request of a priority would preempt one."""
        ...

    def text_bytes(self, inputs: Mapping[str, Value]) -> int:
        """Return the memory of making tokens of a request's text, or 0."""
        ...

    def choose_outputs(
        self, asked: tuple[TensorSpec, ...] | None, *, many: bool
    ) -> tuple[TensorSpec, ...]:
        """Return an answer's outputs: all of them, or the requested ones.

        Raises UnknownTensor for one that such an answer has not.
        """
        ...
