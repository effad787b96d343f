"""The forward pass of decoders as pure functions: empty cache, decoding step, prompt chunk.

The cache holds an array of keys and one of values per layer, [slot, kv head, position, dim]. With
this layout XLA updates rows in place if the cache is donated. Rows are written by a scatter, which
drops positions beyond the end; `dynamic_update_slice` would clamp them and overwrite earlier rows.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from xlaserve.importers.huggingface import experts
from xlaserve.importers.huggingface.form import Form, Rope
from xlaserve.importers.huggingface.products import multiply, rows_of

Cache: TypeAlias = tuple[tuple[jax.Array, jax.Array], ...]
Parameters: TypeAlias = Mapping[str, Any]
"""The arrays by role: `embedding`, `norm`, `layers`, and `head` unless it is tied. Matrices may be
quantised, see `products`."""

_NOWHERE = 1 << 30
"""A position beyond the end of every cache."""
_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def init_cache(form: Form, dtype: Any, slots: int, length: int) -> Cache:
    """Return a cache of zeros for `slots` sequences of up to `length` positions."""
    shape = (slots, form.kv_heads, length, form.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in form.windows)


def decode(  # noqa: PLR0917, the signature that generators have
    form: Form,
    params: Parameters,
    cache: Cache,
    window: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Decode one token in every slot; return the logits [slots, vocab] and the new cache.

    Attention reads the first `len(window)` positions of the cache, so all positions of active slots
    must be below that. A slot whose position is beyond the end of the cache is not written.
    """
    slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    length = window.shape[0]

    def write(stored: jax.Array, rows: jax.Array) -> jax.Array:
        return stored.at[slots, :, positions].set(rows[:, 0], mode="drop")

    def read(stored: jax.Array) -> jax.Array:
        return stored[:, :, :length]

    is_real = positions < cache[0][0].shape[2]
    x, cache = _layers(
        form, params, cache, (tokens[:, None], positions[:, None], is_real), (write, read)
    )
    return _logits(form, params, x[:, 0], few=True), cache


def chunk(  # noqa: PLR0917, the signature that generators have
    form: Form,
    params: Parameters,
    cache: Cache,
    window: jax.Array,
    tokens: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    n: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Process a prompt chunk for one slot; return the n-th token's logits [vocab] and the cache.

    The first n of `tokens` are written to the cache from position `start`; n is at least 1. The
    rest is padding, which is not written.
    """
    count = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    positions = start + count
    places = jnp.where(count < n, positions, _NOWHERE)
    slots = jnp.full_like(places, slot)
    zero = jnp.int32(0)

    def write(stored: jax.Array, rows: jax.Array) -> jax.Array:
        return stored.at[slots, :, places].set(rows[0], mode="drop")

    def read(stored: jax.Array) -> jax.Array:
        shape = (1, stored.shape[1], window.shape[0], stored.shape[3])
        return lax.dynamic_slice(stored, (jnp.int32(slot), zero, zero, zero), shape)

    x, cache = _layers(
        form, params, cache, (tokens[None], positions[None], count < n), (write, read)
    )
    last = lax.dynamic_index_in_dim(x, n - 1, axis=1, keepdims=False)
    return _logits(form, params, last)[0], cache


def all_logits(form: Form, params: Parameters, tokens: jax.Array) -> jax.Array:
    """Return the logits [n, vocab] after each token of a sequence that starts at position 0."""
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    cache = init_cache(form, params["norm"].dtype, 1, tokens.shape[0])

    def write(stored: jax.Array, rows: jax.Array) -> jax.Array:
        return stored.at[jnp.zeros_like(positions), :, positions].set(rows[0])

    given = tokens[None], positions[None], positions >= 0
    x, _ = _layers(form, params, cache, given, (write, lambda stored: stored))
    return _logits(form, params, x[0])


_Access: TypeAlias = tuple[
    Callable[[jax.Array, jax.Array], jax.Array], Callable[[jax.Array], jax.Array]
]
"""Two functions: write rows [b, c, kv head, dim] to a cache array, and read the part of it that
attention uses."""


_Given: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""Tokens [b, c], their positions [b, c], and for all b x c tokens whether they are real: not
padding, and not of an unused slot."""


def _layers(
    form: Form, params: Parameters, cache: Cache, given: _Given, access: _Access
) -> tuple[jax.Array, Cache]:
    tokens, positions, is_real = given
    dtype = params["norm"].dtype
    x = rows_of(params["embedding"], tokens, dtype) * jnp.asarray(form.embedding_scale, dtype)
    if "positions" in params:
        # Only padding and unused slots have positions beyond the end.
        x = x + params["positions"].at[positions].get(mode="clip")
    length = cache[0][0].shape[2]
    turns = {rope: _turns(rope, positions, length) for rope in dict.fromkeys(form.ropes)}
    write, read = access
    written: list[tuple[jax.Array, jax.Array]] = []
    for number, (layer, stored) in enumerate(zip(params["layers"], cache, strict=True)):
        window, turned = form.windows[number], turns[form.ropes[number]]
        q, k, v = _heads(form, layer, _normed(form, x, layer, "input_norm"), turned)
        keys, values = write(stored[0], k), write(stored[1], v)
        written.append((keys, values))
        seen = _seen(positions, read(keys).shape[2], window)
        mixed = _attention(form, q, read(keys), read(values), seen)
        x = x + _behind(form, _linear(layer, "o", mixed), layer, "attention_post_norm")
        x = x + _behind(
            form, _feed_forward(form, layer, x, is_real), layer, "feed_forward_post_norm"
        )
    return x, tuple(written)


def _heads(
    form: Form, layer: Parameters, x: jax.Array, turned: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values [b, c, heads, dim]; rotary positions are applied."""
    shape = (*x.shape[:2], -1, form.head_dim)
    q, k, v = (_linear(layer, role, x) for role in "qkv")
    if "q_norm" in layer:
        q, k = (_norm_of_parts(form, y, layer, role) for y, role in ((q, "q_norm"), (k, "k_norm")))
    return _rotate(q.reshape(shape), turned), _rotate(k.reshape(shape), turned), v.reshape(shape)


def _norm_of_parts(form: Form, x: jax.Array, layer: Parameters, role: str) -> jax.Array:
    """Normalise blocks of the size of the weights: each head, or all heads together."""
    parts = x.reshape(*x.shape[:2], -1, layer[role].shape[0])
    return _norm(form, parts, layer, role).reshape(x.shape)


def _turns(rope: Rope, positions: jax.Array, length: Any) -> tuple[jax.Array, jax.Array]:
    """Return rotary cosines and sines [b, c, 1, pairs].

    The choice between short and long frequencies depends on the length of the cache, not of the
    request, since all keys in a cache must be rotated alike.
    """
    frequencies = jnp.asarray(rope.frequencies, jnp.float32)
    if rope.long_frequencies:
        is_long = jnp.asarray(length, jnp.int32) > rope.original
        long = jnp.asarray(rope.long_frequencies, jnp.float32)
        frequencies = jnp.where(is_long, long, frequencies)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None]
    return jnp.cos(angles)[:, :, None] * rope.scale, jnp.sin(angles)[:, :, None] * rope.scale


def _rotate(x: jax.Array, turned: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate pairs (i, i + half) of the elements; those beyond `2 * half` are unchanged."""
    cos, sin = turned
    half = cos.shape[-1]
    first, second = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half : 2 * half]))
    parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in parts] + [x[..., 2 * half :]], -1)


def _seen(positions: jax.Array, length: int, window: int | None) -> jax.Array:
    """Return the attention mask [b, c, length], True for visible positions."""
    at, own = jnp.arange(length, dtype=jnp.int32)[None, None], positions[:, :, None]
    seen = at <= own
    return seen if window is None else seen & (at > own - window)


def _attention(
    form: Form, q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array
) -> jax.Array:
    """Grouped-query attention; returns [b, c, heads x dim]."""
    b, c = q.shape[:2]
    groups, rows = form.heads // form.kv_heads, c * (form.heads // form.kv_heads)
    # All queries of a key head become rows of one matrix product: of the possible dimension orders,
    # only this one has a fast kernel in XLA for CPUs.
    queries = q.reshape(b, c, form.kv_heads, groups, form.head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(b, form.kv_heads, rows, form.head_dim)
    # There is no such kernel for a single BF16 row: XLA would convert all keys and values to FP32.
    # Add a row.
    spare = int(groups == 1 and _is_step(q) and keys.dtype == jnp.bfloat16)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, spare), (0, 0)))
    scores = jnp.einsum("bkrd,bkwd->bkrw", queries, keys, preferred_element_type=jnp.float32)
    scores = _capped(scores * form.attention_scale, form.attention_cap)
    scores = jnp.where(_of_rows(seen, groups, spare), scores, -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = lax.dot_general(shares, values, (((3,), (2,)), ((0, 1), (0, 1))))
    mixed = mixed[:, :, :rows].reshape(b, form.kv_heads, groups, c, form.head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(b, c, -1)


def _of_rows(seen: jax.Array, groups: int, spare: int) -> jax.Array:
    """Return the mask [b, 1, rows, length] for the rows of `_attention`'s product."""
    b, c, length = seen.shape
    rows = jnp.broadcast_to(seen[:, None], (b, groups + spare, c, length))
    return rows.reshape(b, 1, (groups + spare) * c, length)


def _feed_forward(form: Form, layer: Parameters, x: jax.Array, is_real: jax.Array) -> jax.Array:
    normed = _normed(form, x, layer, "feed_forward_norm")
    activation = _ACTIVATIONS[form.activation]
    if form.experts is not None and "router" in layer:
        flat = normed.reshape(-1, form.hidden)
        mixed = experts.mixed(form.experts, layer, flat, is_real, activation).reshape(x.shape)
        return mixed + _shared(layer, normed, activation) if form.experts.shared else mixed
    up = _linear(layer, "up", normed)
    if "gate" not in layer:
        return _linear(layer, "down", activation(up))
    return _linear(layer, "down", activation(_linear(layer, "gate", normed)) * up)


def _shared(
    layer: Parameters, x: jax.Array, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return the output of the shared expert, weighted per token by its gate."""
    share = jax.nn.sigmoid(_linear(layer, "shared_router", x))
    gated = activation(_linear(layer, "shared_gate", x)) * _linear(layer, "shared_up", x)
    return share * _linear(layer, "shared_down", gated)


def _normed(form: Form, x: jax.Array, layer: Parameters, role: str) -> jax.Array:
    """Apply the norm of this role, if the layer has one."""
    return _norm(form, x, layer, role) if role in layer else x


def _behind(form: Form, x: jax.Array, layer: Parameters, role: str) -> jax.Array:
    """Prepare the output of a block for the residual sum: norm and scale."""
    normed = _norm(form, x, layer, role) if form.post_norms else x
    if form.residual_scale == 1:
        return normed
    return (normed.astype(jnp.float32) * form.residual_scale).astype(x.dtype)


def _linear(layer: Parameters, role: str, x: jax.Array) -> jax.Array:
    y = multiply(x, layer[role], few=_is_step(x))
    bias = layer.get(f"{role}_bias")
    return y if bias is None else y + bias[None, None]


def _is_step(x: jax.Array) -> bool:
    """Tell whether x [b, c, hidden] is a decoding step, with one token per sequence."""
    return bool(x.shape[1] == 1)


def _norm(form: Form, x: jax.Array, among: Parameters, role: str) -> jax.Array:
    wide = x.astype(jnp.float32)
    if form.centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    squares = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * lax.rsqrt(squares + form.norm_epsilon)
    normed = normed * (_spread(among[role], x) + form.norm_offset)
    bias = among.get(f"{role}_bias")
    return (normed if bias is None else normed + _spread(bias, x)).astype(x.dtype)


def _spread(vector: jax.Array, over: jax.Array) -> jax.Array:
    return vector.astype(jnp.float32).reshape((1,) * (over.ndim - 1) + vector.shape)


def _capped(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


def _logits(form: Form, params: Parameters, x: jax.Array, *, few: bool = False) -> jax.Array:
    normed = _norm(form, x, params, "norm")
    head = params["embedding"] if form.tied else params["head"]
    logits = multiply(normed, head, jnp.float32, few=few)
    return _capped(
        logits if form.logit_divisor == 1 else logits / form.logit_divisor, form.logit_cap
    )
