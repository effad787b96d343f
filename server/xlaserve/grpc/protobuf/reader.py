"""The field loop of the protobuf decoder, strict and in bounded time.

To save checks in the loop, an index past the buffer simply raises IndexError, and a field that
extends past its message is detected at the end of the message. Both mean a malformed message.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import betterproto

from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.protobuf.wire import (
    END_GROUP,
    FIXED32,
    FIXED64,
    LENGTH,
    START_GROUP,
    VARINT,
    Data,
    read_size,
    read_tag,
    read_varint,
)

Values: TypeAlias = dict[str, Any]
"""The `__dict__` of a message: fields by name, and three entries that betterproto adds."""

StoreVarint: TypeAlias = Callable[[Values, int], None]
"""Converts a varint, and stores it in the message's `__dict__`."""
StoreSpan: TypeAlias = "Callable[[Reader, Values, int, int], None]"
"""Converts the bytes of a field between two positions, and stores the value in `__dict__`."""

# Costs are in units of fields and added to the number of fields, so that `max_fields` limits the
# decoding time.
MESSAGE_COST = 5
"""Cost of a nested message or map entry; each of its lists, maps and oneofs adds one."""


@dataclass(slots=True)
class Plan:
    """The decoding plan of one message class."""

    message_type: type[betterproto.Message]
    template: Values = field(default_factory=dict)
    """The immutable default values of a new message."""
    cost: int = MESSAGE_COST
    lists: list[str] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)
    groups: dict[str, str | None] = field(default_factory=dict)
    varints: dict[int, StoreVarint] = field(default_factory=dict)
    """Tag -> how to store the field, for wire type VARINT."""
    spans: dict[int, StoreSpan] = field(default_factory=dict)
    """Tag -> how to store the field, for all wire types except VARINT."""

    def blank(self) -> Values:
        """Return the `__dict__` of an empty message."""
        values = self.template.copy()
        for name in self.lists:
            values[name] = []
        for name in self.maps:
            values[name] = {}
        if self.groups:
            values["_group_current"] = self.groups.copy()
        return values

    def message(self, values: Values) -> Any:
        """Create a message from its `__dict__`, bypassing betterproto's slow `__init__`."""
        message = object.__new__(self.message_type)
        object.__setattr__(message, "__dict__", values)
        return message


class Reader:
    """The buffer being decoded, with the remaining field count and depth."""

    __slots__ = ("data", "depth", "left", "limit", "view")

    def __init__(self, data: Data, max_fields: int, max_depth: int) -> None:
        self.data = data
        self.view = memoryview(data)
        self.limit = self.left = max_fields
        self.depth = max_depth

    # The hot loop of decoding, inlined for speed: each iteration decodes one field with a single
    # function call, the one that stores the value.
    def fill(self, plan: Plan, values: Values, pos: int, end: int) -> None:  # noqa: C901, PLR0912
        """Decode the fields between `pos` and `end` into the `__dict__` of a message."""
        data = self.data
        varints = plan.varints
        spans = plan.spans
        while pos < end:
            self.left -= 1
            if self.left < 0:
                raise TooManyFields(self.limit)
            tag = data[pos]
            pos += 1
            if tag > 0x7F:
                tag, after = read_tag(data, pos - 1)
                self.left -= after - pos
                pos = after
            if tag < 8:
                raise MalformedMessage("a field has the number 0")
            wire = tag & 7
            if wire == LENGTH:
                size = data[pos]
                pos += 1
                if size > 0x7F:
                    size, after = read_size(data, pos - 1)
                    self.left -= after - pos
                    pos = after
                stop = pos + size
            elif wire == VARINT:
                varint = data[pos]
                stop = pos + 1
                if varint > 0x7F:
                    varint, stop = read_varint(data, pos)
                    self.left -= stop - pos - 1
                pos = stop
                if tag in varints:
                    varints[tag](values, varint)
                continue
            elif wire == FIXED32:
                stop = pos + 4
            elif wire == FIXED64:
                stop = pos + 8
            else:
                stop = self._skip_group(tag, pos)
            if stop > end:
                raise MalformedMessage("a field extends past its message")
            if tag in spans:
                spans[tag](self, values, pos, stop)
            pos = stop
        if pos != end:
            raise MalformedMessage("a field extends past its message")

    def nested(self, plan: Plan, values: Values, start: int, stop: int) -> None:
        """Decode a nested message between two positions."""
        self.left -= plan.cost
        self.depth -= 1
        if self.depth < 0:
            raise MalformedMessage("messages are nested too deeply")
        self.fill(plan, values, start, stop)
        self.depth += 1

    def _skip_group(self, tag: int, pos: int) -> int:
        """Return the position after a group; `pos` is just after its start tag."""
        if tag & 7 != START_GROUP:
            raise MalformedMessage("a field has an unknown wire type or an unmatched group end")
        groups = [tag >> 3]
        while groups:
            if len(groups) > self.depth:
                raise MalformedMessage("groups are nested too deeply")
            tag, after = read_tag(self.data, pos)
            self.left -= after - pos
            if self.left < 0:
                raise TooManyFields(self.limit)
            pos = after
            wire = tag & 7
            if tag < 8:
                raise MalformedMessage("a field of a group has the number 0")
            if wire == START_GROUP:
                groups.append(tag >> 3)
            elif wire == END_GROUP:
                if groups.pop() != tag >> 3:
                    raise MalformedMessage("a group end without a start")
            else:
                pos = self._skip(wire, pos)
        return pos

    def _skip(self, wire: int, pos: int) -> int:
        """Return the position after a value, which may be past the end of the data."""
        if wire == VARINT:
            after = read_varint(self.data, pos)[1]
            self.left -= after - pos - 1
            return after
        if wire == LENGTH:
            size, after = read_size(self.data, pos)
            self.left -= after - pos - 1
            return after + size
        if wire in (FIXED32, FIXED64):
            return pos + (4 if wire == FIXED32 else 8)
        raise MalformedMessage("a field has an unknown wire type")
