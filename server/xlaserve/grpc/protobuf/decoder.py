"""Decodes messages into betterproto's generated classes, strictly and in bounded time."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import betterproto

from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.protobuf.reader import Plan, Reader, StoreSpan, StoreVarint, Values
from xlaserve.grpc.protobuf.wire import (
    BYTES,
    ENUM,
    LENGTH,
    MAP,
    MESSAGE,
    SCALARS,
    VARINT,
    Convert,
    Field,
    fields_of,
    packed_converter,
    span_converter,
    varint_converter,
)

Views: TypeAlias = Mapping[type[betterproto.Message], Collection[str]]
"""Message class -> repeated bytes fields decoded as views of the message instead of copies."""

# Costs in units of fields, counted in addition to the fields themselves: `max_fields` then limits
# the decoding time.
VIEW_COST = 1
"""Cost of a view: slower than a small copy, and one more object for the garbage collector."""
PACKED_COST = 64
"""Maximum base cost of a packed field; short ones cost two per byte."""
PACKED_BYTES = 256
"""Bytes of a packed field that cost as much as one field: each number becomes an object."""


class Decoder:
    """Decodes messages; caches a decoding plan per message class."""

    def __init__(self, *, max_fields: int, max_depth: int, views: Views) -> None:
        self._max_fields = max_fields
        self._max_depth = max_depth
        self._views = views
        self._plans: dict[type[betterproto.Message], Plan] = {}

    def decode(self, message_type: type[betterproto.Message], data: bytes | memoryview) -> Any:
        """Decode all of `data` as one message.

        Raises MalformedMessage if protobuf's own parser would reject it, and TooManyFields.
        """
        plan = self._plans.get(message_type) or self._learn(message_type)
        values = plan.blank()
        if type(data) is not bytes:
            data = memoryview(data).cast("B")
        reader = Reader(data, self._max_fields, self._max_depth)
        try:
            reader.fill(plan, values, 0, len(data))
        except (IndexError, UnicodeDecodeError) as error:
            raise MalformedMessage("the message is truncated, or a string is not UTF-8") from error
        if reader.left < 0:
            raise TooManyFields(self._max_fields)
        return plan.message(values)

    def _learn(self, message_type: type[betterproto.Message]) -> Plan:
        plans = dict(self._plans)
        plan = _make_plan(message_type, plans, self._views)
        self._plans = plans
        return plan


# --- decoding plans ----------------------------------------------------------------------------


def _make_plan(
    message_type: type[betterproto.Message],
    plans: dict[type[betterproto.Message], Plan],
    views: Views,
) -> Plan:
    known = plans.get(message_type)
    if known is not None:  # also ends the recursion for classes that contain themselves
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


# --- storing decoded values --------------------------------------------------------------------


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
    # Each unknown number becomes a new enum member, which takes as long as decoding a field.
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
        else:  # as in protobuf, a second occurrence of the field is merged into the first
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
    """Select a member of a oneof, and clear the previous one."""
    groups = values["_group_current"]
    current = groups[group]
    if current == name:
        return
    if current is not None:
        del values[current]
    groups[group] = name
