"""Serialization of inference responses: JSON, optionally followed by binary tensors."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from xlaserve.errors import InvalidTensor, OutputNotInForm, OutputNotText
from xlaserve.http.json.json_numbers import write_with_numbers
from xlaserve.http.json.json_tensors import (
    DEFAULT_RULES,
    ESCAPED_CHARACTERS,
    MOST_CHARACTERS,
    QUOTED_CHARACTERS,
    JsonRules,
    NotInJson,
    NotUtf8,
    escaped_octets,
    write_elements,
)
from xlaserve.http.messages import BINARY_TYPE, JSON_TYPE, HttpResponse
from xlaserve.http.threads import Size
from xlaserve.http.v2.infer_request import BINARY_DATA, BINARY_OUTPUT
from xlaserve.serving.inference import DetailedResponse, InferOutput, InferRequest, InferResponse
from xlaserve.serving.made_arrays import ELEMENT_BYTES, octets_of
from xlaserve.tensors import BYTES, DATATYPES, Buffer, Parameter, Tensor, TensorDataError, to_bytes

_BINARY_SIZE = "binary_data_size"
_NO_PARAMETERS: Mapping[str, Mapping[str, Parameter]] = MappingProxyType({})

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header with the length of the JSON before binary tensors."""


class InferBody(msgspec.Struct, frozen=True, gc=False):
    """The body of a response."""

    parts: list[Buffer]
    """The parts of the body, in order; binary tensors are views of contiguous arrays."""
    header_length: int | None
    """Bytes of JSON before the binary tensors; None if the whole body is JSON."""


_Parameters: TypeAlias = Mapping[str, Parameter] | msgspec.UnsetType


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: Sequence[int]
    parameters: _Parameters = msgspec.UNSET


class _Response(msgspec.Struct):
    model_name: str
    model_version: str
    id: str | msgspec.UnsetType
    parameters: _Parameters = msgspec.UNSET


_SHORT_NAMES = frozenset(
    row.name for row in DATATYPES.values() if row.contents is not None and row is not BYTES
)
_SHORT_ELEMENTS = 1 << 10
"""Largest number of elements of an output that is serialized together with its metadata."""
_ENCODER = msgspec.json.Encoder()
_JOINED_BYTES = 64 << 10
"""Size below which a copy is cheaper than separate parts."""
MOST_OF_OTHERS = 25
"""Maximum characters of a number written by Python, for datatypes without typed contents in V2."""
_DESCRIBED_BYTES = 160
"""JSON overhead per output, and for the response, without its texts and sizes."""
_DIMENSION_CHARACTERS = 20


def write_infer_response(
    request: InferRequest, response: InferResponse, rules: JsonRules = DEFAULT_RULES
) -> InferBody:
    """Serialize a response, each output in the form that the request asks for.

    An output is binary if its `binary_data` is true, or, by default, the request's
    `binary_data_output` (binary tensor data extension). The `id` is that of the request, if any.
    Raises InvalidTensor for an output that only binary can represent but JSON is requested, and
    OutputNotInForm or OutputNotText for elements that the rules forbid; see `write_elements`.
    """
    detailed = response if isinstance(response, DetailedResponse) else None
    if not (request.outputs or request.parameters or detailed):
        short = _write_short(response)
        if short is not None:
            return InferBody([short], None)
    default = request.parameters.get(BINARY_OUTPUT) is True
    outputs = request.outputs
    wanted = {o.name: o.parameters.get(BINARY_DATA, default) for o in outputs} if outputs else {}
    identity = response.id or msgspec.UNSET
    own = (detailed and detailed.parameters) or msgspec.UNSET
    of_outputs = detailed.output_parameters if detailed else _NO_PARAMETERS
    head = _ENCODER.encode(_Response(response.model_name, response.model_version, identity, own))
    json: list[Buffer] = [head[:-1] + b',"outputs":[']
    tensors: list[Buffer] = []
    for index, output in enumerate(response.outputs):
        if index:
            json.append(b",")
        parameters = of_outputs.get(output.name) or msgspec.UNSET
        if type(output) is not InferOutput:
            json.append(_describe(output, parameters))  # the data is in shared memory
        elif wanted.get(output.name, default):
            tensors.append(to_bytes(output.datatype, output.data))
            size: Mapping[str, Parameter] = {_BINARY_SIZE: len(tensors[-1])}
            json.append(_describe(output, {**parameters, **size} if parameters else size))
        else:
            json += _with_data(response.model_name, output, parameters, rules)
    json.append(b"]}")
    length = sum(map(len, json))
    if length <= _JOINED_BYTES:
        json = [b"".join(json)]
    return InferBody(json + tensors, length if tensors else None)


def _write_short(response: InferResponse) -> bytes | None:
    """Serialize a response of few numbers; return None for any other."""
    outputs: list[Mapping[str, object]] = []
    for output in response.outputs:
        data, kind = output.data, output.datatype.name
        if kind not in _SHORT_NAMES or data.size > _SHORT_ELEMENTS:
            return None
        outputs.append(
            {"name": output.name, "datatype": kind, "shape": data.shape, "data": data.ravel()}
        )
    fields: dict[str, object] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        fields["id"] = response.id
    fields["outputs"] = outputs
    written = write_with_numbers(fields)
    # NaN and infinities were written as null.
    return None if b"null" in written else written


def write_infer_answer(
    request: InferRequest, response: InferResponse, rules: JsonRules = DEFAULT_RULES
) -> HttpResponse:
    """Serialize a response, with the JSON length in a header if binary tensors follow.

    Raises like `write_infer_response`.
    """
    body = write_infer_response(request, response, rules)
    if body.header_length is None:
        return HttpResponse(content_type=JSON_TYPE, parts=body.parts)
    headers = {HEADER_LENGTH: str(body.header_length)}
    return HttpResponse(content_type=BINARY_TYPE, parts=body.parts, headers=headers)


def output_bytes(response: InferResponse) -> int:
    """Return the size of the output tensors, including those written to shared memory.

    Only the references of large BYTES tensors are counted; they suffice to tell that it is large.
    """
    size = 0
    for output in response.outputs:
        data = output.data
        size += data.nbytes
        if output.datatype is BYTES and data.nbytes <= _JOINED_BYTES:
            size += sum(map(len, data.ravel().tolist()))
    return size


def most_json_bytes(
    response: InferResponse,
    request: InferRequest | None = None,
    rules: JsonRules = DEFAULT_RULES,
) -> Size:
    """Return the maximum size of a response's JSON, plus that of otherwise uncounted BYTES.

    Elements that the request wants as binary add no JSON.
    """
    default = request is not None and request.parameters.get(BINARY_OUTPUT) is True
    outputs = () if request is None else request.outputs
    wanted = {one.name: one.parameters.get(BINARY_DATA, default) for one in outputs}
    size, texts = _described_bytes(response), list[Tensor]()
    for output in response.outputs:
        if type(output) is not InferOutput:
            continue
        is_binary = wanted.get(output.name, default)
        if output.datatype is BYTES:
            # BYTES tensors with few elements are counted by `output_bytes`, which suffices if they
            # are binary.
            if not is_binary or output.data.nbytes > _JOINED_BYTES:
                texts.append(output.data)
        elif not is_binary:
            size += output.data.size * MOST_CHARACTERS.get(output.datatype.name, MOST_OF_OTHERS)
    return partial(texts_bytes, size, texts, rules) if texts else size


def _described_bytes(response: InferResponse) -> int:
    """Return the maximum size of the JSON around the elements, also for binary tensors."""
    texts = [response.model_name, response.model_version, response.id]
    size = (1 + len(response.outputs)) * _DESCRIBED_BYTES
    for output in response.outputs:
        texts.append(output.name)
        size += output.data.ndim * _DIMENSION_CHARACTERS
    if isinstance(response, DetailedResponse):
        own = (response.parameters, *response.output_parameters.values())
        size += sum(len(_ENCODER.encode(dict(parameters))) for parameters in own)
    return size + ESCAPED_CHARACTERS * sum([len(text.encode()) for text in texts])


def texts_bytes(size: int, texts: Iterable[Tensor], rules: JsonRules) -> int:
    """Return `size` plus the maximum size of the texts, both as bytes and as JSON."""
    for array in texts:
        size += array.size * (ELEMENT_BYTES + QUOTED_CHARACTERS) + 2 * octets_of(array)
        size += (ESCAPED_CHARACTERS - 1) * escaped_octets(array, rules)
    return size


def _describe(output: InferOutput, parameters: _Parameters) -> bytes:
    shape = output.data.shape
    return _ENCODER.encode(_Output(output.name, output.datatype.name, shape, parameters))


def _with_data(
    model: str, output: InferOutput, parameters: _Parameters, rules: JsonRules
) -> list[Buffer]:
    elements = elements_of(model, output, rules, "ask for binary_data")
    return [_describe(output, parameters)[:-1] + b',"data":', *elements, b"}"]


def elements_of(model: str, output: InferOutput, rules: JsonRules, action: str) -> list[Buffer]:
    """Return the elements of an output like `write_elements`; its errors name the output.

    `action` tells the client how to get values that JSON cannot represent.
    """
    try:
        return write_elements(output.datatype, output.data, rules)
    except NotInJson as error:
        form = "JSON (strict_json)"
        raise OutputNotInForm(model, output.name, form, str(error), action) from error
    except NotUtf8 as error:
        raise OutputNotText(model, output.name) from error
    except TensorDataError as error:
        raise InvalidTensor(model, "output", output.name, error.expected, error.got) from error
