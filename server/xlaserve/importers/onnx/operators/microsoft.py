"""Fused operators of com.microsoft, which onnxruntime's optimizer produces."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.authoring.cpu.products import contracted
from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.attention import (
    joined_heads,
    probabilities,
    rotated,
    split_heads,
)
from xlaserve.importers.onnx.operators.convolution import convolved, with_bias
from xlaserve.importers.onnx.operators.linear import gemm, matrix_product
from xlaserve.importers.onnx.operators.normalisation import standardised
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, on_device, with_rank

DOMAIN = "com.microsoft"
_EPSILON = 1e-12


def _over(x: jax.Array, value: Value) -> jax.Array:
    return on_device(with_rank(on_device(value), x.ndim))


# --- activations -------------------------------------------------------------------------------


def _fast_gelu(_: Node, x: Value, bias: Value | None = None) -> Value:
    array = on_device(x)
    return jax.nn.gelu(array if bias is None else array + _over(array, bias), approximate=True)


def _bias_gelu(_: Node, x: Value, bias: Value) -> Value:
    array = on_device(x)
    return jax.nn.gelu(array + _over(array, bias), approximate=False)


def _gelu(_: Node, x: Value) -> Value:
    return jax.nn.gelu(on_device(x), approximate=False)


def _quick_gelu(node: Node, x: Value) -> Value:
    array = on_device(x)
    return array * jax.nn.sigmoid(array * node.real("alpha", 1.702))


def _hard_sigmoid(x: jax.Array, alpha: float = 0.2, beta: float = 0.5) -> jax.Array:
    return jnp.clip(x * alpha + beta, 0, 1)


def _leaky_relu(x: jax.Array, alpha: float = 0.01) -> jax.Array:
    return jnp.where(x >= 0, x, x * alpha)


_ACTIVATIONS: dict[str, tuple[Callable[..., jax.Array], int]] = {
    "Clip": (jnp.clip, 2),
    "HardSigmoid": (_hard_sigmoid, 2),
    "LeakyRelu": (_leaky_relu, 1),
    "Relu": (jax.nn.relu, 0),
    "Sigmoid": (jax.nn.sigmoid, 0),
    "Tanh": (jnp.tanh, 0),
}
"""Activations that may follow a fused operator, with their numbers of parameters."""


def _activated(x: jax.Array, name: str, parameters: Sequence[float]) -> jax.Array:
    if not name:
        return x
    if name not in _ACTIVATIONS:
        raise InvalidModel(f"activation: expected {', '.join(_ACTIVATIONS)}, got {name}")
    function, count = _ACTIVATIONS[name]
    if len(parameters) > count:
        raise InvalidModel(f"activation {name} takes {count} parameters, got {len(parameters)}")
    return function(x, *parameters)


# --- products ----------------------------------------------------------------------------------


def _fused_matmul(node: Node, a: Value, b: Value) -> Value:
    left, right = (
        _transposed(node, on_device(value), side) for value, side in ((a, "A"), (b, "B"))
    )
    product = matrix_product(left, right)
    alpha = node.real("alpha", 1.0)
    return product if alpha == 1.0 else product * np.asarray(alpha, product.dtype)


def _transposed(node: Node, x: jax.Array, side: str) -> jax.Array:
    if node.integer(f"transBatch{side}", 0):
        x = jnp.moveaxis(x, 0, -2)
    return jnp.swapaxes(x, -1, -2) if node.integer(f"trans{side}", 0) else x


def _fused_gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Value:
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    parameters = [node.real(name) for name in names if node.has(name)]
    return _activated(on_device(gemm(node, a, b, c)), node.text("activation", ""), parameters)


def _fused_conv(
    node: Node, x: Value, weight: Value, bias: Value | None = None, added: Value | None = None
) -> Value:
    found = with_bias(convolved(node, on_device(x), on_device(weight)), bias)
    if added is not None:
        found = found + on_device(added)
    return _activated(found, node.text("activation", ""), node.reals("activation_params"))


def _inverse(_: Node, x: Value) -> Value:
    found: jax.Array = jnp.linalg.inv(on_device(x))
    return found


_BITS = (2, 4, 8)


def _matmul_bits(
    node: Node,
    a: Value,
    b: Value,
    scales: Value,
    zeros: Value | None = None,
    group: Value | None = None,
    bias: Value | None = None,
) -> Value:
    node.integer("accuracy_level", 0)  # the required accuracy is always met
    bits, block = node.integer("bits", 4), node.integer("block_size")
    columns, rows = node.integer("N"), node.integer("K")
    if group is not None or node.integer("weight_prepacked", 0):
        raise InvalidModel("g_idx and device-specific weight packing are not implemented")
    if bits not in _BITS or block < 1:
        raise InvalidModel(
            f"expected 2, 4 or 8 bits and a block_size above 0, got {bits} bits and {block}"
        )
    x = on_device(a)
    steps = on_device(scales).reshape((columns, -1, 1)).astype(x.dtype)
    count = steps.shape[1]
    levels = _unpacked(on_device(b).reshape((columns, count, -1)), bits).astype(x.dtype)
    middle = jnp.full((1, 1, 1), 2 ** (bits - 1), x.dtype)
    if zeros is not None:
        packed = on_device(zeros).reshape((columns, -1))
        unpacked = _unpacked(packed, bits)[:, :count] if packed.dtype == jnp.uint8 else packed
        middle = unpacked.reshape((columns, count, 1)).astype(x.dtype)
    weights = ((levels - middle) * steps).reshape((columns, -1))[:, :rows]
    product = contracted(x, weights, (x.ndim - 1, 1))
    return product if bias is None else product + _over(product, bias)


def _unpacked(x: jax.Array, bits: int) -> jax.Array:
    """Unpack the bytes of the last dimension into integers of `bits` bits, lowest bits first."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape((1,) * x.ndim + (-1,))
    parts = (x[..., None] >> shifts) & np.uint8(2**bits - 1)
    return parts.reshape((*x.shape[:-1], -1))


# --- normalisation -----------------------------------------------------------------------------


def _skip_layer(
    node: Node,
    x: Value,
    skip: Value,
    gamma: Value,
    beta: Value | None = None,
    bias: Value | None = None,
) -> tuple[Value, ...]:
    total = _summed(x, skip, bias)
    normal, mean, inverse = standardised(total, (-1,), node.real("epsilon", _EPSILON))
    scaled = normal * _over(total, gamma)
    return scaled if beta is None else scaled + _over(total, beta), mean, inverse, total


def _summed(x: Value, skip: Value, bias: Value | None) -> jax.Array:
    array = on_device(x)
    total = array + _over(array, skip)
    return total if bias is None else total + _over(array, bias)


def _skip_simplified(
    node: Node, x: Value, skip: Value, gamma: Value, bias: Value | None = None
) -> tuple[Value, ...]:
    if node.needs(1) or node.needs(2):
        raise InvalidModel("its outputs mean and inv_std_var are for training only")
    total = _summed(x, skip, bias)
    square = jnp.mean(total * total, axis=-1, keepdims=True)
    normal = total * jax.lax.rsqrt(square + node.real("epsilon", _EPSILON))
    return normal * _over(total, gamma), total, total, total


def _embedding(
    node: Node,
    ids: Value,
    segments: Value | None,
    words: Value,
    places: Value,
    kinds: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None = None,
    positions: Value | None = None,
) -> tuple[Value, ...]:
    node.integer("mask_index_type", 0)  # this only affects shape inference
    tokens = on_device(ids)
    where = jnp.arange(tokens.shape[1])[None, :] if positions is None else on_device(positions)
    total = jnp.take(on_device(words), tokens, axis=0, mode="fill")
    total = total + jnp.take(on_device(places), where, axis=0, mode="fill")
    if segments is not None and kinds is not None:
        total = total + jnp.take(on_device(kinds), on_device(segments), axis=0, mode="fill")
    normal, _, _ = standardised(total, (-1,), node.real("epsilon", _EPSILON))
    counts = jnp.zeros(tokens.shape[:1], jnp.int32)
    if mask is not None:
        counts = jnp.sum(on_device(mask) == 1, axis=1).astype(jnp.int32)
    return normal * _over(total, gamma) + _over(total, beta), counts, total


# --- attention ---------------------------------------------------------------------------------


def _rotary(node: Node, x: Value, positions: Value, cos: Value, sin: Value) -> Value:
    if node.integer("is_packed_batching", 0) or node.real("scale", 1.0) != 1.0:
        raise InvalidModel("is_packed_batching and a scale are not implemented")
    array = on_device(x)
    size = node.integer("rotary_embedding_dim", 0)
    heads = node.integer("num_heads", 0)
    if x.ndim == 3:
        heads = heads or array.shape[2] // (2 * cos.shape[-1])
        array = split_heads(array, heads)
    if size and size != 2 * cos.shape[-1]:
        raise InvalidModel(
            f"cos_cache, sin_cache: expected rows of {size // 2} angles, got {cos.shape[-1]}"
        )
    where = on_device(positions)
    if where.ndim == 1:
        where = where[None, :] + jnp.arange(array.shape[2], dtype=where.dtype)[None, :]
    angles = [jnp.take(on_device(t), where, axis=0, mode="fill")[:, None] for t in (cos, sin)]
    turned = rotated(array, *angles, interleaved=bool(node.integer("interleaved", 0)))
    return joined_heads(turned) if x.ndim == 3 else turned


def _attention(
    node: Node,
    x: Value,
    weights: Value,
    bias: Value | None = None,
    mask: Value | None = None,
    past: Value | None = None,
    added: Value | None = None,
    past_length: Value | None = None,
) -> tuple[Value, ...]:
    if node.integer("do_rotary", 0) or node.integer("past_present_share_buffer", 0):
        raise InvalidModel("do_rotary and past_present_share_buffer are not implemented")
    if past_length is not None:
        raise InvalidModel(
            "its input past_sequence_length, for a shared buffer, is not implemented"
        )
    array = on_device(x)
    total = matrix_product(array, on_device(weights))
    total = total if bias is None else total + _over(total, bias)
    third = total.shape[-1] // 3
    sizes = node.integers("qkv_hidden_sizes", (third,) * 3)
    heads = node.integer("num_heads")
    cuts = (sizes[0], sizes[0] + sizes[1])
    q, k, v = (split_heads(part, heads) for part in jnp.split(total, cuts, axis=-1))
    before = (None, None) if past is None else (on_device(past)[0], on_device(past)[1])
    found, keys, values = _attended(node, (q, k, v), mask, added, before)
    if not node.needs(1):
        return (found,)
    return found, jnp.stack([keys, values])


def _multi_head(
    node: Node,
    query: Value,
    key: Value | None = None,
    value: Value | None = None,
    bias: Value | None = None,
    mask: Value | None = None,
    added: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    *rest: Value | None,
) -> tuple[Value, ...]:
    if any(item is not None for item in rest) or node.needs(3):
        raise InvalidModel("shared buffers, beam search and the output qk are not implemented")
    if key is None or value is None or query.ndim != 3:
        raise InvalidModel("packed queries, keys and values are not implemented")
    parts = [on_device(item) for item in (query, key, value)]
    if bias is not None:
        cuts = (parts[0].shape[-1], 2 * parts[0].shape[-1])
        offsets = jnp.split(on_device(bias), cuts)
        parts = [
            part + _over(part, offset) if part.ndim == 3 else part
            for part, offset in zip(parts, offsets, strict=True)
        ]
    heads = node.integer("num_heads")
    q, k, v = (split_heads(part, heads) if part.ndim == 3 else part for part in parts)
    before = tuple(None if item is None else on_device(item) for item in (past_key, past_value))
    return _attended(node, (q, k, v), mask, added, before)


def _attended(
    node: Node,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    mask: Value | None,
    added: Value | None,
    past: Sequence[jax.Array | None],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the attention output, and keys and values with the past prepended."""
    q, k, v = heads
    if past[0] is not None and past[1] is not None:
        k, v = jnp.concatenate([past[0], k], axis=2), jnp.concatenate([past[1], v], axis=2)
    scale = node.real("scale", 0.0) or 1 / math.sqrt(q.shape[-1])
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if added is not None:
        scores = scores + on_device(added)
    lowest = node.real("mask_filter_value", -10000.0)
    steps, total = scores.shape[-2:]
    if mask is not None:
        seen = _seen(on_device(mask), q.shape[0], total)
        scores = scores + jnp.where(seen, 0, lowest).astype(scores.dtype)
    if node.integer("unidirectional", 0):
        last = jnp.arange(steps)[:, None] + (total - steps)
        causal = jnp.arange(total)[None, :] <= last
        scores = jnp.where(causal[None, None], scores, -jnp.inf)
    return joined_heads(jnp.einsum("bhqk,bhkd->bhqd", probabilities(scores), v)), k, v


def _seen(mask: jax.Array, batch: int, total: int) -> jax.Array:
    if mask.ndim == 1 and mask.shape[0] == batch:
        mask = (jnp.arange(total)[None, :] < mask[:, None]).astype(jnp.int32)
    if mask.ndim not in (2, 3):
        raise InvalidModel(f"a mask of the shape {mask.shape} is not implemented")
    return (mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]) != 0


FUSED: Family = {
    "Attention": operator(_attention),
    "BiasGelu": operator(_bias_gelu),
    "EmbedLayerNormalization": operator(_embedding),
    "FastGelu": operator(_fast_gelu),
    "FusedConv": operator(_fused_conv),
    "FusedGemm": operator(_fused_gemm),
    "FusedMatMul": operator(_fused_matmul),
    "Gelu": operator(_gelu),
    "Inverse": operator(_inverse),
    "MatMulNBits": operator(_matmul_bits),
    "MultiHeadAttention": operator(_multi_head),
    "QuickGelu": operator(_quick_gelu),
    "RotaryEmbedding": operator(_rotary),
    "SkipLayerNormalization": operator(_skip_layer),
    "SkipSimplifiedLayerNormalization": operator(_skip_simplified),
    "TransposeMatMul": operator(_fused_matmul),
}
