"""Encodes ModelInfer responses directly from numpy, without message objects."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from xlaserve.grpc.infer.parameters import write_parameters
from xlaserve.grpc.infer.tensors import write_outputs
from xlaserve.grpc.infer.typed_answers import Form, TypedAnswers
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.wire import LENGTH, write_varint
from xlaserve.net.bounded_cache import MakingCache
from xlaserve.serving.inference import DetailedResponse, InferOutput, InferResponse
from xlaserve.tensors import BYTES, Shape, pack_bytes, to_bytes
from xlaserve_proto import inference as pb

Parts: TypeAlias = list[bytes | memoryview]

JOINED_BYTES = 16 << 10
"""Tensors up to this size are copied: that is cheaper than sending another buffer."""

_ID = write_varint(3 << 3 | LENGTH)
_OUTPUTS = write_varint(5 << 3 | LENGTH)
_CONTENTS = write_varint(5 << 3 | LENGTH)
"""Tag of the field `contents` in an output."""
_RAW_OUTPUT_CONTENTS = write_varint(6 << 3 | LENGTH)


class InferEncoder:
    """Encodes responses; caches repeated names, datatypes and shapes, `max_cached` of each."""

    def __init__(self, max_cached: int, typed: TypedAnswers) -> None:
        self._codec = WireCodec()
        self._typed = typed
        self._models = MakingCache(self._write_model, max_cached)
        self._outputs = MakingCache(self._write_output, max_cached)
        self._sizes = MakingCache(_write_size, max_cached)
        self._heads = MakingCache(self._write_head, max_cached)
        """Caches the encoded metadata of responses with one output and no id."""

    def encode_typed(self, response: InferResponse) -> tuple[Parts, int]:
        """Encode the response to a request with typed contents, as `encode`; may raise TooLarge."""
        return self.encode(response, self._typed.write(response.outputs))

    def encode(self, response: InferResponse, form: Form | None = None) -> tuple[Parts, int]:
        """Return a ModelInferResponse as a list of buffers, and their total size.

        Without `form`, outputs are raw. A tensor longer than JOINED_BYTES is a separate buffer,
        and a view of the array if that is contiguous. Raises ValueError for a name with characters
        that UTF-8 cannot encode.
        """
        if type(response) is not InferResponse and not (form is None and _is_placed(response)):
            return self._encode_detailed(response, form)
        if form is None and len(response.outputs) == 1 and not response.id:
            (output,) = response.outputs
            data = output.data
            is_plain = type(output) is InferOutput and output.datatype is not BYTES
            if is_plain and data.nbytes <= JOINED_BYTES:
                head = self._heads[
                    response.model_name,
                    response.model_version,
                    (output.name, output.datatype.name, data.shape),
                    data.nbytes,
                ]
                whole = head + data.tobytes()
                return [whole], len(whole)
        raw_outputs: Iterable[InferOutput] = response.outputs
        small: list[bytes] = [self._models[response.model_name, response.model_version]]
        if response.id:
            text = response.id.encode()
            small += (_ID, write_varint(len(text)), text)
        outputs, sizes = self._outputs, self._sizes
        if form is None:
            for output in response.outputs:
                small.append(outputs[output.name, output.datatype.name, output.data.shape])
        else:
            self._write_typed(small, response.outputs, form)
            raw_outputs = response.outputs if form.raw else ()
        parts: Parts = []
        total = 0
        for output in raw_outputs:
            raw = _raw(output)
            size = len(raw)
            small.append(sizes[size])
            if type(raw) is bytes and size <= JOINED_BYTES:
                small.append(raw)
                continue
            head = b"".join(small)
            small.clear()
            parts += (head, raw)
            total += len(head) + size
        if small:
            rest = b"".join(small)
            parts.append(rest)
            total += len(rest)
        return parts, total

    def _encode_detailed(self, response: InferResponse, form: Form | None) -> tuple[Parts, int]:
        """Encode a response with parameters, or with outputs in shared memory."""
        assert isinstance(response, DetailedResponse)
        outputs, raw = write_outputs(response.outputs, form, response.output_parameters)
        message = pb.ModelInferResponse(
            model_name=response.model_name,
            model_version=response.model_version,
            id=response.id,
            parameters=write_parameters(response.parameters),
            outputs=outputs,
        )
        parts: Parts = [self._codec.encode_message(message)]
        for tensor in raw:
            parts += (self._sizes[len(tensor)], tensor)
        total = sum(map(len, parts))
        return ([b"".join(parts)], total) if total <= JOINED_BYTES else (parts, total)

    def _write_typed(self, small: list[bytes], outputs: Sequence[InferOutput], form: Form) -> None:
        for output, contents in zip(outputs, form.contents, strict=True):
            parts = [
                self._codec.encode_message(
                    _described(output.name, output.datatype.name, output.data.shape)
                )
            ]
            if contents is not None:
                written = self._codec.encode_message(contents)
                parts += (_CONTENTS, write_varint(len(written)), written)
            small += (_OUTPUTS, write_varint(sum(map(len, parts))), *parts)

    def _write_model(self, key: tuple[str, str]) -> bytes:
        name, version = key
        message = pb.ModelInferResponse(model_name=name, model_version=version)
        return self._codec.encode_message(message)

    def _write_head(self, key: tuple[str, str, tuple[str, str, Shape], int]) -> bytes:
        name, version, output, size = key
        return self._models[name, version] + self._outputs[output] + self._sizes[size]

    def _write_output(self, key: tuple[str, str, Shape]) -> bytes:
        name, datatype, shape = key
        output = _described(name, datatype, shape)
        return self._codec.encode_message(pb.ModelInferResponse(outputs=[output]))


def _described(name: str, datatype: str, shape: Shape) -> pb.ModelInferResponseInferOutputTensor:
    return pb.ModelInferResponseInferOutputTensor(name=name, datatype=datatype, shape=list(shape))


def _is_placed(response: InferResponse) -> bool:
    """Tell whether the response differs from a plain one only by outputs in shared memory."""
    return (
        type(response) is DetailedResponse
        and not response.parameters
        and not response.output_parameters
    )


def _raw(output: InferOutput) -> bytes | memoryview:
    """Return the raw contents of an output; empty if the output is in shared memory."""
    if type(output) is not InferOutput:
        return b""
    data = output.data
    if output.datatype is BYTES:
        return pack_bytes(data)
    return data.tobytes() if data.nbytes <= JOINED_BYTES else to_bytes(output.datatype, data)


def _write_size(size: int) -> bytes:
    return _RAW_OUTPUT_CONTENTS + write_varint(size)
