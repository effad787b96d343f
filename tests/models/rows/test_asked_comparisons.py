"""Conditions that request by one comparison and change rows by another one.

They are proved if both comparisons are equal. NumPy decides whether they are, for integers and for
floats including NaN.
"""

# Some of the jax functions called here are untyped.
# mypy: disable-error-code="no-untyped-call"

import operator
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.rows import Inputs, exported, findings_of

Array = Any
Comparison = Callable[[Array, Array], Array]
INPUTS: Inputs = [((), "float32"), ((), "int32")]
BOUND = np.float32(3)
VALUES = {"f": np.array([-1, 3, 7, np.nan], np.float32), "i": np.array([-1, 3, 7], np.int32)}

ASKED: Mapping[str, Comparison] = {
    one.__name__: one
    for one in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
}


def turned(compare: Comparison) -> Comparison:
    return lambda v, z: compare(z, v)


def negated(compare: Comparison) -> Comparison:
    return lambda v, z: ~compare(v, z)


CHANGED: Mapping[str, Comparison] = {
    **ASKED,
    **{f"{name}, turned": turned(compare) for name, compare in ASKED.items()},
    **{f"not {name}": negated(compare) for name, compare in ASKED.items()},
    **{f"not {name}, turned": negated(turned(compare)) for name, compare in ASKED.items()},
}
Case = tuple[str, str, str]
CASES: list[Case] = list(product(VALUES, ASKED, CHANGED))

UNPROVED = {
    ("f", asked, f"not {other}{turned}")
    for asked, other in (("eq", "ne"), ("ne", "eq"))
    for turned in ("", ", turned")
}
"""Valid but unproved: a value may be NaN, so the proof does not use negated comparisons."""


def model(x: Array, n: Array) -> list[Array]:
    bound = jnp.asarray(np.array([BOUND, 1]))[0]
    found: list[Array] = []
    for kind, name in product(VALUES, ASKED):
        v, z = (x, bound) if kind == "f" else (n, bound.astype(jnp.int32))
        asks = ASKED[name](v, z)
        changed = [change(v, z) for change in CHANGED.values()]
        found += lax.cond(
            asks.any(),
            lambda v=v, changed=changed: [jnp.where(one, v * 2 + 1, v) for one in changed],
            lambda v=v: [v] * len(CHANGED),
        )
    return found


def is_left_alone(case: Case) -> bool:
    """Tell whether exactly those rows are changed that request it."""
    kind, asked, changed = case
    v, z = VALUES[kind], BOUND.astype(VALUES[kind].dtype)
    return np.array_equal(ASKED[asked](v, z), CHANGED[changed](v, z))


@pytest.fixture(scope="module")
def proved() -> set[Case]:
    found = zip(CASES, findings_of(exported(model, INPUTS)), strict=True)
    return {case for case, finding in found if finding is None}


def test_what_is_changed_by_the_same_comparison_is_proved(proved: set[Case]) -> None:
    assert proved == set(filter(is_left_alone, CASES)) - UNPROVED


def test_what_is_not_proved_holds() -> None:
    assert set(filter(is_left_alone, UNPROVED)) == UNPROVED
