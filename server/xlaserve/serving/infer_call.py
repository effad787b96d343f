"""Inferences: calls that stations execute, alone or in batches."""

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
"""Traits that calls of a batch share: sizes of inputs but the rows, and inputs left out."""

_NOTHING: Tensors = MappingProxyType({})
_NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})


class Executed(msgspec.Struct, gc=False):
    """Results of one execution, and its times by the clock."""

    outputs: Tensors
    begun_ns: int
    ended_ns: int
    rows: int = 0
    """Rows of all its calls, cancelled ones included."""
    is_counted: bool = False
    """Whether an observer has counted it, with some of its calls; others may be told later."""


class Relayed(msgspec.Struct, gc=False):
    """The outcome of a call that was answered from the execution of another one.

    With a response cache it is a hit or a miss; the execution itself is counted where it was.
    """

    hit_ns: int | None = None
    """How long the answer was looked for."""
    miss_ns: int | None = None
    """Time of the failed lookup, plus that of storing the answer."""


Ended: TypeAlias = Callable[[Executed | BaseException], None]
"""Called on the event loop with the result of an execution, or its error."""

Deliver: TypeAlias = "Callable[[Sequence[InferCall], Executed | BaseException], None]"
"""Answers calls that were executed together, or fails them."""


class Place(Protocol):
    """A queue or worker holding a call."""

    def leave(self, call: "InferCall") -> None:
        """Stop working for an ended call; does nothing for an unknown one."""
        ...


class ServedVersion(Protocol):
    """A model version, as its calls know it."""

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
        """Return the count of the calls in progress, of all versions of the model."""
        ...

    @property
    def statistics(self) -> VersionStatistics:
        """Return the counters of its calls."""
        ...


class User(Protocol):
    """An instance of a model that calls and threads use, and keep from being closed."""

    def acquire(self) -> None:
        """Count one user more."""
        ...

    def release(self) -> None:
        """Count one user less."""
        ...


class ServedInstance(User, Protocol):
    """A loaded instance, as its calls know it."""

    @property
    def model(self) -> str:
        """Return the name of the model."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Describe the model."""
        ...


Shaping: TypeAlias = Callable[[Sequence[InferOutput]], tuple[InferOutput, ...]]
"""Puts outputs into the forms that a request asks for; raises an InvalidRequest."""


class InferCall(Call):
    """An inference. A transport makes it, `Engine.begin` has it executed."""

    id = ""
    """Id of the request and of its answers."""
    found: ServedVersion
    """The version that answers; set with the following when the model is found."""
    instance: ServedInstance
    """Instance that executes it."""
    inputs: Tensors = _NOTHING
    parameters: Mapping[str, Parameter] = _NO_PARAMETERS
    """Parameters of the request."""
    typed = False
    """Whether its inputs came as typed contents, so that its answer has them too."""
    tensor_parameters: TensorParameters = NO_TENSOR_PARAMETERS
    """Parameters of its tensors, for models that take them."""
    rows = 1
    key: ShapeKey = ()
    is_apart = False
    """Whether it is batched only with its own client's requests, after failing those of others."""
    chosen: tuple[TensorSpec, ...] | None = None
    """Requested outputs; None for all."""
    shaping: Shaping | None = None
    """Converts outputs to the requested forms; None if they are returned as computed."""
    turn: Turn | None = None
    """Its place in its sequence; None for models without sequences."""
    resident = False
    """Whether inputs may be on a device, and outputs may stay there: it is a step of an ensemble,
    executed by itself."""
    is_volatile = False
    """Whether a client can change the inputs meanwhile: they are in shared memory."""
    reads_memory = False
    """Whether its message does not hold all of its inputs: equal ones need not ask the same."""
    takes_many = False
    """Whether the client accepts several answers."""
    wants_whole = False
    """Whether it still wants a single one, from a model that can merge its answers."""
    started_ns = 0
    """Time its model was found, by the clock of the engine."""
    submitted_ns = 0
    """When its inputs became ready for execution."""
    executed: Executed | None = None
    """The execution of its answer, with its times."""
    kept: object | None = None
    """The entry of the response cache whose outputs are its answer, as they are."""
    on_begun: Callable[[], object] | None = None
    """Told when a call leaves its queue for an execution, perhaps in a thread, and perhaps again;
    set by who has to know whether one that was lost may have been executed."""
    place: Place | None = None
    """None before it waits, and after its work is done."""
    nested: "set[InferCall] | None" = None
    """Unfinished calls of its Python model, or of its steps; None before the first."""
    is_counted_elsewhere = False
    """Whether the process that executes it counts its statistics."""
    is_counted = False
    """Whether it is counted as a call in progress and as a user of its instance."""

    def wait_at(self, place: Place) -> None:
        """Leave `place` when the call ends, unless it left before."""
        self.place = place
        self.holds_anything = True

    def count(self) -> None:
        """Count as a call in progress until it ends: it was not answered at once."""
        self.is_counted = self.holds_anything = True
        self.found.admission.in_progress += 1
        self.instance.acquire()

    def release(self) -> None:
        """Leave `place`, and count no more."""
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
    """An inference whose one answer a coroutine awaits."""

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
        """Return a nested call, with its parent's client."""
        if parent is None:
            return cls()
        call = cls(parent.headers, parent.peer, parent.deadline, parent=parent)
        call.principal, call.client = parent.principal, parent.client
        return call

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Hand the answer to its awaiter."""
        settle(self._answer, response)

    def refuse(self, error: BaseException) -> None:
        """Raise an error in the awaiter of the answer."""
        settle(self._answer, error)

    async def answered(self) -> InferResponse:
        """Return the answer or raise its error; cancelling the wait cancels the call."""
        try:
            return await self._answer
        finally:
            self.cancel("no caller is waiting for the answer")
