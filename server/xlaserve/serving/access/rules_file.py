"""Strict parser of the rules file (TOML or JSON): no mistake may grant access.

Unknown keys, wrong types and entries without credentials are errors that name their location.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from xlaserve.errors import InvalidSettings
from xlaserve.serving.access.models import OF_MODELS
from xlaserve.serving.access.rules import Caller, Quota, Rules, SignedTokens
from xlaserve.serving.access.tokens import is_digest
from xlaserve.serving.call import OPEN, Operation

SETTING = "access_rules"
MAX_BYTES = 1 << 20
"""Maximum size of a rules file or key set."""
LISTENERS = ("grpc_endpoint", "grpc_data_endpoint", "http_endpoint", "metrics_endpoint")
_TLS = ("subject:", "DNS:", "URI:", "email:", "IP Address:")
_SHOWN, _SHOWN_OF_TOKEN = 80, 8

Read: TypeAlias = Callable[[str, Any], Any]
"""Validates and converts the value of a key; raises `_Wrong`."""


class _Wrong(Exception):
    def __init__(self, where: str, expected: str, got: object) -> None:
        super().__init__(where, expected, got)
        self.where, self.expected, self.got = where, expected, got


def read_rules(path: Path) -> Rules:
    """Return the rules of a file; raises InvalidSettings, which names the line or key."""
    try:
        data = path.read_bytes()
    except OSError as error:
        got = f"{path}: {error.strerror or error}"
        raise InvalidSettings(SETTING, "a file of rules", got) from error
    if len(data) > MAX_BYTES:
        got = f"{path}: {len(data)} bytes"
        raise InvalidSettings(SETTING, f"a file of at most {MAX_BYTES} bytes", got)
    try:
        return parse_rules(data, is_json=path.suffix == ".json")
    except ValueError as error:  # raised by both parsers, with line and column, and by the decoder
        got = f"{path}: {error}"
        raise InvalidSettings(SETTING, "rules in TOML, or JSON in *.json", got) from error
    except RecursionError:
        raise InvalidSettings(SETTING, "less deeply nested rules", str(path)) from None
    except _Wrong as wrong:
        # Show only the beginning: the user may have pasted the token itself.
        shown = _SHOWN_OF_TOKEN if wrong.where.endswith(".token") else _SHOWN
        got = f"{str(wrong.got)[:shown]} ({path})"
        raise InvalidSettings(f"{SETTING}: {wrong.where}", wrong.expected, got) from None


def parse_rules(data: bytes, *, is_json: bool) -> Rules:
    """Parse the bytes of a rules file."""
    text = data.decode()
    value = json.loads(text, object_pairs_hook=_once) if is_json else tomllib.loads(text)
    found = _table("", value, _FILE)
    callers = found.get("caller", ())
    signed = found.get("signed_tokens")
    for number, caller in enumerate(callers):
        if caller.subjects and signed is None:
            where = f"caller[{number}].subject"
            raise _Wrong(where, "a table [signed_tokens] for the keys of subjects", "none")
    names = [caller.name for caller in callers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise _Wrong("caller", "unique names", twice)
    return Rules(callers, signed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, refusing the duplicate keys that the parser would accept."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"duplicate key in {', '.join(key for key, _ in pairs)}"[:_SHOWN])
    return found


# --- value parsers -------------------------------------------------------------------------------


def _table(where: str, value: Any, keys: Mapping[str, Read]) -> dict[str, Any]:
    if type(value) is not dict:
        raise _Wrong(where, "a table", value)
    for key in value:
        if key not in keys:
            raise _Wrong(f"{where}.{key}".lstrip("."), f"one of {', '.join(keys)}", key)
    return {key: keys[key](f"{where}.{key}".lstrip("."), found) for key, found in value.items()}


def _needed(where: str, found: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if key not in found:
            raise _Wrong(where, f"the key {key}", "none")


def _text(where: str, value: Any) -> str:
    if type(value) is not str or not value.strip() or not value.isprintable():
        raise _Wrong(where, "a text", value)
    return value


def _name(where: str, value: Any) -> str:
    if "/" in _text(where, value):  # a slash separates it from the subject of a signed token
        raise _Wrong(where, "a name without /", value)
    return str(value)


def _true(where: str, value: Any) -> bool:
    if value is not True:
        raise _Wrong(where, "true (otherwise leave the key out)", value)
    return True


def _number(least: float, *, above: bool = False) -> Read:
    bound = f"above {least:g}" if above else f"of at least {least:g}"

    def read(where: str, value: Any) -> float:
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or value < least or (above and value == least):
            raise _Wrong(where, f"a number {bound}", value)
        return float(value)

    return read


def _count(where: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _Wrong(where, "an integer of at least 1", value)
    return value


def _many(expected: str, check: Callable[[Any], bool]) -> Read:
    """Return a parser of one value or a non-empty list of values."""

    def read(where: str, value: Any) -> frozenset[Any]:
        values = value if type(value) is list else [value]
        if not values:
            raise _Wrong(where, f"{expected}, or several", value)
        for one in values:
            if not check(one):
                raise _Wrong(where, expected, one)
        return frozenset(values)

    return read


def _is_text(value: Any) -> bool:
    return type(value) is str and bool(value.strip())


def _operations(where: str, value: Any) -> frozenset[Operation]:
    known = [operation.value for operation in Operation if operation not in OPEN]
    expected = f"a list of {', '.join(known)}"
    if type(value) is not list or not value:
        raise _Wrong(where, expected, value)
    for one in value:
        if one not in known:
            raise _Wrong(where, expected, one)
    return frozenset(map(Operation, value))


def _caller(where: str, value: Any) -> Caller:
    found = _table(where, value, _CALLER)
    _needed(where, found, "name", "allow")
    if not found.keys() & _CREDENTIALS:
        raise _Wrong(where, f"one of {', '.join(_CREDENTIALS)}", "none")
    models = found.get("models")
    if models is not None and (wrong := sorted(found["allow"] - OF_MODELS)):
        expected = f"no models with {wrong[0]}, which applies to the whole server"
        raise _Wrong(f"{where}.models", expected, ", ".join(sorted(models)))
    quota = None
    if found.keys() & _QUOTA:
        rate = found.get("requests_per_second")
        burst = found.get("burst", max(1.0, rate or 1.0))
        if "burst" in found and rate is None:
            raise _Wrong(f"{where}.burst", "also requests_per_second", burst)
        quota = Quota(rate, burst, found.get("concurrent_requests"))
    return Caller(
        name=found["name"],
        allow=found["allow"],
        tokens=found.get("token", frozenset()),
        tls=found.get("tls", frozenset()),
        unix_users=found.get("unix_user", frozenset()),
        subjects=found.get("subject", frozenset()),
        models=models,
        anyone=found.get("anyone", False),
        listeners=found.get("listener", frozenset()),
        quota=quota,
    )


def _callers(where: str, value: Any) -> tuple[Caller, ...]:
    if type(value) is not list:
        raise _Wrong(where, "a list of tables, [[caller]]", value)
    return tuple(_caller(f"{where}[{number}]", one) for number, one in enumerate(value))


def _signed(where: str, value: Any) -> SignedTokens:
    found = _table(where, value, _SIGNED)
    _needed(where, found, "keys", "issuer", "audience")
    return SignedTokens(**found)


_CREDENTIALS = ("token", "tls", "unix_user", "subject", "anyone")
_QUOTA = frozenset({"requests_per_second", "burst", "concurrent_requests"})

_CALLER: Mapping[str, Read] = MappingProxyType(
    {
        "name": _name,
        "allow": _operations,
        "token": _many(
            "sha256: and 64 hex digits (xlaserve token)",
            lambda value: type(value) is str and is_digest(value),
        ),
        "tls": _many(
            f"a string that starts with {', '.join(_TLS)}",
            lambda value: type(value) is str and value.startswith(_TLS),
        ),
        "unix_user": _many("a numeric user id", lambda value: type(value) is int and value >= 0),
        "subject": _many("the subject of signed tokens, or '*'", _is_text),
        "models": _many("the name of a model, or a pattern as a-*", _is_text),
        "anyone": _true,
        "listener": _many(f"one of {', '.join(LISTENERS)}", lambda value: value in LISTENERS),
        "requests_per_second": _number(0, above=True),
        "burst": _number(1),
        "concurrent_requests": _count,
    }
)

_SIGNED: Mapping[str, Read] = MappingProxyType(
    {
        "keys": _text,
        "issuer": _text,
        "audience": _text,
        "leeway_seconds": _number(0),
        "refresh_seconds": _number(1),
    }
)

_FILE: Mapping[str, Read] = MappingProxyType({"caller": _callers, "signed_tokens": _signed})
