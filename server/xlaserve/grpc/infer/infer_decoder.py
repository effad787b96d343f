"""Decodes ModelInfer requests directly to numpy, without message objects.

Only ordinary requests are decoded here. Unusual or malformed ones go to the generic codec, which
alone decides whether a message is valid and which error to report. The generic codec also decodes
the parts that repeat between requests, such as an input's name, datatype and shape; the results
are cached by their bytes.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from xlaserve.errors import XlaserveError
from xlaserve.errors.message import MalformedMessage
from xlaserve.grpc.infer.decoded_infer import IN_SHARED_MEMORY, DecodedInfer, Head, Structure
from xlaserve.grpc.infer.parameters import read_parameters
from xlaserve.grpc.infer.tensors import CONTENTS_FIELDS, SHARED_MEMORY
from xlaserve.grpc.infer.typed_contents import (
    CONTENTS_DEPTH,
    MOST_FIELDS,
    Contents,
    NotOrdinary,
    find_contents,
    read_contents,
)
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.decoder import PACKED_BYTES, PACKED_COST
from xlaserve.grpc.protobuf.wire import LENGTH, Data, read_size, write_varint
from xlaserve.net.bounded_cache import BoundedCache, MakingCache
from xlaserve.serving.inference import Form, InferInput, InferRequest, RequestedOutput
from xlaserve.tensors import BYTES, Parameter, datatype_named, element_count
from xlaserve_proto import inference as pb

MAX_KEY_BYTES = 512
"""Maximum length of a field that is looked up in the caches."""
MAX_LAYOUT_BYTES = 1024
"""Maximum size of a cached request layout: the request without its id and elements."""
BYTE_COST = 8
"""Maximum that one byte of a message counts towards the field limit."""

_TAGS = range(1 << 3 | LENGTH, 8 << 3 | LENGTH, 1 << 3)
_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _INPUTS, _OUTPUTS, _RAW_INPUT_CONTENTS = _TAGS
"""The protobuf tags of ModelInferRequest's fields."""

Span: TypeAlias = tuple[int, int]
"""Start and stop of a field's bytes in the message."""


@dataclass(slots=True)
class _Layout:
    """A decoded request that matches requests of equal size and bytes, except id and elements."""

    model_name: str
    model_version: str
    id: Span
    fixed: list[tuple[int, bytes]]
    """The constant parts of the message, all except id and elements, each with its position."""
    structure: Structure
    form: Form
    plain: list[tuple[Head, int]] | None
    """Each input with the start of its elements; None if any elements must be decoded."""


class InferDecoder:
    """Decodes requests; caches up to `max_cached` layouts, inputs, outputs and parameters each."""

    def __init__(self, *, max_fields: int, max_depth: int, max_cached: int) -> None:
        self._codec = WireCodec(max_fields=max_fields, max_depth=max_depth)
        self._max_fields = max_fields
        self._max_depth = max_depth
        self._layouts: BoundedCache[tuple[int, bytes], _Layout] = BoundedCache(max_cached)
        self._heads = MakingCache(self._read_head, max_cached)
        self._outputs = MakingCache(self._read_output, max_cached)
        self._parameters = MakingCache(self._read_parameter, max_cached)

    def decode(self, message: bytes | memoryview) -> DecodedInfer:
        """Decode a request's metadata.

        Raises MalformedMessage and TooManyFields for the same messages as the generic codec.
        """
        try:
            if type(message) is bytes:
                return self._recognise(message) or self._read(message)
            return self._read(memoryview(message).cast("B"))
        except (ValueError, LookupError, XlaserveError):
            pass  # leave this block, so that an error raised below has no exception context
        whole = self._codec.decode_message(pb.ModelInferRequest, message)
        names = whole.model_name, whole.model_version, whole.id
        return DecodedInfer(names, message, self._codec, None, whole)

    # --- requests with a cached layout ---

    def recognise(self, message: bytes | memoryview) -> InferRequest | None:
        """Return the complete request if its layout is cached and no elements need decoding.

        Its tensors are views of the message, or in shared memory. Otherwise return None.
        """
        layout = self._find(message) if type(message) is bytes and len(message) > 1 else None
        if layout is None or layout.plain is None:
            return None
        start, stop = layout.id
        try:
            number = str(message[start:stop], "utf-8") if stop > start else ""
        except UnicodeDecodeError:
            return None
        inputs = [
            InferInput(
                head.name,
                head.datatype,
                np.ndarray(head.shape, head.dtype, message, start),
                head.parameters,
            )
            if head.plain_bytes != IN_SHARED_MEMORY
            else head.shared()
            for head, start in layout.plain
        ]
        structure = layout.structure
        return InferRequest(
            layout.model_name,
            layout.model_version,
            number,
            tuple(inputs),
            structure.outputs,
            structure.parameters,
            layout.form,
            structure.typed,
        )

    def _find(self, message: bytes) -> _Layout | None:
        layout = self._layouts.get((len(message), message[: message[1] + 2]))
        if layout is not None:
            for pos, fixed in layout.fixed:
                if not message.startswith(fixed, pos):
                    return None
        return layout

    def _recognise(self, message: bytes) -> DecodedInfer | None:
        layout = self._find(message)
        if layout is None:
            return None
        start, stop = layout.id
        names = layout.model_name, layout.model_version, str(message[start:stop], "utf-8")
        return DecodedInfer(names, message, self._codec, layout.structure)

    def _keep(self, layout: _Layout, message: bytes) -> None:
        end = len(message)
        varying = [(start, stop) for start, stop, _ in layout.structure.contents]
        pos = size = 0
        for start, stop in sorted((layout.id, *varying, (end, end))):
            if start > pos:
                layout.fixed.append((pos, message[pos:start]))
                size += start - pos
            pos = stop
        if size <= MAX_LAYOUT_BYTES:
            # The key includes the first field, usually the model name, to tell models apart.
            self._layouts.keep((end, message[: message[1] + 2]), layout)

    # --- other requests ---

    # Each iteration reads one field; inlined for speed, like the generic decoder.
    def _read(self, data: Data) -> DecodedInfer:  # noqa: C901, PLR0912
        model_name = model_version = ""
        id_start = id_stop = 0
        heads: list[Head] = []
        raw: list[Contents] = []
        typed: list[Contents] = []
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
                raw.append((pos, stop, None))
            elif tag == _INPUTS:
                head = known.get(bytes(data[pos:stop])) if size <= MAX_KEY_BYTES else None
                heads.append(head or self._read_input(data, pos, stop, typed))
            elif tag == _MODEL_NAME:
                model_name = str(data[pos:stop], "utf-8")
            elif tag == _ID:
                str(data[id_start:id_stop], "utf-8")  # validate the id that this one replaces
                id_start, id_stop = pos, stop
            elif tag == _MODEL_VERSION:
                model_version = str(data[pos:stop], "utf-8")
            elif tag == _OUTPUTS:
                outputs.append(self._outputs[_key(data, pos, stop)])
            elif tag == _PARAMETERS:
                name, value = self._parameters[_key(data, pos, stop)]
                parameters[name] = value
            else:
                raise NotOrdinary
            pos = stop
        contents = _paired(heads, raw, typed)
        if pos != end:
            raise NotOrdinary
        if end * BYTE_COST > self._max_fields:
            self._count(end, raw, typed)
        names = model_name, model_version, str(data[id_start:id_stop], "utf-8")
        structure = Structure(
            heads,
            contents,
            tuple(outputs),
            MappingProxyType(parameters),
            typed=contents is typed,
        )
        if type(data) is bytes and all(elements is None for _, _, elements in contents):
            span = id_start, id_stop
            plain = [
                (head, start)
                for head, (start, stop, _) in zip(heads, contents, strict=True)
                if stop - start == head.plain_bytes or head.is_known_to_be_shared
            ]
            all_plain = plain if len(plain) == len(heads) else None
            self._keep(
                _Layout(model_name, model_version, span, [], structure, Form(), all_plain), data
            )
        return DecodedInfer(names, data, self._codec, structure)

    def _count(self, end: int, raw: list[Contents], typed: list[Contents]) -> None:
        """Raise NotOrdinary unless an upper bound of the fields is within the limit."""
        most = BYTE_COST * (end - sum(stop - start for start, stop, _ in raw))
        for start, stop, elements in typed:
            if not isinstance(elements, list):  # a packed field costs less than separate fields
                most += PACKED_COST + (stop - start) // PACKED_BYTES - BYTE_COST * (stop - start)
        if most > self._max_fields:
            raise NotOrdinary

    # --- parts of a request ---

    def _read_input(self, data: Data, start: int, stop: int, typed: list[Contents]) -> Head:
        at = find_contents(data, start, stop)
        head = self._heads[_key(data, start, at)]
        field = head.datatype.contents
        if at == stop:
            return head
        # An input in shared memory must have no contents.
        is_shared = head.plain_bytes == IN_SHARED_MEMORY
        if field is None or is_shared or self._max_depth < CONTENTS_DEPTH:
            raise NotOrdinary
        # Check the limit before decoding, which takes time proportional to the contents.
        cost = BYTE_COST * len(data) if head.datatype is BYTES else len(data) // PACKED_BYTES
        if cost > self._max_fields:
            raise NotOrdinary
        typed.append(read_contents(data, at, stop, field))
        return head

    def _read_head(self, body: bytes) -> Head:
        (tensor,) = self._alone(_INPUTS, body).inputs
        contents = vars(tensor).get("contents")
        if contents is not None and any(getattr(contents, name) for name in CONTENTS_FIELDS):
            raise NotOrdinary
        datatype = datatype_named(tensor.datatype)
        count = element_count(tensor.shape)
        plain = count > 0 and datatype.dtype.kind not in "bO"
        plain_bytes = count * datatype.itemsize if plain else -1
        return Head(
            tensor.name,
            datatype,
            tuple(tensor.shape),
            MappingProxyType(read_parameters(tensor.parameters)),
            datatype.dtype,
            IN_SHARED_MEMORY if SHARED_MEMORY in tensor.parameters else plain_bytes,
        )

    def _read_output(self, body: bytes) -> RequestedOutput:
        (output,) = self._alone(_OUTPUTS, body).outputs
        return RequestedOutput(output.name, MappingProxyType(read_parameters(output.parameters)))

    def _read_parameter(self, body: bytes) -> tuple[str, Parameter]:
        (parameter,) = read_parameters(self._alone(_PARAMETERS, body).parameters).items()
        return parameter

    def _alone(self, tag: int, body: bytes) -> pb.ModelInferRequest:
        """Decode a field with the generic codec, as a request that has only this field."""
        message = bytes((tag,)) + write_varint(len(body)) + body
        return self._codec.decode_message(pb.ModelInferRequest, message)


def _key(data: Data, start: int, stop: int) -> bytes:
    if stop - start > MAX_KEY_BYTES:
        raise NotOrdinary
    return bytes(data[start:stop])


def _paired(heads: list[Head], raw: list[Contents], typed: list[Contents]) -> list[Contents]:
    """Match contents with inputs by order; raise NotOrdinary if they do not match."""
    contents = raw or typed
    for head in heads:
        if head.plain_bytes == IN_SHARED_MEMORY:
            contents = _aligned(heads, contents)
            break
    if len(heads) != len(contents) or (raw and typed):
        raise NotOrdinary
    return contents


def _aligned(heads: list[Head], contents: list[Contents]) -> list[Contents]:
    """Insert empty contents for each input whose elements are in shared memory."""
    left = iter(contents)
    nothing: Contents = (0, 0, None)
    try:
        aligned = [
            nothing if head.plain_bytes == IN_SHARED_MEMORY else next(left) for head in heads
        ]
    except StopIteration:
        raise NotOrdinary from None
    if next(left, None) is not None:
        raise NotOrdinary
    return aligned


def tensor_offset(first_bytes: memoryview, message_bytes: int) -> int:
    """Return the offset of the first raw tensor in a request of `message_bytes`, or 0 if unknown.

    The receiver uses it to place the message so that the tensor is aligned. Reads only the tags
    and lengths of a few fields, and never raises.
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
