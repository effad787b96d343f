"""Mixture of experts: tokens go to the routed experts, and no other expert is read."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from dataclasses import replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from xlaserve.importers.huggingface import experts, products, quantising
from xlaserve.importers.huggingface.form import Experts

HIDDEN, WIDE = 16, 24
FORM = Experts(5, 2, normalised=True, intermediate=WIDE, shared=0, layers=(True,))
FORMS = {"normalised": FORM, "as they are": replace(FORM, normalised=False)}
Numbers = npt.NDArray[np.float32]


def numbers(*shape: int, seed: int = 0) -> Numbers:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


LAYER = {
    "router": numbers(FORM.count, HIDDEN, seed=1),
    "expert_gate": numbers(FORM.count, WIDE, HIDDEN, seed=2),
    "expert_up": numbers(FORM.count, WIDE, HIDDEN, seed=3),
    "expert_down": numbers(FORM.count, HIDDEN, WIDE, seed=4),
}


def program(form: Experts) -> Any:
    """Return the artifact for a variable number of tokens."""
    (tokens,) = jax.export.symbolic_shape("n")

    def mixed(layer: Any, x: jax.Array, is_real: jax.Array) -> jax.Array:
        return experts.mixed(form, layer, x, is_real, jax.nn.silu)

    layer = {role: jax.ShapeDtypeStruct(array.shape, array.dtype) for role, array in LAYER.items()}
    x = jax.ShapeDtypeStruct((tokens, HIDDEN), jnp.float32)
    is_real = jax.ShapeDtypeStruct((tokens,), jnp.bool_)
    return jax.jit(jax.export.export(jax.jit(mixed))(layer, x, is_real).call)


def one_by_one(form: Experts, x: Numbers) -> Numbers:
    """Compute one token at a time, following the definition."""
    found = np.zeros_like(x)
    for token, row in enumerate(x):
        raised = np.exp(LAYER["router"] @ row)
        shares = raised / raised.sum()
        chosen = np.argsort(-shares)[: form.chosen]
        sum_of_chosen = shares[chosen].sum() if form.normalised else 1
        for expert in chosen:
            gate, up, down = (LAYER[f"expert_{name}"][expert] for name in ("gate", "up", "down"))
            inner = gate @ row / (1 + np.exp(-gate @ row)) * (up @ row)
            found[token] += shares[expert] / sum_of_chosen * (down @ inner)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_the_experts_of_each_token_are_mixed_by_its_shares(name: str) -> None:
    """With more tokens than an expert computes at a time; one in three has no expert."""
    x = numbers(100, HIDDEN, seed=5)
    is_real = np.arange(100) % 3 != 1
    found = np.asarray(program(FORMS[name])(LAYER, x, is_real))

    np.testing.assert_allclose(found[is_real], one_by_one(FORMS[name], x)[is_real], atol=2e-4)
    assert not found[~is_real].any()


def test_no_expert_is_read_that_no_token_was_given_to() -> None:
    """Unused experts are NaN, which even a weight of 0 would propagate."""
    router = np.zeros((FORM.count, HIDDEN), np.float32)
    router[[0, 2], 0] = 9
    layer = {**LAYER, "router": router}
    for role in ("expert_gate", "expert_up", "expert_down"):
        layer[role] = LAYER[role].copy()
        layer[role][[1, 3, 4]] = np.nan
    x = np.abs(numbers(4, HIDDEN, seed=6))
    found = np.asarray(program(FORM)(layer, x, np.ones(4, np.bool_)))

    assert np.isfinite(found).all()
    assert found.any(axis=1).all()


def test_a_token_that_is_nobodys_is_given_to_no_expert() -> None:
    chosen = jnp.asarray([[0, 3], [1, 3], [4, 0]], jnp.int32)
    pairs = experts.sorted_by_expert(FORM, chosen, jnp.asarray([True, False, True]))

    assert [2, 0, 0, 1, 1] == pairs.counts.tolist()
    assert [0, 2, 2, 2, 3] == pairs.starts.tolist()
    assert [0, 5, 1, 4] == pairs.order[:4].tolist()


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
@pytest.mark.parametrize("at_once", [1 << 20, 7 * 32])
def test_a_product_with_one_of_several_matrices_is_that_with_it_alone(
    kind: str | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in blocks of rows, of which the last is smaller."""
    monkeypatch.setattr(products, "_AT_ONCE", at_once)
    several: Any = numbers(3, 16, 32)
    x = numbers(4, 32, seed=1)
    alone: Any = several[2]
    if kind is not None:
        layers = [{"expert_up": several, "up": alone}]
        params = {"embedding": numbers(2, 2), "layers": layers}
        (layer,) = quantising.quantised(params, kind)["layers"]
        several, alone = layer["expert_up"], layer["up"]
    found = jax.jit(products.multiply_one)(x, several, jnp.int32(2))
    wanted = jax.jit(products.multiply)(x, alone)

    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_no_matrix_of_an_expert_is_copied_whole(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_AT_ONCE", 1 << 14)
    plain = jnp.zeros((4, 512, 512), dtype)
    scale = jnp.ones((4, 512), jnp.float32)
    several = {"int8": plain, "scale": scale} if dtype == jnp.int8 else plain

    def chained(x: jax.Array, several: Any, first: jax.Array) -> jax.Array:
        for number in range(3):
            x = products.multiply_one(x, several, first + number)
        return x

    x = jnp.zeros((1, 512), jnp.float32)
    memory = jax.jit(chained).lower(x, several, jnp.int32(0)).compile().memory_analysis()

    assert memory is not None
    assert memory.temp_size_in_bytes < 512 * 512
