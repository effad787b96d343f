"""The datatypes of the V2 protocol, and tensors as specifications, bytes and elements."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from xlaserve.errors import UnknownDatatype
from xlaserve.tensors.byte_elements import LENGTH, PIECE_BYTES, PIECE_ELEMENTS, cut, joined, packed

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes of a tensor as a transport hands them in; arrays view them in place."""

Shape: TypeAlias = tuple[int, ...]
"""Sizes of the dimensions, -1 where any size is accepted."""

Parameter: TypeAlias = bool | int | float | str
"""A value of a parameter map of the V2 protocol."""

Tensor: TypeAlias = np.ndarray[Any, Any]
"""An array in row-major order; BYTES tensors have dtype object and hold `bytes`."""

Octets: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""Bytes as an array."""

ALIGNMENT = 64
"""Alignment in bytes for XLA to read an array in place on the CPU; else it copies it first."""

MAX_DIMENSIONS = 64
"""The most dimensions of an array in numpy; more would also make a shape slow to multiply."""

Elements: TypeAlias = "Sequence[Any] | Tensor"
"""Typed elements in row-major order, as a list or as an array of one dimension."""

_SHOWN_DIMENSIONS = 16
_SHOWN_DIGITS = 24


class Kind(Enum):
    """The kind of a datatype's elements; numpy's kinds do not cover ml_dtypes."""

    BOOLEAN = auto()
    INTEGER = auto()
    FLOAT = auto()
    TEXT = auto()


@dataclass(frozen=True, slots=True)
class Datatype:
    """One row of the datatype table."""

    name: str
    """The name in the V2 protocol."""
    config_name: str
    """The name in a model configuration."""
    config_number: int
    """The number of that name: in `DataType` of protos/model_config.proto, and in Triton."""
    kind: Kind
    dtype: "np.dtype[Any]"
    itemsize: int
    """Bytes of one element; 0 for BYTES, whose elements vary."""
    contents: str | None
    """The field of InferTensorContents that carries it; None where only raw bytes can."""
    tolerance: float
    """Allowed relative difference of two results; 0 for exact datatypes."""
    has_buffer: bool
    """Whether numpy has this dtype itself, and with it the buffer protocol and .npy files."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_number(self) -> bool:
        """Whether elements have an order and a distance."""
        return self.kind in {Kind.INTEGER, Kind.FLOAT}


def _row(
    name: str, number: int, dtype: Any, contents: str | None = None, tolerance: float = 0.0
) -> Datatype:
    """Make a row; the table holds what cannot be read from the dtype."""
    held: np.dtype[Any] = np.dtype(dtype)
    kind = _KINDS.get(held.kind, Kind.INTEGER if "int" in held.name else Kind.FLOAT)
    text = kind is Kind.TEXT
    return Datatype(
        name,
        "TYPE_STRING" if text else f"TYPE_{name}",
        number,
        kind,
        held,
        0 if text else held.itemsize,
        contents,
        tolerance,
        held.isbuiltin == 1 and not text,
    )


_KINDS = {"b": Kind.BOOLEAN, "i": Kind.INTEGER, "u": Kind.INTEGER, "f": Kind.FLOAT, "O": Kind.TEXT}
"""Kinds by numpy's kind of dtype; most dtypes of ml_dtypes have V."""

_ROWS = (
    _row("BOOL", 1, np.bool_, "bool_contents"),
    _row("UINT8", 2, "<u1", "uint_contents"),
    _row("UINT16", 3, "<u2", "uint_contents"),
    _row("UINT32", 4, "<u4", "uint_contents"),
    _row("UINT64", 5, "<u8", "uint64_contents"),
    _row("INT8", 6, "<i1", "int_contents"),
    _row("INT16", 7, "<i2", "int_contents"),
    _row("INT32", 8, "<i4", "int_contents"),
    _row("INT64", 9, "<i8", "int64_contents"),
    _row("FP16", 10, "<f2", tolerance=2e-2),
    _row("BF16", 14, ml_dtypes.bfloat16, tolerance=5e-2),
    _row("FP32", 11, "<f4", "fp32_contents", tolerance=1e-4),
    _row("FP64", 12, "<f8", "fp64_contents", tolerance=1e-9),
    _row("BYTES", 13, np.object_, "bytes_contents"),
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


def kind_of(dtype: Any) -> Kind | None:
    """Return the kind of the datatype with this numpy dtype, None where V2 has none."""
    row = _BY_DTYPE.get(np.dtype(dtype))
    return None if row is None else row.kind


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A model's description of an input or output."""

    name: str
    datatype: Datatype
    shape: Shape
    """All dimensions, the batch included; -1 for any size."""

    def __str__(self) -> str:
        return describe(self.datatype, self.shape)

    def accepts(self, shape: Sequence[int]) -> bool:
        """Tell whether a tensor of this concrete shape fits."""
        if len(shape) != len(self.shape):
            return False
        # A list: a generator would be resumed for each dimension.
        sizes = zip(self.shape, shape, strict=True)
        return not [have for want, have in sizes if want not in (-1, have)]


def describe(datatype: Datatype | str, shape: Sequence[int]) -> str:
    """Write a datatype and a shape as error texts and tables show them: `FP32[-1,784]`."""
    more = ",..." if len(shape) > _SHOWN_DIMENSIONS else ""
    return f"{datatype}[{','.join(map(str, shape[:_SHOWN_DIMENSIONS]))}{more}]"


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specifications of arrays, each with a dtype of the table."""
    return tuple(
        TensorSpec(name, _BY_DTYPE[tensor.dtype], tensor.shape) for name, tensor in tensors.items()
    )


class TensorDataError(ValueError):
    """Tensor data that does not fit its datatype and shape; carries what was expected and got.

    Callers that know the model and the tensor turn it into InvalidTensor.
    """

    def __init__(self, expected: str, got: str) -> None:
        self.expected = expected
        self.got = got
        super().__init__(f"expected {expected}, got {got}")


def element_count(shape: Sequence[int]) -> int:
    """Multiply a concrete shape, in Python integers so that it cannot overflow.

    Raises TensorDataError for a negative size and for more dimensions than an array can have.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise TensorDataError(f"at most {MAX_DIMENSIONS} dimensions", str(len(shape)))
    if shape and min(shape) < 0:
        raise TensorDataError("a shape without negative dimensions", str(list(shape)))
    return math.prod(shape)


def _shaped(array: Tensor, shape: Sequence[int]) -> Tensor:
    """Give an array, whose elements are counted already, its shape."""
    try:
        return array.reshape(shape)
    except ValueError:
        raise _not_addressable(shape) from None


def _not_addressable(shape: Sequence[int]) -> TensorDataError:
    # Without elements the other dimensions may be of any size, though not for numpy.
    return TensorDataError("dimensions within the address space", str(list(shape)))


def from_bytes(datatype: Datatype, shape: Sequence[int], data: Buffer) -> Tensor:
    """View raw bytes (little-endian, row-major, unpadded) as an array of this shape.

    No copy is made, except for BYTES, whose elements become `bytes` objects.
    Raises TensorDataError when the byte count is not that of the shape.
    """
    if datatype is BYTES:
        return unpack_bytes(shape, data)
    expected = element_count(shape) * datatype.itemsize
    view = memoryview(data)
    if view.nbytes != expected:
        raise TensorDataError(
            f"{expected} bytes for {describe(datatype, shape)}", f"{view.nbytes} bytes"
        )
    if datatype is _BOOL and expected and np.frombuffer(view, dtype=np.uint8).max() > 1:
        raise TensorDataError("BOOL bytes of 0 or 1", "another byte")
    try:
        return np.ndarray(shape, datatype.dtype, view)
    except ValueError:
        raise _not_addressable(shape) from None


def aligned_bytes(count: int) -> Octets:
    """Return uninitialized memory, aligned so that XLA reads it in place."""
    memory = np.empty(count + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + count]


def unpack_bytes(shape: Sequence[int], data: Buffer) -> Tensor:
    """Split BYTES data: each element is a 4-byte little-endian length and that many bytes.

    Raises TensorDataError when elements and shape, or lengths and data, disagree.
    """
    count = element_count(shape)
    view = memoryview(data).cast("B")
    if count * LENGTH.size > len(view):
        raise TensorDataError(
            f"{count} length-prefixed elements for {describe(BYTES, shape)}", f"{len(view)} bytes"
        )
    return _shaped(_split(view, count), shape)


def _split(view: memoryview, count: int) -> Tensor:
    elements = np.empty(count, BYTES.dtype)
    done = position = 0
    while done < count:
        raw = bytes(view[position : position + PIECE_BYTES])
        piece, size = cut(raw, min(count - done, PIECE_ELEMENTS))
        if not piece:
            piece = [_long_element(view, position, done, count)]
            size = LENGTH.size + len(piece[0])
        elements[done : done + len(piece)] = _objects(piece)
        done += len(piece)
        position += size
    if position != len(view):
        raise TensorDataError(f"{count} elements", f"{len(view) - position} extra bytes")
    return elements


def _long_element(view: memoryview, position: int, index: int, count: int) -> bytes:
    """Return the element at a position, which is longer than a piece or incomplete."""
    start = position + LENGTH.size
    if start > len(view):
        raise TensorDataError(f"{count} elements", f"{index} elements in {len(view)} bytes")
    size = LENGTH.unpack_from(view, position)[0]
    if start + size > len(view):
        raise TensorDataError(f"{size} bytes of element {index}", f"{len(view) - start} bytes")
    return bytes(view[start : start + size])


def pack_bytes(tensor: Tensor) -> bytes | memoryview:
    """Write a BYTES tensor with its length prefixes; the inverse of `unpack_bytes`.

    Raises TensorDataError for an element that is neither bytes nor text.
    """
    flat = tensor.ravel()
    starts = range(0, len(flat), PIECE_ELEMENTS) or (0,)
    return joined([packed(encoded_elements(flat[at : at + PIECE_ELEMENTS])) for at in starts])


def encoded_elements(tensor: Tensor) -> list[bytes]:
    """Return the elements of a BYTES tensor in row-major order; raises as `pack_bytes` does."""
    return [e if type(e) is bytes else _encoded(e) for e in tensor.ravel().tolist()]


def _encoded(element: object) -> bytes:
    match element:
        case bytes():
            return element
        case str():
            return element.encode(errors="surrogatepass")
        case bytearray() | memoryview():
            return bytes(element)
    raise TensorDataError("elements of bytes or text", type(element).__name__)


def to_bytes(datatype: Datatype, tensor: Tensor) -> bytes | memoryview:
    """Return the raw bytes of a tensor, as a view of its memory wherever that is contiguous.

    The elements must be those of the datatype already.
    """
    if datatype is BYTES:
        return pack_bytes(tensor)
    if datatype.has_buffer and tensor.size and tensor.flags.c_contiguous:
        return tensor.data.cast("B")
    # The buffer protocol has no letter for dtypes of ml_dtypes; as bytes all can be viewed.
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def from_elements(datatype: Datatype, shape: Sequence[int], elements: Elements) -> Tensor:
    """Build an array from typed elements in row-major order.

    Raises TensorDataError when their number is not that of the shape, when one is of another kind
    than the datatype, or when a number does not fit it (peers narrow it silently).
    """
    count = element_count(shape)
    if len(elements) != count:
        raise TensorDataError(
            f"{count} elements for {describe(datatype, shape)}", f"{len(elements)} elements"
        )
    accepted, build = _BUILDERS[datatype.kind]
    for found in _types(elements):
        if not issubclass(found, accepted) or (found is bool and bool not in accepted):
            raise TensorDataError(f"elements of {datatype}", found.__name__)
    return _shaped(build(datatype, elements), shape)


def _types(elements: Elements) -> set[type]:
    if isinstance(elements, np.ndarray) and elements.dtype != np.object_:
        return {elements.dtype.type}
    return set(map(type, elements))


def _bools(datatype: Datatype, elements: Elements) -> Tensor:
    return np.asarray(elements, dtype=datatype.dtype)


def _integers(datatype: Datatype, elements: Elements) -> Tensor:
    limits = np.iinfo(datatype.dtype)
    for outside in _extremes(elements):
        if not limits.min <= outside <= limits.max:
            expected = f"{datatype} between {limits.min} and {limits.max}"
            raise TensorDataError(expected, _shown(outside))
    return np.asarray(elements, dtype=datatype.dtype)


def _shown(number: int) -> str:
    # Python refuses to write an integer of thousands of digits.
    return str(number) if abs(number) < 10**_SHOWN_DIGITS else "a number with more digits"


def _extremes(elements: Elements) -> tuple[int, ...]:
    if not len(elements):
        return ()
    if isinstance(elements, np.ndarray):
        return int(elements.min()), int(elements.max())
    return int(min(elements)), int(max(elements))


def _floats(datatype: Datatype, elements: Elements) -> Tensor:
    if isinstance(elements, np.ndarray) and elements.dtype == datatype.dtype:
        return elements
    try:
        wide = np.asarray(elements, dtype=np.float64)
    except OverflowError:
        raise TensorDataError(f"{datatype}", "a number out of range") from None
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(datatype.dtype, copy=False)
    # What is too large is infinite, or NaN where the datatype has no infinity.
    if np.any(np.isfinite(wide) & ~np.isfinite(narrow)):
        raise TensorDataError(f"{datatype}", "a number out of range")
    return narrow


def _texts(datatype: Datatype, elements: Elements) -> Tensor:
    return _objects([_encoded(element) for element in elements])


def _objects(elements: Sequence[bytes]) -> Tensor:
    return np.fromiter(elements, BYTES.dtype, len(elements))


_INTEGRAL = (int, np.integer)
_REAL: tuple[type, ...] = (
    *(int, float, np.integer, np.floating),
    *(row.dtype.type for row in _ROWS if row.kind is Kind.FLOAT and not row.has_buffer),
)

_BUILDERS: Mapping[Kind, tuple[tuple[type, ...], Callable[[Datatype, Elements], Tensor]]] = (
    MappingProxyType(
        {
            Kind.BOOLEAN: ((bool, np.bool_), _bools),
            Kind.INTEGER: (_INTEGRAL, _integers),
            Kind.FLOAT: (_REAL, _floats),
            Kind.TEXT: ((object,), _texts),
        }
    )
)
"""Accepted elements and the maker of an array of them, by the kind of a datatype."""
