"""Reads the fields of any message strictly and in bounded time.

Nothing here looks ahead of a check: an index beyond the buffer raises IndexError, a field that
ends beyond its message is found when the message ends, and both are malformed messages.
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
"""The `__dict__` of a message: its fields by name, and three entries of betterproto's own."""

StoreVarint: TypeAlias = Callable[[Values, int], None]
"""Stores a field's varint in the fields of a message."""
StoreSpan: TypeAlias = "Callable[[Reader, Values, int, int], None]"
"""Stores the bounds of a field's bytes in the fields of a message."""

# Costs besides those of the fields, so that a bound on the count is a bound on the time.
MESSAGE_COST = 5
"""Cost of a nested message or a map entry, plus one for each list and map in it."""


@dataclass(slots=True)
class Plan:
    """The decoding plan of one message class."""

    message_type: type[betterproto.Message]
    template: Values = field(default_factory=dict)
    """Values that every message starts from, all of them immutable."""
    cost: int = MESSAGE_COST
    lists: list[str] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)
    groups: dict[str, str | None] = field(default_factory=dict)
    varints: dict[int, StoreVarint] = field(default_factory=dict)
    """Tag -> field that comes as a varint."""
    spans: dict[int, StoreSpan] = field(default_factory=dict)
    """Tag -> field that comes as bytes: four, eight, or as many as a size says."""

    def blank(self) -> Values:
        """Return the fields of an empty message."""
        values = self.template.copy()
        for name in self.lists:
            values[name] = []
        for name in self.maps:
            values[name] = {}
        if self.groups:
            values["_group_current"] = self.groups.copy()
        return values

    def message(self, values: Values) -> Any:
        """Make the message of these fields, without the checks that cost `__init__` its time."""
        message = object.__new__(self.message_type)
        object.__setattr__(message, "__dict__", values)
        return message


class Reader:
    """A message being read, and its remaining limits."""

    __slots__ = ("data", "depth", "left", "limit", "view")

    def __init__(self, data: Data, max_fields: int, max_depth: int) -> None:
        self.data = data
        self.view = memoryview(data)
        self.limit = self.left = max_fields
        self.depth = max_depth

    # The length of the next function buys the speed of everything that clients send: one turn
    # reads one field, known or not, without a call but the one that stores it.
    def fill(self, plan: Plan, values: Values, pos: int, end: int) -> None:  # noqa: C901, PLR0912
        """Read the fields from `pos` to `end` into the fields of a message."""
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
        """Read a message within the message."""
        self.left -= plan.cost
        self.depth -= 1
        if self.depth < 0:
            raise MalformedMessage("messages are nested too deeply")
        self.fill(plan, values, start, stop)
        self.depth += 1

    def _skip_group(self, tag: int, pos: int) -> int:
        """Return the position after a group, whose start tag ends at `pos`."""
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
        """Return the position after a value, possibly beyond the data."""
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
