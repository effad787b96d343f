"""Encodes messages of betterproto's generated classes as protobuf's own encoder does.

All parts of a message are collected in one list and joined at the end, so that a large tensor is
copied only once, from its array into the message.
"""

import operator
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import betterproto
import numpy as np

from xlaserve.grpc.protobuf.wire import (
    BYTES,
    LENGTH,
    MAP,
    MESSAGE,
    SCALARS,
    STRING,
    VARINT,
    Field,
    Numbers,
    Scalar,
    fields_of,
    to_varint,
    to_varints,
    write_varint,
    write_varints,
)

Parts: TypeAlias = list[bytes | memoryview]

Write: TypeAlias = Callable[[Parts, Any], int]
"""Appends the encoded field to a list of parts; returns the number of bytes added."""
Dump: TypeAlias = Callable[[Any], bytes]
"""Encodes one value, without the tag."""

_FEW = 32
"""Up to this many packed numbers, encoding in Python is faster than with numpy."""


@dataclass(frozen=True, slots=True)
class Step:
    """The encoder of one field of a message class."""

    name: str
    group: str | None
    write: Write


@dataclass(slots=True)
class Plan:
    """The encoding plan of one message class."""

    message_type: type[betterproto.Message]
    steps: list[Step] = field(default_factory=list)

    def write(self, parts: Parts, message: object) -> int:
        """Append an encoded message to a list of parts; return the number of bytes added."""
        if not isinstance(message, self.message_type):
            raise TypeError(f"expected {self.message_type.__name__}, got {type(message).__name__}")
        values = object.__getattribute__(message, "__dict__")
        groups = values["_group_current"]
        size = 0
        for step in self.steps:
            value = values.get(step.name)
            if value is None or value is betterproto.PLACEHOLDER:
                continue
            if step.group is not None and groups[step.group] != step.name:
                continue
            try:
                size += step.write(parts, value)
            except (TypeError, ValueError, OverflowError, struct.error) as error:
                name = f"{self.message_type.__name__}.{step.name}"
                raise ValueError(f"{name}: {error}") from error
        return size


class Encoder:
    """Encodes messages; caches an encoding plan per message class."""

    def __init__(self) -> None:
        self._plans: dict[type[betterproto.Message], Plan] = {}

    def encode(self, message: betterproto.Message) -> bytes:
        """Encode a message.

        Raises ValueError, naming the field, for a value that does not fit the field's type.
        """
        message_type = type(message)
        plan = self._plans.get(message_type) or self._learn(message_type)
        parts: Parts = []
        plan.write(parts, message)
        return b"".join(parts)

    def _learn(self, message_type: type[betterproto.Message]) -> Plan:
        plans = dict(self._plans)
        plan = _make_plan(message_type, plans)
        self._plans = plans
        return plan


# --- encoding plans ----------------------------------------------------------------------------


def _make_plan(
    message_type: type[betterproto.Message], plans: dict[type[betterproto.Message], Plan]
) -> Plan:
    known = plans.get(message_type)
    if known is not None:  # also ends the recursion for classes that contain themselves
        return known
    plan = plans[message_type] = Plan(message_type)
    for row in fields_of(message_type):
        plan.steps.append(Step(row.name, row.group, _write_field(row, plans)))
    return plan


def _write_field(row: Field, plans: dict[type[betterproto.Message], Plan]) -> Write:
    if row.type == MAP:
        key, value = (_write_one(part, plans, always=True) for part in fields_of(row.target))
        return _map(row, key, value)
    if row.repeated and row.type in SCALARS and SCALARS[row.type].wire != LENGTH:
        return _packed(row)
    if row.repeated:
        return _each(_write_one(row, plans, always=True))
    return _write_one(row, plans, always=row.optional or row.group is not None)


def _write_one(row: Field, plans: dict[type[betterproto.Message], Plan], *, always: bool) -> Write:
    """Return the encoder of a single value; it omits the default value unless `always`."""
    if row.type == MESSAGE:
        return _message(row, _make_plan(row.target, plans), always=always)
    if row.type in _LOADS:
        return _sized(row, _LOADS[row.type], always=always)
    return _number(row, always=always)


# --- numbers -----------------------------------------------------------------------------------


def _number(row: Field, *, always: bool) -> Write:
    scalar = SCALARS[row.type]
    dump = _dump(scalar)
    tag = write_varint(row.tag(scalar.wire))
    default = None if always else dump(scalar.default)

    def write(parts: Parts, value: object) -> int:
        written = dump(value)
        if written == default:
            return 0
        parts.append(tag + written)
        return len(tag) + len(written)

    return write


def _dump(scalar: Scalar) -> Dump:
    if scalar.dtype.kind == "b":
        return _dump_bool
    pack = scalar.layout.pack
    if scalar.dtype.kind == "f":
        return pack
    limits = np.iinfo(scalar.dtype)
    low, high = int(limits.min), int(limits.max)

    def dump(value: Any) -> bytes:
        number = operator.index(value)
        if not low <= number <= high:
            raise ValueError(f"{number} is not between {low} and {high}")
        return write_varint(to_varint(scalar, number)) if scalar.wire == VARINT else pack(number)

    return dump


def _dump_bool(value: object) -> bytes:
    if not isinstance(value, int | np.bool_):
        raise TypeError(f"expected bool, got {type(value).__name__}")
    return b"\1" if value else b"\0"


def _packed(row: Field) -> Write:
    scalar = SCALARS[row.type]
    dump = _dump(scalar)
    tag = write_varint(row.tag(LENGTH))

    def write(parts: Parts, values: Any) -> int:
        if len(values) == 0:
            return 0
        written = _dump_many(scalar, values) if len(values) > _FEW else None
        if written is None:
            written = b"".join(map(dump, values))
        head = tag + write_varint(len(written))
        parts += (head, written)
        return len(head) + len(written)

    return write


def _dump_many(scalar: Scalar, values: Any) -> bytes | None:
    """Encode packed numbers with numpy; None if their types or ranges need Python's checks."""
    array: Numbers = np.asarray(values)
    kind = scalar.dtype.kind
    if array.ndim != 1 or array.dtype.kind not in ("fiu" if kind == "f" else "biu"):
        return None
    if kind == "f":
        return _dump_floats(scalar, array)
    if kind == "b":
        return bytes(array != 0)
    limits = np.iinfo(scalar.dtype)
    if int(array.min()) < limits.min or int(array.max()) > limits.max:
        return None
    if scalar.wire == VARINT:
        return write_varints(to_varints(scalar, array))
    return array.astype(scalar.dtype).tobytes()


def _dump_floats(scalar: Scalar, array: Numbers) -> bytes:
    with np.errstate(over="ignore"):
        cut = array.astype(scalar.dtype)
    if (np.isinf(cut) & np.isfinite(array)).any():
        raise OverflowError("float too large to pack with f format")
    return cut.tobytes()


# --- text, bytes, messages and maps ------------------------------------------------------------


def _load_text(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"expected str, got {type(value).__name__}")
    return value.encode()


def _load_bytes(value: Any) -> bytes | memoryview:
    if type(value) is bytes:
        return value
    view = memoryview(value)
    return view.cast("B") if view.nbytes else b""


_LOADS: Mapping[str, Callable[[Any], bytes | memoryview]] = MappingProxyType(
    {STRING: _load_text, BYTES: _load_bytes}
)


def _sized(row: Field, load: Callable[[Any], bytes | memoryview], *, always: bool) -> Write:
    tag = write_varint(row.tag(LENGTH))

    def write(parts: Parts, value: object) -> int:
        loaded = load(value)
        size = len(loaded)
        if size == 0 and not always:
            return 0
        head = tag + write_varint(size)
        parts += (head, loaded)
        return len(head) + size

    return write


def _each(one: Write) -> Write:
    def write(parts: Parts, values: Any) -> int:
        return sum(one(parts, value) for value in values)

    return write


def _message(row: Field, plan: Plan, *, always: bool) -> Write:
    tag = write_varint(row.tag(LENGTH))

    def write(parts: Parts, message: betterproto.Message) -> int:
        at = len(parts)
        parts.append(b"")
        size = plan.write(parts, message)
        if size == 0 and not always and not betterproto.serialized_on_wire(message):
            parts.pop()
            return 0
        parts[at] = tag + write_varint(size)
        return len(parts[at]) + size

    return write


def _map(row: Field, write_key: Write, write_value: Write) -> Write:
    tag = write_varint(row.tag(LENGTH))

    def write(parts: Parts, mapping: Mapping[object, object]) -> int:
        total = 0
        for key, value in mapping.items():
            at = len(parts)
            parts.append(b"")
            size = write_key(parts, key) + write_value(parts, value)
            parts[at] = tag + write_varint(size)
            total += len(parts[at]) + size
        return total

    return write
