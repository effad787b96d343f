"""Reads the bytes of a message into its generated class, strictly and in bounded time.

Nothing here looks ahead of a check: an index beyond the buffer raises IndexError, a field that
ends beyond its message is found when the message ends, and both are malformed messages.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import betterproto

from xlaserve.transport.grpc.wire import (
    BYTES,
    END_GROUP,
    ENUM,
    FIXED32,
    FIXED64,
    LENGTH,
    MAP,
    MESSAGE,
    SCALARS,
    START_GROUP,
    VARINT,
    Convert,
    Data,
    Field,
    MalformedMessage,
    fields_of,
    packed_converter,
    read_size,
    read_tag,
    read_varint,
    span_converter,
    varint_converter,
)

Values: TypeAlias = dict[str, Any]
"""The `__dict__` of a message: its fields by name, and three entries of betterproto's own."""

StoreVarint: TypeAlias = Callable[[Values, int], None]
"""Takes the fields of a message, and the varint that came for one of them."""
StoreSpan: TypeAlias = "Callable[[Reader, Values, int, int], None]"
"""Takes the fields of a message, and where the bytes that came for one of them start and stop."""

Views: TypeAlias = Mapping[type[betterproto.Message], Collection[str]]
"""Repeated bytes fields that are read as views of the received message instead of as copies."""

# What counts besides the fields themselves, so that a bound on the count is a bound on the time.
MESSAGE_COST = 5
"""A nested message or a map entry, and one more for each list and map that it starts with."""
VIEW_COST = 1
"""A view, which is slower to make than a small copy, and one more object for the collector."""
PACKED_COST = 64
"""Starting on a packed field, at most; a short one counts two for each of its bytes."""
PACKED_BYTES = 256
"""Bytes of a packed field that count as one field, since each number becomes a Python object."""


class TooManyFields(ValueError):
    """A message that would take too long to read."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the message has more than {limit} fields (max_message_fields)")


@dataclass(slots=True)
class Plan:
    """How the messages of one class are read."""

    message_type: type[betterproto.Message]
    template: Values = field(default_factory=dict)
    """What every message starts from; no value in it can change."""
    cost: int = MESSAGE_COST
    lists: list[str] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)
    groups: dict[str, str | None] = field(default_factory=dict)
    varints: dict[int, StoreVarint] = field(default_factory=dict)
    """By tag: the fields that come as a varint."""
    spans: dict[int, StoreSpan] = field(default_factory=dict)
    """By tag: the fields that come as bytes: four, eight, or as many as a size says."""

    def blank(self) -> Values:
        """Return the fields of a message that was on the wire, but empty."""
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


# --- reading -----------------------------------------------------------------------------------


class Reader:
    """One message that is being read, and what is left of its bounds."""

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
                raise MalformedMessage("a field ends beyond its message")
            if tag in spans:
                spans[tag](self, values, pos, stop)
            pos = stop
        if pos != end:
            raise MalformedMessage("a field ends beyond its message")

    def nested(self, plan: Plan, values: Values, start: int, stop: int) -> None:
        """Read a message within the message."""
        self.left -= plan.cost
        self.depth -= 1
        if self.depth < 0:
            raise MalformedMessage("messages are nested too deeply")
        self.fill(plan, values, start, stop)
        self.depth += 1

    def _skip_group(self, tag: int, pos: int) -> int:
        """Return the position behind a group, whose start tag ends at `pos`."""
        if tag & 7 != START_GROUP:
            raise MalformedMessage("a field has an unknown wire type, or ends no group")
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
                    raise MalformedMessage("a group ends that did not start")
            else:
                pos = self._skip(wire, pos)
        return pos

    def _skip(self, wire: int, pos: int) -> int:
        """Return the position behind a value, which may be beyond the data."""
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


class Decoder:
    """Reads messages; keeps the plan of every class that it has met."""

    def __init__(self, *, max_fields: int, max_depth: int, views: Views) -> None:
        self._max_fields = max_fields
        self._max_depth = max_depth
        self._views = views
        self._plans: dict[type[betterproto.Message], Plan] = {}

    def decode(self, message_type: type[betterproto.Message], data: bytes | memoryview) -> Any:
        """Return the message that all of the data is.

        Raises MalformedMessage where protobuf's own parser would refuse it, and TooManyFields.
        """
        plan = self._plans.get(message_type) or self._learn(message_type)
        values = plan.blank()
        if type(data) is not bytes:
            data = memoryview(data).cast("B")
        reader = Reader(data, self._max_fields, self._max_depth)
        try:
            reader.fill(plan, values, 0, len(data))
        except (IndexError, UnicodeDecodeError) as error:
            raise MalformedMessage("the message is cut off, or a string is not UTF-8") from error
        if reader.left < 0:
            raise TooManyFields(self._max_fields)
        return plan.message(values)

    def _learn(self, message_type: type[betterproto.Message]) -> Plan:
        plans = dict(self._plans)
        plan = _make_plan(message_type, plans, self._views)
        self._plans = plans
        return plan


# --- making a plan -----------------------------------------------------------------------------


def _make_plan(
    message_type: type[betterproto.Message],
    plans: dict[type[betterproto.Message], Plan],
    views: Views,
) -> Plan:
    known = plans.get(message_type)
    if known is not None:  # also where a class contains itself
        return known
    plan = plans[message_type] = Plan(message_type)
    plan.template |= {"_serialized_on_wire": True, "_unknown_fields": b"", "_group_current": {}}
    for row in fields_of(message_type):
        _plan_default(plan, row)
        if row.type == MESSAGE:
            _plan_message(plan, row, _make_plan(row.target, plans, views))
        elif row.type == MAP:
            _, value = fields_of(row.target)
            missing = _make_plan(value.target, plans, views) if value.type == MESSAGE else None
            entry = _make_plan(row.target, plans, views)
            plan.spans[row.tag(LENGTH)] = _add_entry(row.name, entry, missing)
        else:
            _plan_scalar(plan, row, viewed=row.name in views.get(message_type, ()))
    plan.cost += len(plan.lists) + len(plan.maps) + len(plan.groups)
    return plan


def _plan_default(plan: Plan, row: Field) -> None:
    if row.group is not None:
        plan.groups[row.group] = None
    elif row.type == MAP:
        plan.maps.append(row.name)
    elif row.repeated:
        plan.lists.append(row.name)
    elif row.type == ENUM and not row.optional:
        plan.template[row.name] = row.target.try_value(0)
    elif row.type != MESSAGE and not row.optional:
        plan.template[row.name] = SCALARS[row.type].default


def _plan_message(plan: Plan, row: Field, inner: Plan) -> None:
    store = (_add_message if row.repeated else _put_message)(row.name, inner)
    plan.spans[row.tag(LENGTH)] = _in_group(row, store)


def _plan_scalar(plan: Plan, row: Field, *, viewed: bool) -> None:
    scalar = SCALARS[row.type]
    if scalar.wire == VARINT:
        put_or_add = _add_varint if row.repeated else _put_varint
        store = put_or_add(row.name, varint_converter(row))
        plan.varints[row.tag(VARINT)] = _varint_in_group(row, store)
    else:
        plan.spans[row.tag(scalar.wire)] = _in_group(row, _store_span(row, viewed=viewed))
    if row.repeated and scalar.wire != LENGTH:
        plan.spans[row.tag(LENGTH)] = _extend(row, packed_converter(row))


def _store_span(row: Field, *, viewed: bool) -> StoreSpan:
    if row.repeated and row.type == BYTES and viewed:
        return _add_view(row.name)
    return (_add if row.repeated else _put)(row.name, span_converter(row))


# --- values into the fields of a message -------------------------------------------------------


def _put_varint(name: str, convert: Callable[[int], Any]) -> StoreVarint:
    def put(values: Values, varint: int) -> None:
        values[name] = convert(varint)

    return put


def _add_varint(name: str, convert: Callable[[int], Any]) -> StoreVarint:
    def add(values: Values, varint: int) -> None:
        values[name].append(convert(varint))

    return add


def _put(name: str, convert: Convert) -> StoreSpan:
    def put(reader: Reader, values: Values, start: int, stop: int) -> None:
        values[name] = convert(reader.data[start:stop])

    return put


def _add(name: str, convert: Convert) -> StoreSpan:
    def add(reader: Reader, values: Values, start: int, stop: int) -> None:
        values[name].append(convert(reader.data[start:stop]))

    return add


def _add_view(name: str) -> StoreSpan:
    def add(reader: Reader, values: Values, start: int, stop: int) -> None:
        reader.left -= VIEW_COST
        values[name].append(reader.view[start:stop])

    return add


def _extend(row: Field, convert: Convert) -> StoreSpan:
    name = row.name
    # An unknown number becomes a new enum member, which takes as long as reading a field.
    per_field = 1 if row.type == ENUM else PACKED_BYTES

    def extend(reader: Reader, values: Values, start: int, stop: int) -> None:
        size = stop - start
        if size == 0:
            return
        reader.left -= min(2 * size, PACKED_COST) + size // per_field
        if reader.left < 0:
            raise TooManyFields(reader.limit)
        values[name] += convert(reader.data[start:stop])

    return extend


def _put_message(name: str, plan: Plan) -> StoreSpan:
    def put(reader: Reader, values: Values, start: int, stop: int) -> None:
        known = values.get(name)
        if known is None:
            fields = plan.blank()
            values[name] = plan.message(fields)
        else:  # given twice: the second is merged into the first
            fields = object.__getattribute__(known, "__dict__")
        reader.nested(plan, fields, start, stop)

    return put


def _add_message(name: str, plan: Plan) -> StoreSpan:
    def add(reader: Reader, values: Values, start: int, stop: int) -> None:
        fields = plan.blank()
        reader.nested(plan, fields, start, stop)
        values[name].append(plan.message(fields))

    return add


def _add_entry(name: str, entry: Plan, missing: Plan | None) -> StoreSpan:
    def add(reader: Reader, values: Values, start: int, stop: int) -> None:
        fields = entry.blank()
        reader.nested(entry, fields, start, stop)
        if missing is not None and "value" not in fields:
            reader.left -= missing.cost
            fields["value"] = missing.message(missing.blank())
        values[name][fields["key"]] = fields["value"]

    return add


def _in_group(row: Field, store: StoreSpan) -> StoreSpan:
    name, group = row.name, row.group
    if group is None:
        return store

    def choose(reader: Reader, values: Values, start: int, stop: int) -> None:
        _choose(values, group, name)
        store(reader, values, start, stop)

    return choose


def _varint_in_group(row: Field, store: StoreVarint) -> StoreVarint:
    name, group = row.name, row.group
    if group is None:
        return store

    def choose(values: Values, varint: int) -> None:
        _choose(values, group, name)
        store(values, varint)

    return choose


def _choose(values: Values, group: str, name: str) -> None:
    """Make a member of a oneof the one that is set; the one before is gone."""
    groups = values["_group_current"]
    current = groups[group]
    if current == name:
        return
    if current is not None:
        del values[current]
    groups[group] = name
