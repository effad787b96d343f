"""Decodes typed contents in the usual encoding: one packed field at the end."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.grpc.protobuf.wire import (
    LENGTH,
    SCALARS,
    VARINT,
    Data,
    Field,
    fields_of,
    packed_array,
    read_size,
)
from xlaserve.tensors import Elements
from xlaserve_proto import inference as pb

Contents: TypeAlias = "tuple[int, int, Elements | None]"
"""Start and stop of an input's contents; the elements, or None if the bytes are raw contents."""

MOST_FIELDS = 256
"""Requests or inputs with more fields than this are left to the generic codec."""
CONTENTS_DEPTH = 2
"""Nesting depth of typed contents in a request."""

_CONTENTS = 5 << 3 | LENGTH
_BEFORE_CONTENTS = frozenset(number << 3 | LENGTH for number in range(1, 5))
"""Tags of the fields that precede an input's contents."""


class NotOrdinary(ValueError):
    """The message is unusual or malformed, and has to be decoded by the generic codec."""


def find_contents(data: Data, start: int, stop: int) -> int:
    """Return the position of an input's typed contents, or `stop` if there are none."""
    pos = start
    for _ in range(MOST_FIELDS):
        if pos >= stop or data[pos] not in _BEFORE_CONTENTS:
            break
        size, pos = read_size(data, pos + 1)
        pos += size
    return pos if pos < stop and data[pos] == _CONTENTS and data[pos + 1] else stop


def read_contents(data: Data, at: int, stop: int, field: str) -> Contents:
    """Decode the typed contents at a position, in time linear in their length.

    Raises NotOrdinary unless they are one packed field with the expected name; IndexError or
    MalformedMessage if they are malformed.
    """
    tag, read = _READERS[field]
    pos = _last_field(data, at, stop)
    if data[pos] != tag:
        raise NotOrdinary
    return read(data, pos, stop)


def _last_field(data: Data, pos: int, stop: int) -> int:
    """Return the start of the value of the field at `pos`, which must be the last one."""
    size, pos = read_size(data, pos + 1)
    if pos + size != stop or not size:
        raise NotOrdinary
    return pos


def _read_bytes(tag: int, data: Data, at: int, stop: int) -> Contents:
    elements = []
    pos = at
    while pos < stop:
        if data[pos] != tag:
            raise NotOrdinary
        size, pos = read_size(data, pos + 1)
        elements.append(bytes(data[pos : pos + size]))
        pos += size
    if pos != stop:
        raise NotOrdinary
    return at, stop, elements


def _read_fixed(itemsize: int, data: Data, at: int, stop: int) -> Contents:
    """Return packed floats, whose encoding is the same as raw contents."""
    pos = _last_field(data, at, stop)
    if (stop - pos) % itemsize:
        raise NotOrdinary
    return pos, stop, None


def _read_varints(make: Callable[[Data], Elements], data: Data, at: int, stop: int) -> Contents:
    pos = _last_field(data, at, stop)
    return pos, stop, make(memoryview(data)[pos:stop])


def _reader(row: Field) -> tuple[int, Callable[[Data, int, int], Contents]]:
    tag, scalar = row.tag(LENGTH), SCALARS[row.type]
    if scalar.wire == LENGTH:
        return tag, partial(_read_bytes, tag)
    if scalar.wire == VARINT:
        return tag, partial(_read_varints, packed_array(row))
    return tag, partial(_read_fixed, scalar.dtype.itemsize)


_READERS = MappingProxyType({row.name: _reader(row) for row in fields_of(pb.InferTensorContents)})
"""Name of a typed contents field -> its tag and its decoder."""
