"""Grammars that take seconds to minutes to compute, by kind."""

import json
from collections.abc import Callable, Mapping

NUMBER = 9_999_991
Made = Callable[[int], tuple[str, str]]
"""Makes a grammar from a number: its request parameter and its text."""


def _schema(text: str) -> Made:
    return lambda number: ("json_schema", text.replace("N", str(NUMBER + number)))


def _many(number: int) -> tuple[str, str]:
    divisors = range(9000 + number, 9100 + number)
    found = {"anyOf": [{"type": "integer", "multipleOf": one} for one in divisors]}
    return "json_schema", json.dumps(found)


def _by_property(number: int) -> tuple[str, str]:
    listed = {
        f"p{one}": {"type": "integer", "multipleOf": 9000 + number + one} for one in range(300)
    }
    return "json_schema", json.dumps({"type": "object", "properties": listed})


HARD: Mapping[str, Made] = {
    "multiple": _schema('{"type":"integer","multipleOf":N}'),
    "multiple, nested": _schema('{"type":"object","properties":{"a":{"multipleOf":N}}}'),
    "multiple, decimal": _schema('{"items":{"anyOf":[{"multipleOf" : N.5}]}}'),
    "multiple, exponent": _schema('{"multipleOf":Ne-3}'),
    "multiple, escaped": _schema(r'{"type":"integer","multiple\u004ff":N}'),
    "multiples together": _schema(
        '{"allOf":[{"type":"integer","multipleOf":9973},{"multipleOf":9967}],"maximum":N}'
    ),
    "multiples by reference": _schema(
        '{"$defs":{"a":{"type":"integer","multipleOf":9973}},'
        '"allOf":[{"$ref":"#/$defs/a"},{"multipleOf":9967}],"maximum":N}'
    ),
    "many multiples": _many,
    "a multiple for each property": _by_property,
    "multiple in Lark": lambda number: (
        "grammar",
        f'start: %json {{"type":"integer","multipleOf":{NUMBER + number}}}',
    ),
}
"""Grammars that the library's own fuel limit does not stop."""

BOUNDED: Mapping[str, tuple[str, str]] = {
    "repetitions within repetitions": ("regex", "(((a{1000}){1000}){1000}){1000}"),
    "many repetitions": ("regex", "(a|b){0,100000}c{100000,200000}"),
    "states without number": ("regex", "(a|b)*a(a|b){20}"),
    "deep arrays": ("json_schema", '{"items":' * 2000 + "{}" + "}" * 2000),
    "a loop of rules": ("grammar", "start: a\na: b\nb: a"),
}
"""Grammars that a limit of the library rejects before its first step."""
