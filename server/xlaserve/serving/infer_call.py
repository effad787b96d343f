"""Inference calls, which stations execute alone or in batches."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, Self, TypeAlias

import msgspec

from xlaserve.concurrency.completion import settle
from xlaserve.runtime.handling import NO_TENSOR_PARAMETERS, TensorParameters
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.call import NO_HEADERS, NOBODY, Admission, Call, Headers, Peer
from xlaserve.serving.inference import InferOutput, InferResponse
from xlaserve.serving.stations.sequences.table import Turn
from xlaserve.serving.statistics import VersionStatistics
from xlaserve.tensors import Parameter, Tensor, TensorSpec

Tensors: TypeAlias = Mapping[str, Tensor]
"""Arrays by name."""

ShapeKey: TypeAlias = tuple[tuple[int | str, ...], ...]
"""Properties that calls of one batch share: input sizes except rows, and omitted inputs."""

_NOTHING: Tensors = MappingProxyType({})
_NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})


class Executed(msgspec.Struct, gc=False):
    """Results of one execution, with its begin and end by the engine's clock."""

    outputs: Tensors
    begun_ns: int
    ended_ns: int
    rows: int = 0
    """Rows of all calls of the execution, including cancelled ones."""
    is_counted: bool = False
    """Whether an observer has already counted the execution, with another of its calls."""


class Relayed(msgspec.Struct, gc=False):
    """Outcome of a call answered from another call's execution.

    With a response cache it is a hit or a miss; the execution itself is counted with the other
    call.
    """

    hit_ns: int | None = None
    """Duration of a successful cache lookup."""
    miss_ns: int | None = None
    """Duration of a failed cache lookup plus the insertion of the answer."""


Ended: TypeAlias = Callable[[Executed | BaseException], None]
"""Called on the event loop with the result of an execution, or its error."""

Deliver: TypeAlias = "Callable[[Sequence[InferCall], Executed | BaseException], None]"
"""Answers the calls of one execution, or fails them."""


class Holder(Protocol):
    """A queue or worker that currently has a call."""

    def leave(self, call: "InferCall") -> None:
        """Stop working for an ended call; does nothing for an unknown one."""
        ...


class ServedVersion(Protocol):
    """A model version, as seen by its calls."""

    @property
    def model(self) -> str:
        """Return the name of the model."""
        ...

    @property
    def number(self) -> str:
        """Return the number of the version."""
        ...

    @property
    def admission(self) -> Admission:
        """Return the counter of calls in progress, shared by all versions of the model."""
        ...

    @property
    def statistics(self) -> VersionStatistics:
        """Return the version's statistics."""
        ...


class User(Protocol):
    """A model instance; calls and threads keep it open while they use it."""

    def acquire(self) -> None:
        """Add a user."""
        ...

    def release(self) -> None:
        """Remove a user."""
        ...


class ServedInstance(User, Protocol):
    """A loaded instance, as seen by its calls."""

    @property
    def model(self) -> str:
        """Return the name of the model."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Return the description of the model."""
        ...


Shaping: TypeAlias = Callable[[Call, Sequence[InferOutput]], tuple[InferOutput, ...]]
"""Converts a call's outputs to the requested forms; raises an InvalidRequest."""


class InferCall(Call):
    """An inference. A transport creates it; `Engine.begin` executes it."""

    id = ""
    """Id of the request, repeated in its answers."""
    found: ServedVersion
    """The model version; set with the attributes below when the model is found."""
    instance: ServedInstance
    """The instance that executes the call."""
    inputs: Tensors = _NOTHING
    parameters: Mapping[str, Parameter] = _NO_PARAMETERS
    """Parameters of the request."""
    typed = False
    """Whether the inputs came as typed contents; the answer then has typed contents too."""
    tensor_parameters: TensorParameters = NO_TENSOR_PARAMETERS
    """Parameters of single tensors, for models that accept them."""
    rows = 1
    key: ShapeKey = ()
    is_apart = False
    """Whether to batch this call only with calls of the same client, because batches with calls of
    other clients have failed."""
    chosen: tuple[TensorSpec, ...] | None = None
    """Requested outputs; None for all."""
    shaping: Shaping | None = None
    """Converts outputs to the requested forms; None if they are returned as computed."""
    turn: Turn | None = None
    """Position in the sequence; None for models without sequences."""
    resident = False
    """Whether inputs may be device arrays and outputs may stay on the device: set for ensemble
    steps that run unbatched.
    """
    is_volatile = False
    """Whether the client can change the inputs during execution: they are in shared memory."""
    read_from: Sequence[object] = ()
    """Shared memory regions of the inputs, in use until the call ends. Their contents may differ
    between equal messages.
    """
    takes_many = False
    """Whether the client accepts several answers."""
    wants_whole = False
    """Whether the client wants one answer from a decoupled model that can merge its answers."""
    started_ns = 0
    """Time at which the call's model was found, by the engine's clock."""
    submitted_ns = 0
    """Time at which the call's inputs were ready for execution, by the engine's clock."""
    executed: Executed | None = None
    """The execution that produced the answer, with its times."""
    kept: object | None = None
    """The response-cache entry whose outputs are the answer, unconverted."""
    on_begun: Callable[[], object] | None = None
    """Called when the call leaves its queue for execution, perhaps on a thread and more than once.
    A retry needs it: a lost call that had begun may have been executed.
    """
    place: Holder | None = None
    """The queue or worker that has the call; None before and after."""
    nested: "set[InferCall] | None" = None
    """Unfinished nested calls, made by its Python model or ensemble; None before the first."""
    is_counted_elsewhere = False
    """Whether the process that executes the call counts it in its statistics."""
    is_counted = False
    """Whether the call is counted as a call in progress and as a user of its instance."""

    def wait_at(self, place: Holder) -> None:
        """Record the queue or worker that has the call, which the call leaves when it ends."""
        self.place = place
        self.holds_anything = True

    def count(self) -> None:
        """Count the call as in progress until it ends, since it was not answered immediately."""
        self.is_counted = self.holds_anything = True
        self.found.admission.in_progress += 1
        self.instance.acquire()

    def release(self) -> None:
        """Remove the call from `place`, where it waits, and from the requests in progress."""
        place = self.place
        if place is not None:
            self.place = None
            place.leave(self)
        if self.is_counted:
            self.is_counted = False
            self.found.admission.in_progress -= 1
            self.instance.release()
        if self._holds is not None or self._timer is not None or self.on_writable is not None:
            super().release()


class AwaitedInfer(InferCall):
    """An inference with one answer, awaited by a coroutine."""

    def __init__(
        self,
        headers: Headers = NO_HEADERS,
        peer: Peer = NOBODY,
        deadline: float | None = None,
        *,
        parent: Call | None = None,
    ) -> None:
        self.headers = headers
        self.peer = peer
        self.deadline = deadline
        self.parent = parent
        self._answer: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    @property
    def is_new(self) -> bool:
        """Tell whether the call is unused."""
        return not (self.is_found or self.has_ended)

    @classmethod
    def within(cls, parent: Call | None) -> Self:
        """Return a nested call with its parent's client; without a parent it has no client."""
        if parent is None:
            return cls()
        call = cls(parent.headers, parent.peer, parent.deadline, parent=parent)
        call.principal, call.client = parent.principal, parent.client
        return call

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Pass the answer to the awaiting coroutine."""
        settle(self._answer, response)

    def refuse(self, error: BaseException) -> None:
        """Raise the error in the awaiting coroutine."""
        settle(self._answer, error)

    async def answered(self) -> InferResponse:
        """Return the answer or raise its error; cancelling this coroutine cancels the call."""
        try:
            return await self._answer
        finally:
            self.cancel("no caller is waiting for the answer")
