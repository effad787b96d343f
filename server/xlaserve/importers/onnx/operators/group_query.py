"""GroupQueryAttention of com.microsoft: query heads in groups share cached keys and values.

For each batch entry, T is the length of its cache after the call (`seqlens_k` + 1), and P its
length before. With S steps, P is T - S, or 0 for a first prompt that is padded beyond T. Values
that onnxruntime leaves unspecified (outputs of padding, the cache beyond T) are finite.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.attention import capped, joined_heads, rotated, split_heads
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, is_host, on_device, scalar_of

_REFUSED_INPUTS = ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens")
_REFUSED_ATTRIBUTES = ("sliding_window_cache", "qk_output")
_QUANTISATIONS = ("k_quant_type", "v_quant_type")


@dataclass(frozen=True, slots=True)
class _Places:
    """Positions of one call; `before` and `after` are [batch, 1]."""

    before: jax.Array
    """Length of the cache before the call (P), INT32."""
    after: jax.Array
    """Length of the cache after the call (T), INT32."""
    steps: int
    total: int
    """Size of the returned cache."""

    @property
    def of_steps(self) -> jax.Array:
        """Return the position of each step, [batch, steps]."""
        return self.before + jnp.arange(self.steps, dtype=jnp.int32)[None, :]

    @property
    def fit(self) -> jax.Array:
        """Tell which entries have lengths that fit the cache, [batch, 1]."""
        return (self.after >= 1) & (self.before + self.steps <= self.total)


def _group_query(
    node: Node,
    query: Value,
    key: Value | None,
    value: Value | None,
    past_key: Value | None,
    past_value: Value | None,
    lengths: Value,
    total: Value,
    cos: Value | None = None,
    sin: Value | None = None,
    positions: Value | None = None,
    added: Value | None = None,
    sink: Value | None = None,
    *rest: Value | None,
) -> tuple[jax.Array, ...]:
    _check_refused(node, rest)
    if (past_key is None) != (past_value is None):
        raise InvalidModel("expected both past_key and past_value, got one of them")
    q, k, v = _heads(node, query, key, value)
    past = None if past_key is None else on_device(past_key)
    places = _places(lengths, total, steps=q.shape[2], past=past)
    if node.integer("do_rotary", 0):
        q, k = _turned(node, (q, k), (cos, sin), places, positions)
    else:
        node.integer("rotary_interleaved", 0)  # it has no effect without rotation
    keys = _appended(past, k, places)
    values = _appended(None if past_value is None else on_device(past_value), v, places)
    found = _found(node, q, keys, values, places, added, sink)
    found = jnp.where(places.fit[:, :, None], joined_heads(found), jnp.nan)
    return found.astype(query.dtype), keys, values


def _check_refused(node: Node, rest: tuple[Value | None, ...]) -> None:
    for name, given in zip(_REFUSED_INPUTS, rest, strict=False):
        if given is not None:
            raise InvalidModel(f"its input {name} is not implemented")
    for name in _REFUSED_ATTRIBUTES:
        if node.integer(name, 0):
            raise InvalidModel(f"its attribute '{name}' is not implemented")
    for name in _QUANTISATIONS:
        if node.text(name, "NONE") != "NONE":
            raise InvalidModel(f"its attribute '{name}': a quantized cache is not implemented")
    node.obeyed(("kv_cache_bit_width", "qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"))
    if node.needs(3):
        raise InvalidModel("its output output_qk is not implemented")


def _heads(
    node: Node, query: Value, key: Value | None, value: Value | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values split into heads, [batch, heads, steps, size]."""
    heads, shared = node.integer("num_heads"), node.integer("kv_num_heads")
    if heads < 1 or shared < 1 or heads % shared:
        raise InvalidModel(f"its {heads} query heads are not a multiple of its {shared} key heads")
    array = on_device(query)
    if array.ndim != 3:
        raise InvalidModel(f"its query: expected [batch, steps, hidden], got {array.shape}")
    if key is None or value is None:
        if key is not value:
            raise InvalidModel("expected both key and value, got one of them")
        all_heads = split_heads(array, heads + 2 * shared)
        q, k, v = jnp.split(all_heads, (heads, heads + shared), axis=1)
        return q, k, v
    q = split_heads(array, heads)
    k, v = split_heads(on_device(key), shared), split_heads(on_device(value), shared)
    for name, item in (("key", k), ("value", v)):
        if item.shape[2:] != q.shape[2:]:
            raise InvalidModel(
                f"its {name}: expected {q.shape[2]} steps and heads of {q.shape[3]}, "
                f"got {item.shape[2]} and {item.shape[3]}"
            )
    return q, k, v


def _places(lengths: Value, total: Value, *, steps: int, past: jax.Array | None) -> _Places:
    if not is_host(total):
        raise InvalidModel(
            "its total_sequence_length depends on data but sets the size of output present_key;"
            " if it is a model input, make it a constant with --const"
        )
    after = on_device(lengths).reshape((-1, 1)).astype(jnp.int32) + 1
    before = jnp.maximum(after - steps, 0)
    return _Places(before, after, steps, _room(scalar_of(total), steps, past))


def _room(total: Any, steps: int, past: jax.Array | None) -> Any:
    """Return the size of the returned cache; raises InvalidModel if the steps do not fit.

    Sizes are integers or symbolic expressions.
    """
    if past is None:
        if total != steps:
            raise InvalidModel(
                f"without past_key, expected a total_sequence_length of {steps}, got {total}"
            )
        return total
    held = past.shape[2]
    if total is held or (is_symbolic_dim(total) and total == held):
        return total
    try:
        larger = total if total >= held else held
        is_short = larger < steps
    except Exception as error:
        raise InvalidModel(
            f"which of total_sequence_length ({total}) and the size of past_key ({held}) is"
            " larger is unknown; set the dynamic dimensions with --dim"
        ) from error
    if is_short:
        raise InvalidModel(f"total_sequence_length: expected at least {steps}, got {total}")
    return larger


def _turned(
    node: Node,
    heads: tuple[jax.Array, jax.Array],
    tables: tuple[Value | None, Value | None],
    places: _Places,
    positions: Value | None,
) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys with rotary positions applied."""
    cos, sin = tables
    if cos is None or sin is None:
        raise InvalidModel("do_rotary: expected cos_cache and sin_cache, got none")
    where = places.of_steps if positions is None else on_device(positions)
    if where.ndim != 2:
        raise InvalidModel(f"position_ids: expected [batch, steps], got {where.shape}")
    angles = [
        jnp.take(on_device(table), where, axis=0, mode="fill")[:, None] for table in (cos, sin)
    ]
    is_interleaved = bool(node.integer("rotary_interleaved", 0))
    q, k = (rotated(item, *angles, interleaved=is_interleaved) for item in heads)
    return q, k


def _appended(past: jax.Array | None, new: jax.Array, places: _Places) -> jax.Array:
    """Write new entries to a cache [batch, heads, total, size] from position P on."""
    if past is None:
        return new
    lacking = places.total - past.shape[2]
    kept = jnp.pad(past, ((0, 0), (0, 0), (0, lacking), (0, 0)))
    step = jnp.arange(places.total, dtype=jnp.int32)[None, :] - places.before
    is_new = ((step >= 0) & (step < places.steps))[:, None, :, None]
    if not is_symbolic_dim(places.steps) and places.steps == 1:
        return jnp.where(is_new, new, kept).astype(past.dtype)
    moved = jax.vmap(lambda rows, at: jnp.take(rows, at, axis=1, mode="clip"))(new, step)
    return jnp.where(is_new, moved, kept).astype(past.dtype)


def _found(
    node: Node,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    places: _Places,
    added: Value | None,
    sink: Value | None,
) -> jax.Array:
    """Attend to the cache; return [batch, heads, steps, size] in FP32."""
    batch, heads, steps, size = q.shape
    shared = keys.shape[1]
    scale = node.real("scale", 0.0) or 1 / math.sqrt(size)
    groups = q.reshape((batch, shared, heads // shared, steps, size)).astype(jnp.float32)
    raw = jnp.einsum("bkgsd,bktd->bkgst", groups * scale, keys.astype(jnp.float32))
    scores = capped(raw, node.real("softcap", 0.0)).reshape((batch, heads, steps, places.total))
    if added is not None:
        scores = scores + _fitted(on_device(added), places.total)
    scores = jnp.where(_seen(node, places)[:, None], scores, -jnp.inf)
    weights = _weights(node, scores, sink).reshape(raw.shape)
    found = jnp.einsum("bkgst,bktd->bkgsd", weights, values.astype(jnp.float32))
    return found.reshape((batch, heads, steps, size))


def _fitted(added: jax.Array, total: int) -> jax.Array:
    """Crop or pad a bias to the size of the cache; padding is masked anyway."""
    columns = added.shape[-1]
    cut = added[..., :total].astype(jnp.float32)
    return jnp.pad(cut, ((0, 0),) * 3 + ((0, max(total - columns, 0)),))


def _seen(node: Node, places: _Places) -> jax.Array:
    """Return the mask [batch, steps, total] of cache positions that each step attends to."""
    key = jnp.arange(places.total, dtype=jnp.int32)[None, None, :]
    seen = key < places.after[:, :, None]
    window = node.integer("local_window_size", -1)
    if not node.integer("causal", 1):
        if window >= 0:
            raise InvalidModel(f"local_window_size: expected -1 with causal 0, got {window}")
        return jnp.broadcast_to(seen, (seen.shape[0], places.steps, places.total))
    own = places.of_steps[:, :, None]
    seen = seen & (key <= own)
    # The window includes the step's own position.
    return seen & (key > own - window) if window >= 0 else seen


def _weights(node: Node, scores: jax.Array, sink: Value | None) -> jax.Array:
    """Return the softmax over the last dimension; an attention sink adds to the denominator."""
    is_smooth = bool(node.integer("smooth_softmax", 0))
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sink is None and not is_smooth:
        top = jnp.where(jnp.isneginf(top), 0, top)
        powers = jnp.exp(scores - top)
        return powers / jnp.maximum(jnp.sum(powers, axis=-1, keepdims=True), 1e-30)
    logit = jnp.zeros((1,)) if sink is None else on_device(sink)
    drain = logit.astype(jnp.float32).reshape((1, -1, 1, 1))
    top = jnp.maximum(top, drain)
    powers = jnp.exp(scores - top)
    return powers / (jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(drain - top))


GROUP_QUERY: Family = {"GroupQueryAttention": operator(_group_query)}
