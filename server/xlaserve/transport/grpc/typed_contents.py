"""Typed contents of an input as clients write them: one field, packed, at the end of the input."""

from types import MappingProxyType
from typing import NamedTuple

from xlaserve.tensors import Elements
from xlaserve.transport.grpc.wire import LENGTH, Data, fields_of, packed_array, read_size
from xlaserve_proto import inference as pb

MOST_FIELDS = 256
"""Fields of a request, and of an input, beyond which it is not ordinary."""
CONTENTS_DEPTH = 2
"""How deep typed contents lie in a request."""

_CONTENTS = 5 << 3 | LENGTH
_BEFORE_CONTENTS = frozenset(number << 3 | LENGTH for number in range(1, 5))
"""Tags of an input."""

_FIELDS = {row.name: row for row in fields_of(pb.InferTensorContents)}
_BYTES = _FIELDS.pop("bytes_contents")
_BYTES_TAG = _BYTES.tag(LENGTH)
_PACKED = MappingProxyType(
    {row.tag(LENGTH): (name, packed_array(row)) for name, row in _FIELDS.items()}
)
"""By tag: the name of a field of typed contents, and what makes an array of it."""


class NotOrdinary(ValueError):
    """What the generic codec has to read."""


class Contents(NamedTuple):
    """The elements of one input."""

    field: str
    elements: Elements
    packed_bytes: int
    """Of how many packed bytes they were read."""


def find_contents(data: Data, start: int, stop: int) -> int:
    """Return where an input has a field that may be its typed contents; `stop` if it has none."""
    pos = start
    for _ in range(MOST_FIELDS):
        if pos >= stop or data[pos] not in _BEFORE_CONTENTS:
            break
        size, pos = read_size(data, pos + 1)
        pos += size
    return pos if pos < stop and data[pos] == _CONTENTS and data[pos + 1] else stop


def read_contents(data: Data, at: int, stop: int) -> Contents:
    """Read the contents that were found, in the time that it takes to look at each byte.

    Raises NotOrdinary unless they are all of one field, IndexError or MalformedMessage where they
    are none.
    """
    pos = _last_field(data, at, stop)
    if data[pos] == _BYTES_TAG:
        return Contents(_BYTES.name, _read_bytes(data, pos, stop), 0)
    packed = _PACKED.get(data[pos])
    if packed is None:
        raise NotOrdinary
    field, make = packed
    pos = _last_field(data, pos, stop)
    return Contents(field, make(memoryview(data)[pos:stop]), stop - pos)


def _last_field(data: Data, pos: int, stop: int) -> int:
    """Return where the value of a field starts, which has one and is followed by none."""
    size, pos = read_size(data, pos + 1)
    if pos + size != stop or not size:
        raise NotOrdinary
    return pos


def _read_bytes(data: Data, pos: int, stop: int) -> list[bytes]:
    elements = []
    while pos < stop:
        if data[pos] != _BYTES_TAG:
            raise NotOrdinary
        size, pos = read_size(data, pos + 1)
        elements.append(bytes(data[pos : pos + size]))
        pos += size
    if pos != stop:
        raise NotOrdinary
    return elements
