"""Attention operators, rotary embeddings and key-value caches."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.datatypes import dtype_of
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, on_device, with_rank

# --- Shared by ONNX and com.microsoft ----------------------------------------------------------


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Turn [batch, steps, heads * size] into [batch, heads, steps, size]."""
    batch, steps, hidden = x.shape
    if heads < 1 or hidden % heads:
        raise InvalidModel(f"its hidden size of {hidden} is not a multiple of its {heads} heads")
    return jnp.swapaxes(x.reshape((batch, steps, heads, hidden // heads)), 1, 2)


def joined_heads(x: jax.Array) -> jax.Array:
    """Turn [batch, heads, steps, size] into [batch, steps, heads * size]."""
    batch, heads, steps, size = x.shape
    return jnp.swapaxes(x, 1, 2).reshape((batch, steps, heads * size))


def repeated_heads(x: jax.Array, heads: int) -> jax.Array:
    """Repeat the shared keys or values for each query head of their group."""
    batch, own, steps, size = x.shape
    if own == heads:
        return x
    if heads % own:
        raise InvalidModel(f"its {heads} query heads are not a multiple of its {own} key heads")
    copies = jnp.broadcast_to(x[:, :, None], (batch, own, heads // own, steps, size))
    return copies.reshape((batch, heads, steps, size))


def capped(scores: jax.Array, limit: float) -> jax.Array:
    """Limit scores smoothly to between -limit and limit; 0 for no limit."""
    return jnp.tanh(scores / limit) * limit if limit else scores


def probabilities(scores: jax.Array) -> jax.Array:
    """Return the softmax over the last dimension; a row of -inf gives zeros, not NaN."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    powers = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top).astype(scores.dtype))
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return jnp.where(total == 0, 0, powers / jnp.where(total == 0, 1, total)).astype(scores.dtype)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotate pairs of elements of the last dimension; angles are broadcast over x.

    Pairs are adjacent elements if `interleaved`, otherwise elements of the first and second half.
    Elements beyond the angles are unchanged.
    """
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    real, imaginary = first * cos - second * sin, first * sin + second * cos
    if interleaved:
        whole = jnp.stack([real, imaginary], axis=-1).reshape(turned.shape)
    else:
        whole = jnp.concatenate([real, imaginary], axis=-1)
    return jnp.concatenate([whole, rest], axis=-1).astype(x.dtype)


# --- Attention ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reach:
    """How many keys before and after its own position a query attends to; -1 for no limit."""

    before: int
    behind: int

    def allows(self, position: jax.Array, key: jax.Array) -> jax.Array:
        """Tell whether queries at `position` attend to `key`."""
        seen = jnp.ones((), jnp.bool_)
        if self.before >= 0:
            seen = seen & (key >= position - self.before)
        if self.behind >= 0:
            seen = seen & (key <= position + self.behind)
        return seen


def _attention(
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    lengths: Value | None = None,
) -> tuple[Value, ...]:
    if (past_key is None) != (past_value is None):
        raise InvalidModel("expected both past_key and past_value, got one of them")
    if past_key is not None and lengths is not None:
        raise InvalidModel("expected past_key or nonpad_kv_seqlen, got both")
    queries, keys, values = _heads(node, on_device(q), on_device(k), on_device(v))
    if past_key is not None and past_value is not None:
        keys = jnp.concatenate([on_device(past_key), keys], axis=2)
        values = jnp.concatenate([on_device(past_value), values], axis=2)
    scale = node.real("scale", 1 / math.sqrt(queries.shape[-1]))
    # Scale both operands by the square root, so that FP16 does not overflow.
    root = math.sqrt(abs(scale))
    every = repeated_heads(keys, queries.shape[1]) * math.copysign(root, scale)
    raw = jnp.einsum("bhqd,bhkd->bhqk", queries * root, every).astype(queries.dtype)
    limited = capped(raw, node.real("softcap", 0.0))
    biased = _masked(node, limited, mask, 0 if past_key is None else past_key.shape[2], lengths)
    precision = node.integer("softmax_precision", 0)
    wide = biased.astype(dtype_of(precision)) if precision else biased
    weights = probabilities(wide).astype(queries.dtype)
    found = jnp.einsum("bhqk,bhkd->bhqd", weights, repeated_heads(values, queries.shape[1]))
    result = joined_heads(found) if q.ndim == 3 else found
    stages = (raw, limited, biased, weights)
    mode = node.integer("qk_matmul_output_mode", 0)
    if not 0 <= mode < len(stages):
        raise InvalidModel(f"qk_matmul_output_mode: expected 0 to 3, got {mode}")
    return result.astype(queries.dtype), keys, values, stages[mode]


def _heads(
    node: Node, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if q.ndim == 4:
        node.obeyed(("q_num_heads", "kv_num_heads"))  # the inputs are split into heads already
        return q, k, v
    heads, shared = node.integer("q_num_heads"), node.integer("kv_num_heads")
    return split_heads(q, heads), split_heads(k, shared), split_heads(v, shared)


def _masked(
    node: Node, scores: jax.Array, mask: Value | None, past: int, lengths: Value | None
) -> jax.Array:
    """Add the mask, and set scores of keys that a query must not see to -inf."""
    steps, total = scores.shape[-2:]
    right_window = node.integer("right_window_size", -1)
    reach = _Reach(
        node.integer("left_window_size", -1), 0 if node.integer("is_causal", 0) else right_window
    )
    key = jnp.arange(total)[None, None, None, :]
    ends = None if lengths is None else on_device(lengths).reshape((-1, 1, 1, 1))
    offset = past if ends is None else ends - steps
    seen = reach.allows(jnp.arange(steps)[None, None, :, None] + offset, key)
    if ends is not None:
        seen = seen & (key < ends)
    if mask is not None:
        given = on_device(with_rank(on_device(mask), 4))
        lacking = total - given.shape[-1]
        nothing = False if given.dtype == jnp.bool_ else -jnp.inf
        given = jnp.pad(given, ((0, 0),) * 3 + ((0, lacking),), constant_values=nothing)
        if given.dtype == jnp.bool_:
            seen = seen & given
        else:
            scores = scores + given.astype(scores.dtype)
    return jnp.where(seen, scores, -jnp.inf).astype(scores.dtype)


# --- RotaryEmbedding ---------------------------------------------------------------------------


def _rotary(node: Node, x: Value, cos: Value, sin: Value, positions: Value | None = None) -> Value:
    array = on_device(x)
    heads = node.integer("num_heads", 0)
    split = split_heads(array, heads) if x.ndim == 3 else array
    size = node.integer("rotary_embedding_dim", 0) or split.shape[-1]
    angles = [_angles(table, positions) for table in (cos, sin)]
    if any(2 * angle.shape[-1] != size for angle in angles):
        raise InvalidModel(
            f"cos_cache, sin_cache: expected rows of {size // 2} angles, got {angles[0].shape[-1]}"
        )
    turned = rotated(split, *angles, interleaved=bool(node.integer("interleaved", 0)))
    return joined_heads(turned) if x.ndim == 3 else turned


def _angles(table: Value, positions: Value | None) -> jax.Array:
    """Return rotary angles [batch, 1, steps, pairs], looked up by position if given."""
    array = on_device(table)
    if positions is not None:
        array = jnp.take(array, on_device(positions), axis=0, mode="fill")
    return array[:, None]


# --- caches and states -------------------------------------------------------------------------


def _tensor_scatter(node: Node, cache: Value, update: Value, begins: Value | None = None) -> Value:
    mode = node.text("mode", "linear")
    if mode not in ("linear", "circular"):
        raise InvalidModel(f"mode: expected linear or circular, got {mode}")
    axis = node.integer("axis", -2) % cache.ndim
    if axis == 0:
        raise InvalidModel("axis: expected an axis other than the batch axis, got the batch axis")
    rows, new = (jnp.moveaxis(on_device(value), axis, 1) for value in (cache, update))
    steps = jnp.arange(new.shape[1])[None, :]
    first = jnp.zeros((1,), jnp.int64) if begins is None else on_device(begins)
    places = jnp.broadcast_to(first[:, None] + steps, (rows.shape[0], new.shape[1]))
    if mode == "circular":
        places = places % rows.shape[1]
    written = jax.vmap(lambda row, values, where: row.at[where].set(values))(rows, new, places)
    return jnp.moveaxis(written, 1, axis)


_RULES = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}
"""Whether the state decays, and whether it is corrected (delta rule), by `update_rule`."""


def _linear_attention(
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    past: Value | None = None,
    decay: Value | None = None,
    beta: Value | None = None,
) -> tuple[Value, ...]:
    node.integer("chunk_size", 64)  # chunk_size affects performance only
    rule = node.text("update_rule", "gated_delta")
    if rule not in _RULES:
        raise InvalidModel(f"update_rule: expected {', '.join(_RULES)}, got {rule}")
    decays, corrects = _RULES[rule]
    if (decays and decay is None) or (corrects and beta is None):
        raise InvalidModel(f"update_rule {rule}: its input decay or beta is missing")
    heads, shared = node.integer("q_num_heads"), node.integer("kv_num_heads")
    queries = split_heads(on_device(q), heads)
    keys, values = split_heads(on_device(k), shared), split_heads(on_device(v), shared)
    scale = node.real("scale", 0.0) or 1 / math.sqrt(queries.shape[-1])
    batch, _, steps, size = keys.shape
    gate = jnp.ones((batch, shared, steps, 1), jnp.float32)
    if decays and decay is not None:
        gate = jnp.exp(split_heads(on_device(decay).astype(jnp.float32), shared))
    rate = jnp.ones((batch, shared, steps, 1), jnp.float32)
    if corrects and beta is not None:
        given = on_device(beta).astype(jnp.float32)
        rate = rate * split_heads(given, 1 if given.shape[-1] == 1 else shared)
    start = (
        jnp.zeros((batch, shared, size, values.shape[-1]), jnp.float32)
        if past is None
        else on_device(past).astype(jnp.float32)
    )

    def step(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value, keep, amount = now
        state = state * keep[..., None]
        if corrects:
            value = (value - jnp.einsum("bhkv,bhk->bhv", state, key)) * amount
        state = state + key[..., None] * value[..., None, :]
        every = repeated_heads(state, heads)
        return state, scale * jnp.einsum("bhkv,bhk->bhv", every, query)

    turned = [
        jnp.moveaxis(item.astype(jnp.float32), 2, 0) for item in (queries, keys, values, gate, rate)
    ]
    state, found = jax.lax.scan(step, start, tuple(turned))
    result = joined_heads(jnp.moveaxis(found, 0, 2)).astype(queries.dtype)
    return result, state.astype(queries.dtype if past is None else past.dtype)


def _causal_convolution(
    node: Node, x: Value, weight: Value, bias: Value | None = None, past: Value | None = None
) -> tuple[Value, ...]:
    activation = node.text("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise InvalidModel(f"activation: expected none, silu or swish, got {activation}")
    array, filters = on_device(x), on_device(weight)
    batch, channels, _ = array.shape
    kept = filters.shape[-1] - 1
    before = jnp.zeros((batch, channels, kept), array.dtype) if past is None else on_device(past)
    whole = jnp.concatenate([before.astype(array.dtype), array], axis=2)
    found = jax.lax.conv_general_dilated(
        whole, filters, (1,), ((0, 0),), feature_group_count=channels
    )
    if bias is not None:
        found = found + on_device(bias)[None, :, None]
    return (
        found if activation == "none" else jax.nn.silu(found),
        whole[:, :, whole.shape[2] - kept :],
    )


ATTENTION: Family = {
    "Attention": operator(_attention),
    "CausalConvWithState": operator(_causal_convolution),
    "LinearAttention": operator(_linear_attention),
    "RotaryEmbedding": operator(_rotary),
    "TensorScatter": operator(_tensor_scatter),
}
