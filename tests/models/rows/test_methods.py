"""Methods other than the networks in `honest_rows`: each proof is checked by execution."""

# A table of methods: what each is says its name.
# mypy: ignore-errors=True
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import pytest
from jax import lax, nn
from support.honest_rows import dense, f, i, w
from support.row_trial import leak
from support.rows import exported

from xlaserve.row_proofs import prove


def gaussian_process(x):
    known, seen = w(6, 3), w(6)

    def kernel(a, b):
        return jnp.exp(-((a[..., :, None, :] - b[..., None, :, :]) ** 2).sum(-1))

    solved = jnp.linalg.solve(kernel(known, known) + 0.1 * jnp.eye(6), seen)
    return kernel(x[:, None], known)[:, 0] @ solved


def state_space(x):
    a, b, c = nn.sigmoid(w(4)), w(3, 4), w(4, 2)
    _, found = lax.associative_scan(
        lambda one, other: (one[0] * other[0], one[1] * other[0] + other[1]),
        (jnp.broadcast_to(a, (*x.shape[:2], 4)), x @ b),
        axis=1,
    )
    return found @ c


def set_transformer(x, n):
    mask = jnp.arange(x.shape[1]) < n[:, None]
    scores = jnp.where(mask[:, None], jnp.einsum("qd,bkd->bqk", w(2, 4), x), -1e9)
    return nn.softmax(scores, -1) @ x


def diffusion(x):
    def step(y, t):
        return y - 0.1 * dense(y, 4, jnp.tanh) * t, None

    return lax.scan(step, x, jnp.linspace(1.0, 0.0, 5))[0]


def runge_kutta(x):
    def field(y):
        return jnp.tanh(y @ _FIELD)

    def step(_, y):
        one = field(y)
        two = field(y + 0.05 * one)
        return y + 0.1 * (one + 2 * two) / 3

    return lax.fori_loop(0, 4, step, x)


_FIELD = w(4, 4)


def flow(x):
    left, right = x[:, :2], x[:, 2:]
    scale = jnp.tanh(dense(left, 2))
    return jnp.concatenate([left, right * jnp.exp(scale) + dense(left, 2)], 1), scale.sum(1)


def suppressed(boxes):
    def of_one(one):
        order = jnp.argsort(-one[:, 4])
        one = one[order]
        low = jnp.maximum(one[:, None, :2], one[None, :, :2])
        high = jnp.minimum(one[:, None, 2:4], one[None, :, 2:4])
        common = jnp.prod(jnp.clip(high - low, 0), -1)

        def keep(kept, n):
            return kept.at[n].set(~jnp.any((common[n] > 0.5) & kept & (jnp.arange(5) < n))), None

        return lax.scan(keep, jnp.zeros(5, bool), jnp.arange(5))[0]

    return jax.vmap(of_one)(boxes)


def forward_algorithm(x):
    def step(before, seen):
        return nn.logsumexp(before[:, :, None] + _HIDDEN, 1) + seen, None

    return lax.scan(step, x[:, 0], jnp.moveaxis(x[:, 1:], 1, 0))[0]


_HIDDEN, _FACTORS = w(4, 4), w(9, 4)

METHODS = {
    "gaussian process": (gaussian_process, [f(3)]),
    "state space": (state_space, [f(6, 3)]),
    "set transformer": (set_transformer, [f(5, 4), i()]),
    "diffusion": (diffusion, [f(4)]),
    "runge kutta": (runge_kutta, [f(4)]),
    "normalizing flow": (flow, [f(4)]),
    "boxes of each image": (suppressed, [f(5, 5)]),
    "hidden markov": (forward_algorithm, [f(5, 4)]),
    "k-means": (lambda x: jnp.argmin(((x[:, None] - w(5, 3)) ** 2).sum(-1), 1), [f(3)]),
    "principal components": (lambda x: (x - w(6)) @ w(6, 2), [f(6)]),
    "factorization machine": (
        lambda at: (
            0.5
            * (
                (jnp.asarray(_FACTORS)[at % 9].sum(1)) ** 2
                - (jnp.asarray(_FACTORS)[at % 9] ** 2).sum(1)
            ).sum(1)
        ),
        [i(3)],
    ),
    "isotonic": (lambda x: jnp.interp(x, jnp.arange(5.0), jnp.cumsum(jnp.abs(w(5)))), [f(3)]),
    "mahalanobis": (lambda x: jnp.einsum("bi,ij,bj->b", x, w(3, 3) @ w(3, 3).T, x), [f(3)]),
    "ridge of each": (
        lambda x, y: jnp.linalg.solve(
            jnp.swapaxes(x, 1, 2) @ x + jnp.eye(2), jnp.swapaxes(x, 1, 2) @ y[..., None]
        )[..., 0],
        [f(5, 2), f(5)],
    ),
    "embedding of a pair": (
        lambda a, b: (dense(a, 4) * dense(b, 4)).sum(1) / 2,
        [f(3), f(3)],
    ),
    "argmax of each pixel": (lambda x: jnp.argmax(x, -1), [f(3, 3, 4)]),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_proved(name: str) -> None:
    fn, inputs = METHODS[name]
    made = exported(fn, inputs)

    verdict = prove(made, 0, [f"y{number}" for number in range(len(made.out_avals))])

    assert "proved" == str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_what_is_proved_of_a_method_holds(name: str) -> None:
    assert "" == leak(exported(*METHODS[name]))
