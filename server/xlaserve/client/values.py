"""Encodes values in requests and decodes them in answers, by content type."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from xlaserve.dialing.interface import InferenceResult
from xlaserve.errors import InvalidRequest
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.tensors import BYTES, Parameter, Tensor, TensorDataError, datatype_of
from xlaserve.tensors.client_trees import flattened, nested
from xlaserve.tensors.content_types import (
    CONTENT_TYPES,
    DATA_FRAME,
    columns_of,
    decode_all,
    encode,
    of_value,
)

_CONTENT_TYPE = "content_type"
NO_TEXTS: Mapping[str, str] = MappingProxyType({})
NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})

Wanted: TypeAlias = Sequence[str] | Mapping[str, str]
"""Names of the requested outputs, or a map from names to content types; empty for all outputs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one inference; `answer["y"]` is the value of output y."""

    model: str
    version: str
    id: str
    value: Any = field(repr=False)
    """Output name -> decoded value, or a `pandas.DataFrame`."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """Output name -> array as received."""
    parameters: Mapping[str, Parameter]
    output_parameters: Mapping[str, Mapping[str, Parameter]]
    """Output name -> parameters, for outputs that have any."""

    @property
    def tree(self) -> dict[str, Any]:
        """Return the outputs as a tree, with names such as `sum.all` and `each.0` as paths."""
        return nested({name: self.value[name] for name in self.tensors})

    def __getitem__(self, output: str) -> Any:
        return self.value[output]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


def request(
    model: str,
    inputs: Any,
    *,
    version: str = "",
    outputs: Wanted = (),
    content_type: str = "",
    content_types: Mapping[str, str] = NO_TEXTS,
    id: str = "",
    parameters: Mapping[str, Parameter] = NO_PARAMETERS,
) -> InferRequest:
    """Build the request that `infer` sends; raise InvalidRequest, naming the tensor, on errors."""
    own = dict(parameters)
    is_frame = hasattr(inputs, "columns")
    if is_frame or content_type:
        own[_CONTENT_TYPE] = DATA_FRAME if is_frame else content_type
    try:
        values: Mapping[str, Any] = columns_of(inputs) if is_frame else flattened(model, inputs)
    except TensorDataError as error:
        raise InvalidRequest(f"model '{model}': {error}") from error
    wanted = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs, "")
    return InferRequest(
        model,
        version,
        id,
        tuple(
            _input(model, name, value, content_types.get(name, content_type), in_frame=is_frame)
            for name, value in values.items()
        ),
        tuple(
            RequestedOutput(name, {_CONTENT_TYPE: kind} if kind else {})
            for name, kind in wanted.items()
        ),
        own,
    )


def _input(model: str, name: str, value: Any, kind: str, *, in_frame: bool) -> InferInput:
    try:
        if in_frame:
            # As in MLServer, only string columns have a content type.
            of_tensor = {_CONTENT_TYPE: "str"} if value.dtype.hasobject else {}
            return _tensor(model, name, value, of_tensor)
        kind = kind if kind and kind != DATA_FRAME else of_value(value)
        tensor = value if isinstance(value, np.ndarray) else encode(value, kind)
    except TensorDataError as error:
        raise InvalidRequest(f"model '{model}', input '{name}': {error}") from error
    return _tensor(model, name, tensor, {_CONTENT_TYPE: kind})


def _tensor(
    model: str, name: str, tensor: Tensor, parameters: Mapping[str, Parameter]
) -> InferInput:
    if tensor.dtype.kind in "SU":
        tensor = tensor.astype(np.object_)
    datatype = BYTES if tensor.dtype.hasobject else datatype_of(tensor.dtype)
    if datatype is None:
        expected = "an array of a datatype of the protocol"
        raise InvalidRequest(
            f"model '{model}', input '{name}': expected {expected}, got {tensor.dtype}"
        )
    return InferInput(name, datatype, tensor, parameters)


def answer_of(result: InferenceResult) -> Answer:
    """Decode a response by its content types; raise ValueError if they do not match the data."""
    content_types = {
        name: str(one.get(_CONTENT_TYPE)) for name, one in result.output_parameters.items()
    }
    kinds = {name: kind for name, kind in content_types.items() if kind in CONTENT_TYPES}
    of_answer = DATA_FRAME if result.parameters.get(_CONTENT_TYPE) == DATA_FRAME else ""
    return Answer(
        result.model,
        result.version,
        result.id,
        decode_all(result.outputs, kinds, of_answer),
        result.outputs,
        result.parameters,
        result.output_parameters,
    )
