"""The feed-forward of a mixture of experts, in which a router selects experts per token.

Tokens are sorted by expert, and a loop processes up to 32 tokens of one expert per iteration. A
decoding step thus reads only the matrices of the selected experts, and a long chunk computes each
token only for its own experts. The number of iterations is computed on the device, so the compiled
program does not depend on the routing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlaserve.importers.huggingface.form import Experts
from xlaserve.importers.huggingface.products import multiply, multiply_one

_PIECE = 32
"""Tokens of an expert per loop iteration."""


class Pairs(NamedTuple):
    """(token, expert) pairs, sorted by expert."""

    order: jax.Array
    """[pairs]: the pairs, numbered by token, sorted by expert; those of padding come last."""
    starts: jax.Array
    """[experts]: index of each expert's first pair."""
    counts: jax.Array
    """[experts]: number of pairs of each expert."""


def mixed(
    form: Experts,
    layer: Mapping[str, Any],
    x: jax.Array,
    is_real: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return the weighted sum of the selected experts' outputs for x [tokens, hidden].

    Rows where `is_real` is False (padding, unused slots) give zeros. They are routed to no expert,
    so that no additional expert matrices have to be read.
    """
    logits = multiply(x, layer["router"], jnp.float32)
    shares, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), form.chosen)
    if form.normalised:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    shares = jnp.where(is_real[:, None], shares, 0)
    pairs = sorted_by_expert(form, chosen, is_real)
    found = _products(form, layer, x, pairs, activation)
    # Restore the token order. Rows that no expert computed hold arbitrary numbers.
    placed = found[jnp.argsort(pairs.order)].reshape(*chosen.shape, x.shape[-1])
    placed = jnp.where(shares[..., None] > 0, placed.astype(jnp.float32), 0)
    return jnp.einsum("tk,tkh->th", shares, placed).astype(x.dtype)


def sorted_by_expert(form: Experts, chosen: jax.Array, is_real: jax.Array) -> Pairs:
    """Sort the pairs of tokens and their selected experts, `chosen` [tokens, experts per token]."""
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
    """Return the experts' outputs [pairs, hidden], in the order of `pairs`.

    The last piece of an expert may extend into the next expert's pairs, which are computed later
    and overwrite those rows.
    """
    piece = x[:_PIECE].shape[0]
    size = jnp.asarray(piece, jnp.int32)
    pieces = (pairs.counts + size - 1) // size
    ends = jnp.cumsum(pieces)
    padding = jnp.zeros((piece, x.shape[-1]), x.dtype)
    # Pad the rows, because `dynamic_slice` would clamp the start of the last piece.
    given = jnp.concatenate([x[pairs.order // form.chosen], padding])

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
