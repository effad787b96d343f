"""Inference requests and responses as numpy arrays, independent of any protocol.

Immutable by convention. Several are created per request, so they are msgspec structs: creating
a dataclass takes three times as long, a frozen one nine times.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from xlaserve.tensors import Datatype, Parameter, Shape, Tensor, TensorSpec


# gc=False: none of them can be part of a reference cycle.
class InferInput(msgspec.Struct, gc=False):
    """One input tensor; `data` has the client's shape and datatype."""

    name: str
    datatype: Datatype
    data: Tensor
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class SharedInput(InferInput, gc=False):
    """An input in shared memory, located by its parameters; `data` is empty."""

    shape: Shape = ()


class RequestedOutput(msgspec.Struct, gc=False):
    """An output that the client requests."""

    name: str
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class Form:
    """Everything in a request except its id and its input elements; immutable by convention.

    Requests that a transport parses to the same form share this object.
    """

    __slots__ = ("accepted_by", "checked_by", "chosen", "rows")

    def __init__(self) -> None:
        self.accepted_by: object = None
        """The last `QuickCheck` that accepted the form; it accepts the form again without
        checking.
        """
        self.rows = 0
        """Row count found by that check."""
        self.checked_by: object = None
        """The `QuickCheck` of the model for which the form last passed the complete checks."""
        self.chosen: tuple[TensorSpec, ...] | None = None
        """Outputs that those checks selected; None for all."""


class InferRequest(msgspec.Struct, gc=False):
    """A ModelInfer request (V2 protocol, Inference)."""

    model_name: str
    model_version: str = ""
    id: str = ""
    inputs: tuple[InferInput, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    """Requested outputs; empty for all outputs of the model, in its order."""
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)
    form: Form | None = None
    """Shared form; None if no other request of this form is known."""
    typed: bool = False
    """Whether the inputs came as typed contents; the answer then has typed contents too."""


class InferOutput(msgspec.Struct, gc=False):
    """One output tensor."""

    name: str
    datatype: Datatype
    data: Tensor


class InferResponse(msgspec.Struct, gc=False):
    """An answer to an InferRequest; `model_version` is the version that computed it."""

    model_name: str
    model_version: str
    id: str
    outputs: tuple[InferOutput, ...]


class PlacedOutput(InferOutput, gc=False):
    """An output in shared memory; `data` only gives its shape."""


class DetailedResponse(InferResponse, gc=False):
    """An answer that has parameters or a PlacedOutput."""

    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)
    output_parameters: Mapping[str, Mapping[str, Parameter]] = msgspec.field(default_factory=dict)
    """Parameters by output name; names of absent outputs are ignored."""


class Pending(Protocol):
    """An unanswered request."""

    def cancel(self) -> None:
        """Abandon the request without notifying observers. Does nothing once it is answered."""
        ...
