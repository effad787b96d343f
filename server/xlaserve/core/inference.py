"""One inference as the core sees it: a request and its response, in numpy.

Nobody changes them once they are made. They are not frozen because some are made for every
request, and the frozen ones take three times as long to make.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from xlaserve.tensors import Datatype, Tensor

Parameter: TypeAlias = bool | int | float | str
"""A value of a parameter map of the V2 protocol."""


@dataclass(slots=True)
class InferInput:
    """One input tensor; `data` has the shape and the datatype that the client gave."""

    name: str
    datatype: Datatype
    data: Tensor
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class RequestedOutput:
    """One output that the client asks for."""

    name: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class InferRequest:
    """A ModelInfer request (V2 protocol, Inference)."""

    model_name: str
    model_version: str = ""
    id: str = ""
    inputs: tuple[InferInput, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty for all outputs of the model, in its order."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class InferOutput:
    """One output tensor."""

    name: str
    datatype: Datatype
    data: Tensor


@dataclass(slots=True)
class InferResponse:
    """What answers an InferRequest; `model_version` is the version that computed it."""

    model_name: str
    model_version: str
    id: str
    outputs: tuple[InferOutput, ...]
