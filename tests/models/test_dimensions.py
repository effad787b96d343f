"""Texts of dimensions are held to a grammar with bounds before JAX evaluates them."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import ast
import json
import re
import shutil
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xlaserve.runtime
from xlaserve.artifact import artifact, dimensions, manifest
from xlaserve.errors import InvalidModel

SERVER = Path(xlaserve.runtime.__file__).parents[1]

HOSTILE = {
    "a power": "s^200000000",
    "a power of a number": "2^200000000",
    "powers in a product": "*".join(["s^16"] * 3),
    "a power of a sum that an operation hides": "floordiv(a + b + c, 1)^16",
    "a product of sums": "*".join(f"max(a{n} + b{n} + c{n}, 1)" for n in range(8)),
    "a number of many digits": "9" * 4000,
    "nested operations": "max(" * 40 + "a" + ", 1)" * 40,
    "a long text": "a + " * 2000 + "a",
    "many terms": " + ".join(f"x{n}" for n in range(600)),
    "calls": "__import__('os')",
    "placeholders": "...",
    "parentheses": "(" * 1000 + "a" + ")" * 1000,
    "an open end": "max(a",
    "no exponent": "a^b",
    "two names": "a b",
}
GOOD: tuple[str, ...] = (
    "",
    "3",
    "b",
    "b, 784",
    "2*b + 1",
    "-1*s + 3",
    "b - 1, -4",
    "floordiv(s + -1, 2) + 1",
)
GOOD += ("mod(s, 3)*b^2", "max(0, s - 4)", "min(floordiv(s, 2), t), 5,", "größe")


@pytest.mark.parametrize("name", HOSTILE)
def test_text_beyond_the_grammar_is_refused_before_jax_sees_it(name: str) -> None:
    with pytest.raises(InvalidModel, match="dimension '"):
        dimensions.check([HOSTILE[name]])


@pytest.mark.parametrize("text", GOOD)
def test_shapes_are_what_jax_makes_of_them(text: str) -> None:
    scope = jax.export.SymbolicScope()
    expected = tuple(jax.export.symbolic_shape(text, scope=scope))

    assert expected == dimensions.symbolic(text, scope)


NAMES = st.sampled_from(["b", "s", "t"])
EXPRESSIONS = st.recursive(
    st.one_of(NAMES, st.integers(1, 99).map(str)),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", " - "]), inner).map("".join),
        st.tuples(NAMES, st.just("*"), st.integers(1, 9).map(str)).map("".join),
        st.tuples(st.sampled_from(["max", "min", "floordiv", "mod"]), inner, st.integers(1, 9)).map(
            lambda found: f"{found[0]}({found[1]}, {found[2]})"
        ),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_what_jax_writes_is_read_again(text: str) -> None:
    scope = jax.export.SymbolicScope()
    found = jax.export.symbolic_shape(text, scope=scope)
    written = ", ".join(map(str, found))

    assert tuple(found) == dimensions.symbolic(written, scope)


def test_dimensions_of_one_artifact_are_bounded_together() -> None:
    shape = ", ".join(f"a{n} + b{n} + c{n} + d{n}" for n in range(64))
    dimensions.check([shape, "1, 2"])

    with pytest.raises(InvalidModel, match="have 25600 terms in total, expected at most 16384"):
        dimensions.check([shape] * 100)


def test_constraints_are_read_by_the_same_grammar() -> None:
    assert 2 == len(dimensions.symbolic("a, b", constraints=["a >= b + 1"]))
    with pytest.raises(InvalidModel, match="dimension 'a"):
        dimensions.symbolic("a, b", constraints=["a^99999999 >= b"])


def test_no_other_module_gives_texts_to_jax() -> None:
    """Every caller of `symbolic_shape` in the server, by its syntax."""
    callers = {
        path.relative_to(SERVER).as_posix()
        for path in SERVER.rglob("*.py")
        if "symbolic_shape" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "symbolic_shape"
    }

    assert {"artifact/dimensions.py"} == callers


@pytest.mark.parametrize("name", ["a power", "a power of a sum that an operation hides"])
def test_a_manifest_with_a_hostile_dimension_is_refused(
    example_models: Path, tmp_path: Path, name: str
) -> None:
    """By the text of the dimension, in either list of the manifest."""
    sent = shutil.copytree(example_models / "identity" / "1", tmp_path / "1")
    for place in ("arguments", "results"):
        described = json.loads((sent / manifest.FILE_NAME).read_text())
        whole = described["durable"][place]
        whole[0] = f"float32[{HOSTILE[name]}]"
        (sent / manifest.FILE_NAME).write_text(json.dumps(described))

        with pytest.raises(InvalidModel, match=re.escape(f"dimension '{HOSTILE[name][:8]}")):
            artifact.read(sent, manifest.read(sent))


def test_an_artifact_of_jax_with_a_hostile_dimension_is_refused() -> None:
    """The file of `jax.export` has texts of shapes too, which its reader evaluates."""
    name = "s_longer_than_what_replaces_it"
    (size,) = jax.export.symbolic_shape(name)
    argument = jax.ShapeDtypeStruct((size,), np.float32)
    data = bytes(jax.export.export(jax.jit(lambda x: x + x))(argument).serialize())
    hostile = f"s^{'9' * (len(name) - 2)}".encode()
    assert name.encode() in data

    with pytest.raises(InvalidModel, match=r"^model\.jaxexp: dimension 's\^999"):
        artifact.deserialize(bytearray(data.replace(name.encode(), hostile)))
