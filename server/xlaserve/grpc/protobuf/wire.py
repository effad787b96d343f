"""The protobuf wire format: scalar types, varints, and field metadata of generated classes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import betterproto
import numpy as np

from xlaserve.errors.message import MalformedMessage

VARINT, FIXED64, LENGTH, START_GROUP, END_GROUP, FIXED32 = range(6)
"""The wire types, which are the low three bits of a tag (protobuf Encoding, Message Structure)."""

STRING, BYTES, ENUM, MESSAGE, MAP = "string", "bytes", "enum", "message", "map"
"""betterproto's names of the field types other than numbers."""

Data: TypeAlias = bytes | memoryview
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Varints: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Convert: TypeAlias = Callable[[Data], Any]
"""Converts the bytes of a field to a value, or the bytes of a packed field to a list of values."""

_LONGEST = 10
"""Maximum bytes of a varint; protobuf keeps the low 64 of its 70 bits."""
_MASK = (1 << 64) - 1
_MAX_TAG = (1 << 32) - 1
_MAX_BYTES_OF_32_BITS = 5
_SLAB = 1 << 16
_FEW = 64
"""Up to this many bytes of packed varints, decoding in Python is faster than with numpy."""


# --- types -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scalar:
    """The encoding of a scalar type."""

    wire: int
    """The wire type of a single value; LENGTH for string and bytes, which are never packed."""
    default: object
    dtype: "np.dtype[Any]"
    """The type that a varint is truncated to, or the encoding of a fixed-size number."""
    zigzag: bool = False

    @property
    def layout(self) -> Struct:
        """Return the struct format of a fixed-size number."""
        return Struct(f"<{_LETTERS[self.dtype.str[1:]]}")


_LETTERS = MappingProxyType({"i4": "i", "i8": "q", "u4": "I", "u8": "Q", "f4": "f", "f8": "d"})


def _row(wire: int, default: object, dtype: str, zigzag: bool = False) -> Scalar:
    return Scalar(wire, default, np.dtype(dtype), zigzag)


SCALARS = MappingProxyType(
    {
        "int32": _row(VARINT, 0, "<i4"),
        "int64": _row(VARINT, 0, "<i8"),
        "uint32": _row(VARINT, 0, "<u4"),
        "uint64": _row(VARINT, 0, "<u8"),
        "sint32": _row(VARINT, 0, "<i4", True),
        "sint64": _row(VARINT, 0, "<i8", True),
        "bool": _row(VARINT, False, "?"),
        ENUM: _row(VARINT, 0, "<i4"),
        "fixed32": _row(FIXED32, 0, "<u4"),
        "fixed64": _row(FIXED64, 0, "<u8"),
        "sfixed32": _row(FIXED32, 0, "<i4"),
        "sfixed64": _row(FIXED64, 0, "<i8"),
        "float": _row(FIXED32, 0.0, "<f4"),
        "double": _row(FIXED64, 0.0, "<f8"),
        STRING: _row(LENGTH, "", "O"),
        BYTES: _row(LENGTH, b"", "O"),
    }
)
"""Name of a scalar type, as in the metadata of generated classes -> its encoding."""


# --- varints -----------------------------------------------------------------------------------


def read_varint(data: Data, pos: int) -> tuple[int, int]:
    """Decode a varint; return its low 64 bits and the position after it."""
    value = data[pos]
    if value < 0x80:
        return value, pos + 1
    value &= 0x7F
    shift = 7
    for at in range(pos + 1, pos + _LONGEST):
        byte = data[at]
        if byte < 0x80:
            return (value | byte << shift) & _MASK, at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
    raise MalformedMessage("a varint is longer than ten bytes")


def read_tag(data: Data, pos: int) -> tuple[int, int]:
    """Decode a tag of at most 32 bits in at most five bytes; return it and the position after."""
    tag, after = read_varint(data, pos)
    if tag > _MAX_TAG or after - pos > _MAX_BYTES_OF_32_BITS:
        raise MalformedMessage("a field number is out of range")
    return tag, after


def read_size(data: Data, pos: int) -> tuple[int, int]:
    """Decode a length of at most five bytes; return it and the position after it."""
    size, after = read_varint(data, pos)
    if after - pos > _MAX_BYTES_OF_32_BITS:
        raise MalformedMessage("a size has more than five bytes")
    return size, after


def read_varints(run: Data) -> Iterator[Varints]:
    """Decode adjacent varints; yield arrays of limited size, to bound numpy's memory."""
    octets = np.frombuffer(run, np.uint8)
    start = 0
    while start < len(run):
        end = min(start + _SLAB, len(run))
        longest = min(end + _LONGEST, len(run))
        while end < longest and run[end - 1] > 0x7F:
            end += 1
        yield _read_slab(octets[start:end])
        start = end


def _read_slab(octets: Numbers) -> Varints:
    ends = np.flatnonzero(octets < 0x80)
    if not ends.size or ends[-1] != octets.size - 1:
        raise MalformedMessage("a packed field ends within a varint, or one is too long")
    if ends.size == octets.size:
        return octets.astype(np.uint64)
    starts = np.concatenate(([0], ends[:-1] + 1))
    values: Varints = (octets[starts] & 0x7F).astype(np.uint64)
    # Each iteration processes the next byte of all varints that have one.
    longer = np.flatnonzero(ends > starts)
    for index in range(1, _LONGEST):
        at = starts[longer] + index
        values[longer] |= (octets[at] & 0x7F).astype(np.uint64) << np.uint64(7 * index)
        longer = longer[ends[longer] > at]
        if not longer.size:
            return values
    raise MalformedMessage("a varint is longer than ten bytes")


def write_varint(value: int) -> bytes:
    """Encode a number from 0 to 2^64-1 as a varint."""
    if value < 0x80:
        return _SINGLE[value]
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


_SINGLE = tuple(bytes((value,)) for value in range(0x80))


def write_varints(values: Varints) -> bytes:
    """Encode numbers as adjacent varints; the inverse of `read_varints`."""
    sizes = np.ones(values.size, np.int64)
    for index in range(1, _LONGEST):
        sizes += values >= np.uint64(1 << 7 * index)
    written = np.empty(int(sizes.sum()), np.uint8)
    starts = np.cumsum(sizes) - sizes
    rest = np.arange(values.size)
    for index in range(_LONGEST):
        septets = (values[rest] >> np.uint64(7 * index) & np.uint64(0x7F)).astype(np.uint8)
        more = sizes[rest] > index + 1
        written[starts[rest] + index] = septets | more.astype(np.uint8) << 7
        rest = rest[more]
    return written.tobytes()


# --- field metadata ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """The metadata of one field of a generated class."""

    name: str
    number: int
    type: str
    """A key of SCALARS, or MESSAGE or MAP."""
    repeated: bool
    optional: bool
    """Whether the field is declared `optional`: None if absent, and a default is encoded."""
    group: str | None
    """The name of the field's oneof, or None."""
    target: Any
    """The class of an enum or message field, or of a map's entries."""

    def tag(self, wire: int) -> int:
        """Return the field's tag for a wire type."""
        return self.number << 3 | wire


def fields_of(message_type: type[betterproto.Message]) -> Sequence[Field]:
    """Return the fields of a generated class, ordered by number.

    Raises TypeError for a field of one of Google's wrapper or time messages, which the codec does
    not support.
    """
    meta = cast("Any", message_type)._betterproto
    return tuple(_field(message_type, meta, name) for name in meta.sorted_field_names)


def _field(message_type: type[betterproto.Message], meta: Any, name: str) -> Field:
    row: betterproto.FieldMetadata = meta.meta_by_field_name[name]
    target = meta.cls_by_field[name]
    known = row.proto_type in SCALARS or issubclass(target, betterproto.Message)
    if row.wraps or not known:
        raise TypeError(f"{message_type.__name__}.{name} has a type unknown to the codec")
    return Field(
        name=name,
        number=row.number,
        type=row.proto_type,
        repeated=meta.default_gen[name] is list,
        optional=bool(row.optional),
        group=row.group,
        target=target,
    )


# --- decoding values ---------------------------------------------------------------------------


def varint_converter(row: Field) -> Callable[[int], Any]:
    """Return a function that converts a varint to a value, truncated as protobuf does."""
    number = _from_varint(SCALARS[row.type])
    if row.type != ENUM:
        return number
    return lambda varint: row.target.try_value(number(varint))


def _from_varint(scalar: Scalar) -> Callable[[int], Any]:
    if scalar.dtype.kind == "b":
        return bool
    bits = 8 * scalar.dtype.itemsize
    mask = (1 << bits) - 1
    sign = 1 << (bits - 1)
    if scalar.zigzag:
        return lambda varint: (varint & mask) >> 1 ^ -(varint & 1)
    if scalar.dtype.kind == "u":
        return lambda varint: varint & mask
    return lambda varint: ((varint & mask) ^ sign) - sign


def _from_varints(scalar: Scalar, varints: Varints) -> Numbers:
    cut: Numbers = varints != 0
    if scalar.dtype.kind == "b":
        return cut
    cut = varints.astype(f"<u{scalar.dtype.itemsize}")
    if scalar.zigzag:
        cut = cut >> 1 ^ -(cut & 1)
    return cut.view(scalar.dtype)


def span_converter(row: Field) -> Convert:
    """Return a function that converts the bytes of a single value."""
    if row.type == STRING:
        return lambda run: str(run, "utf-8")
    if row.type == BYTES:
        return bytes
    unpack = SCALARS[row.type].layout.unpack
    return lambda run: unpack(run)[0]


def packed_converter(row: Field) -> Convert:
    """Return a function that converts a non-empty packed field to a list."""
    return _packed_varints(row) if SCALARS[row.type].wire == VARINT else _packed_fixed(row)


def packed_array(row: Field) -> Callable[[Data], Numbers]:
    """Return a function that converts a non-empty packed field to an array; not for enums.

    For fixed-size numbers, the array is a view of the field.
    """
    scalar = SCALARS[row.type]
    return partial(_view_fixed if scalar.wire != VARINT else _array_of_varints, scalar)


def _view_fixed(scalar: Scalar, run: Data) -> Numbers:
    if len(run) % scalar.dtype.itemsize:
        raise MalformedMessage("a packed field ends within a value")
    return np.frombuffer(run, scalar.dtype)


def _array_of_varints(scalar: Scalar, run: Data) -> Numbers:
    return np.concatenate([_from_varints(scalar, varints) for varints in read_varints(run)])


def _packed_fixed(row: Field) -> Convert:
    scalar = SCALARS[row.type]

    def convert(run: Data) -> list[Any]:
        values: list[Any] = _view_fixed(scalar, run).tolist()
        return values

    return convert


def _packed_varints(row: Field) -> Convert:
    scalar = SCALARS[row.type]
    one = varint_converter(row)
    as_they_are = scalar.dtype.kind in "iu" and not scalar.zigzag and row.type != ENUM

    def few(run: bytes) -> list[Any]:
        if as_they_are and run.isascii():  # all varints have one byte, as in most shapes
            return list(run)
        values = []
        pos = 0
        while pos < len(run):
            varint, pos = read_varint(run, pos)
            values.append(one(varint))
        return values

    def convert(run: Data) -> list[Any]:
        if len(run) <= _FEW:
            return few(bytes(run))
        values: list[Any] = []
        for varints in read_varints(run):
            values += _from_varints(scalar, varints).tolist()
        return [row.target.try_value(value) for value in values] if row.type == ENUM else values

    return convert


# --- encoding values ---------------------------------------------------------------------------


def to_varint(scalar: Scalar, number: int) -> int:
    """Return the 64-bit varint value for a number in the range of its type."""
    if scalar.zigzag:
        number = number << 1 ^ number >> 63
    return number & _MASK


def to_varints(scalar: Scalar, numbers: Numbers) -> Varints:
    """Convert an array of numbers as `to_varint` does."""
    if numbers.dtype.kind == "u":
        return numbers.astype(np.uint64)
    signed = numbers.astype(np.int64)
    if scalar.zigzag:
        signed = signed << 1 ^ signed >> 63
    return signed.view(np.uint64)
