"""Reductions with an initial value, which XLA ignores if there is only one element."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.row_trial import leak
from support.rows import exported, findings_of

F4 = [((4,), "float32")]
GIVEN = np.asarray([3, 0, 1, 5])
INT = np.iinfo(np.int32)
UNSIGNED = np.iinfo(np.uint32)


def over_the_batch(
    reduced_by: Callable[..., Any], dtype: str, start: object
) -> Callable[[jax.Array], jax.Array]:
    def model(x: jax.Array) -> jax.Array:
        given = jnp.broadcast_to(jnp.asarray(GIVEN.astype(dtype)), x.shape)
        first: Any = np.asarray(start, dtype)
        found: Any = lax.reduce(given, first, reduced_by, (0,))
        sums: jax.Array = x + found.astype(jnp.float32)
        return sums

    return model


@pytest.mark.parametrize(
    ("reduced_by", "dtype", "start", "is_proved"),
    [
        (lax.max, "float32", -np.inf, True),
        (lax.max, "float32", np.inf, False),
        (lax.max, "float32", 2, False),
        (lax.max, "int32", INT.min, True),
        (lax.max, "int32", INT.max, False),
        (lax.max, "int32", 2, False),
        (lax.max, "uint32", 0, True),
        (lax.max, "uint32", 1, False),
        (lax.min, "float32", np.inf, True),
        (lax.min, "float32", -np.inf, False),
        (lax.min, "int32", INT.max, True),
        (lax.min, "int32", -1, False),
        (lax.min, "uint32", UNSIGNED.max, True),
        (lax.min, "uint32", 0, False),
        (lax.bitwise_or, "int32", 0, True),
        (lax.bitwise_or, "int32", 2, False),
        (lax.bitwise_or, "bool", False, True),
        (lax.bitwise_or, "bool", True, False),
        (lax.bitwise_and, "int32", -1, True),
        (lax.bitwise_and, "int32", 2, False),
        (lax.bitwise_and, "uint32", UNSIGNED.max, True),
        (lax.bitwise_and, "uint32", 0, False),
        (lax.bitwise_and, "bool", True, True),
        (lax.bitwise_and, "bool", False, False),
    ],
)
def test_a_start_that_counts_makes_a_batch_of_one_another(
    reduced_by: Callable[..., Any], dtype: str, start: object, is_proved: bool
) -> None:
    artifact = exported(over_the_batch(reduced_by, dtype, start), F4)

    (finding,) = findings_of(artifact)

    assert (finding is None) == is_proved
    assert (leak(artifact) == "") == is_proved


def test_a_start_that_is_an_input_of_the_model_is_not_known() -> None:
    def model(x: jax.Array) -> jax.Array:
        given = jnp.broadcast_to(jnp.asarray(GIVEN.astype(np.float32)), x.shape)
        found: jax.Array = x + lax.reduce(given, jnp.exp(jnp.asarray(2.0)), lax.max, (0,))
        return found

    (finding,) = findings_of(exported(model, F4))

    assert finding is not None


def looked_up(
    reduced_by: Callable[..., Any], start: int, is_of_truth: bool = False
) -> Callable[..., jax.Array]:
    """Look up elements of a flattened batch, at an integer bounded by a one-element reduction."""

    def model(x: jax.Array, n: jax.Array) -> jax.Array:
        one: Any = (n > 0)[:, None] if is_of_truth else jnp.clip(n, -1, 4)[:, None]
        first: Any = np.asarray(start, one.dtype)
        found: Any = lax.reduce(one, first, reduced_by, (1,))
        at: jax.Array = x.reshape(-1)[jnp.arange(x.shape[0]) * 4 + found.astype(jnp.int32)]
        return at

    return model


@pytest.mark.parametrize(
    ("reduced_by", "start"),
    [(lax.max, 0), (lax.min, 3), (lax.add, 1), (lax.add, -1)],
    ids=["largest", "smallest", "sum", "difference"],
)
def test_a_start_bounds_no_index(reduced_by: Callable[..., Any], start: int) -> None:
    (finding,) = findings_of(
        exported(looked_up(reduced_by, start), [((4,), "float32"), ((), "int32")])
    )

    assert finding is not None


BOUNDED: dict[str, tuple[Callable[..., Any], bool]] = {
    "largest": (lambda n: jnp.clip(n, 0, 3).max(-1), True),
    "largest, from below": (lambda n: jnp.clip(n, -1, 3).max(-1), False),
    "smallest": (lambda n: jnp.clip(n, 0, 3).min(-1), True),
    "smallest, too far": (lambda n: jnp.clip(n, 0, 4).min(-1), False),
    "sum": (lambda n: jnp.clip(n, 0, 1).sum(-1), True),
    "sum of too much": (lambda n: jnp.clip(n, 0, 2).sum(-1), False),
    "sum of negative ones": (lambda n: 3 - jnp.clip(n, -1, 0).sum(-1) * -1, True),
    "any": (lambda n: (n > 0).any(-1).astype(jnp.int32), True),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_a_reduction_of_bounded_integers_is_bounded(name: str) -> None:
    compute, is_proved = BOUNDED[name]

    def model(x: jax.Array, n: jax.Array) -> jax.Array:
        at: jax.Array = x.reshape(-1)[jnp.arange(x.shape[0]) * 4 + compute(n)]
        return at

    artifact = exported(model, [((4,), "float32"), ((3,), "int32")])
    (finding,) = findings_of(artifact)

    assert (finding is None) == is_proved
    assert not is_proved or leak(artifact) == ""
