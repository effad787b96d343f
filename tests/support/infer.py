"""Compares two ways of decoding ModelInfer requests."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from xlaserve.errors import XlaserveError
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.infer.infer_codec import DecodedInfer, InferCodec
from xlaserve.grpc.infer.infer_decoder import InferDecoder
from xlaserve.grpc.infer.tensors import read_request
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve_proto.inference import ModelInferRequest

Outcome: TypeAlias = tuple[Any, ...]
"""The step that failed, with its error; or the complete content of the request."""
Read: TypeAlias = Callable[[bytes | memoryview], tuple[str, str, Callable[[], InferRequest]]]


def generically(codec: WireCodec) -> Read:
    """Decode through the message classes."""

    def read(data: bytes | memoryview) -> tuple[str, str, Callable[[], InferRequest]]:
        message = codec.decode_message(ModelInferRequest, data)
        return message.model_name, message.model_version, lambda: read_request(message)

    return read


def directly(codec: InferCodec | InferDecoder) -> Read:
    """Decode as the fast path does, checking its shortcut against the full decoder."""

    def read(data: bytes | memoryview) -> tuple[str, str, Callable[[], InferRequest]]:
        recognised = codec.recognise(data)
        decoded: DecodedInfer = codec.decode(data)
        if recognised is not None:
            assert described(recognised) == described(decoded.request())
            return recognised.model_name, recognised.model_version, lambda: recognised
        return decoded.model_name, decoded.model_version, decoded.request

    return read


def outcome(read: Read, data: bytes | memoryview) -> Outcome:
    """Decode a request and describe the result."""
    try:
        name, version, request = read(data)
    except (MalformedMessage, TooManyFields) as error:
        return "structure", type(error), str(error)
    try:
        return name, version, described(request())
    except XlaserveError as error:
        return name, version, "tensors", type(error), str(error)


def described(request: InferRequest) -> Outcome:
    """Return all fields of a request, with types, in a comparable form."""
    return (
        request.model_name,
        request.model_version,
        request.id,
        tuple(map(_input, request.inputs)),
        tuple((output.name, _parameters(output.parameters)) for output in request.outputs),
        _parameters(request.parameters),
        request.typed,
    )


def _input(tensor: InferInput) -> Outcome:
    data = tensor.data
    shape = tuple(map(type, data.shape)), data.shape
    elements = _elements(data)
    return tensor.name, tensor.datatype, data.dtype, shape, elements, _parameters(tensor.parameters)


def _elements(data: Any) -> Any:
    """Return the elements in a comparable form, ignoring NaN bits: Python quiets NaNs."""
    if data.dtype == np.object_:
        return [(type(element), element) for element in data.ravel()]
    if data.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):  # on some processors, signalling NaNs warn
            nan = np.isnan(data)
        return nan.tobytes(), np.where(nan, np.zeros_like(data), data).tobytes()
    return data.tobytes()


def _parameters(parameters: Any) -> list[Outcome]:
    # repr, since NaN is not equal to itself.
    return [(name, type(value), repr(value)) for name, value in parameters.items()]
