"""The feed-forward of a mixture of experts: a router gives each token to a few.

Tokens are sorted by their experts, and a loop takes a piece of one expert's tokens at a time. So a
step reads the matrices of those experts alone that a token was given to, each once, and a long
chunk computes no token for experts that it was not given to. The loop's length is a number on the
device: no program depends on what the router says.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlaserve.importers.huggingface.form import Experts
from xlaserve.importers.huggingface.products import multiply, multiply_one

_PIECE = 32
"""The most tokens of an expert that are computed at a time."""


class Pairs(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert."""

    order: jax.Array
    """[pairs]: the pair at each place, by token; unused ones come last."""
    starts: jax.Array
    """[experts]: the place of the first pair of an expert."""
    counts: jax.Array
    """[experts]: the pairs of an expert."""


def mixed(
    form: Experts,
    layer: Mapping[str, Any],
    x: jax.Array,
    is_real: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return [tokens, hidden]: what the experts of each token [tokens, hidden] give, by its shares.

    A token that is not real is given to no expert, and has zeros: one that no request has would
    have more experts read.
    """
    logits = multiply(x, layer["router"], jnp.float32)
    shares, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), form.chosen)
    if form.normalised:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    shares = jnp.where(is_real[:, None], shares, 0)
    pairs = sorted_by_expert(form, chosen, is_real)
    found = _products(form, layer, x, pairs, activation)
    # Back in the order of tokens; what nobody computed may be any number.
    placed = found[jnp.argsort(pairs.order)].reshape(*chosen.shape, x.shape[-1])
    placed = jnp.where(shares[..., None] > 0, placed.astype(jnp.float32), 0)
    return jnp.einsum("tk,tkh->th", shares, placed).astype(x.dtype)


def sorted_by_expert(form: Experts, chosen: jax.Array, is_real: jax.Array) -> Pairs:
    """Return the pairs of tokens and their chosen experts [tokens, chosen]."""
    flat = jnp.where(is_real[:, None], chosen, form.count).reshape(-1)
    counts = jnp.zeros(form.count + 1, jnp.int32).at[flat].add(1)[: form.count]
    return Pairs(jnp.argsort(flat, stable=True), jnp.cumsum(counts) - counts, counts)


def _products(
    form: Experts,
    layer: Mapping[str, Any],
    x: jax.Array,
    pairs: Pairs,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return [pairs, hidden], in the order of the pairs.

    A piece of an expert may reach into the pairs of the next one, which come after it and
    overwrite what it wrote there.
    """
    piece = x[:_PIECE].shape[0]
    size = jnp.asarray(piece, jnp.int32)
    pieces = (pairs.counts + size - 1) // size
    ends = jnp.cumsum(pieces)
    behind = jnp.zeros((piece, x.shape[-1]), x.dtype)
    # A piece at the end would otherwise be moved to where it fits.
    given = jnp.concatenate([x[pairs.order // form.chosen], behind])

    def one(number: jax.Array, found: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
        within = number - (ends[expert] - pieces[expert])
        first = pairs.starts[expert] + within * size
        taken = lax.dynamic_slice(given, (first, jnp.int32(0)), (piece, x.shape[-1]))
        gate = activation(multiply_one(taken, layer["expert_gate"], expert))
        up = multiply_one(taken, layer["expert_up"], expert)
        down = multiply_one(gate * up, layer["expert_down"], expert)
        return lax.dynamic_update_slice(found, down, (first, jnp.int32(0)))

    found: jax.Array = lax.fori_loop(jnp.int32(0), ends[-1], one, jnp.zeros_like(given))
    return found[: pairs.order.shape[0]]
