"""Rows that do not request the taken branch: proved if the branch leaves them unchanged.

NumPy decides whether it does, for all booleans and integers that a row may have.
"""

# Some of the jax functions called here are untyped.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.row_trial import leak
from support.rows import Inputs, exported, findings_of

INPUTS: Inputs = [((), "float32"), ((), "float32"), ((), "float32"), ((), "int32")]
Array = Any
Question = Callable[[Any, Array, Array, Array], Array]
"""Arguments: a module, whether a row requests the branch, and two booleans of the row."""
Change = Callable[[Any, Array, Array, Array], Array]
"""Arguments: a module, whether a row requests the branch, a boolean and an integer of the row."""


def _pair(xp: Any, *columns: Array) -> Array:
    return xp.concatenate([one[:, None] for one in columns], 1)


QUESTIONS: Mapping[str, Question] = {
    "asks": lambda xp, p, r, t: p,
    "does not": lambda xp, p, r, t: ~p,
    "not does not": lambda xp, p, r, t: ~~p,
    "another": lambda xp, p, r, t: r,
    "both": lambda xp, p, r, t: p & r,
    "both, turned": lambda xp, p, r, t: r & p,
    "either": lambda xp, p, r, t: p | r,
    "either, turned": lambda xp, p, r, t: r | p,
    "either of both": lambda xp, p, r, t: (p & r) | (t & p),
    "either of both and none": lambda xp, p, r, t: (p & r) | (t & ~p),
    "not either": lambda xp, p, r, t: ~(~p | r),
    "not both": lambda xp, p, r, t: ~(~p & r),
    "exclusive": lambda xp, p, r, t: p ^ r,
    "chosen by it": lambda xp, p, r, t: xp.where(p, r, False),
    "chosen by it, or true": lambda xp, p, r, t: xp.where(p, r, True),
    "chosen by its opposite": lambda xp, p, r, t: xp.where(~p, False, r),
    "chosen by its opposite, or another": lambda xp, p, r, t: xp.where(~p, t, r),
    "chosen by another": lambda xp, p, r, t: xp.where(r, p, t),
    "chosen by another, both": lambda xp, p, r, t: xp.where(r, p, p & t),
    "other than false": lambda xp, p, r, t: p != False,  # noqa: E712
    "other than true": lambda xp, p, r, t: p != True,  # noqa: E712
    "other than another": lambda xp, p, r, t: p != r,
    "any of two": lambda xp, p, r, t: _pair(xp, p, p & r).any(1),
    "any of two, of which one": lambda xp, p, r, t: _pair(xp, p, r).any(1),
    "all of two": lambda xp, p, r, t: _pair(xp, p, p).all(1),
    "all of its opposite": lambda xp, p, r, t: ~_pair(xp, ~p, ~p).all(1),
    "spread and reduced": lambda xp, p, r, t: xp.broadcast_to(p[:, None], (*p.shape, 3)).any(1),
    "spread and all": lambda xp, p, r, t: xp.broadcast_to(p[:, None], (*p.shape, 3)).all(1),
    "opposite spread, and all": lambda xp, p, r, t: ~xp.broadcast_to(
        ~p[:, None], (*p.shape, 3)
    ).all(1),
    "another spread": lambda xp, p, r, t: xp.broadcast_to(r[:, None], (*p.shape, 3)).any(1),
    "in another shape": lambda xp, p, r, t: p[:, None].reshape(-1),
}  # fmt: skip

CHANGES: Mapping[str, Change] = {
    "nothing": lambda xp, p, r, v: v,
    "other": lambda xp, p, r, v: v + 1,
    "chosen": lambda xp, p, r, v: xp.where(p, v * 2, v),
    "chosen, turned": lambda xp, p, r, v: xp.where(p, v, v * 2),
    "chosen twice": lambda xp, p, r, v: xp.where(r, xp.where(p, 7, v), v),
    "chosen twice, one of another": lambda xp, p, r, v: xp.where(r, xp.where(p, 7, v), v + 1),
    "chosen from the other side": lambda xp, p, r, v: xp.where(r, v, xp.where(~p, v, 9)),
    "chosen by the answer": lambda xp, p, r, v: xp.where(p & r, xp.where(r, v, 8), v),
    "sum": lambda xp, p, r, v: v + xp.where(p, 1, 0),
    "sum, turned": lambda xp, p, r, v: xp.where(p, 1, 0) + v,
    "sum of one": lambda xp, p, r, v: v + xp.where(p, 0, 1),
    "sum of a truth": lambda xp, p, r, v: v + p.astype(np.int32),
    "sum of an opposite": lambda xp, p, r, v: v + (~p).astype(np.int32),
    "sum of another": lambda xp, p, r, v: v + r.astype(np.int32),
    "sum of both": lambda xp, p, r, v: v + (p & r).astype(np.int32),
    "sum of sums": lambda xp, p, r, v: (v + xp.where(p, 1, 0)) + xp.where(p & r, 5, 0),
    "difference": lambda xp, p, r, v: v - xp.where(p, 1, 0),
    "difference, turned": lambda xp, p, r, v: xp.where(p, 1, 0) - v,
    "difference of itself": lambda xp, p, r, v: v - v,
    "product": lambda xp, p, r, v: v * xp.where(p, 2, 1),
    "bits": lambda xp, p, r, v: v | xp.where(p, 1, 0),
    "bits, turned": lambda xp, p, r, v: xp.where(p, 1, 0) | v,
    "bits of one": lambda xp, p, r, v: v | xp.where(p, 0, 1),
    "bits of both": lambda xp, p, r, v: v & xp.where(p, 1, 0),
}

UNPROVED = frozenset(
    {
        "all of its opposite",
        "all of two",
        "any of two",
        "chosen by another, both",
        "other than false",
        "product",
    }
)
"""True but not proved."""


def answers(xp: Any, p: Array, r: Array, t: Array, v: Array) -> list[Array]:
    """Return the results for an integer in the branch taken if some row requests it."""
    found = [xp.where(ask(xp, p, r, t), v * 2 + 1, v) for ask in QUESTIONS.values()]
    return [*found, *(change(xp, p, r, v) for change in CHANGES.values())]


def model(x: Array, y: Array, z: Array, v: Array) -> list[Array]:
    p, r, t = x > 0, y > 0, z > 0
    found: list[Array] = lax.cond(
        p.any(),
        lambda: answers(jnp, p, r, t, v),
        lambda: [v] * (len(QUESTIONS) + len(CHANGES)),
    )
    return found


@pytest.fixture(scope="module")
def proved() -> frozenset[str]:
    names = (*QUESTIONS, *CHANGES)
    assert len(set(names)) == len(names)
    found = zip(names, findings_of(exported(model, INPUTS)), strict=True)
    return frozenset(name for name, finding in found if finding is None)


@pytest.fixture(scope="module")
def left_alone() -> frozenset[str]:
    every = np.array(list(product([False, True], [False, True], [-3, 0, 1, 6])))
    r, t, v = (every[:, 0] > 0, every[:, 1] > 0, every[:, 2].astype(np.int32))
    found = answers(np, np.zeros(len(every), bool), r, t, v)
    return frozenset(
        name for name, one in zip((*QUESTIONS, *CHANGES), found, strict=True) if (one == v).all()
    )


def test_a_row_that_does_not_ask_is_proved_where_it_is_left_alone(
    proved: frozenset[str], left_alone: frozenset[str]
) -> None:
    assert proved == left_alone - UNPROVED


def test_what_is_proved_is_so_beside_rows_that_ask(proved: frozenset[str]) -> None:
    places = [n for n, name in enumerate((*QUESTIONS, *CHANGES)) if name in proved]
    artifact = exported(lambda *given: [model(*given)[n] for n in places], INPUTS)

    assert leak(artifact) == ""
