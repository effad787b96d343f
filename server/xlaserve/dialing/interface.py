"""The common interface of the gRPC and REST clients of V2 servers."""

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
        """Name of the gRPC status, or of the HTTP status's equivalent; empty if there is none."""


class NotReached(CallFailed):
    """The connection failed, or the peer does not speak the protocol of the URL."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The result of one inference."""

    model: str
    version: str
    outputs: Mapping[str, Tensor]
    datatypes: Mapping[str, Datatype]
    seconds: float
    """Seconds between sending the request and receiving its response."""
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    """Parameters of the response."""
    output_parameters: Mapping[str, Mapping[str, Parameter]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Output name -> parameters, for outputs that have any."""


def asked(model: str, version: str, inputs: Sequence[tuple[TensorSpec, Tensor]]) -> InferRequest:
    """Build an inference request from arrays.

    If an array's dtype has no datatype, as for objects, the input's datatype is used.
    """
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
    """The inputs and outputs of a model, from its metadata."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    labelled: frozenset[str] = frozenset()
    """Names of the classification outputs for which the server has labels."""


Json: TypeAlias = dict[str, Any]
"""A response in protobuf's JSON mapping, with the field names of the protocol; defaults may be
absent."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One version of a model in the index of a server (model repository extension)."""

    name: str
    version: str = ""
    state: str = ""
    """READY, LOADING, UNLOADING or UNAVAILABLE; empty for a model that was never loaded."""
    reason: str = ""


LABELS = "labels"
"""Metadata parameter that holds an output's labels."""


class MemoryClient(Protocol):
    """Registers shared memory of this machine with a server (system shared memory extension)."""

    async def register(self, name: str, key: str, size: int) -> None:
        """Register the shared memory object `key` under a name."""
        ...

    async def unregister(self, name: str) -> None:
        """Unregister a region; an unknown name is not an error."""
        ...

    async def knows(self, name: str) -> bool:
        """Tell whether the server has a region registered under a name."""
        ...


class ServerClient(Protocol):
    """Client of one server; an asynchronous context manager that raises CallFailed."""

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
        """Yield the responses to one request as they arrive; `timeout` limits the whole request."""
        ...

    async def describe(self, model: str, version: str = "") -> Json:
        """Return the metadata of a model (V2 protocol, Model Metadata)."""
        ...

    async def index(self) -> list[IndexEntry]:
        """Return the loaded and loadable models (model repository extension)."""
        ...

    async def configuration(self, model: str, version: str = "") -> Json:
        """Return the configuration of a model (model configuration extension)."""
        ...

    async def statistics(self, model: str = "", version: str = "") -> list[Json]:
        """Return the statistics of one model or all models (statistics extension)."""
        ...

    async def load(self, model: str, config: str = "") -> None:
        """Load or reload a model; `config` is a JSON configuration to use instead of its own."""
        ...

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Unload a model; with `dependents`, also the steps of an ensemble."""
        ...

    def failure(self, error: BaseException | None) -> CallFailed | None:
        """Return the CallFailed for a connection or server error; None for other errors."""
        ...
