"""V2 protocol datatypes, tensor specifications, and conversions from and to bytes."""

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
"""Tensor bytes from a transport; arrays are views of them."""

Shape: TypeAlias = tuple[int, ...]
"""Sizes of the dimensions; -1 accepts any size."""

Parameter: TypeAlias = bool | int | float | str
"""A value in a parameter map of the V2 protocol."""

Tensor: TypeAlias = np.ndarray[Any, Any]
"""An array in row-major order. BYTES tensors have dtype object, with `bytes` elements."""

Octets: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""An array of bytes."""

ALIGNMENT = 64
"""Alignment in bytes required for XLA to read an array in place on the CPU; it copies others."""

MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a numpy array; more would also make shapes slow to multiply."""

Elements: TypeAlias = "Sequence[Any] | Tensor"
"""Typed elements in row-major order, as a list or one-dimensional array."""

_SHOWN_DIMENSIONS = 16
_SHOWN_DIGITS = 24


class Kind(Enum):
    """The kind of a datatype's elements. numpy's own kinds do not cover ml_dtypes."""

    BOOLEAN = auto()
    INTEGER = auto()
    FLOAT = auto()
    TEXT = auto()


@dataclass(frozen=True, slots=True)
class Datatype:
    """A datatype of the V2 protocol."""

    name: str
    """Name in the V2 protocol."""
    config_name: str
    """Name in a model configuration."""
    config_number: int
    """Number in the `DataType` enum of protos/model_config.proto, the same as in Triton."""
    kind: Kind
    dtype: "np.dtype[Any]"
    itemsize: int
    """Bytes per element; 0 for BYTES, whose elements vary in size."""
    contents: str | None
    """The field of InferTensorContents for this datatype; None if it can only be sent as raw bytes.
    """
    tolerance: float
    """Permitted relative difference between two results; 0 for exact datatypes."""
    has_buffer: bool
    """Whether numpy itself has this dtype, so that the buffer protocol and .npy files support it.
    """

    def __str__(self) -> str:
        return self.name

    @property
    def is_number(self) -> bool:
        """Tell whether elements are numbers, which can be ordered and subtracted."""
        return self.kind in {Kind.INTEGER, Kind.FLOAT}


def _row(
    name: str, number: int, dtype: Any, contents: str | None = None, tolerance: float = 0.0
) -> Datatype:
    """Make a datatype; the arguments are the facts that do not follow from the dtype."""
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
"""Kinds by numpy's kind character; most dtypes of ml_dtypes have `V`."""

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
"""Datatypes by their V2 names (V2 protocol, Tensor Data Types; BF16 as in Triton)."""

BY_CONFIG_NAME = MappingProxyType({row.config_name: row for row in _ROWS})
"""Datatypes by their names in a model configuration."""

BYTES = DATATYPES["BYTES"]
_BOOL = DATATYPES["BOOL"]
_BY_DTYPE = {row.dtype: row for row in _ROWS}


def datatype_named(name: str) -> Datatype:
    """Return the datatype with this V2 name, or raise UnknownDatatype."""
    row = DATATYPES.get(name)
    if row is None:
        raise UnknownDatatype(name, DATATYPES)
    return row


def datatype_of(dtype: Any) -> Datatype | None:
    """Return the datatype with this numpy dtype, or None if V2 has none."""
    return _BY_DTYPE.get(np.dtype(dtype))


def kind_of(dtype: Any) -> Kind | None:
    """Return the kind of the datatype with this numpy dtype, or None if V2 has none."""
    row = _BY_DTYPE.get(np.dtype(dtype))
    return None if row is None else row.kind


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape of a model's input or output."""

    name: str
    datatype: Datatype
    shape: Shape
    """All dimensions, including the batch; -1 accepts any size."""

    def __str__(self) -> str:
        return describe(self.datatype, self.shape)

    def accepts(self, shape: Sequence[int]) -> bool:
        """Tell whether a tensor of this concrete shape is accepted."""
        if len(shape) != len(self.shape):
            return False
        # A list is faster: a generator would be resumed for each dimension.
        sizes = zip(self.shape, shape, strict=True)
        return not [have for want, have in sizes if want not in (-1, have)]


def describe(datatype: Datatype | str, shape: Sequence[int]) -> str:
    """Format a datatype and shape for error messages and tables: `FP32[-1,784]`."""
    more = ",..." if len(shape) > _SHOWN_DIMENSIONS else ""
    return f"{datatype}[{','.join(map(str, shape[:_SHOWN_DIMENSIONS]))}{more}]"


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specifications of arrays, which must have V2 dtypes."""
    return tuple(
        TensorSpec(name, _BY_DTYPE[tensor.dtype], tensor.shape) for name, tensor in tensors.items()
    )


class TensorDataError(ValueError):
    """Tensor data does not match its datatype and shape; names expected and actual.

    Callers that know the model and the tensor convert it to InvalidTensor.
    """

    def __init__(self, expected: str, got: str) -> None:
        self.expected = expected
        self.got = got
        super().__init__(f"expected {expected}, got {got}")


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a concrete shape; Python integers cannot overflow.

    Raises TensorDataError for negative sizes and for more dimensions than an array can have.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise TensorDataError(f"at most {MAX_DIMENSIONS} dimensions", str(len(shape)))
    if shape and min(shape) < 0:
        raise TensorDataError("a shape without negative dimensions", str(list(shape)))
    return math.prod(shape)


def _shaped(array: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape an array whose number of elements has been checked."""
    try:
        return array.reshape(shape)
    except ValueError:
        raise _not_addressable(shape) from None


def _not_addressable(shape: Sequence[int]) -> TensorDataError:
    # Without elements any sizes are possible in V2, but numpy has a limit.
    return TensorDataError("dimensions within the address space", str(list(shape)))


def from_bytes(datatype: Datatype, shape: Sequence[int], data: Buffer) -> Tensor:
    """View raw bytes (little-endian, row-major, unpadded) as an array of this shape.

    No copy is made, except for BYTES, whose elements become `bytes` objects. Raises TensorDataError
    if the number of bytes does not match the shape.
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
    """Split BYTES data: each element has a 4-byte little-endian length prefix.

    Raises TensorDataError if elements and shape, or lengths and data, do not match.
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
    """Return an element that is longer than one piece, or raise for an incomplete one."""
    start = position + LENGTH.size
    if start > len(view):
        raise TensorDataError(f"{count} elements", f"{index} elements in {len(view)} bytes")
    size = LENGTH.unpack_from(view, position)[0]
    if start + size > len(view):
        raise TensorDataError(f"{size} bytes of element {index}", f"{len(view) - start} bytes")
    return bytes(view[start : start + size])


def pack_bytes(tensor: Tensor) -> bytes | memoryview:
    """Encode a BYTES tensor with length prefixes; the inverse of `unpack_bytes`.

    Raises TensorDataError for an element that is neither bytes nor str.
    """
    flat = tensor.ravel()
    starts = range(0, len(flat), PIECE_ELEMENTS) or (0,)
    return joined([packed(encoded_elements(flat[at : at + PIECE_ELEMENTS])) for at in starts])


def encoded_elements(tensor: Tensor) -> list[bytes]:
    """Return the elements of a BYTES tensor in row-major order; raises like `pack_bytes`."""
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
    """Return the raw bytes of a tensor, as a view of its memory if that is contiguous.

    The tensor must already have the dtype of the datatype.
    """
    if datatype is BYTES:
        return pack_bytes(tensor)
    if datatype.has_buffer and tensor.size and tensor.flags.c_contiguous:
        return tensor.data.cast("B")
    # The buffer protocol has no format for ml_dtypes, but any array can be viewed as bytes.
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def from_elements(datatype: Datatype, shape: Sequence[int], elements: Elements) -> Tensor:
    """Build an array from typed elements in row-major order.

    Raises TensorDataError if their number does not match the shape, if an element has another kind
    than the datatype, or if a number is out of range (other servers truncate it silently).
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
    # Python refuses to format integers with thousands of digits.
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
    # Numbers out of range became infinite, or NaN in datatypes without infinity.
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
"""Accepted element types and the function that makes an array, by kind."""
