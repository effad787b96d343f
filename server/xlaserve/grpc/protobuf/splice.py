"""Replaces the id at a field path in a serialized message, without decoding the message.

ModelMesh only replaces the first occurrence of the field, but protobuf parsers use the last one, so
a client that sends the field twice could choose the model. Every occurrence is replaced here.
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
"""Maximum length of a path; protobuf's own parsers allow a depth of 100."""
SPAN_COST = 10
"""Cost of each occurrence of a field on the path, in units of fields, for moving bytes."""
VALUE_BYTES = 256
"""Bytes of the value that count as one field, for each occurrence that is replaced."""

_MAX_NUMBER = (1 << 29) - 1
_SPANS = "spans"


class Span(NamedTuple):
    """The position of one occurrence of a field on the path."""

    level: int
    """Index of the field in the path."""
    start: int
    """Start of the value, just after its length."""
    stop: int


class Edit(NamedTuple):
    """Replacement of the bytes between two positions."""

    start: int
    stop: int
    octets: bytes


@dataclass(frozen=True, slots=True)
class InjectionPath:
    """The path to an id in a message: the numbers of message fields, then of a string field.

    A repeated field stands for all of its elements. The path must not contain a map, because all
    its keys would become equal, or a member of a oneof, which a later member could override.
    Raises InvalidSettings if there are no numbers, too many, or invalid ones.
    """

    numbers: tuple[int, ...]
    plan: Plan = field(init=False, repr=False, compare=False)
    """Decoding plan that finds the fields on the path."""

    def __post_init__(self) -> None:
        in_range = all(0 < number <= _MAX_NUMBER for number in self.numbers)
        if not (in_range and 0 < len(self.numbers) <= MAX_PATH):
            expected = f"1 to {MAX_PATH} field numbers of 1 to {_MAX_NUMBER}"
            raise InvalidSettings("idInjectionPath", expected, self.numbers)
        object.__setattr__(self, "plan", _make_plan(self.numbers))


def splice_string(
    message: Data, path: InjectionPath, value: str | bytes, *, max_fields: int, max_depth: int
) -> Data:
    """Return the message with every occurrence of the field at `path` set to `value`.

    This includes every occurrence of the enclosing messages, which may be repeated. If one lacks
    the next field of the path, the field is appended. A field with the right number but another
    wire type is ignored, as any parser does. All other bytes are unchanged; if nothing has to
    change, the message itself is returned.

    Time is linear in the message and the result. The result is longer by at most the value, or by
    VALUE_BYTES times `max_fields`. Raises MalformedMessage and TooManyFields as a decoder with
    these limits does, but does not check the contents of other fields.
    """
    data = message if type(message) is bytes else memoryview(message).cast("B")
    octets = value.encode() if isinstance(value, str) else value
    missing = _missing_fields(path.numbers, octets)
    reader = Reader(data, max_fields, max_depth)
    spans = _find(reader, path.plan, cost=len(missing[0]) // VALUE_BYTES)
    edits = _edits(reader.view, spans, octets, missing)
    return _apply(reader.view, edits) if edits else message


# --- finding the fields ------------------------------------------------------------------------


def _make_plan(numbers: Sequence[int], level: int = 0) -> Plan:
    """Return a decoding plan that knows only the next field of the path, at each level."""
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
    """Return the occurrences of fields on the path, in order; each adds `cost` to the limit."""
    spans: list[Span] = []
    try:
        reader.fill(plan, {_SPANS: spans}, 0, len(reader.data))
    except IndexError as error:
        raise MalformedMessage("the message is truncated") from error
    reader.left -= cost * len(spans)
    if reader.left < 0:
        raise TooManyFields(reader.limit)
    return spans


# --- building the result -----------------------------------------------------------------------


def _missing_fields(numbers: Sequence[int], octets: bytes) -> list[bytes]:
    """Return, for each level of the path, the encoded field to append to a message without it."""
    fields: list[bytes] = []
    for number in reversed(numbers):
        octets = write_varint(number << 3 | LENGTH) + write_varint(len(octets)) + octets
        fields.append(octets)
    return fields[::-1]


def _edits(
    view: memoryview, spans: Sequence[Span], octets: bytes, missing: Sequence[bytes]
) -> list[Edit]:
    """Return the replacements, from the end of the message to its start.

    In this order, the new length of each nested message is known when its length field is reached.
    """
    leaf = len(missing) - 1
    edits: list[Edit] = []
    # For each level, within the current message: whether the field of the path was found, and the
    # number of bytes by which its fields have grown.
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
    """Return the start of the length varint that ends at `stop`.

    The byte before it ends a tag, so its high bit is 0.
    """
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
