"""Decodes inputs and encodes outputs by content type, for models with `decoded = True`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xlaserve.errors import InvalidParameter, InvalidTensor
from xlaserve.errors.code import WrongOutput
from xlaserve.model_config.fields import CONTENT_TYPE
from xlaserve.python_models.author import Answer
from xlaserve.runtime.handling import ModelRequest, Parameters
from xlaserve.tensors import BYTES, Tensor, TensorDataError, TensorSpec
from xlaserve.tensors.content_types import (
    CONTENT_TYPES,
    DATA_FRAME,
    columns_of,
    data_frame,
    decode,
    encode,
    of_value,
)

_ARRAY = "np"
_SHOWN_CHARACTERS = 80


class Contents:
    """Decodes the inputs of one model, and encodes its outputs.

    The content type of an input is the first of: its parameter `content_type`, the configuration's
    `content_type.<input>`, the request's `content_type`, the configuration's `content_type`, `np`.
    That of an output is the parameter of the requested output, the configuration's
    `content_type.<output>`, or derived from the value.
    """

    def __init__(
        self, model: str, outputs: Sequence[TensorSpec], configured: Mapping[str, str]
    ) -> None:
        """`configured` are the `parameters` of the configuration."""
        self._model = model
        self._specs = {spec.name: spec for spec in outputs}
        self._configured = configured

    def decoded(self, request: ModelRequest, inputs: Mapping[str, Tensor]) -> Any:
        """Return the decoded inputs by name, or a `pandas.DataFrame` if the request's type is `pd`.

        Raises an InvalidRequest that names the tensor.
        """
        of_request = self._of_request(request)
        default = _ARRAY if of_request == DATA_FRAME else of_request
        of_inputs = request.tensor_parameters.inputs
        found = {}
        for name, tensor in inputs.items():
            chosen = self._chosen(of_inputs, name) or default
            try:
                found[name] = decode(tensor, chosen)
            except TensorDataError as error:
                raise InvalidTensor(
                    self._model, "input", name, error.expected, error.got
                ) from error
        if of_request != DATA_FRAME:
            return found
        try:
            return data_frame(found)
        except (TensorDataError, ValueError) as error:
            # The columns have different lengths.
            expected = "columns of equal length, as in a DataFrame"
            raise InvalidParameter(
                CONTENT_TYPE, expected, str(error)[:_SHOWN_CHARACTERS]
            ) from error

    def encoded(self, request: ModelRequest, answer: Answer) -> Answer:
        """Convert the outputs of an answer to tensors, and add their content types as parameters.

        Raises WrongOutput.
        """
        given, parameters = answer.outputs, dict(answer.parameters)
        is_frame = hasattr(given, "columns")
        if is_frame:
            given = self._columns(given)
            parameters = {CONTENT_TYPE: DATA_FRAME, **parameters}
        if not isinstance(given, Mapping):
            return answer  # OutputCheck reports the error
        outputs: dict[str, object] = dict(given)
        of_outputs = {name: dict(one) for name, one in answer.output_parameters.items()}
        for name in request.outputs:
            if name not in outputs:
                continue  # OutputCheck reports the error
            value = given[name]
            kind = self._kind(request, name, value)
            if is_frame and self._specs[name].datatype is BYTES:
                kind = "str"
            outputs[name] = self._written(self._specs[name], value, kind)
            of_outputs[name] = {CONTENT_TYPE: kind, **of_outputs.get(name, {})}
        return Answer(outputs, parameters, of_outputs)

    def _of_request(self, request: ModelRequest) -> str:
        """Return the content type of a whole request; raises InvalidParameter."""
        found = request.parameters.get(CONTENT_TYPE) or self._configured.get(CONTENT_TYPE, _ARRAY)
        if found not in CONTENT_TYPES and found != DATA_FRAME:
            known = ", ".join((*CONTENT_TYPES, DATA_FRAME))
            raise InvalidParameter(CONTENT_TYPE, f"one of {known}", repr(found)[:_SHOWN_CHARACTERS])
        return str(found)

    def _chosen(self, given: Mapping[str, Parameters], tensor: str) -> str:
        """Return a tensor's content type, or an empty string if neither source sets it."""
        found = given[tensor].get(CONTENT_TYPE) if tensor in given else None
        return str(found or self._configured.get(f"{CONTENT_TYPE}.{tensor}", ""))

    def _columns(self, frame: Any) -> dict[str, Tensor]:
        try:
            return columns_of(frame)
        except TensorDataError as error:
            raise WrongOutput(self._model, "", error.expected, error.got) from error

    def _kind(self, request: ModelRequest, output: str, value: object) -> str:
        """Return the content type to encode a value with."""
        of_outputs = request.tensor_parameters.outputs
        if chosen := self._chosen(of_outputs, output):
            return chosen
        is_array = self._specs[output].datatype is not BYTES and not isinstance(value, dict)
        return _ARRAY if is_array else of_value(value)

    def _written(self, spec: TensorSpec, value: object, kind: str) -> object:
        """Encode the value of an output as a tensor; raises WrongOutput."""
        if isinstance(value, np.ndarray):
            return value  # an array needs no encoding
        try:
            tensor = encode(value, kind)
        except TensorDataError as error:
            raise WrongOutput(self._model, spec.name, error.expected, error.got) from error
        # One row per element, as MLServer encodes lists, unless the output has no batch dimension.
        if kind != _ARRAY and len(spec.shape) in (1, 2):
            return tensor.reshape((-1, 1)[: len(spec.shape)])
        return tensor
