"""Parses configurations in proto-JSON."""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn, TypeAlias

import betterproto

from xlaserve.model_config.schema import (
    ARTICLES,
    MESSAGES,
    BadConfig,
    Draft,
    Field,
    Schema,
    checked_float,
    checked_integer,
    enum_member,
    find_field,
    finite,
    schema_of,
    shown,
    shown_number,
)
from xlaserve.tensors import DATATYPES
from xlaserve_proto import inference

DEPTH = 100
"""Maximum nesting of arrays and objects, as in protobuf's JSON parsers."""


class _Object(tuple[tuple[str, "Json"], ...]):
    """The members of a JSON object; unlike a dict, it keeps duplicate keys."""


Json: TypeAlias = "bool | int | float | str | list[Json] | _Object | None"

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?+|([\[{])|([\]}])', re.DOTALL)
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
_EXACT = 2**53
"""Floats below this value represent integers exactly."""

# The load example of the model repository extension uses V2 names for tensors.
_TENSOR_ALIASES = MappingProxyType({"datatype": "data_type", "shape": "dims"})
_ALIASES: Mapping[type[betterproto.Message], Mapping[str, str]] = MappingProxyType(
    {
        inference.ModelConfig: MappingProxyType({"inputs": "input", "outputs": "output"}),
        inference.ModelInput: _TENSOR_ALIASES,
        inference.ModelOutput: _TENSOR_ALIASES,
    }
)
_DATATYPE_ALIASES = MappingProxyType(
    {row.name: row.config_name for row in DATATYPES.values()} | {"STRING": "TYPE_STRING"}
)


def read_json(text: str, schema: Schema) -> betterproto.Message:
    """Parse proto-JSON into a message; unknown fields are errors.

    Raises BadConfig with the path of keys as its place.
    """
    _check_brackets(text)
    try:
        root: Json = json.loads(
            text,
            object_pairs_hook=_Object,
            parse_int=_parse_integer,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise BadConfig(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    return _message(schema, root)


def _check_brackets(text: str) -> None:
    depth = opened = 0
    for bracket in _BRACKETS.finditer(text):
        opened += bracket[1] is not None
        depth += (bracket[1] is not None) - (bracket[2] is not None)
        if depth > DEPTH:
            raise BadConfig(f"nested deeper than {DEPTH} levels")
        if opened > 2 * MESSAGES:
            raise BadConfig(f"more than {2 * MESSAGES} objects and lists")


def _parse_integer(digits: str) -> int | float:
    # Python refuses very long ints. Here their magnitude is enough, since no field takes them.
    return int(digits) if len(digits) < 100 else float(digits)


def _refuse_constant(constant: str) -> NoReturn:
    raise BadConfig(f'{constant} is not JSON, write "{constant}"')


def _message(schema: Schema, value: Json) -> betterproto.Message:
    if not isinstance(value, _Object):
        raise BadConfig.mismatch("an object", _got(value))
    draft = Draft(schema)
    aliases = _ALIASES.get(schema.message, {})
    for key, member in value:
        field = find_field(schema.by_either_name, aliases.get(key, key))
        try:
            _fill(draft, field, _config_name(member) if key == "datatype" else member)
        except BadConfig as problem:
            raise problem.within(f".{key}") from None
    return draft.finish()


def _config_name(value: Json) -> Json:
    return _DATATYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _fill(draft: Draft, field: Field, value: Json) -> None:
    draft.claim(field)
    if value is None:
        return
    draft.choose(field)
    if field.kind == "map" and field.message:
        _fill_map(draft, field, schema_of(field.message), value)
    elif field.repeated:
        draft.append(field, _list(field, value))
    else:
        draft.set(field, _single(field, value))


def _fill_map(draft: Draft, field: Field, entry: Schema, value: Json) -> None:
    if not isinstance(value, _Object):
        raise BadConfig.mismatch("an object", _got(value))
    for name, member in value:
        try:
            key = _map_key(entry.by_name["key"], name)
            draft.put(field, key, _single(entry.by_name["value"], member))
        except BadConfig as problem:
            raise problem.within(f"[{shown(name)}]") from None


def _map_key(field: Field, key: str) -> object:
    if field.kind == "bool" and key in ("true", "false"):
        return key == "true"
    return _single(field, key)


def _list(field: Field, value: Json) -> list[object]:
    if not isinstance(value, list):
        raise BadConfig.mismatch("a list", _got(value))
    return [_item(field, index, item) for index, item in enumerate(value)]


def _item(field: Field, index: int, value: Json) -> object:
    try:
        return _single(field, value)
    except BadConfig as problem:
        raise problem.within(f"[{index}]") from None


def _single(field: Field, value: Json) -> object:
    if field.message:
        return _message(schema_of(field.message), value)
    return _SCALARS[field.kind](field, value)


def _integer(field: Field, value: Json) -> int:
    number = _whole(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        number = _whole(_parse_integer(value))
    elif isinstance(value, str) and _NUMBER.fullmatch(value):
        number = _whole(float(value))
    if number is None:
        raise BadConfig.mismatch(ARTICLES[field.kind], _got(value))
    return checked_integer(field, number)


def _whole(value: Json) -> int | None:
    """Return an integral number, which may be written as a float; None for other values."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(field: Field, value: Json) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return checked_float(field, finite(field, float(value)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadConfig.mismatch(ARTICLES[field.kind], _got(value))
    return checked_float(field, finite(field, float(value)))


def _bool(field: Field, value: Json) -> bool:
    if not isinstance(value, bool):
        raise BadConfig.mismatch(ARTICLES[field.kind], _got(value))
    return value


def _string(field: Field, value: Json) -> str:
    if not isinstance(value, str):
        raise BadConfig.mismatch(ARTICLES[field.kind], _got(value))
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadConfig.mismatch("a string", f"half of a surrogate pair in {_got(value)}")
    return value


def _bytes(field: Field, value: Json) -> bytes:
    text = _string(field, value).rstrip("=").translate(_URL_SAFE)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadConfig.mismatch("base64", _got(value)) from None


def _enum(field: Field, value: Json) -> betterproto.Enum:
    member = value if isinstance(value, str) else _whole(value)
    if member is None:
        raise BadConfig.mismatch("the name or number of an enum value", _got(value))
    return enum_member(field, member)


_URL_SAFE = str.maketrans("-_", "+/")

_SCALARS: Mapping[str, Callable[[Field, Json], object]] = MappingProxyType(
    {
        "int32": _integer,
        "int64": _integer,
        "uint32": _integer,
        "uint64": _integer,
        "float": _float,
        "double": _float,
        "bool": _bool,
        "string": _string,
        "bytes": _bytes,
        "enum": _enum,
    }
)


def _got(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return shown_number(value)
        case str():
            return shown(value)
        case _Object():
            return "an object"
        case _:
            return "a list"
