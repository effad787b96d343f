"""The forward pass of encoders as pure functions: tokens and mask in, embeddings out."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from xlaserve.importers.huggingface.encoders.form import EncoderForm
from xlaserve.importers.huggingface.products import multiply

Parameters: TypeAlias = Mapping[str, Any]
"""The arrays by role: `embedding`, `positions`, `types`, `distances`, `norm` and `layers`."""

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
_FAR = 128
"""Distances from this one on share a bucket."""
_LOWEST = -1e30
"""Used instead of minus infinity, so that a row without tokens gives no NaN."""


def embed(form: EncoderForm, params: Parameters, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return embeddings [b, size] FP32 of token ids [b, s]; the mask [b, s] is 0 for padding.

    Padding must follow the tokens of its row; it does not affect the result.
    """
    real = mask != 0
    states = hidden_states(form, params, ids, real).astype(jnp.float32)
    found = jnp.concatenate([_POOLINGS[kind](states, real) for kind in form.poolings], axis=-1)
    if form.is_normalised:
        length = jnp.sqrt(jnp.sum(found * found, axis=-1, keepdims=True))
        found = found / jnp.maximum(length, 1e-12)
    return found


def hidden_states(
    form: EncoderForm, params: Parameters, ids: jax.Array, real: jax.Array
) -> jax.Array:
    """Return the hidden states [b, s, hidden] after the last layer."""
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
    # Positions beyond the table give NaN, so a row that is too long has no valid embedding.
    places = params["positions"].at[positions + form.first_position].get(mode="fill")
    x = params["embedding"].at[ids].get(mode="fill") + places[None]
    if "types" in params:
        x = x + params["types"][0][None, None]
    x = _norm(form, x, params, "norm")
    bias = jnp.where(real[:, None, None, :], jnp.float32(0), jnp.float32(_LOWEST))
    if "distances" in params:
        bias = bias + _distances(form, params["distances"], positions)
    for layer in params["layers"]:
        x = _norm(form, x + _attention(form, layer, x, bias), layer, "attention_norm")
        up = _ACTIVATIONS[form.activation](_linear(layer, "up", x))
        x = _norm(form, x + _linear(layer, "down", up), layer, "feed_forward_norm")
    return x


def _attention(form: EncoderForm, layer: Parameters, x: jax.Array, bias: jax.Array) -> jax.Array:
    q, k, v = (
        _linear(layer, role, x).reshape(*x.shape[:2], form.heads, form.head_dim) for role in "qkv"
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(scores / math.sqrt(form.head_dim) + bias, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape)
    return _linear(layer, "o", mixed)


def _distances(form: EncoderForm, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the relative position bias [1, heads, s, s].

    Near distances have a bucket each, far ones share logarithmic buckets. Each direction has half
    of the buckets.
    """
    half = form.relative // 2
    near = half // 2
    distance = positions[:, None] - positions[None, :]
    offset = jnp.where(distance < 0, half, 0)
    far = jnp.abs(distance)
    logs = jnp.log(jnp.maximum(far, 1).astype(jnp.float32) / near) / math.log(_FAR / near)
    grown = jnp.minimum(near + (logs * (half - near)).astype(jnp.int32), half - 1)
    buckets = offset + jnp.where(far < near, far, grown)
    found: jax.Array = jnp.transpose(table[buckets].astype(jnp.float32), (2, 0, 1))[None]
    return found


def _linear(layer: Parameters, role: str, x: jax.Array) -> jax.Array:
    found: jax.Array = multiply(x, layer[role]) + layer[f"{role}_bias"][None, None]
    return found


def _norm(form: EncoderForm, x: jax.Array, among: Parameters, role: str) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + form.norm_epsilon)
    weight, bias = (among[name].astype(jnp.float32)[None, None] for name in (role, f"{role}_bias"))
    found: jax.Array = (normed * weight + bias).astype(x.dtype)
    return found


# --- Pooling -----------------------------------------------------------------------------------


def _first(states: jax.Array, real: jax.Array) -> jax.Array:
    return states[:, 0]


def _largest(states: jax.Array, real: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(real[..., None], states, jnp.float32(-1e9)), axis=1)


def _sum(states: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = jnp.sum(states * weights[..., None], axis=1)
    return total, jnp.maximum(jnp.sum(weights, axis=1)[:, None], 1e-9)


def _mean(states: jax.Array, real: jax.Array) -> jax.Array:
    total, count = _sum(states, real.astype(jnp.float32))
    return total / count


def _by_root(states: jax.Array, real: jax.Array) -> jax.Array:
    total, count = _sum(states, real.astype(jnp.float32))
    return total / jnp.sqrt(count)


def _weighted(states: jax.Array, real: jax.Array) -> jax.Array:
    places = jnp.arange(1, states.shape[1] + 1, dtype=jnp.float32)[None]
    total, count = _sum(states, real.astype(jnp.float32) * places)
    return total / count


def _last(states: jax.Array, real: jax.Array) -> jax.Array:
    at = jnp.arange(states.shape[1], dtype=jnp.int32)[None]
    count = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
    return _sum(states, (at == jnp.maximum(count, 1) - 1).astype(jnp.float32))[0]


_POOLINGS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _by_root,
    "weightedmean": _weighted,
    "lasttoken": _last,
}
