"""Finds `multipleOf` values that a JSON schema would compile, without compiling it.

Only reports values that are certain to be compiled: numbers that other keywords may limit, and
unreferenced schemas, are left to llguidance. Imports nothing from the server, like
`grammar_process.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

_BOUNDS = ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"})
_VALUES = frozenset({"const", "enum"})
"""Keywords that enumerate the valid values; other keywords are then not compiled."""
_CHOICES = ("anyOf", "oneOf")
_OF_OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "additionalItems"})
_WIDER = {"number": frozenset({"number", "integer"})}
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_MOST_DECIMALS = 30
MOST_LOOKS = 1_000
"""Maximum number of schemas visited, including repeated visits: about 10 ms."""


def too_large(schema: Any, most: int) -> Decimal | None:
    """Return a `multipleOf` that will be compiled and has more than `most` remainders, or None.

    Raises ArithmeticError for numbers that Decimal cannot represent.
    """
    # Fast path: most schemas have no such `multipleOf` anywhere, which is ten times faster to
    # check.
    if all(remainders(one) <= most for one in _written_multiples(schema)):
        return None
    return next((one for one in compiled_multiples(schema) if remainders(one) > most), None)


def _written_multiples(schema: Any) -> Iterator[Decimal]:
    found = [schema]
    while found:
        one = found.pop()
        if isinstance(one, list):
            found += one
        elif isinstance(one, dict):
            yield from _multiples([one])
            found += one.values()


def compiled_multiples(schema: Any) -> Iterator[Decimal]:
    """Yield every `multipleOf` of numbers that are not bounded on both sides or enumerated.

    Schemas that must hold together (`allOf`, `$ref`) limit each other. Stops when there are too
    many combinations.
    """
    found: list[Sequence[Schema]] = [[schema]] if isinstance(schema, dict) else []
    seen: set[frozenset[int]] = set()
    without_choices: dict[int, Schema] = {}
    left = MOST_LOOKS
    while found:
        together = list(_together(schema, found.pop()))
        left -= len(together)
        if left < 0:
            return
        key = frozenset(map(id, together))
        if key in seen:
            continue
        seen.add(key)
        choices = [one[name] for one in together for name in _CHOICES if name in one]
        if any(_VALUES & one.keys() for one in together) or len(choices) > 1:
            continue
        if choices:
            without = [
                without_choices.setdefault(id(one), _without_choices(one)) for one in together
            ]
            found += ([*without, one] for one in _schemas(choices[0]))
            continue
        types = _types(together)
        if "integer" in types and not _is_bounded(together):
            yield from _multiples(together)
        if "object" in types:
            found += ([one] for one in _values(together))
        if "array" in types:
            found += ([one] for one in _items(together))


def _together(root: Any, schemas: Iterable[Schema]) -> Iterator[Schema]:
    """Yield the schemas, and all others that must hold together with them."""
    left, seen = list(schemas), set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += _schemas(one.get("allOf"))
        target = _referred(root, one.get("$ref"))
        left += [target] if isinstance(target, dict) else []


def _referred(root: Any, reference: Any) -> Any:
    """Resolve a reference within the schema; None if it is invalid."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, dict):
            return None
        root = root.get(name)
    return root


def _schemas(found: Any) -> list[Schema]:
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _without_choices(one: Schema) -> Schema:
    """Return a schema without `anyOf` and `oneOf`; the same object if it has neither."""
    if not any(name in one for name in _CHOICES):
        return one
    return {name: value for name, value in one.items() if name not in _CHOICES}


def _types(together: Iterable[Schema]) -> frozenset[str]:
    """Return the possible types of values; invalid `type` keywords restrict nothing."""
    types = _TYPES
    for one in together:
        said = one.get("type")
        named = said if isinstance(said, list) else [said]
        known = [name for name in named if isinstance(name, str) and name in _TYPES]
        if known:
            types &= frozenset(chain.from_iterable(_WIDER.get(name, {name}) for name in known))
    return types


def _is_bounded(together: Iterable[Schema]) -> bool:
    names = set(chain.from_iterable(together))
    return all(bound & names for bound in _BOUNDS)


def _multiples(together: Iterable[Schema]) -> Iterator[Decimal]:
    for one in together:
        multiple = one.get("multipleOf")
        if isinstance(multiple, (int, Decimal)) and not isinstance(multiple, bool):
            yield Decimal(multiple).copy_abs()


def _values(together: Sequence[Schema]) -> list[Schema]:
    """Return the schemas of an object's values, or none if other keywords may limit them."""
    own = [one for one in together if _OF_OBJECTS & one.keys()]
    if len(own) != 1 or any("maxProperties" in one for one in together):
        return []
    named, matched, others = (
        own[0].get(name) for name in ("properties", "patternProperties", "additionalProperties")
    )
    maps = [one for one in (named, matched) if isinstance(one, dict) and one]
    values = list(maps[0].values()) if len(maps) == 1 else []
    if len(values) > 1 and maps[0] is matched:
        values = []  # a name may match several patterns
    return _schemas([*values, others])


def _items(together: Sequence[Schema]) -> list[Schema]:
    """Return the schemas of an array's items, or none if other keywords may limit them."""
    own = [one for one in together if _OF_ARRAYS & one.keys()]
    if len(own) != 1:
        return []
    first, rest = own[0].get("prefixItems", []), own[0].get("items")
    if isinstance(rest, list):
        first, rest = rest, own[0].get("additionalItems")
    items = [*first, rest] if isinstance(first, list) else [rest]
    most = [one["maxItems"] for one in together if "maxItems" in one]
    if not all(isinstance(one, int) for one in most):
        return []
    return _schemas(items[: min(most, default=len(items))])


def remainders(multiple: Decimal) -> int:
    """Return a lower bound of the remainders that a `multipleOf` distinguishes.

    Factors of two and five are ignored, since trailing digits decide them; so 1,000,000 has few.
    """
    _, _, exponent = multiple.as_tuple()
    if not isinstance(exponent, int) or not multiple or abs(exponent) > _MOST_DECIMALS:
        return 0
    decimals = max(0, -exponent)
    left = int(multiple.scaleb(decimals))
    for factor in (2, 5):
        while left % factor == 0:
            left //= factor
    return int(left // 10**decimals)
