"""One inference as the core sees it: a request and its response, in numpy.

Nobody changes them once they are made. Several are made for every request, so they are structs of
msgspec: a dataclass takes three times as long to make, a frozen one nine times.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from xlaserve.tensors import Datatype, Parameter, Shape, Tensor, TensorSpec


# None of them can be part of a cycle: the garbage collector need not look at them.
class InferInput(msgspec.Struct, gc=False):
    """One input tensor; `data` has the shape and the datatype that the client gave."""

    name: str
    datatype: Datatype
    data: Tensor
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class SharedInput(InferInput, gc=False):
    """One input whose elements are in shared memory, as its parameters say; `data` is empty."""

    shape: Shape = ()


class RequestedOutput(msgspec.Struct, gc=False):
    """One output that the client asks for."""

    name: str
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class Form:
    """Everything of a request but its id and the elements of its inputs; nobody changes it.

    Requests that a transport reads as one form share this object.
    """

    __slots__ = ("accepted_by", "checked_by", "chosen", "rows")

    def __init__(self) -> None:
        self.accepted_by: object = None
        """The last check that accepted the form; it accepts the form again."""
        self.rows = 0
        """Rows that it has found."""
        self.checked_by: object = None
        """The check of a model that every rule was applied for last, and found nothing wrong."""
        self.chosen: tuple[TensorSpec, ...] | None = None
        """The outputs that it has found to be asked for; None for all."""


class InferRequest(msgspec.Struct, gc=False):
    """A ModelInfer request (V2 protocol, Inference)."""

    model_name: str
    model_version: str = ""
    id: str = ""
    inputs: tuple[InferInput, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty for all outputs of the model, in its order."""
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)
    form: Form | None = None
    """None if no other request of the same form is known."""
    typed: bool = False
    """Whether the inputs came as typed contents, so that the answer has them too."""


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
    """An output with its elements in shared memory; `data` gives its shape."""


class DetailedResponse(InferResponse, gc=False):
    """An answer with parameters, or with a PlacedOutput."""

    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)
    output_parameters: Mapping[str, Mapping[str, Parameter]] = msgspec.field(default_factory=dict)
    """By output; those of absent outputs are ignored."""


class Pending(Protocol):
    """An unanswered request."""

    def cancel(self) -> None:
        """Abandon the request: no observer is called. Does nothing once it is answered."""
        ...
