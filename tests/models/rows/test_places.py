"""Indices computed from row numbers, in the forms of exporters and beam searches."""

# Some of the jax functions called here are untyped.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.rows import Inputs, exported, verdict_of

from xlaserve.row_proofs import Independence

K, F = 5, 3
X: Inputs = [((K, F), "float32")]
X_AND_N: Inputs = [((K, F), "float32"), ((), "int32")]
X_AND_MASK: Inputs = [((K, F), "float32"), ((K,), "bool")]
X_AND_INDEX: Inputs = [((K, F), "float32"), ((K,), "int32")]
Model = Callable[..., Any]


def rows(x: Any) -> Any:
    return jnp.arange(x.shape[0])


def flat(x: Any) -> Any:
    return x.reshape(-1, *x.shape[2:])


def spread(x: Any) -> Any:
    return x.reshape(-1)


def wrapped(index: Any, size: Any) -> Any:
    return jnp.where(index < 0, index + size, index)


def gather_nd(x: Any, *columns: Any) -> Any:
    """Gather as ONNX does: by concatenated index vectors, each wrapped separately."""
    vectors = jnp.concatenate([one[..., None] for one in jnp.broadcast_arrays(*columns)], -1)
    places = tuple(wrapped(vectors[..., n], x.shape[n]) for n in range(len(columns)))
    return x.at[places].get(mode="fill")


def beam(x: Any) -> Any:
    """Reorder the beams of each row by the best of all their next words."""
    _, best = jax.lax.top_k(x.reshape(-1, K * F), K)
    return flat(x)[rows(x)[:, None] * K + best // F]


def divided(x: Any) -> Any:
    counted = jnp.arange(x.shape[0] * K)
    return x[counted // K, counted % K].reshape(x.shape)


OWN: dict[str, tuple[Model, Inputs]] = {
    "row and column": (lambda x, n: x[rows(x), n], X_AND_N),
    "row and columns": (
        lambda x: x.at[rows(x)[:, None, None, None], jnp.arange(K)].get(mode="fill"),
        X,
    ),
    "wrapped": (lambda x, n: x[wrapped(rows(x), x.shape[0]), wrapped(n, K)], X_AND_N),
    "vectors": (lambda x, n: gather_nd(x, rows(x), n), X_AND_N),
    "vectors of all": (lambda x: gather_nd(x, rows(x)[:, None], jnp.arange(K)[None]), X),
    "three columns": (lambda x, n: gather_nd(x, rows(x), n, n), X_AND_N),
    "vectors that are wrapped at once": (
        lambda x, n: x.at[
            tuple(
                jnp.moveaxis(
                    wrapped(jnp.stack([rows(x), n], -1), jnp.array([x.shape[0], K])), -1, 0
                )
            )
        ].get(mode="clip"),
        X_AND_N,
    ),
    "flat, all": (lambda x: flat(x)[rows(x)[:, None] * K + jnp.arange(K)], X),
    "flat, twice flat": (
        lambda x: x.reshape(-1)[rows(x)[:, None] * (K * F) + jnp.arange(K * F)],
        X,
    ),
    "flat, a constant": (lambda x: flat(x)[K * rows(x) + 2], X),
    "flat, counted over all": (
        lambda x: flat(x)[jnp.arange(x.shape[0] * K).reshape(-1, K)[:, 3]],
        X,
    ),
    "flat, where": (lambda x, m: flat(x)[rows(x) * K + jnp.argmax(m, 1)], X_AND_MASK),
    "flat, least": (lambda x: flat(x)[rows(x) * K + jnp.argmin(x[..., 0], 1)], X),
    "flat, in order": (
        lambda x: flat(x)[rows(x)[:, None] * K + jnp.argsort(x[..., 0], 1)],
        X,
    ),
    "flat, clamped": (lambda x, n: flat(x)[rows(x) * K + jnp.clip(n, 0, K - 1)], X_AND_N),
    "flat, clamped by two": (
        lambda x, n: flat(x)[jnp.minimum(jnp.maximum(n, 0), K - 1) + rows(x) * K],
        X_AND_N,
    ),
    "flat, last and wrapped": (
        lambda x, m: flat(x)[rows(x) * K + wrapped(m.sum(1) - 1, K)],
        X_AND_MASK,
    ),
    "flat, wrapped as a whole": (
        lambda x, m: flat(x)[wrapped(rows(x) * K + jnp.argmax(m, 1), x.shape[0] * K)],
        X_AND_MASK,
    ),
    "flat, a choice": (
        lambda x, m: flat(x)[jnp.where(m, rows(x)[:, None] * K + 1, rows(x)[:, None] * K + 4)],
        X_AND_MASK,
    ),
    "flat, slices": (
        lambda x, m: jax.vmap(
            lambda at: jax.lax.dynamic_slice(flat(x), (at * K + 1, 0), (3, F)),
        )(rows(x)),
        X_AND_MASK,
    ),
    "beams": (beam, X),
    "divided": (divided, X),
    "put by row and column": (
        lambda x, n: jnp.zeros(x.shape[:2]).at[wrapped(rows(x), x.shape[0]), n].set(x[:, 0, 0]),
        X_AND_N,
    ),
    "put flat": (
        lambda x, m: (
            jnp.zeros(x.shape[0] * K)
            .at[rows(x) * K + jnp.argmax(m, 1)]
            .add(x[:, 0, 0])
            .reshape(-1, K)
        ),
        X_AND_MASK,
    ),
    "put over what is there": (
        lambda x, m: (
            flat(x)
            .at[rows(x)[:, None] * K + jnp.argmax(m, 1)[:, None] * jnp.arange(2)]
            .set(7.0, mode="drop")
            .reshape(x.shape)
        ),
        X_AND_MASK,
    ),
    "inside of a loop": (
        lambda x: jax.lax.fori_loop(
            0, 3, lambda _, y: flat(y)[rows(x)[:, None] * K + jnp.argsort(y[..., 0], 1)], x
        ),
        X,
    ),
}

OTHERS: dict[str, tuple[Model, Inputs]] = {
    "the row before": (lambda x: x[rows(x) - 1], X),
    "from behind": (lambda x: x[x.shape[0] - 1 - rows(x)], X),
    "every second": (lambda x: x.at[rows(x) * 2].get(mode="clip"), X),
    "columns in another order": (
        lambda x: gather_nd(x, jnp.arange(K)[None] * 0, rows(x)[:, None] % K),
        X,
    ),
    "a table by row": (lambda x: x + jnp.arange(64.0)[rows(x)][:, None, None], X),
    "flat, one too far": (lambda x: flat(x)[rows(x) * K + jnp.arange(1, K + 1)[:, None]].T, X),
    "flat, of any size": (lambda x, n: flat(x)[rows(x) * K + n], X_AND_N),
    "flat, last and not wrapped": (
        lambda x, m: flat(x)[rows(x) * K + m.sum(1) - 1],
        X_AND_MASK,
    ),
    "flat, clamped one too far": (
        lambda x, n: flat(x)[rows(x) * K + jnp.clip(n, 0, K)],
        X_AND_N,
    ),
    "flat, from one below, and not wrapped": (
        lambda x, n: jnp.take(flat(x), rows(x) * K + jnp.clip(n, -1, K - 1), axis=0, mode="clip"),
        X_AND_N,
    ),
    "flat, another stride": (lambda x: flat(x)[rows(x) * (K - 1) + 1], X),
    "flat, of all other elements": (
        # The sign of one index says nothing about the indices in other positions.
        lambda x, n: flat(x)[
            rows(x)[:, None] * K
            + jnp.where(
                jnp.clip(n, -4, 4) < 0, jnp.flip(jnp.clip(n, -4, 4), 1) + 4, jnp.clip(n, -4, 4)
            )
        ],
        X_AND_INDEX,
    ),
    "counted by the size of the batch, and cut": (
        lambda x: (
            x[:, :3, 0] + spread(jnp.broadcast_to(jnp.arange(K)[:, None], (K, x.shape[0])))[:3] * 2
        ),
        X,
    ),
    "counted to the end of the batch": (
        lambda x: x[:, :3, 0] + jnp.arange(x.shape[0] + 2)[x.shape[0] - 1 :] * 2,
        X,
    ),
    "put a row further": (
        lambda x: jnp.zeros((x.shape[0], F)).at[rows(x) + 1].set(x[:, 0], mode="drop"),
        X,
    ),
    "put flat, of any size": (
        lambda x, n: jnp.zeros(x.shape[0] * K).at[rows(x) * K + n].add(x[:, 0, 0]).reshape(-1, K),
        X_AND_N,
    ),
}


def _inputs(inputs: Inputs, count: int) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(1)
    made = {
        "float32": lambda shape: np.asarray(random.standard_normal(shape), "float32"),
        "int32": lambda shape: random.integers(-K - 1, K + 2, shape, "int32"),
        "bool": lambda shape: random.integers(0, 3, shape) == 2,
    }
    found = [made[dtype]((count, *shape)) for shape, dtype in inputs]
    for one in found:
        if one.dtype == "int32":
            one.flat[::3] = K + 1
    return found


def _sees_others(model: Model, inputs: Inputs) -> bool:
    """Tell whether rows change if they are computed alone or at other positions."""
    given = _inputs(inputs, 6)
    run = jax.jit(exported(model, inputs).call)
    (together,) = map(np.asarray, run(*given))
    places = [slice(at, at + 2) for at in (1, 2, 4)]
    alone = [np.asarray(run(*(one[place] for one in given))[0]) for place in places]
    return any(
        not np.array_equal(together[place], one, equal_nan=True)
        for place, one in zip(places, alone, strict=True)
    )


@pytest.mark.parametrize("name", OWN)
def test_a_row_that_looks_at_its_own_place_is_proved(name: str) -> None:
    assert "proved" == str(verdict_of(*OWN[name]))


@pytest.mark.parametrize("name", OTHERS)
def test_a_row_that_may_look_at_another_one_is_not(name: str) -> None:
    assert Independence.PROVED is not verdict_of(*OTHERS[name]).independence


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN, *OTHERS])
def test_rows_look_at_others_where_nothing_is_proved(name: str) -> None:
    assert (name in OTHERS) == _sees_others(*{**OWN, **OTHERS}[name])


def test_an_index_that_overflows_in_a_large_batch_is_not_proved() -> None:
    """In a batch of 6,554 rows, the row number times 5 exceeds the range of int16."""

    def model(x: Any) -> Any:
        return flat(x)[rows(x).astype("int16") * jnp.int16(K)]

    assert Independence.PROVED is not verdict_of(model, X).independence
