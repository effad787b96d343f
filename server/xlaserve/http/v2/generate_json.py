"""The JSON of the generate extension: tensors and parameters as fields.

{"text_input": "hello", "parameters": {"temperature": 0}}
{"model_name": "m", "model_version": "1", "text_output": "hello world"}
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec

from xlaserve.errors import InvalidBody, InvalidTensor
from xlaserve.http.json.json_tensors import DEFAULT_RULES, JsonRules, list_sizes, read_elements
from xlaserve.http.json.json_text import (
    MOST_ARRAYS,
    check_depth,
    check_elements,
    check_members,
)
from xlaserve.http.messages import HttpResponse
from xlaserve.http.v2.infer_request import read_parameters
from xlaserve.http.v2.infer_response import elements_of
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import (
    DetailedResponse,
    InferInput,
    InferOutput,
    InferRequest,
    InferResponse,
)
from xlaserve.tensors import Buffer, Parameter, Shape, TensorDataError, TensorSpec, describe

TEXT, TEXT_INPUT, TEXT_OUTPUT = "text", "text_input", "text_output"
"""The text tensor of language models, and the request and response fields that Triton uses for
it."""

_ID = "id"
_STOP = "stop"
_PARAMETERS = "parameters"

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


def read_generate_request(
    info: ModelInfo, model: str, version: str, body: memoryview, *, max_depth: int
) -> InferRequest:
    """Decode a request (generate extension, Generate Request JSON Object).

    A field with the name of a model input is that tensor: a bare value is one element, and a list
    has the input's shape, whose variable dimension follows from the number of elements. All other
    fields, and those in the object `parameters`, are parameters, except that `id` is the request
    id. Raises only InvalidRequest and its subclasses, such as InvalidBody and InvalidTensor.
    """
    check_depth(body, max_depth)
    check_members(body)
    inputs = {spec.name: spec for spec in info.inputs}
    is_text = has_text(info)
    if is_text:
        inputs[TEXT_INPUT] = inputs[TEXT]
    tensors: list[InferInput] = []
    parameters: dict[str, Any] = {}
    identity = ""
    fields = list(_fields(_object(body), inputs))
    if len(body) > MOST_ARRAYS:
        check_elements(b",".join([value for name, value in fields if name not in inputs]))
    for name, value in fields:
        spec = inputs.get(name)
        if spec is not None:
            tensors.append(_tensor(model, spec, bytes(value), is_batched=bool(info.max_batch_size)))
        elif name == _ID:
            identity = _identity(_value(value))
        else:
            parameters[name] = _value(value)
    stop = parameters.get(_STOP)
    if is_text and isinstance(stop, list):
        # Parameters cannot be lists: encode this one as the JSON text that the model parses.
        parameters[_STOP] = _ENCODER.encode(stop).decode()
    return InferRequest(
        model, version, identity, tuple(tensors), parameters=read_parameters(parameters)
    )


def _object(text: memoryview | msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return _OBJECT.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"expected a generate request, an object of JSON: {error}") from error
    except RecursionError:
        raise InvalidBody("the JSON is nested too deeply") from None


def _fields(
    fields: Mapping[str, msgspec.Raw], inputs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, msgspec.Raw]]:
    """Yield the fields of a request, with the object `parameters` flattened in place."""
    for name, value in fields.items():
        is_object = bytes(value).lstrip()[:1] == b"{"
        if name == _PARAMETERS and name not in inputs and is_object:
            yield from _object(value).items()
        else:
            yield name, value


def _value(value: msgspec.Raw) -> Any:
    try:
        return _ANY.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"expected a generate request in JSON: {error}") from error
    except RecursionError:
        raise InvalidBody("the JSON is nested too deeply") from None


def _identity(value: Any) -> str:
    # Accept numbers too: Triton's clients send either.
    if value is None or isinstance(value, str):
        return value or ""
    if type(value) is int:
        return str(value)
    raise InvalidBody(f"expected '{_ID}' as a string or an integer, got {type(value).__name__}")


def _tensor(model: str, spec: TensorSpec, text: bytes, *, is_batched: bool) -> InferInput:
    listed = text if text[:1] == b"[" else b"[%b]" % text
    try:
        shape = _shape(spec, list_sizes(spec.datatype, listed), is_batched=is_batched)
        return InferInput(spec.name, spec.datatype, read_elements(spec.datatype, shape, listed))
    except TensorDataError as error:
        raise InvalidTensor(model, "input", spec.name, error.expected, error.got) from error


def _shape(spec: TensorSpec, sizes: Shape, *, is_batched: bool) -> Shape:
    wanted = spec.shape
    if len(sizes) == len(wanted):
        return sizes
    rows: Shape = (1,) if is_batched else ()
    if len(sizes) == len(wanted) - len(rows):
        return (*rows, *sizes)
    rest, count = wanted[len(rows) :], prod(sizes)
    if sum(size == -1 for size in rest) > 1:
        raise TensorDataError(
            f"one level of lists per dimension of {describe(spec.datatype, wanted)}, which has"
            " several open ones",
            f"{len(sizes)} levels of lists",
        )
    known = prod(size for size in rest if size != -1)
    free = count // known if known else 0
    return (*rows, *(free if size == -1 else size for size in rest))


def has_text(info: ModelInfo) -> bool:
    """Tell whether a model takes and returns text, as `text_input` and `text_output`."""
    return info.generation is not None and info.generation.is_text_offered


def write_generate_answer(
    response: InferResponse, rules: JsonRules = DEFAULT_RULES, *, is_text: bool = False
) -> HttpResponse:
    """Serialize a response (generate extension, Generate Response JSON Object).

    Each output is a field: its only element, or a flat list of its elements. With `is_text`, the
    output `text` becomes the field `text_output`. Raises InvalidTensor for FP16 and BF16, and
    OutputNotInForm or OutputNotText for values that the rules forbid; see `write_elements`.
    """
    head: dict[str, Parameter] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        head[_ID] = response.id
    if isinstance(response, DetailedResponse):
        # Add the parameters as fields, unless the name is taken.
        taken = {"model_name", "model_version", _ID, *(o.name for o in response.outputs)}
        head |= {n: value for n, value in response.parameters.items() if n not in taken}
    parts: list[Buffer] = [_ENCODER.encode(head)[:-1]]
    for output in response.outputs:
        name = TEXT_OUTPUT if is_text and output.name == TEXT else output.name
        parts += (b",%b:" % _ENCODER.encode(name), *_elements(response, output, rules))
    parts.append(b"}")
    return HttpResponse(parts=parts)


def _elements(response: InferResponse, output: InferOutput, rules: JsonRules) -> list[Buffer]:
    elements = elements_of(response.model_name, output, rules, "use V2")
    if output.data.size == 1:
        (only,) = elements
        return [memoryview(only)[1:-1]]
    return elements
