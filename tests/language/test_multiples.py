"""`multipleOf` in schemas: the values that the library compiles are found, and no others."""

import json
from decimal import Decimal
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlaserve.language.grammar_process import Alphabet
from xlaserve.language.multiples import MOST_LOOKS, compiled_multiples

LARGE = {"type": "integer", "multipleOf": 9999991}
BOUNDS = {"minimum": 0, "maximum": 9}


def found(schema: Any) -> set[int]:
    read = json.loads(json.dumps(schema), parse_float=Decimal)
    return {int(one) for one in compiled_multiples(read)}


COMPILED: dict[str, Any] = {
    "alone": LARGE,
    "of any type": {"multipleOf": 9999991},
    "bounded on one side": {**LARGE, "minimum": 0},
    "a property": {"properties": {"a": LARGE}},
    "a property named as a keyword": {"properties": {"enum": LARGE}},
    "a property named as this keyword": {"properties": {"multipleOf": LARGE}},
    "a property named as a bound": {"properties": {"minimum": LARGE, "maximum": {}, "const": {}}},
    "other properties": {"additionalProperties": LARGE},
    "a pattern": {"patternProperties": {"a": LARGE}},
    "items": {"type": "array", "items": LARGE},
    "first items": {"prefixItems": [{}, LARGE]},
    "items behind first ones": {"items": [{}], "additionalItems": LARGE},
    "a choice": {"anyOf": [{"type": "string"}, LARGE]},
    "one choice": {"oneOf": [{"type": "string"}, LARGE]},
    "all of": {"allOf": [{"type": "number"}, LARGE, {"minimum": 0}]},
    "referred to": {"$defs": {"a": LARGE}, "items": {"$ref": "#/$defs/a"}},
    "referred to by an odd name": {"$defs": {"a/~b": LARGE}, "$ref": "#/$defs/a~1~0b"},
    "recursive": {"anyOf": [{"$ref": "#"}, LARGE]},
    "in itself": {"properties": {"a": {"$ref": "#"}, "b": LARGE}},
}
OTHERS: dict[str, Any] = {
    "bounded": {**LARGE, **BOUNDS},
    "bounded by all of": {"allOf": [LARGE, BOUNDS]},
    "bounded beside all of": {**BOUNDS, "allOf": [LARGE]},
    "bounded beside a choice": {**BOUNDS, "anyOf": [LARGE, {"multipleOf": 3}]},
    "bounded beside a reference": {"$defs": {"a": LARGE}, "$ref": "#/$defs/a", **BOUNDS},
    "bounded by a reference": {"$defs": {"a": BOUNDS}, "$ref": "#/$defs/a", **LARGE},
    "bounded by another choice": {"allOf": [{"anyOf": [LARGE]}, {"anyOf": [BOUNDS]}]},
    "bounded by all of within a choice": {"anyOf": [{"allOf": [LARGE, BOUNDS]}]},
    "a bounded property": {"allOf": [{"properties": {"a": LARGE}}, {"properties": {"a": BOUNDS}}]},
    "a property bounded by a pattern": {
        "properties": {"a": LARGE},
        "patternProperties": {"a": BOUNDS},
    },
    "a value": {"allOf": [{"const": 0}, LARGE]},
    "values": {"enum": [0], **LARGE},
    "among values": {"enum": [LARGE]},
    "text": {"type": "string", "multipleOf": 9999991},
    "text by all of": {"allOf": [{"type": "string"}, {"multipleOf": 9999991}]},
    "text beside a choice": {"type": "string", "anyOf": [{"multipleOf": 9999991}]},
    "items of no array": {"type": "string", "items": LARGE},
    "no items": {"prefixItems": [LARGE], "maxItems": 0},
    "not referred to": {"$defs": {"a": LARGE}, "definitions": {"b": LARGE}, "type": "string"},
    "referred to by nothing else": {
        "$defs": {"a": {"items": LARGE}, "b": {"type": "null"}},
        "$ref": "#/$defs/b",
    },
    "a default": {"type": "string", "default": LARGE, "examples": [LARGE], "title": "a"},
    "an unknown keyword": {"type": "string", "x-limits": LARGE},
    "a property of this name": {"properties": {"multipleOf": {"type": "string"}}},
    "a number for a property": {"properties": {"multipleOf": 9999991}},
    "a truth": {"properties": {"multipleOf": True}},
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_multiple_that_is_compiled_is_found(name: str) -> None:
    assert {9999991} == found(COMPILED[name])


@pytest.mark.parametrize("name", OTHERS)
def test_a_multiple_that_is_not_compiled_or_is_limited_is_left_to_the_library(name: str) -> None:
    assert set() == found(OTHERS[name])


def test_schemas_that_are_met_in_very_many_ways_are_left_to_the_library() -> None:
    links: dict[str, Any] = {
        f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}", "title": t} for t in "ab"]}
        for n in range(MOST_LOOKS)
    }
    links[f"a{MOST_LOOKS}"] = LARGE

    assert set() == found({"$ref": "#/$defs/a0", "$defs": links})


# # --- comparison with the library ---------------------------------------------------------------

NONE: dict[str, Any] = {"multipleOf": 0}
"""The library refuses this wherever it compiles it, and nowhere else."""
PARTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        *({"type": name} for name in ("integer", "number", "string", "array", "object")),
        *({"minimum": 0}, {"maximum": 9}, {"maxItems": 0}, {"minLength": 1}, {"enum": [0, []]}),
        {},
    ]
)


def larger(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(schemas, min_size=1, max_size=2)
    names = st.sampled_from(["a", "multipleOf", "enum", "properties"])
    objects = st.dictionaries(names, schemas, min_size=1, max_size=2)
    whole = st.one_of(
        few.map(lambda found: {"allOf": found}),
        few.map(lambda found: {"anyOf": found}),
        few.map(lambda found: {"prefixItems": found}),
        schemas.map(lambda found: {"items": found}),
        schemas.map(lambda found: {"additionalProperties": found}),
        objects.map(lambda found: {"properties": found}),
        st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]),
    )
    return st.tuples(PARTS, whole).map(lambda both: {**both[0], **both[1]})


SCHEMAS = st.recursive(
    st.tuples(PARTS, st.sampled_from([NONE, {}])).map(lambda both: {**both[0], **both[1]}),
    larger,
    max_leaves=4,
)


def is_refused(schema: Any) -> bool:
    """Tell whether the library reports an error in a schema."""
    matcher = llguidance.LLMatcher
    alphabet = Alphabet(300, {"299": "<eos>"}, [299])
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(alphabet), eos_token=[299])
    try:
        grammar = matcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError:
        return True
    return bool(matcher(tokenizer, grammar, log_level=0).is_error())


@settings(max_examples=60)
@given(SCHEMAS, st.fixed_dictionaries({"a": SCHEMAS, "b": SCHEMAS}))
def test_what_is_found_the_library_compiles(schema: Any, named: Any) -> None:
    whole = {**schema, "$defs": named}
    if found(whole):
        assert is_refused(whole)


def test_the_library_refuses_what_it_compiles_alone() -> None:
    """Shows that the test above is meaningful."""
    assert is_refused({"items": NONE})
    assert not is_refused({"$defs": {"a": NONE}, "type": "string"})
