"""Verdicts on row independence, and the outputs that they name."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from support.rows import verdict_of

from xlaserve.row_proofs.verdict import Independence, Verdict, worst


def test_a_verdict_names_operation_reason_place_and_output() -> None:
    verdict = Verdict(
        Independence.MIXED, "y", "stablehlo.reduce", "reduces over the rows", "model.py:12"
    )

    assert str(verdict) == (
        "mixed: stablehlo.reduce reduces over the rows (model.py:12), in output 'y'"
    )


def test_a_proof_is_one_word() -> None:
    assert str(Verdict(Independence.PROVED)) == "proved"


def test_a_reason_without_an_operation_stands_alone() -> None:
    assert str(Verdict(Independence.UNKNOWN, reason="too deep")) == "unknown: too deep"


def test_the_worst_of_several_platforms_says_which_it_is() -> None:
    mixed = Verdict(Independence.MIXED, "y", "stablehlo.reduce", "reduces over the rows")
    proved = Verdict(Independence.PROVED, loops_follow_rows=True)

    found = worst({"cpu": proved, "tpu": mixed})

    assert "mixed: stablehlo.reduce reduces over the rows, on tpu, in output 'y'" == str(found)
    assert found.loops_follow_rows
    assert mixed == worst({"cpu": mixed, "tpu": mixed})


def no_rule(x: jax.Array) -> jax.Array:
    return x.reshape(4, x.shape[0])


def mixes(x: jax.Array) -> jax.Array:
    return x - x.sum(0)


def asks_for_the_size(x: jax.Array) -> jax.Array:
    return x * jnp.maximum(jnp.asarray(x.shape[0]) - 100, 0)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ((jnp.tanh, no_rule), ("y1", "stablehlo.reshape")),
        ((no_rule, mixes), ("y1", "stablehlo.reduce")),
        ((mixes, no_rule, mixes), ("y0", "stablehlo.reduce")),
        ((no_rule, no_rule), ("y0", "stablehlo.reshape")),
        ((jnp.tanh, asks_for_the_size), ("y1", "stablehlo.maximum")),
        ((asks_for_the_size, jnp.tanh), ("y0", "stablehlo.maximum")),
        ((asks_for_the_size, mixes), ("y1", "stablehlo.reduce")),
    ],
)
def test_the_first_output_is_named_of_those_that_mix_rows_or_of_all(
    outputs: Sequence[Callable[[jax.Array], jax.Array]], expected: tuple[str, str]
) -> None:
    verdict = verdict_of(lambda x: [one(x) for one in outputs], [((4,), "float32")])

    assert (verdict.output, verdict.operation) == expected
