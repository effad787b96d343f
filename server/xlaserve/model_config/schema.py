"""Describes the fields of generated message classes, for the configuration parsers."""

import functools
import json
import keyword
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Self

import betterproto
from betterproto import FieldMetadata, ProtoClassMetadata

_SHOWN = 60
"""Maximum length of a faulty value in an error, in characters."""

MESSAGES = 10_000
"""Maximum number of messages in a configuration; each takes tens of microseconds to create."""

_INTEGERS = MappingProxyType(
    {
        "int32": (-(2**31), 2**31 - 1),
        "int64": (-(2**63), 2**63 - 1),
        "uint32": (0, 2**32 - 1),
        "uint64": (0, 2**64 - 1),
    }
)
_FLOATS = MappingProxyType({"float": struct.Struct("<f"), "double": struct.Struct("<d")})

ARTICLES = MappingProxyType(
    {
        "string": "a string",
        "bytes": "bytes",
        "bool": "true or false",
        "float": "a float",
        "double": "a double",
        "message": "a message",
        **{kind: f"an {kind}" for kind in ("int32", "int64")},
        **{kind: f"a {kind}" for kind in ("uint32", "uint64")},
    }
)
"""Names of protobuf types with articles, for errors."""


_GIVEN = "_given_by_a_text"
"""Attribute with the names of set fields: proto3 itself does not record explicit defaults."""


class BadConfig(ValueError):
    """An invalid configuration; `model_config.text` converts it into InvalidModel.

    Callers add the position with `within` as the error propagates.
    """

    def __init__(self, problem: str, place: str = "") -> None:
        self.problem = problem
        self.place = place
        super().__init__(problem, place)

    @classmethod
    def mismatch(cls, expected: str, got: str) -> Self:
        """Return an error with the expected and the actual value."""
        return cls(f"expected {expected}, got {got}")

    def within(self, outer: str) -> Self:
        """Return the same error with the path of the enclosing field prepended."""
        return type(self)(self.problem, outer + self.place)

    def __str__(self) -> str:
        place = self.place.removeprefix(".")
        return f"{place}: {self.problem}" if place else self.problem


def shown(text: str) -> str:
    """Quote part of a configuration for an error: ASCII only, truncated."""
    return json.dumps(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message."""

    name: str
    attribute: str
    """Name of the attribute in the generated class."""
    kind: str
    """A protobuf scalar type, `enum`, `message` or `map`."""
    repeated: bool = False
    oneof: str | None = None
    message: type[betterproto.Message] | None = None
    """Class of a message field; for a map, the class of its entries, with `key` and `value`."""
    members: Mapping[str, betterproto.Enum] | None = None
    """The members of an enum field, by name."""

    @property
    def json_name(self) -> str:
        """The lowerCamelCase name in proto-JSON."""
        first, *rest = self.name.split("_")
        return first + "".join(part[:1].upper() + part[1:] for part in rest)


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a message class."""

    message: type[betterproto.Message]
    by_name: Mapping[str, Field]
    by_either_name: Mapping[str, Field]
    """Fields by both of their proto-JSON names."""


@functools.cache
def schema_of(message: type[betterproto.Message]) -> Schema:
    """Read the fields of a generated class from its metadata."""
    # Type checkers do not know the descriptor behind `_betterproto`.
    generated: Any = message
    metadata: ProtoClassMetadata = generated._betterproto
    fields = [
        _field(name, meta, message._type_hint(name), metadata.cls_by_field[name])
        for name, meta in metadata.meta_by_field_name.items()
    ]
    by_name = {field.name: field for field in fields}
    by_json_name = {field.json_name: field for field in fields}
    return Schema(message, MappingProxyType(by_name), MappingProxyType(by_json_name | by_name))


def _field(attribute: str, meta: FieldMetadata, hint: object, python_type: Any) -> Field:
    bare = attribute.removesuffix("_")
    kind = meta.proto_type
    return Field(
        name=bare if keyword.iskeyword(bare) else attribute,
        attribute=attribute,
        kind=kind,
        repeated=getattr(hint, "__origin__", None) is list,
        oneof=meta.group,
        message=python_type if kind in ("message", "map") else None,
        members=python_type.__members__ if kind == "enum" else None,
    )


def find_field(fields: Mapping[str, Field], name: str) -> Field:
    """Return the field with this name; raises BadConfig with similar names if there is none."""
    field = fields.get(name)
    if field is None:
        near = dict.fromkeys(fields[key].name for key in get_close_matches(name[:_SHOWN], fields))
        known = sorted({known.name for known in fields.values()})
        hint = f"did you mean {' or '.join(near)}?" if near else f"expected {', '.join(known)}"
        raise BadConfig(f"unknown field {shown(name)}, {hint}")
    return field


class Draft:
    """Builds a message."""

    def __init__(self, schema: Schema) -> None:
        self._message = schema.message
        self._values: dict[str, Any] = {}
        self._given: set[str] = set()
        self._chosen: dict[str, str] = {}

    def claim(self, field: Field) -> None:
        """Record that a field is set; raises BadConfig if it already is."""
        if field.name in self._given:
            raise BadConfig(f"{field.name} is given twice")
        self._given.add(field.name)

    def choose(self, field: Field) -> None:
        """Record the member of a oneof; raises BadConfig if another member is set."""
        if field.oneof:
            chosen = self._chosen.setdefault(field.oneof, field.name)
            if chosen != field.name:
                raise BadConfig(f"{field.name} and {chosen} are both given, expected one of them")

    def set(self, field: Field, value: object) -> None:
        """Set the value of a field."""
        self._values[field.attribute] = value

    def append(self, field: Field, values: Iterable[object]) -> None:
        """Add values to a repeated field."""
        self._values.setdefault(field.attribute, []).extend(values)

    def put(self, field: Field, key: object, value: object) -> None:
        """Add an entry to a map; raises BadConfig for a duplicate key."""
        entries = self._values.setdefault(field.attribute, {})
        if key in entries:
            raise BadConfig(f"key {shown(str(key))} of {field.name} is given twice")
        entries[key] = value

    def finish(self) -> betterproto.Message:
        """Return the message; it counts as present even if no field is set."""
        message = self._message(**self._values)
        message._serialized_on_wire = True
        vars(message)[_GIVEN] = frozenset(self._given)
        return message


def given_of(message: betterproto.Message) -> frozenset[str]:
    """Return the names of the fields that the parsed text sets, even to their defaults.

    The result is empty for a message that was not parsed from text.
    """
    given: frozenset[str] = message.__dict__.get(_GIVEN, frozenset())
    return given


def checked_integer(field: Field, value: int) -> int:
    """Return the value; raises BadConfig if it is out of range for the field."""
    lowest, highest = _INTEGERS[field.kind]
    if not lowest <= value <= highest:
        raise BadConfig.mismatch(ARTICLES[field.kind], shown_number(value))
    return value


def shown_number(value: float) -> str:
    """Format a number for an error; integers may have thousands of digits."""
    return repr(value) if abs(value) < 10**_SHOWN else "a number of more than 60 digits"


def checked_float(field: Field, value: float) -> float:
    """Round the value to the field's type; raises BadConfig if it overflows."""
    try:
        (rounded,) = _FLOATS[field.kind].unpack(_FLOATS[field.kind].pack(value))
    except OverflowError:
        raise BadConfig.mismatch(ARTICLES[field.kind], shown_number(value)) from None
    return float(rounded)


def finite(field: Field, value: float) -> float:
    """Return the value; raises BadConfig if the number overflowed to infinity."""
    if not math.isfinite(value):
        raise BadConfig.mismatch(ARTICLES[field.kind], "a number out of range")
    return value


def enum_member(field: Field, value: str | int) -> betterproto.Enum:
    """Return an enum member by name or number; raises BadConfig if there is none."""
    members = field.members or {}
    for name, member in members.items():
        if value in (name, member.value):
            return member
    got = value if isinstance(value, str) else shown_number(value)
    raise BadConfig.mismatch(f"one of {', '.join(members)}", got[:_SHOWN])
