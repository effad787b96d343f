"""The interface of a client of a V2 server, over gRPC or REST."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeAlias

from xlaserve.errors import XlaserveError
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.tensors import Datatype, Parameter, Tensor, TensorSpec, datatype_of


class CallFailed(XlaserveError):
    """The server answered with an error, or could not be reached."""

    def __init__(self, url: str, problem: str, status: str = "") -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url
        self.problem = problem
        self.status = status
        """Name of the gRPC status, or of the equivalent of an HTTP status; empty for none."""


class NotReached(CallFailed):
    """Nothing that speaks the protocol of the URL answers there."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The result of one inference."""

    model: str
    version: str
    outputs: Mapping[str, Tensor]
    datatypes: Mapping[str, Datatype]
    seconds: float
    """Seconds from sending the request to its answer."""
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the answer."""
    output_parameters: Mapping[str, Mapping[str, Parameter]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Parameters by output, if any."""


def asked(model: str, version: str, inputs: Sequence[tuple[TensorSpec, Tensor]]) -> InferRequest:
    """Return the request for an inference of arrays; without a datatype, one has its input's."""
    return InferRequest(
        model,
        version,
        inputs=tuple(
            InferInput(spec.name, datatype_of(array.dtype) or spec.datatype, array)
            for spec, array in inputs
        ),
    )


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model, as its metadata has them."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    labelled: frozenset[str] = frozenset()
    """Outputs whose classes have labels that the server knows."""


Json: TypeAlias = dict[str, Any]
"""An answer as proto-JSON, with the protocol's names; default values may be absent."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One version of a model in the index of a server (model repository extension)."""

    name: str
    version: str = ""
    state: str = ""
    """READY, LOADING, UNLOADING, UNAVAILABLE; empty for a model that was never loaded."""
    reason: str = ""


LABELS = "labels"
"""Metadata parameter of an output with its labels."""


class MemoryClient(Protocol):
    """Has a server know shared memory of this machine (system shared memory extension)."""

    async def register(self, name: str, key: str, size: int) -> None:
        """Register shared memory under a name."""
        ...

    async def unregister(self, name: str) -> None:
        """Unregister a region; an unknown one is no error."""
        ...

    async def knows(self, name: str) -> bool:
        """Tell whether the server knows shared memory of a name."""
        ...


class ServerClient(Protocol):
    """Speaks to one server; an asynchronous context manager that raises CallFailed."""

    @property
    def memory(self) -> MemoryClient:
        """Return the interface for registering shared memory."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None: ...

    async def live(self) -> bool:
        """Tell whether the server is live (V2 protocol, Health)."""
        ...

    async def ready(self) -> bool:
        """Tell whether the server is ready (V2 protocol, Health)."""
        ...

    async def inputs(self, model: str, version: str = "") -> list[TensorSpec]:
        """Return the inputs of a model (V2 protocol, Model Metadata)."""
        ...

    async def tensors(self, model: str, version: str = "") -> ModelTensors:
        """Return the inputs and outputs of a model (V2 protocol, Model Metadata)."""
        ...

    async def infer(
        self, model: str, version: str, inputs: Sequence[tuple[TensorSpec, Tensor]]
    ) -> InferenceResult:
        """Run one inference (V2 protocol, Inference)."""
        ...

    async def ask(self, request: InferRequest, timeout: float | None = None) -> InferenceResult:
        """Run one inference; `timeout` overrides the client's."""
        ...

    def stream(
        self, request: InferRequest, timeout: float
    ) -> AsyncGenerator[InferenceResult, None]:
        """Yield the answers to one request, as they come; `timeout` is for all of them."""
        ...

    async def describe(self, model: str, version: str = "") -> Json:
        """Return the metadata of a model (V2 protocol, Model Metadata)."""
        ...

    async def index(self) -> list[IndexEntry]:
        """Return the models that are, or could be, loaded (model repository extension)."""
        ...

    async def configuration(self, model: str, version: str = "") -> Json:
        """Return the configuration of a model (model configuration extension)."""
        ...

    async def statistics(self, model: str = "", version: str = "") -> list[Json]:
        """Return the statistics of a model, or of all (statistics extension)."""
        ...

    async def load(self, model: str, config: str = "") -> None:
        """Load or reload a model, with a configuration in JSON instead of its own if given."""
        ...

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Unload a model, and with `dependents` its steps too."""
        ...

    def failure(self, error: BaseException | None) -> CallFailed | None:
        """Return the error to raise for one of the connection or of the server; None for others."""
        ...
