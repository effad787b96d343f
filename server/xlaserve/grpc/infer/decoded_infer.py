"""A ModelInfer request whose metadata was decoded, but not yet its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from xlaserve.grpc.infer.tensors import read_request
from xlaserve.grpc.infer.typed_contents import Contents
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.grpc.protobuf.wire import Data
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput, SharedInput
from xlaserve.serving.inputs.images import unpack_bytes_or_image
from xlaserve.serving.made_arrays import ELEMENT_BYTES
from xlaserve.tensors import (
    BYTES,
    DATATYPES,
    Datatype,
    Parameter,
    Shape,
    TensorDataError,
    from_bytes,
    from_elements,
)
from xlaserve_proto import inference as pb

_BOOL = DATATYPES["BOOL"]
_LENGTH_BYTES = 4
_LONG_BYTES = 16 << 10
_LONG_ELEMENTS = 4096
_LONG_ELEMENT_BYTES = 256 << 10
_LONG_FLAG_BYTES = 1 << 20
"""Up to this many bytes of BOOL are decoded on the event loop, in about 0.5 ms. For BYTES,
`_LONG_ELEMENTS` limits the elements and `_LONG_ELEMENT_BYTES` the total bytes."""
IN_SHARED_MEMORY = -2
"""Value of `Head.plain_bytes` for an input whose elements are in shared memory."""


class Head(NamedTuple):
    """The metadata of one input, without its elements."""

    name: str
    datatype: Datatype
    shape: Shape
    parameters: Mapping[str, Parameter]
    dtype: "np.dtype[Any]"
    plain_bytes: int
    """Length of the raw contents if numpy can view them without decoding; -1 if they must be
    decoded, IN_SHARED_MEMORY if the message does not contain them."""

    def shared(self) -> SharedInput:
        """Return the input without elements; they are read from shared memory later."""
        nothing = np.empty(0, self.dtype)
        return SharedInput(self.name, self.datatype, nothing, self.parameters, self.shape)

    @property
    def is_known_to_be_shared(self) -> bool:
        """Tell whether the elements are in shared memory and their size follows from the shape."""
        return self.plain_bytes == IN_SHARED_MEMORY and self.datatype is not BYTES


@dataclass(slots=True)
class Structure:
    """The decoded parts of a request that similar requests can share; immutable by convention."""

    heads: list[Head]
    contents: list[Contents]
    outputs: tuple[RequestedOutput, ...]
    parameters: Mapping[str, Parameter]
    typed: bool
    """Whether the request has no raw contents, so that its response may have typed contents."""

    def elements_bytes(self) -> int:
        """Return the bytes needed to decode elements in a thread; 0 if no thread is needed."""
        size = 0
        is_long = False
        for head, (start, stop, _) in zip(self.heads, self.contents, strict=True):
            if head.datatype is BYTES:
                # Each element has a four-byte length prefix, which bounds their number even if the
                # shape claims more.
                count = min(prod(head.shape), (stop - start) // _LENGTH_BYTES)
                size += count * ELEMENT_BYTES + stop - start
                is_long |= count > _LONG_ELEMENTS or stop - start > _LONG_ELEMENT_BYTES
            elif head.datatype is _BOOL:
                is_long |= stop - start > _LONG_FLAG_BYTES
        return max(size, 1) if is_long else 0

    def inputs(self, data: Data) -> tuple[InferInput, ...]:
        """Read the tensors from the message; raises TensorDataError."""
        inputs: list[InferInput] = []
        for head, (start, stop, elements) in zip(self.heads, self.contents, strict=True):
            name, datatype, shape, parameters, dtype, plain_bytes = head
            if elements is not None:
                tensor = from_elements(datatype, shape, elements)
            elif stop - start == plain_bytes:
                tensor = np.ndarray(shape, dtype, data, start)
            elif plain_bytes == IN_SHARED_MEMORY:
                inputs.append(head.shared())
                continue
            elif datatype is BYTES:
                tensor = unpack_bytes_or_image(shape, memoryview(data)[start:stop])
            else:
                tensor = from_bytes(datatype, shape, memoryview(data)[start:stop])
            inputs.append(InferInput(name, datatype, tensor, parameters))
        return tuple(inputs)


class DecodedInfer:
    """A request whose metadata was decoded; `request` decodes its tensors."""

    __slots__ = (
        "_codec",
        "_data",
        "_message",
        "_structure",
        "id",
        "model_name",
        "model_version",
    )

    def __init__(
        self,
        names: tuple[str, str, str],
        data: Data,
        codec: WireCodec,
        structure: Structure | None,
        message: pb.ModelInferRequest | None = None,
    ) -> None:
        self.model_name, self.model_version, self.id = names
        self._data = data
        self._codec = codec
        self._structure = structure
        self._message = message

    @property
    def elements_bytes(self) -> int:
        """Return the bytes needed to decode elements in a thread; 0 if no thread is needed."""
        if len(self._data) <= _LONG_BYTES or self._structure is None:
            return 0
        return self._structure.elements_bytes()

    @property
    def ordinary(self) -> bool:
        """Tell whether the fast decoder read the request: it has no unknown fields."""
        return self._structure is not None

    def request(self) -> InferRequest:
        """Decode the tensors, as views of the message if possible; raise as `read_request` does."""
        structure = self._structure
        if structure is not None:
            try:
                inputs = structure.inputs(self._data)
            except TensorDataError:
                pass  # decode it with the generic codec, which raises the proper error
            else:
                return InferRequest(
                    self.model_name,
                    self.model_version,
                    self.id,
                    inputs,
                    structure.outputs,
                    structure.parameters,
                    typed=structure.typed,
                )
        if self._message is None:
            self._message = self._codec.decode_message(pb.ModelInferRequest, self._data)
        return read_request(self._message)
