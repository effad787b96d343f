"""The interface of a client of a V2 server, over gRPC or REST."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from xlaserve.core.serving.inference import InferInput, InferRequest
from xlaserve.errors import XlaserveError
from xlaserve.tensors import Datatype, Parameter, Tensor, TensorSpec, datatype_of


class CallFailed(XlaserveError):
    """The server answered with an error, or could not be reached."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")


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
    """Parameters of its outputs, by output; only of those that have any."""


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


LABELS = "labels"
"""The parameter of an output's metadata that has the labels of its classes."""


class ServerClient(Protocol):
    """Speaks to one server; an asynchronous context manager that raises CallFailed."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
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

    async def ask(self, request: InferRequest) -> InferenceResult:
        """Run one inference, with all that its request says."""
        ...

    def failure(self, error: BaseException | None) -> CallFailed | None:
        """Return the error to raise for one of the connection or of the server; None for others."""
        ...
