"""Normalisation over batches, layers, groups and channels."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.convolution import per_channel
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, axis_of, on_device, with_rank

_GROUPS_BY_CHANNEL = 21
"""Opset since which GroupNormalization has scales per channel; before, it had them per group."""


def _batch(node: Node, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Value:
    epsilon = node.real("epsilon", 1e-5)
    node.real("momentum", 0.9)  # momentum is for training only
    if node.integer("training_mode", 0):
        raise InvalidModel("training_mode is on, which serving does not support")
    # Compute factor and offset per channel, which leaves two operations per element.
    spread = on_device(variance)
    factor = on_device(scale).astype(spread.dtype) / jnp.sqrt(spread + epsilon)
    offset = on_device(bias).astype(spread.dtype) - on_device(mean) * factor
    array = on_device(x)
    scaled = array.astype(spread.dtype) * per_channel(factor, x.ndim)
    return (scaled + per_channel(offset, x.ndim)).astype(array.dtype)


def standardised(
    x: jax.Array, axes: tuple[int, ...], epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise over axes; return the result, the mean and the reciprocal standard deviation."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=axes, keepdims=True) + epsilon)
    return centred * inverse, mean, inverse


def _layer(node: Node, x: Value, scale: Value, bias: Value | None = None) -> tuple[Value, ...]:
    axis = axis_of(node.integer("axis", -1), x.ndim)
    array = _widened(node, x)
    axes = tuple(range(axis, x.ndim))
    normal, mean, inverse = standardised(array, axes, node.real("epsilon", 1e-5))
    scaled = normal.astype(x.dtype) * on_device(with_rank(on_device(scale), x.ndim))
    if bias is not None:
        scaled = scaled + on_device(with_rank(on_device(bias), x.ndim))
    return (scaled, mean, inverse)[: len(node.outputs)]


def _widened(node: Node, x: Value) -> jax.Array:
    """Return x in the precision of the first stage, which is at least FP32."""
    array = on_device(x)
    stash = node.integer("stash_type", 1)
    return array.astype(jnp.float32) if stash == 1 and array.dtype.itemsize < 4 else array


def _root_mean_square(node: Node, x: Value, scale: Value) -> Value:
    axis = axis_of(node.integer("axis", -1), x.ndim)
    array = _widened(node, x)
    square = jnp.mean(array * array, axis=tuple(range(axis, x.ndim)), keepdims=True)
    normal = array * jax.lax.rsqrt(square + node.real("epsilon", 1e-5))
    return normal.astype(x.dtype) * on_device(with_rank(on_device(scale), x.ndim))


def _simplified(node: Node, x: Value, scale: Value) -> Value:
    if node.needs(1):
        raise InvalidModel("its second output is for training only")
    return _root_mean_square(node, x, scale)


def _instance(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    axes = tuple(range(2, x.ndim))
    normal, _, _ = standardised(on_device(x), axes, node.real("epsilon", 1e-5))
    return normal * per_channel(scale, x.ndim) + per_channel(bias, x.ndim)


def _group(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    groups = node.integer("num_groups")
    array = _widened(node, x)
    split = array.reshape((x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    axes = tuple(range(2, split.ndim))
    normal, _, _ = standardised(split, axes, node.real("epsilon", 1e-5))
    if node.opset >= _GROUPS_BY_CHANNEL:
        whole = normal.reshape(x.shape).astype(x.dtype)
        return whole * per_channel(scale, x.ndim) + per_channel(bias, x.ndim)
    scaled = normal.astype(x.dtype) * per_channel(scale, split.ndim)
    return (scaled + per_channel(bias, split.ndim)).reshape(x.shape)


def _local_response(node: Node, x: Value) -> Value:
    alpha, beta = node.real("alpha", 1e-4), node.real("beta", 0.75)
    bias, size = node.real("bias", 1.0), node.integer("size")
    array = on_device(x)
    pads = ((0, 0), ((size - 1) // 2, math.ceil((size - 1) / 2)), *((0, 0),) * (x.ndim - 2))
    sums = jax.lax.reduce_window(
        array * array,
        np.zeros((), array.dtype)[()],
        jax.lax.add,
        (1, size) + (1,) * (x.ndim - 2),
        (1,) * x.ndim,
        pads,
    )
    normal: Value = array / (bias + alpha / size * sums) ** beta
    return normal


def _lp(node: Node, x: Value) -> Value:
    axis, p = axis_of(node.integer("axis", -1), x.ndim), node.integer("p", 2)
    array = on_device(x)
    return divided(array, jnp.linalg.norm(array, ord=p, axis=axis, keepdims=True))


def divided(x: jax.Array, norm: jax.Array) -> jax.Array:
    """Divide by a norm; zeros stay zero."""
    return jnp.where(norm == 0, jnp.zeros_like(x), x / jnp.where(norm == 0, 1, norm))


def _mean_variance(node: Node, x: Value) -> Value:
    axes = node.integers("axes", (0, 2, 3))
    array = on_device(x)
    centred = array - jnp.mean(array, axis=axes, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centred * centred, axis=axes, keepdims=True))
    return centred / (deviation + 1e-9)


NORMALISATION: Family = {
    "BatchNormalization": operator(_batch),
    "GroupNormalization": operator(_group),
    "InstanceNormalization": operator(_instance),
    "LRN": operator(_local_response),
    "LayerNormalization": operator(_layer),
    "LpNormalization": operator(_lp),
    "MeanVarianceNormalization": operator(_mean_variance),
    "RMSNormalization": operator(_root_mean_square),
    "SimplifiedLayerNormalization": operator(_simplified),
}
