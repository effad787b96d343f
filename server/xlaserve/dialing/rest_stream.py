"""Client side of `generate_stream`: encodes the request, decodes the server-sent events."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from math import prod
from typing import Any

from xlaserve.dialing.interface import InferenceResult, ModelTensors
from xlaserve.errors import InvalidRequest
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.tensors import BYTES, Shape, Tensor, TensorSpec, from_elements

MOST_EVENT_BYTES = 1 << 26
"""Maximum length of an event in bytes; a longer one is an error."""
_TEXT, _TEXT_OUTPUT = "text", "text_output"
_OF_ANSWER = ("model_name", "model_version", "id")


def write_generate(request: InferRequest) -> bytes:
    """Encode a request as JSON; raise InvalidRequest, naming the input, if that is impossible."""
    fields: dict[str, Any] = {each.name: _elements(request, each) for each in request.inputs}
    if request.id:
        fields["id"] = request.id
    if request.parameters:
        fields["parameters"] = dict(request.parameters)
    return json.dumps(fields, separators=(",", ":")).encode()


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON object of each server-sent event; raise ValueError if one is malformed."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk.replace(b"\r\n", b"\n")
        while (end := held.find(b"\n\n")) >= 0:
            lines = bytes(held[:end]).split(b"\n")
            del held[: end + 2]
            data = b"\n".join(
                line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")
            )
            if data:
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError("an event is not a JSON object")
                yield event
        if len(held) > MOST_EVENT_BYTES:
            raise ValueError(f"an event has more than {MOST_EVENT_BYTES} bytes")
    if held.strip():
        raise ValueError("the stream ended within an event")


def read_event(event: Mapping[str, Any], tensors: ModelTensors, seconds: float) -> InferenceResult:
    """Decode an event's outputs; raise ValueError if they do not match the metadata."""
    specs = {spec.name: spec for spec in tensors.outputs}
    outputs: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    for field, value in event.items():
        name = _TEXT if field == _TEXT_OUTPUT and field not in specs else field
        if name in specs:
            outputs[name] = _tensor(specs[name], value)
        elif field not in _OF_ANSWER:
            parameters[field] = value
    return InferenceResult(
        str(event.get("model_name", "")),
        str(event.get("model_version", "")),
        outputs,
        {name: specs[name].datatype for name in outputs},
        seconds,
        str(event.get("id", "")),
        parameters,
    )


def _elements(request: InferRequest, tensor: InferInput) -> Any:
    if tensor.datatype is not BYTES:
        listed: Any = tensor.data.tolist()
        return listed
    try:
        return _texts(tensor.data.tolist())
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"model '{request.model_name}', input '{tensor.name}': expected texts in UTF-8 for a "
            f"stream over REST, got other bytes: {error}"
        ) from error


def _texts(value: Any) -> Any:
    if isinstance(value, list):
        return [_texts(each) for each in value]
    return value.decode() if isinstance(value, bytes) else str(value)


def _tensor(spec: TensorSpec, value: Any) -> Tensor:
    flat: Sequence[Any] = value if isinstance(value, list) else [value]
    if spec.datatype is BYTES:
        flat = [str(each).encode() for each in flat]
    return from_elements(spec.datatype, _shape(spec.shape, len(flat)), flat)


def _shape(shape: Shape, count: int) -> Shape:
    """Infer the shape of `count` elements from the metadata, since events have no shapes.

    Of several dynamic dimensions, the last takes all elements and the others are 1. If the count
    does not match the shape, the result is one-dimensional.
    """
    known = prod(size for size in shape if size != -1)
    opened = [place for place, size in enumerate(shape) if size == -1]
    if not opened:
        return shape if known == count else (count,)
    if not known or count % known:
        return (count,)
    return tuple(
        size if size != -1 else (count // known if place == opened[-1] else 1)
        for place, size in enumerate(shape)
    )
