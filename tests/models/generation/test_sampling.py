"""Sampling: greedy tokens, random draws, and their independence within a step."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlaserve.generation import sampling
from xlaserve.generation.sampling import INTEGERS, REALS, Tables, sample
from xlaserve.runtime.generator.info import mask_words

VOCAB, ROWS = 300, 6
NOISE = {"random_bits", "threefry2x32"}
"""Operations that generate random numbers."""


@jax.jit
def _sample(logits: Any, tables: tuple[Any, ...], integers: Any, reals: Any) -> Any:
    """Sample as steps do, compiled once per number of rows."""
    return sample(logits, Tables(*tables), integers, reals, (2,))[0]


@pytest.fixture(autouse=True)
def _narrow() -> Iterator[None]:
    """Use the 32-bit types of an export."""
    with jax.enable_x64(False):
        yield


def sampled(logits: Any, **columns: Any) -> Any:
    """Return the sampled token of each row; `columns` sets integer and real parameters."""
    given, tables, integers, reals = _arguments(logits, **columns)
    parts = tuple(getattr(tables, part.name) for part in fields(tables))
    return np.asarray(_sample(given, parts, integers, reals))


def _arguments(logits: Any, **columns: Any) -> tuple[Any, ...]:
    rows, vocab = logits.shape
    integers = np.zeros((rows, len(INTEGERS)), np.int32)
    reals = np.zeros((rows, len(REALS)), np.float32)
    given = {"is_active": 1, "may_stop": 1, "top_p": 1.0, "repetition": 1.0, **columns}
    for name, values in given.items():
        array, names = (integers, INTEGERS) if name in INTEGERS else (reals, REALS)
        array[:, names.index(name)] = values
    tables = Tables(
        jnp.zeros((rows, vocab), jnp.int32),
        jnp.zeros((rows, vocab), jnp.int8),
        jnp.zeros((rows, vocab), jnp.float32),
        jnp.full((rows, mask_words(vocab)), -1, jnp.int32),
    )
    return jnp.asarray(logits), tables, jnp.asarray(integers), jnp.asarray(reals)


def drawn(logits: Any, seed: int, position: int) -> int:
    """Return the token that JAX draws for a seed at a position."""
    words = jnp.asarray([0, seed], jnp.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    return int(jax.random.categorical(key, jnp.asarray(logits)))


@pytest.fixture
def logits() -> Any:
    return np.random.default_rng(3).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)


def test_greedy_tokens_are_the_first_of_the_likeliest(logits: Any) -> None:
    logits[:, (70, 20, 250)] = 50.0
    logits[1] = -np.inf

    assert [20, 0, 20, 20, 20, 20] == sampled(logits).tolist()


def test_a_row_without_a_number_has_a_token_of_the_vocabulary(logits: Any) -> None:
    logits[2] = np.nan

    assert 0 <= sampled(logits)[2] < VOCAB


def test_draws_are_those_of_the_seed_at_the_position(logits: Any) -> None:
    """Whatever the other rows of the step are."""
    seeds, positions = np.arange(ROWS) + 11, 7 * np.arange(ROWS)
    found = sampled(logits, seed_low=seeds, position=positions, temperature=0.5)

    expected = [
        drawn(row / np.float32(0.5), int(seed), int(position))
        for row, seed, position in zip(logits, seeds, positions, strict=True)
    ]
    assert expected == found.tolist()


@pytest.mark.parametrize("limit", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.1}])
def test_neither_greedy_rows_nor_others_change_beside_each_other(
    logits: Any, limit: dict[str, Any]
) -> None:
    """In mixed steps each row has the same token as in a step of its kind alone."""
    is_drawn = np.arange(ROWS) % 2 == 1
    seeds, limits = {"seed_low": np.arange(ROWS)}, limit
    greedy = sampled(logits, **seeds)
    hot = sampled(logits, temperature=1.3, **seeds, **limits)

    beside = sampled(logits, temperature=1.3 * is_drawn, **seeds, **limits)

    assert np.where(is_drawn, hot, greedy).tolist() == beside.tolist()
    assert (hot != greedy).any()


def test_a_step_of_greedy_rows_makes_no_noise(logits: Any) -> None:
    """Random numbers for all tokens of all slots would dominate the cost of sampling."""
    given, tables, integers, reals = _arguments(logits)

    def chosen(given: jax.Array, integers: jax.Array, reals: jax.Array) -> Any:
        return sample(given, tables, integers, reals, (2,))

    found = jax.make_jaxpr(chosen)(given, integers, reals)

    assert NOISE & _operations(found.jaxpr, of_conditions=True)
    assert not NOISE & _operations(found.jaxpr, of_conditions=False)


_LIKELY = jax.jit(sampling._likely)


def _kept(logits: Any, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens of a row that pass the limits, in vocabulary order."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    within = order[: top_k or VOCAB]
    chances = np.exp(logits[within].astype(np.float64))
    chances /= chances.sum()
    before = np.cumsum(chances) - chances
    kept = (before < top_p) & (chances >= min_p * chances[0])
    kept[0] = True
    return set(within[kept].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 7, VOCAB + 5])
@pytest.mark.parametrize("top_p", [1e-6, 0.305, 0.905, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_limits_leave_the_likeliest_tokens(
    logits: Any, top_k: int, top_p: float, min_p: float
) -> None:
    """Of equally likely tokens the first ones stay; masked tokens are covered too."""
    logits[1] = 0.0
    logits[2, 50:] = -np.inf
    logits[3] = np.round(logits[3])

    columns = [np.full((ROWS, 1), value, np.float32) for value in (top_p, min_p)]
    counts, limited = np.full((ROWS, 1), top_k, np.int32), np.ones((ROWS, 1), bool)
    found = _LIKELY(*map(jnp.asarray, (logits, counts, *columns, limited)))

    for row, left in zip(logits, np.asarray(found), strict=True):
        kept = _kept(row, top_k, top_p, min_p)
        # Tokens with zero probability may be kept.
        assert {i for i in kept if row[i] > -np.inf} == set(np.flatnonzero(left > -np.inf).tolist())
        assert np.isin(left[left > -np.inf], row).all()


def _operations(jaxpr: Any, *, of_conditions: bool) -> set[str]:
    """Return the names of the operations, including or excluding those within conditionals."""
    found: set[str] = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        if equation.primitive.name == "cond" and not of_conditions:
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                body = getattr(inner, "jaxpr", inner)
                found |= _operations(body, of_conditions=of_conditions)
    return found


def _is_jaxpr(value: object) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
