"""Puts an id into a serialized message at a path of fields, without decoding.

A mesh rewrites the first occurrence of the field on its way here, and a parser takes the last:
a client that sends the field twice would choose the model itself. So every occurrence is replaced.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import betterproto

from xlaserve.errors import InvalidSettings
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.protobuf.reader import Plan, Reader, StoreSpan, Values
from xlaserve.grpc.protobuf.wire import LENGTH, Data, write_varint

MAX_PATH = 32
"""Most numbers in a path; protobuf's own parsers go to a depth of 100."""
SPAN_COST = 10
"""Cost of an occurrence of a field of the path, in fields: bytes around it are moved."""
VALUE_BYTES = 256
"""Bytes of the value that count as a field, each time that the value is written."""

_MAX_NUMBER = (1 << 29) - 1
_SPANS = "spans"


class Span(NamedTuple):
    """The span of an occurrence of a field of the path."""

    level: int
    """The index of the field in the path."""
    start: int
    """Start of the value; its size stands just before."""
    stop: int


class Edit(NamedTuple):
    """New bytes for those between two positions."""

    start: int
    stop: int
    octets: bytes


@dataclass(frozen=True, slots=True)
class InjectionPath:
    """The path to an id in a message: numbers of message fields, and last that of a string field.

    A repeated field stands for each of its elements. No field on the path may be a map, whose
    keys would become one, or a member of a oneof, since a later member would take its place.
    Raises InvalidSettings where the numbers are none, too many or not those of fields.
    """

    numbers: tuple[int, ...]
    plan: Plan = field(init=False, repr=False, compare=False)
    """Plan that finds the fields, made in advance."""

    def __post_init__(self) -> None:
        in_range = all(0 < number <= _MAX_NUMBER for number in self.numbers)
        if not (in_range and 0 < len(self.numbers) <= MAX_PATH):
            expected = f"1 to {MAX_PATH} field numbers of 1 to {_MAX_NUMBER}"
            raise InvalidSettings("idInjectionPath", expected, self.numbers)
        object.__setattr__(self, "plan", _make_plan(self.numbers))


def splice_string(
    message: Data, path: InjectionPath, value: str | bytes, *, max_fields: int, max_depth: int
) -> Data:
    """Return the message with the value in every occurrence of the field at the path.

    Every occurrence of each enclosing message counts, since they may be the elements of a list.
    One that lacks its next field of the path gets it at its end; a field of that number but
    another wire type is not that field, here as in any parser. The rest stays as it is, in its
    order. A message in which nothing has to change is returned itself.

    Takes time in proportion to the message and to the result, which is longer by at most the
    value, or by VALUE_BYTES for each of `max_fields`. Raises MalformedMessage and TooManyFields
    as a decoder with these limits does, but does not look into fields that are off the path.
    """
    data = message if type(message) is bytes else memoryview(message).cast("B")
    octets = value.encode() if isinstance(value, str) else value
    missing = _missing_fields(path.numbers, octets)
    reader = Reader(data, max_fields, max_depth)
    spans = _find(reader, path.plan, cost=len(missing[0]) // VALUE_BYTES)
    edits = _edits(reader.view, spans, octets, missing)
    return _apply(reader.view, edits) if edits else message


# --- finding -----------------------------------------------------------------------------------


def _make_plan(numbers: Sequence[int], level: int = 0) -> Plan:
    """Make a plan for messages in which only the next field of the path is known."""
    within = _make_plan(numbers, level + 1) if level + 1 < len(numbers) else None
    tag = numbers[level] << 3 | LENGTH
    return Plan(betterproto.Message, spans={tag: _note(level, within)})


def _note(level: int, within: Plan | None) -> StoreSpan:
    def note(reader: Reader, values: Values, start: int, stop: int) -> None:
        reader.left -= SPAN_COST
        values[_SPANS].append(Span(level, start, stop))
        if within is not None:
            reader.nested(within, values, start, stop)

    return note


def _find(reader: Reader, plan: Plan, cost: int) -> list[Span]:
    """List the fields on the path, by their start; each has a cost."""
    spans: list[Span] = []
    try:
        reader.fill(plan, {_SPANS: spans}, 0, len(reader.data))
    except IndexError as error:
        raise MalformedMessage("the message is truncated") from error
    reader.left -= cost * len(spans)
    if reader.left < 0:
        raise TooManyFields(reader.limit)
    return spans


# --- writing -----------------------------------------------------------------------------------


def _missing_fields(numbers: Sequence[int], octets: bytes) -> list[bytes]:
    """Write, for each level, the field that a message without it gets."""
    fields: list[bytes] = []
    for number in reversed(numbers):
        octets = write_varint(number << 3 | LENGTH) + write_varint(len(octets)) + octets
        fields.append(octets)
    return fields[::-1]


def _edits(
    view: memoryview, spans: Sequence[Span], octets: bytes, missing: Sequence[bytes]
) -> list[Edit]:
    """List what has to change, from the end of the message to its start.

    In this order the new size of a message is known when its size is met.
    """
    leaf = len(missing) - 1
    edits: list[Edit] = []
    # For each level of the message being read backwards: whether the field of the path was
    # met in it, and by how much its fields have grown.
    met = [False] * (leaf + 1)
    grown = [0] * (leaf + 1)
    for level, start, stop in reversed(spans):
        if level == leaf:
            growth = len(octets) - (stop - start)
            if growth or view[start:stop] != octets:
                edits.append(Edit(start, stop, octets))
        else:
            growth = grown[level + 1]
            if not met[level + 1]:
                growth = len(missing[level + 1])
                edits.append(Edit(stop, stop, missing[level + 1]))
            met[level + 1] = False
            grown[level + 1] = 0
        if growth:
            at = _start_of_size(view, start)
            size = write_varint(stop - start + growth)
            growth += len(size) - (start - at)
            edits.append(Edit(at, start, size))
        met[level] = True
        grown[level] += growth
    return edits if met[0] else [Edit(len(view), len(view), missing[0])]


def _start_of_size(view: memoryview, stop: int) -> int:
    """Return the start of the size that ends here; a tag ends before it, high bit off."""
    at = stop - 1
    while view[at - 1] > 0x7F:
        at -= 1
    return at


def _apply(view: memoryview, edits: Iterable[Edit]) -> bytes:
    pieces: list[Data] = []
    end = len(view)
    for start, stop, octets in edits:
        pieces += (view[stop:end], octets)
        end = start
    pieces.append(view[:end])
    return b"".join(reversed(pieces))
