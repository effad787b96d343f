"""Decoding of inference requests: JSON, optionally followed by binary tensors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from xlaserve.errors import InvalidBody, InvalidParameter, InvalidRequest, InvalidTensor
from xlaserve.http.json.json_tensors import few_floats, quote_not_finite, read_elements
from xlaserve.http.json.json_text import (
    MOST_ARRAYS,
    check_depth,
    check_elements_around_data,
    check_members,
)
from xlaserve.http.json.large_arrays import LARGE_BYTES, Cut, cut_arrays
from xlaserve.http.v2.raw_request import read_raw_request
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput, SharedInput
from xlaserve.serving.inputs.images import unpack_bytes_or_image
from xlaserve.tensors import (
    BYTES,
    DATATYPES,
    Datatype,
    Parameter,
    Shape,
    Tensor,
    TensorDataError,
    datatype_named,
    element_count,
    from_bytes,
)

BINARY_OUTPUT = "binary_data_output"
"""Request parameter for the default form of outputs, binary or JSON."""

BINARY_DATA = "binary_data"
"""Parameter of a requested output: whether it is returned as binary."""

_BINARY_SIZE = "binary_data_size"
_SHARED_MEMORY = "shared_memory_region"

_SHOWN_CHARACTERS = 80
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_INT64 = range(-(2**63), 2**63)
_OF_64_BITS = range(-(2**63), 2**64)
"""Range of integer parameters: signed or unsigned 64 bits."""

_NAMES = {type(None): "null", dict: "an object", list: "an array"}

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=_INT64.start, le=_INT64.stop - 1)]
_Parameters: TypeAlias = dict[str, Any] | None


class _Input(msgspec.Struct):
    name: str
    shape: tuple[_Size, ...]
    datatype: str
    parameters: _Parameters = None
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters = None


class _Request(msgspec.Struct):
    """Unknown keys are ignored, as is `model_name`: the path names the model."""

    inputs: list[_Input]
    id: str | None = None
    parameters: _Parameters = None
    outputs: list[_Output] | None = None


_DECODER = msgspec.json.Decoder(_Request)


class _ShortInput(msgspec.Struct):
    name: str
    shape: tuple[_Size, ...]
    datatype: str
    data: list[float]
    parameters: _Parameters = None


class _ShortRequest(msgspec.Struct):
    """A `_Request` whose tensors are flat lists of numbers, without requested outputs."""

    inputs: list[_ShortInput]
    id: str | None = None
    parameters: _Parameters = None
    outputs: None = None


_SHORT_DECODER = msgspec.json.Decoder(_ShortRequest)
_SHORT_BYTES = 1 << 12
_LEVELS_AROUND_DATA = 3
"""Nesting level of an input's data in a request."""


def read_header_length(text: str | None) -> int | None:
    """Return the value of the Inference-Header-Content-Length header, or None if it is absent.

    Raises InvalidBody unless the value is a few decimal digits (binary tensor data extension).
    """
    if text is None:
        return None
    if not _DIGITS.fullmatch(text):
        shown = text[:_SHOWN_CHARACTERS]
        raise InvalidBody(f"expected Inference-Header-Content-Length in digits, got {shown!r}")
    return int(text)


def read_infer_request(
    info: ModelInfo,
    model: str,
    version: str,
    body: memoryview,
    header_length: int | None,
    *,
    max_depth: int,
) -> InferRequest:
    """Decode an inference request (V2 protocol, Inference; binary tensor data extension).

    `header_length` is the number of bytes of JSON, which binary tensors follow in the order of
    their inputs. None means that the whole body is JSON, 0 that the whole body is one tensor.
    Binary tensors are views of the body. The last of duplicate keys counts; null counts as absent.
    Raises only InvalidRequest and its subclasses, such as InvalidBody and InvalidTensor.
    """
    if header_length is None and len(body) <= _SHORT_BYTES:
        short = _read_short(info, model, version, bytes(body), max_depth)
        if short is not None:
            return short
    if header_length == 0:
        return read_raw_request(info, model, version, body)
    length = len(body) if header_length is None else header_length
    if not 0 < length <= len(body):
        raise InvalidBody(
            f"expected JSON of {length} bytes (Inference-Header-Content-Length), "
            f"got {len(body)} bytes in all"
            if header_length is not None
            else "expected a JSON object, got an empty body"
        )
    text = body[:length]
    tail = None if header_length is None else body[length:]
    if length > LARGE_BYTES:
        large = _read_large(_Reader(info, model, version, _behind(tail)), text, max_depth)
        if large is not None:
            return large
    check_depth(text, max_depth)
    check_members(text)
    if length > MOST_ARRAYS:
        check_elements_around_data(text)
    reader = _Reader(info, model, version, _behind(tail))
    try:
        message = _decode(text)
    except InvalidBody:
        # A NaN in a tensor may be the cause: quote it, so that the reader's error names the tensor.
        finite = quote_not_finite(bytes(text))
        if finite is not None:
            reader.read(_decode(finite))
        raise
    return reader.read(message)


def _read_short(
    info: ModelInfo, model: str, version: str, text: bytes, max_depth: int
) -> InferRequest | None:
    """Decode a short, regular request of floats; return None for any other."""
    if text.count(b"[") + text.count(b"{") > max_depth:
        return None
    try:
        message = _SHORT_DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    inputs = message.inputs
    if message.parameters or len(inputs) > len(info.inputs):
        return None
    read = []
    for tensor in inputs:
        data = few_floats(tensor.datatype, tensor.shape, tensor.data)
        if data is None or tensor.parameters:
            return None
        read.append(InferInput(tensor.name, DATATYPES[tensor.datatype], data))
    return InferRequest(model, version, message.id or "", tuple(read))


def _read_large(reader: "_Reader", text: memoryview, max_depth: int) -> InferRequest | None:
    """Decode a request whose large arrays are plain lists of numbers; return None for any other."""
    cut = cut_arrays(text)
    if cut is None:
        return None
    reader.cut, reader.max_levels = cut, max_depth - _LEVELS_AROUND_DATA
    try:
        check_depth(cut.document, max_depth)
        check_members(cut.document)
        check_elements_around_data(cut.document)
        request = reader.read(_decode(cut.document))
    except InvalidRequest:
        return None
    # A remaining array was not read, and therefore not validated.
    return None if cut.arrays else request


def _decode(text: memoryview | bytes) -> _Request:
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(
            f"expected an inference request in {len(text)} bytes of JSON: {error}"
        ) from error
    except RecursionError:
        raise InvalidBody("the JSON is nested too deeply") from None


def _behind(tail: memoryview | None) -> "_Tail | None":
    return None if tail is None else _Tail(tail)


@dataclass(slots=True)
class _Tail:
    """Unread binary tensors after the JSON."""

    left: memoryview

    def take(self, size: int) -> memoryview:
        if size > len(self.left):
            raise TensorDataError(
                f"{size} bytes of binary data", f"{len(self.left)} bytes in the rest of the body"
            )
        taken, self.left = self.left[:size], self.left[size:]
        return taken


@dataclass(slots=True)
class _Reader:
    """Converts the decoded JSON message of one request."""

    info: ModelInfo
    model: str
    version: str
    tail: _Tail | None
    cut: Cut | None = None
    """Large arrays that were cut out before the message was decoded."""
    max_levels: int = 0
    """Maximum nesting depth of the large arrays."""

    def read(self, message: _Request) -> InferRequest:
        return InferRequest(
            model_name=self.model,
            model_version=self.version,
            id=message.id or "",
            inputs=self._inputs(message.inputs),
            outputs=self._outputs(message.outputs or ()),
            parameters=_read_request_parameters(message.parameters),
        )

    def _inputs(self, inputs: Sequence[_Input]) -> tuple[InferInput, ...]:
        alone = self.tail is not None and sum(map(_is_binary, inputs)) == 1
        # One input more than the model has is enough for the core to refuse the request.
        read = tuple([self._input(i, alone) for i in inputs[: len(self.info.inputs) + 1]])
        if len(read) == len(inputs) and self.tail is not None and self.tail.left:
            raise InvalidBody(
                f"model '{self.model}': unexpected additional input data, "
                f"{len(self.tail.left)} bytes after the last tensor"
            )
        return read

    def _input(self, tensor: _Input, alone: bool) -> InferInput:
        datatype = datatype_named(tensor.datatype)
        parameters = read_parameters(tensor.parameters)
        if _SHARED_MEMORY in parameters:
            return self._shared(datatype, tensor, parameters)
        try:
            data = self._data(datatype, tensor, parameters, alone)
        except TensorDataError as error:
            raise InvalidTensor(
                self.model, "input", tensor.name, error.expected, error.got
            ) from error
        parameters.pop(_BINARY_SIZE, None)
        return InferInput(tensor.name, datatype, data, parameters)

    def _shared(
        self, datatype: Datatype, tensor: _Input, parameters: dict[str, Parameter]
    ) -> InferInput:
        """Return an input without elements; they are read from shared memory later."""
        given = ["data"] * (tensor.data is not msgspec.UNSET)
        given += [_BINARY_SIZE] * (_BINARY_SIZE in parameters)
        if given:
            raise InvalidTensor(
                self.model,
                "input",
                tensor.name,
                f"one of data, {_BINARY_SIZE} and {_SHARED_MEMORY}",
                " and ".join([*given, _SHARED_MEMORY]),
            )
        nothing = np.empty(0, datatype.dtype)
        return SharedInput(tensor.name, datatype, nothing, parameters, tensor.shape)

    def _data(
        self,
        datatype: Datatype,
        tensor: _Input,
        parameters: dict[str, Parameter],
        alone: bool,
    ) -> Tensor:
        in_json = tensor.data is not msgspec.UNSET
        if in_json and _BINARY_SIZE in parameters:
            raise TensorDataError(
                f"one of data, {_BINARY_SIZE} and {_SHARED_MEMORY}", f"{_BINARY_SIZE} and data"
            )
        if isinstance(tensor.data, msgspec.Raw):
            return self._elements(datatype, tensor.shape, bytes(tensor.data))
        size = _binary_size(datatype, tensor.shape, parameters)
        return self._binary(datatype, tensor.shape, size, alone)

    def _elements(self, datatype: Datatype, shape: Shape, text: bytes) -> Tensor:
        if self.cut is None or text not in self.cut.arrays:
            return read_elements(datatype, shape, text)
        array = self.cut.read(datatype, shape, text, self.max_levels)
        if array is None:
            raise TensorDataError("a plain list of numbers", "another")
        return array

    def _binary(
        self, datatype: Datatype, shape: Sequence[int], size: int | None, alone: bool
    ) -> Tensor:
        if self.tail is None:
            raise TensorDataError(
                "data, or binary data and an Inference-Header-Content-Length header",
                "neither" if size is None else "no such header",
            )
        if size is None:
            if not alone:
                raise TensorDataError(f"a {_BINARY_SIZE}, since other inputs are binary", "none")
            size = len(self.tail.left)
        taken = self.tail.take(size)
        if datatype is BYTES:
            return unpack_bytes_or_image(shape, taken)
        return from_bytes(datatype, shape, taken)

    def _outputs(self, outputs: Sequence[_Output]) -> tuple[RequestedOutput, ...]:
        # Likewise, one output more than the model has is enough.
        if not outputs:
            return ()
        return tuple([self._output(o) for o in islice(outputs, len(self.info.outputs) + 1)])

    def _output(self, output: _Output) -> RequestedOutput:
        parameters = read_parameters(output.parameters)
        binary = parameters.get(BINARY_DATA, False)
        if not isinstance(binary, bool):
            expected = f"{BINARY_DATA} to be true or false"
            raise InvalidTensor(self.model, "output", output.name, expected, _shown(binary))
        return RequestedOutput(output.name, parameters)


def _is_binary(tensor: _Input) -> bool:
    return tensor.data is msgspec.UNSET and _SHARED_MEMORY not in (tensor.parameters or ())


def _binary_size(
    datatype: Datatype, shape: Sequence[int], parameters: dict[str, Parameter]
) -> int | None:
    """Return the size of a binary tensor; without a size parameter, it follows from the shape.

    OpenVINO Model Server does the same. Returns None for BYTES without a size.
    """
    size = parameters.get(_BINARY_SIZE)
    if size is None:
        return None if datatype is BYTES else element_count(shape) * datatype.itemsize
    if type(size) is not int or size < 0:
        raise TensorDataError(f"a {_BINARY_SIZE} of 0 or more bytes", _shown(size))
    return size


def _read_request_parameters(parameters: _Parameters) -> dict[str, Parameter]:
    read = read_parameters(parameters)
    binary = read.get(BINARY_OUTPUT, False)
    if not isinstance(binary, bool):
        raise InvalidParameter(BINARY_OUTPUT, "true or false", _shown(binary))
    return read


def read_parameters(parameters: _Parameters) -> dict[str, Parameter]:
    """Return the parameters unchanged, or raise InvalidParameter for an unsupported value.

    Unsupported are null, arrays, objects, and integers of more than 64 bits (parameters extension).
    """
    if not parameters:
        return {}
    for name, value in parameters.items():
        if type(value) in _NAMES:
            expected = "a bool, a number or a string"
            raise InvalidParameter(name[:_SHOWN_CHARACTERS], expected, _NAMES[type(value)])
        if type(value) is int and value not in _OF_64_BITS:
            raise InvalidParameter(name[:_SHOWN_CHARACTERS], "a 64-bit integer", "a larger integer")
    return parameters


def _shown(value: Parameter) -> str:
    return repr(value)[:_SHOWN_CHARACTERS]
