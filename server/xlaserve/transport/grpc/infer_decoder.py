"""Reads ModelInfer requests from the wire into numpy, without a message object on the way.

Only what is ordinary is read here. Whatever is not, and whatever is wrong, is left to the generic
codec, so that it has the last word on what a message is and on how a refusal reads. What repeats
from request to request, like the name, the datatype and the shape of an input, is read by the
generic codec too, once, and is known again by its bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from xlaserve.core.images import unpack_bytes_or_image
from xlaserve.core.inference import InferInput, InferRequest, Parameter, RequestedOutput
from xlaserve.errors import XlaserveError
from xlaserve.tensors import (
    BYTES,
    Datatype,
    Elements,
    Shape,
    Tensor,
    TensorDataError,
    datatype_named,
    element_count,
    from_bytes,
    from_elements,
)
from xlaserve.transport.grpc.bounded_cache import BoundedCache
from xlaserve.transport.grpc.codec import WireCodec
from xlaserve.transport.grpc.decoder import PACKED_BYTES, PACKED_COST
from xlaserve.transport.grpc.parameters import read_parameters
from xlaserve.transport.grpc.tensors import CONTENTS_FIELDS, read_request
from xlaserve.transport.grpc.wire import (
    LENGTH,
    Data,
    MalformedMessage,
    fields_of,
    packed_array,
    read_size,
    write_varint,
)
from xlaserve_proto import inference as pb

MAX_KEY_BYTES = 512
"""Bytes of a field up to which it is looked for among those that were read before."""
MOST_FIELDS = 256
"""Fields of a request, and of an input, beyond which it is not ordinary."""
BYTE_COST = 8
"""More than any byte of a message counts towards the most fields that it may have."""

_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _INPUTS, _OUTPUTS, _RAW_INPUT_CONTENTS = (
    number << 3 | LENGTH for number in range(1, 8)
)
"""Tags of ModelInferRequest."""
_TAGS = frozenset(number << 3 | LENGTH for number in range(1, 8))
_CONTENTS = 5 << 3 | LENGTH
_BEFORE_CONTENTS = frozenset(number << 3 | LENGTH for number in range(1, 5))
"""Tags of an input."""
_CONTENTS_DEPTH = 2
"""How deep typed contents lie in a request."""

_BYTES_CONTENTS = 8 << 3 | LENGTH
_PACKED = MappingProxyType(
    {
        row.tag(LENGTH): (row.name, packed_array(row))
        for row in fields_of(pb.InferTensorContents)
        if row.tag(LENGTH) != _BYTES_CONTENTS
    }
)
"""Of typed contents, by tag: the name of the field and what makes an array of it."""

Typed: TypeAlias = tuple[Elements, int]
"""The elements of typed contents, and of how many packed bytes they were read."""
Span: TypeAlias = tuple[int, int]
"""Where the bytes of a field start and stop."""


class _NotOrdinary(ValueError):
    """A message that the generic codec has to read."""


class _Head(NamedTuple):
    """What an input says of itself, without its elements; one that no tensor can have is none."""

    name: str
    datatype: Datatype
    shape: Shape
    parameters: Mapping[str, Parameter]
    dtype: "np.dtype[Any]"
    plain_bytes: int
    """How many raw bytes are the tensor just as they are; -1 where they have to be looked at."""


@dataclass(slots=True)
class DecodedInfer:
    """A request whose structure was read; its tensors were not."""

    model_name: str
    model_version: str
    request: Callable[[], InferRequest]
    """Reads the tensors, as views of the message where possible; raises as `read_request`."""

    @classmethod
    def of(cls, message: pb.ModelInferRequest) -> Self:
        """Return what a message says."""
        return cls(message.model_name, message.model_version, partial(read_request, message))


class InferDecoder:
    """Reads requests; keeps `max_cached` each of the inputs, outputs and parameters it has met."""

    def __init__(self, *, max_fields: int, max_depth: int, max_cached: int) -> None:
        self._codec = WireCodec(max_fields=max_fields, max_depth=max_depth)
        self._max_fields = max_fields
        self._max_depth = max_depth
        self._heads = BoundedCache(self._read_head, max_cached)
        self._outputs = BoundedCache(self._read_output, max_cached)
        self._parameters = BoundedCache(self._read_parameter, max_cached)

    def decode(self, message: bytes | memoryview) -> DecodedInfer:
        """Return the request that all of the message is.

        Raises MalformedMessage and TooManyFields, for the same messages as the generic codec.
        """
        try:
            return self._read(message if type(message) is bytes else memoryview(message).cast("B"))
        except (ValueError, LookupError, XlaserveError):
            pass  # and out of here, so that a refusal has no other one behind it
        return DecodedInfer.of(self._codec.decode_message(pb.ModelInferRequest, message))

    # One turn reads one field, as in the generic decoder, and for the same reason.
    def _read(self, data: Data) -> DecodedInfer:  # noqa: C901, PLR0912
        model_name = model_version = request_id = ""
        heads: list[_Head] = []
        raw: list[Span] = []
        typed: list[Typed] = []
        outputs: list[RequestedOutput] = []
        parameters: dict[str, Parameter] = {}
        known = self._heads
        end = len(data)
        pos = 0
        for _ in range(MOST_FIELDS):
            if pos >= end:
                break
            tag = data[pos]
            size = data[pos + 1]
            pos += 2
            if size > 0x7F:
                size, pos = read_size(data, pos - 1)
            stop = pos + size
            if tag == _RAW_INPUT_CONTENTS:
                raw.append((pos, stop))
            elif tag == _INPUTS:
                head = known.get(bytes(data[pos:stop])) if size <= MAX_KEY_BYTES else None
                heads.append(head or self._read_input(data, pos, stop, typed))
            elif tag == _MODEL_NAME:
                model_name = str(data[pos:stop], "utf-8")
            elif tag == _ID:
                request_id = str(data[pos:stop], "utf-8")
            elif tag == _MODEL_VERSION:
                model_version = str(data[pos:stop], "utf-8")
            elif tag == _OUTPUTS:
                outputs.append(self._outputs[_key(data, pos, stop)])
            elif tag == _PARAMETERS:
                name, value = self._parameters[_key(data, pos, stop)]
                parameters[name] = value
            else:
                raise _NotOrdinary
            pos = stop
        if pos != end or len(heads) != len(raw or typed) or (raw and typed):
            raise _NotOrdinary
        if end * BYTE_COST > self._max_fields:
            self._count(end, raw, typed)
        rest = (model_name, model_version, request_id, outputs, parameters)
        read = partial(self._request, data, heads, raw, typed, rest)
        return DecodedInfer(model_name, model_version, read)

    def _count(self, end: int, raw: list[Span], typed: list[Typed]) -> None:
        """Raise _NotOrdinary unless a message surely has no more fields than it may have."""
        most = BYTE_COST * (end - sum(stop - start for start, stop in raw))
        for _, packed in typed:
            most += PACKED_COST + packed // PACKED_BYTES - BYTE_COST * packed
        if most > self._max_fields:
            raise _NotOrdinary

    # --- the parts of a request ---

    def _read_input(self, data: Data, start: int, stop: int, typed: list[Typed]) -> _Head:
        at = _find_contents(data, start, stop)
        if at == stop:
            return self._heads[_key(data, start, stop)]
        # What follows takes a time that the number of fields does not bound.
        if self._max_depth < _CONTENTS_DEPTH or len(data) // PACKED_BYTES > self._max_fields:
            raise _NotOrdinary
        head = self._heads[_key(data, start, at)]
        pos = _last_field(data, at, stop)
        tag = data[pos]
        if tag == _BYTES_CONTENTS:
            if head.datatype is not BYTES or len(data) * BYTE_COST > self._max_fields:
                raise _NotOrdinary
            typed.append((_read_elements(data, pos, stop), 0))
            return head
        name, make = _PACKED[tag]
        pos = _last_field(data, pos, stop)
        if head.datatype.contents != name:
            raise _NotOrdinary
        typed.append((make(memoryview(data)[pos:stop]), stop - pos))
        return head

    def _read_head(self, body: bytes) -> _Head:
        (tensor,) = self._alone(_INPUTS, body).inputs
        contents = vars(tensor).get("contents")
        if contents is not None and any(getattr(contents, name) for name in CONTENTS_FIELDS):
            raise _NotOrdinary
        datatype = datatype_named(tensor.datatype)
        count = element_count(tensor.shape)
        plain = count > 0 and datatype.dtype.kind not in "bO"
        return _Head(
            tensor.name,
            datatype,
            tuple(tensor.shape),
            MappingProxyType(read_parameters(tensor.parameters)),
            datatype.dtype,
            count * datatype.itemsize if plain else -1,
        )

    def _read_output(self, body: bytes) -> RequestedOutput:
        (output,) = self._alone(_OUTPUTS, body).outputs
        return RequestedOutput(output.name, MappingProxyType(read_parameters(output.parameters)))

    def _read_parameter(self, body: bytes) -> tuple[str, Parameter]:
        (parameter,) = read_parameters(self._alone(_PARAMETERS, body).parameters).items()
        return parameter

    def _alone(self, tag: int, body: bytes) -> pb.ModelInferRequest:
        """Read a request of this one field."""
        message = bytes((tag,)) + write_varint(len(body)) + body
        return self._codec.decode_message(pb.ModelInferRequest, message)

    # --- tensors ---

    def _request(
        self,
        data: Data,
        heads: list[_Head],
        raw: list[Span],
        typed: list[Typed],
        rest: tuple[str, str, str, list[RequestedOutput], dict[str, Parameter]],
    ) -> InferRequest:
        model_name, model_version, request_id, outputs, parameters = rest
        try:
            inputs = _from_typed(heads, typed) if typed else _from_raw(data, heads, raw)
        except TensorDataError:
            pass
        else:
            return InferRequest(
                model_name, model_version, request_id, inputs, tuple(outputs), parameters
            )
        return read_request(self._codec.decode_message(pb.ModelInferRequest, data))


# --- on the wire -------------------------------------------------------------------------------


def _key(data: Data, start: int, stop: int) -> bytes:
    if stop - start > MAX_KEY_BYTES:
        raise _NotOrdinary
    return bytes(data[start:stop])


def _find_contents(data: Data, start: int, stop: int) -> int:
    """Return where an input has a field that may be its typed contents; `stop` if it has none."""
    pos = start
    for _ in range(MOST_FIELDS):
        if pos >= stop or data[pos] == _CONTENTS:
            break
        if data[pos] not in _BEFORE_CONTENTS:
            return stop
        size, pos = read_size(data, pos + 1)
        pos += size
    return pos if pos < stop and data[pos] == _CONTENTS and data[pos + 1] else stop


def _last_field(data: Data, pos: int, stop: int) -> int:
    """Return where the value of a field starts; raises _NotOrdinary if another field follows."""
    size, pos = read_size(data, pos + 1)
    if pos + size != stop or not size:
        raise _NotOrdinary
    return pos


def _read_elements(data: Data, pos: int, stop: int) -> list[bytes]:
    elements = []
    while pos < stop:
        if data[pos] != _BYTES_CONTENTS:
            raise _NotOrdinary
        size, pos = read_size(data, pos + 1)
        elements.append(bytes(data[pos : pos + size]))
        pos += size
    if pos != stop:
        raise _NotOrdinary
    return elements


# --- to numpy ----------------------------------------------------------------------------------


def _from_raw(data: Data, heads: list[_Head], raw: list[Span]) -> tuple[InferInput, ...]:
    inputs = []
    for (name, datatype, shape, parameters, dtype, plain), (start, stop) in zip(
        heads, raw, strict=True
    ):
        if stop - start == plain:
            tensor: Tensor = np.ndarray(shape, dtype, data, start)
        elif datatype is BYTES:
            tensor = unpack_bytes_or_image(shape, memoryview(data)[start:stop])
        else:
            tensor = from_bytes(datatype, shape, memoryview(data)[start:stop])
        inputs.append(InferInput(name, datatype, tensor, parameters))
    return tuple(inputs)


def _from_typed(heads: list[_Head], typed: list[Typed]) -> tuple[InferInput, ...]:
    inputs = []
    for head, (elements, _) in zip(heads, typed, strict=True):
        tensor = from_elements(head.datatype, head.shape, elements)
        inputs.append(InferInput(head.name, head.datatype, tensor, head.parameters))
    return tuple(inputs)


# --- where a tensor lies -----------------------------------------------------------------------


def tensor_offset(first_bytes: memoryview, message_bytes: int) -> int:
    """Return where in a request of `message_bytes` its first raw tensor starts.

    Returns 0 where the first bytes do not tell. Whoever receives the request can place it so that
    the tensor is aligned. Reads nothing but the heads of a few fields, and never raises.
    """
    pos = 0
    try:
        for _ in range(MOST_FIELDS):
            tag = first_bytes[pos]
            size, pos = read_size(first_bytes, pos + 1)
            if tag == _RAW_INPUT_CONTENTS:
                return pos if pos + size <= message_bytes else 0
            if tag not in _TAGS:
                return 0
            pos += size
    except (IndexError, MalformedMessage):
        pass
    return 0
