"""The datatypes of the V2 protocol, and tensors as specifications, bytes and elements."""

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from xlaserve.errors import UnknownDatatype

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes of a tensor as a transport hands them in; arrays view them in place."""

Shape: TypeAlias = tuple[int, ...]
"""Sizes of the dimensions, -1 where any size is accepted."""

Tensor: TypeAlias = "np.ndarray[Any, Any]"
"""An array in row-major order; BYTES tensors have dtype object and hold `bytes`."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Datatype:
    """One row of the datatype table."""

    name: str
    """The name in the V2 protocol."""
    config_name: str
    """The name in a model configuration."""
    dtype: "np.dtype[Any]"
    itemsize: int
    """Bytes of one element; 0 for BYTES, whose elements vary."""
    contents: str | None
    """The field of InferTensorContents that carries it; None where only raw bytes can."""

    def __str__(self) -> str:
        return self.name


def _row(name: str, config: str, dtype: Any, itemsize: int, contents: str | None) -> Datatype:
    return Datatype(name, config, np.dtype(dtype), itemsize, contents)


_ROWS = (
    _row("BOOL", "TYPE_BOOL", np.bool_, 1, "bool_contents"),
    _row("UINT8", "TYPE_UINT8", "<u1", 1, "uint_contents"),
    _row("UINT16", "TYPE_UINT16", "<u2", 2, "uint_contents"),
    _row("UINT32", "TYPE_UINT32", "<u4", 4, "uint_contents"),
    _row("UINT64", "TYPE_UINT64", "<u8", 8, "uint64_contents"),
    _row("INT8", "TYPE_INT8", "<i1", 1, "int_contents"),
    _row("INT16", "TYPE_INT16", "<i2", 2, "int_contents"),
    _row("INT32", "TYPE_INT32", "<i4", 4, "int_contents"),
    _row("INT64", "TYPE_INT64", "<i8", 8, "int64_contents"),
    _row("FP16", "TYPE_FP16", "<f2", 2, None),
    _row("BF16", "TYPE_BF16", ml_dtypes.bfloat16, 2, None),
    _row("FP32", "TYPE_FP32", "<f4", 4, "fp32_contents"),
    _row("FP64", "TYPE_FP64", "<f8", 8, "fp64_contents"),
    _row("BYTES", "TYPE_STRING", np.object_, 0, "bytes_contents"),
)

DATATYPES = MappingProxyType({row.name: row for row in _ROWS})
"""The V2 datatypes by protocol name (V2 protocol, Tensor Data Types; BF16 as Triton has it)."""

BY_CONFIG_NAME = MappingProxyType({row.config_name: row for row in _ROWS})
"""The V2 datatypes by the name that a model configuration uses."""

BYTES = DATATYPES["BYTES"]
_BOOL = DATATYPES["BOOL"]
_BY_DTYPE = {row.dtype: row for row in _ROWS}


def datatype_named(name: str) -> Datatype:
    """Return the row of a protocol name, or raise UnknownDatatype."""
    row = DATATYPES.get(name)
    if row is None:
        raise UnknownDatatype(name, DATATYPES)
    return row


def datatype_of(dtype: Any) -> Datatype | None:
    """Return the row whose elements have this numpy dtype, None where V2 has no name for it."""
    return _BY_DTYPE.get(np.dtype(dtype))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model says of one input or output."""

    name: str
    datatype: Datatype
    shape: Shape
    """All dimensions, the batch dimension included; -1 where any size is accepted."""

    def __str__(self) -> str:
        return describe(self.datatype, self.shape)

    def accepts(self, shape: Sequence[int]) -> bool:
        """Tell whether a tensor of this concrete shape fits."""
        return len(shape) == len(self.shape) and all(
            want in (-1, have) for want, have in zip(self.shape, shape, strict=True)
        )


def describe(datatype: Datatype | str, shape: Sequence[int]) -> str:
    """Write a datatype and a shape as error texts and tables show them: `FP32[-1,784]`."""
    return f"{datatype}[{','.join(map(str, shape))}]"


class TensorDataError(ValueError):
    """Tensor data that does not fit its datatype and shape; carries what was expected and got.

    Whoever knows the model and the tensor turns it into InvalidTensor.
    """

    def __init__(self, expected: str, got: str) -> None:
        self.expected = expected
        self.got = got
        super().__init__(f"expected {expected}, got {got}")


def element_count(shape: Sequence[int]) -> int:
    """Multiply a concrete shape, in Python integers so that it cannot overflow."""
    for size in shape:
        if size < 0:
            raise TensorDataError("a shape without negative dimensions", str(list(shape)))
    return math.prod(shape)


def from_bytes(datatype: Datatype, shape: Sequence[int], data: Buffer) -> Tensor:
    """View raw bytes (little-endian, row-major, unpadded) as an array of this shape.

    No copy is made, except for BYTES, whose elements become `bytes` objects.
    Raises TensorDataError when the byte count is not that of the shape.
    """
    count = element_count(shape)
    if datatype is BYTES:
        return unpack_bytes(shape, data)
    expected = count * datatype.itemsize
    if len(data) != expected:
        raise TensorDataError(
            f"{expected} bytes for {describe(datatype, shape)}", f"{len(data)} bytes"
        )
    if datatype is _BOOL and bytes(data).translate(None, b"\0\1"):
        raise TensorDataError("BOOL bytes of 0 or 1", "another byte")
    return np.frombuffer(data, dtype=datatype.dtype).reshape(shape)


def unpack_bytes(shape: Sequence[int], data: Buffer) -> Tensor:
    """Split BYTES data: each element is a 4-byte little-endian length and that many bytes.

    Raises TensorDataError when elements and shape, or lengths and data, disagree.
    """
    count = element_count(shape)
    view = memoryview(data).cast("B")
    end = len(view)
    if count * _LENGTH.size > end:
        raise TensorDataError(
            f"{count} length-prefixed elements for {describe(BYTES, shape)}", f"{end} bytes"
        )
    elements = np.empty(count, dtype=np.object_)
    position = 0
    for index in range(count):
        start = position + 4
        if start > end:
            raise TensorDataError(f"{count} elements", f"{index} elements in {end} bytes")
        position = start + int.from_bytes(view[position:start], "little")
        if position > end:
            raise TensorDataError(
                f"{position - start} bytes of element {index}", f"{end - start} bytes"
            )
        elements[index] = bytes(view[start:position])
    if position != end:
        raise TensorDataError(f"{count} elements", f"{end - position} bytes more")
    return elements.reshape(shape)


def pack_bytes(tensor: Tensor) -> bytes:
    """Write a BYTES tensor with its length prefixes; the inverse of `unpack_bytes`."""
    parts: list[bytes] = []
    for element in tensor.ravel():
        data = element.encode() if isinstance(element, str) else bytes(element)
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def to_bytes(datatype: Datatype, tensor: Tensor) -> bytes | memoryview:
    """Return the raw bytes of a tensor, as a view of its memory wherever that is contiguous."""
    if datatype is BYTES:
        return pack_bytes(tensor)
    flat = np.ascontiguousarray(tensor).reshape(-1)
    # The buffer protocol has no letter for bfloat16; as bytes every datatype can be viewed.
    return memoryview(flat.view(np.uint8))


def from_elements(datatype: Datatype, shape: Sequence[int], elements: Sequence[Any]) -> Tensor:
    """Build an array from typed elements in row-major order.

    Raises TensorDataError when their number is not that of the shape, or an integer does not fit
    the datatype (peers narrow it silently).
    """
    count = element_count(shape)
    if len(elements) != count:
        raise TensorDataError(
            f"{count} elements for {describe(datatype, shape)}", f"{len(elements)} elements"
        )
    if datatype is BYTES:
        return _objects(elements).reshape(shape)
    if datatype.dtype.kind in "iu":
        return _integers(datatype, elements).reshape(shape)
    return np.array(elements, dtype=datatype.dtype).reshape(shape)


def _objects(elements: Iterable[Any]) -> Tensor:
    values = list(elements)
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array


def _integers(datatype: Datatype, elements: Sequence[Any]) -> Tensor:
    # Wide enough for every typed field: of the 64-bit ones only uint64_contents exceeds int64.
    wide = np.array(elements, dtype=np.uint64 if datatype.name == "UINT64" else np.int64)
    limits = np.iinfo(datatype.dtype)
    if wide.size and (int(wide.min()) < limits.min or int(wide.max()) > limits.max):
        outside = next(v for v in elements if not limits.min <= v <= limits.max)
        raise TensorDataError(f"{datatype} between {limits.min} and {limits.max}", str(outside))
    return wide.astype(datatype.dtype, copy=False)
