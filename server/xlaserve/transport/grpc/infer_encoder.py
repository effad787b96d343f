"""Writes the answers of ModelInfer, without a message object on the way."""

from typing import TypeAlias

from xlaserve.core.inference import InferOutput, InferResponse
from xlaserve.tensors import BYTES, Shape, pack_bytes, to_bytes
from xlaserve.transport.bounded_cache import MakingCache
from xlaserve.transport.grpc.codec import WireCodec
from xlaserve.transport.grpc.wire import LENGTH, write_varint
from xlaserve_proto import inference as pb

Parts: TypeAlias = list[bytes | memoryview]

JOINED_BYTES = 16 << 10
"""Bytes of a tensor up to which a copy costs less than one more part to send."""

_ID = write_varint(3 << 3 | LENGTH)
_RAW_OUTPUT_CONTENTS = write_varint(6 << 3 | LENGTH)


class InferEncoder:
    """Writes responses; keeps what repeats: names, datatypes and shapes, `max_cached` of each."""

    def __init__(self, max_cached: int) -> None:
        self._codec = WireCodec()
        self._models = MakingCache(self._write_model, max_cached)
        self._outputs = MakingCache(self._write_output, max_cached)
        self._sizes = MakingCache(_write_size, max_cached)

    def encode(self, response: InferResponse) -> tuple[Parts, int]:
        """Return the parts of a ModelInferResponse in their order, and their bytes together.

        A tensor of more than JOINED_BYTES is a part of its own, a view of its memory wherever
        that is contiguous. Raises ValueError for a name that is not Unicode.
        """
        small: list[bytes] = [self._models[response.model_name, response.model_version]]
        if response.id:
            text = response.id.encode()
            small += (_ID, write_varint(len(text)), text)
        outputs, sizes = self._outputs, self._sizes
        for output in response.outputs:
            small.append(outputs[output.name, output.datatype.name, output.data.shape])
        parts: Parts = []
        total = 0
        for output in response.outputs:
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

    def _write_model(self, key: tuple[str, str]) -> bytes:
        name, version = key
        message = pb.ModelInferResponse(model_name=name, model_version=version)
        return self._codec.encode_message(message)

    def _write_output(self, key: tuple[str, str, Shape]) -> bytes:
        name, datatype, shape = key
        output = pb.ModelInferResponseInferOutputTensor(
            name=name, datatype=datatype, shape=list(shape)
        )
        return self._codec.encode_message(pb.ModelInferResponse(outputs=[output]))


def _raw(output: InferOutput) -> bytes | memoryview:
    data = output.data
    if output.datatype is BYTES:
        return pack_bytes(data)
    return data.tobytes() if data.nbytes <= JOINED_BYTES else to_bytes(output.datatype, data)


def _write_size(size: int) -> bytes:
    return _RAW_OUTPUT_CONTENTS + write_varint(size)
