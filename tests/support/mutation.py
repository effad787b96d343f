"""Random protobuf messages, and mutations of them, from one seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_LENGTH = 2
_TEXTS = ("", "x", "FP32", "é", "日本", "\U0001f600", "a" * 130, "\0")
_INTEGERS = (0, 1, -1, 2, 127, 128, 300, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.5, -2.25, 1e30, math.inf, -math.inf, math.nan)
_DEEPEST = 3


# --- valid messages ----------------------------------------------------------------------------


def random_message(random: Random, message_class: type[Message]) -> bytes:
    """Serialize a message with a random subset of its fields set."""
    message = message_class()
    _fill(random, message, _DEEPEST)
    return message.SerializePartialToString(deterministic=True)


def _fill(random: Random, message: Any, depth: int) -> None:
    few = 5 / max(5, len(message.DESCRIPTOR.fields))
    for field in message.DESCRIPTOR.fields:
        if random.random() > max(few, 0.15):
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            _fill_map(random, getattr(message, field.name), field, depth)
        elif field.default_value == []:
            _fill_list(random, getattr(message, field.name), field, depth)
        elif field.message_type:
            child = getattr(message, field.name)
            child.SetInParent()
            _fill_child(random, child, depth)
        else:
            setattr(message, field.name, _scalar(random, field))


def _fill_child(random: Random, child: Any, depth: int) -> None:
    if depth:
        _fill(random, child, depth - 1)


def _fill_list(random: Random, values: Any, field: FieldDescriptor, depth: int) -> None:
    for _ in range(random.choice((1, 2, 3, 40)) if not field.message_type else 2):
        if field.message_type:
            _fill_child(random, values.add(), depth)
        else:
            values.append(_scalar(random, field))


def _fill_map(random: Random, values: Any, field: Any, depth: int) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(random.randrange(3)):
        if value.message_type:
            _fill_child(random, values[_scalar(random, key)], depth)
        else:
            values[_scalar(random, key)] = _scalar(random, value)


def _scalar(random: Random, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.choice(_TEXTS).encode() + random.randbytes(random.randrange(3))
    return _SCALARS[field.cpp_type](random)


def _integer(low: int, high: int) -> Callable[[Random], int]:
    fitting = [value for value in _INTEGERS if low <= value <= high]
    return lambda random: random.choice(fitting)


_SCALARS: dict[int, Callable[[Random], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integer(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _integer(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _integer(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _integer(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: _integer(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: lambda random: random.random() < 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: lambda random: random.choice(_FLOATS),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda random: random.choice(_FLOATS),
    FieldDescriptor.CPPTYPE_STRING: lambda random: random.choice(_TEXTS),
}


# --- Wire format, independent of message classes -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A field in wire format."""

    tag: int
    body: bytes
    """The value; without the length prefix if the field is length-delimited."""

    def __bytes__(self) -> bytes:
        if self.tag & 7 == _LENGTH:
            return varint(self.tag) + varint(len(self.body)) + self.body
        return varint(self.tag) + self.body


def varint(value: int, padding: int = 0) -> bytes:
    """Encode a varint with `padding` redundant bytes."""
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    for _ in range(padding):
        octets[-1] |= 0x80
        octets.append(0)
    return bytes(octets)


def pieces(data: bytes) -> list[Piece]:
    """Split a valid message without groups into fields; return [] for anything else."""
    found = []
    pos = 0
    try:
        while pos < len(data):
            tag, pos = _varint_at(data, pos)
            start = pos
            if tag & 7 == _LENGTH:
                size, start = _varint_at(data, pos)
                pos = start + size
            else:
                pos = {0: _varint_at(data, pos)[1], 1: pos + 8, 5: pos + 4}[tag & 7]
            found.append(Piece(tag, data[start:pos]))
    except (IndexError, KeyError):
        return []
    return found if pos == len(data) else []


def _varint_at(data: bytes, pos: int) -> tuple[int, int]:
    value = shift = 0
    while data[pos] > 0x7F:
        value |= (data[pos] & 0x7F) << shift
        shift += 7
        pos += 1
    return value | data[pos] << shift, pos + 1


# --- Mutations -----------------------------------------------------------------------------------

Mutation: TypeAlias = Callable[[Random, bytes, bytes], bytes]
"""Takes a non-empty message and another message; returns the mutated first one."""


def _flip_bits(random: Random, data: bytes, other: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(random.randint(1, 3)):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def _truncate(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randrange(len(data))]


def _insert(random: Random, data: bytes, other: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.randbytes(random.randint(1, 4)) + data[at:]


def _duplicate(random: Random, data: bytes, other: bytes) -> bytes:
    start = random.randrange(len(data))
    stop = random.randint(start, len(data))
    return data[:stop] + data[start:stop] + data[stop:]


def _splice(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _merge(random: Random, data: bytes, other: bytes) -> bytes:
    return data + other


def _shuffle(random: Random, data: bytes, other: bytes) -> bytes:
    fields = pieces(data) + pieces(other)
    random.shuffle(fields)
    return b"".join(map(bytes, fields))


def _change_wire_type(random: Random, data: bytes, other: bytes) -> bytes:
    return _rewrite(random, data, lambda piece: varint(piece.tag ^ random.randint(1, 7)))


def _change_number(random: Random, data: bytes, other: bytes) -> bytes:
    number = random.choice((0, 1, 2, 3, 4, 5, 15, 16, 99, 2**29 - 1, 2**29))
    return _rewrite(random, data, lambda piece: varint(number << 3 | piece.tag & 7))


def _pad_tag(random: Random, data: bytes, other: bytes) -> bytes:
    return _rewrite(random, data, lambda piece: varint(piece.tag, random.randint(1, 10)))


def _rewrite(random: Random, data: bytes, tag: Callable[[Piece], bytes]) -> bytes:
    fields = pieces(data)
    written = [bytes(piece) for piece in fields]
    if written:
        at = random.randrange(len(fields))
        written[at] = tag(fields[at]) + written[at][len(varint(fields[at].tag)) :]
    return b"".join(written)


def _change_value(random: Random, data: bytes, other: bytes) -> bytes:
    """Replace a length or varint by one that is overlong, too large, or wrong."""
    fields = pieces(data)
    written = [bytes(piece) for piece in fields]
    at = random.randrange(len(fields)) if fields else 0
    if fields and fields[at].tag & 7 == _LENGTH:
        size = len(fields[at].body)
        wrong = (size, size + 1, max(size - 1, 0), size + 2**32, 2**31 - 1, 2**31, 2**64 - 1)
        head = varint(random.choice(wrong), random.choice((0, 0, 1, 4, 8, 9)))
        written[at] = varint(fields[at].tag) + head + fields[at].body
    elif fields and fields[at].tag & 7 == 0:
        value = random.choice((0, 1, 2**31, 2**32 + 1, 2**63, 2**64 - 1, 2**66, 2**70 - 1))
        written[at] = varint(fields[at].tag) + varint(value, random.choice((0, 1, 5, 9)))
    return b"".join(written)


def _add_unknown(random: Random, data: bytes, other: bytes) -> bytes:
    """Insert an unknown or invalid field between two fields."""
    number = random.choice((1, 2, 5, 90, 1000, 2**29 - 1))
    depth = random.choice((1, 2, 99, 100, 101))
    start, end = varint(number << 3 | 3), varint(number << 3 | 4)
    thing = random.choice(
        (
            varint(number << 3) + varint(random.getrandbits(64)),
            varint(number << 3 | 1) + bytes(8),
            varint(number << 3 | 5) + bytes(4),
            bytes(Piece(number << 3 | _LENGTH, other)),
            start + other + end,
            start * depth + end * depth,
            start + end + end,
            start + varint(91 << 3 | 4),
        )
    )
    fields = [bytes(piece) for piece in pieces(data)]
    fields.insert(random.randint(0, len(fields)), thing)
    return b"".join(fields)


def _unpack(random: Random, data: bytes, other: bytes) -> bytes:
    """Unpack a packed field, or pack unpacked ones."""
    fields = pieces(data)
    packed = b"".join(piece.body for piece in fields if piece.tag & 7 == 0)
    number = random.choice(fields).tag >> 3 if fields else 1
    singles = b"".join(
        varint(number << 3) + varint(octet) for octet in other[: random.randint(0, 8)]
    )
    return data + bytes(Piece(number << 3 | _LENGTH, packed)) + singles


_FLAT: Sequence[Mutation] = (
    _flip_bits,
    _truncate,
    _insert,
    _duplicate,
    _splice,
    _merge,
    _shuffle,
    _change_wire_type,
    _change_number,
    _pad_tag,
    _change_value,
    _add_unknown,
    _unpack,
)


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """Mutate a message anywhere, or inside a nested message whose length is kept consistent."""
    fields = pieces(data)
    nested = [at for at, piece in enumerate(fields) if piece.tag & 7 == _LENGTH and piece.body]
    if nested and random.random() < 0.5:
        at = random.choice(nested)
        fields[at] = Piece(fields[at].tag, mutate(random, fields[at].body, other))
        return b"".join(map(bytes, fields))
    return random.choice(_FLAT)(random, data, other) if data else other
