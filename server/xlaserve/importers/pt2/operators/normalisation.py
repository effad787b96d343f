"""Normalisation by stored or computed statistics."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family
from xlaserve.importers.pt2.values import FLOAT, NOT_COMPUTED, Dtype, NotComputed, aligned, as_array

_TRAINING = "it uses batch statistics, as in training: call model.eval() before the export"


def _wide(dtype: Dtype) -> Dtype:
    """Return the dtype of statistics: FP32 for narrower ones, as in PyTorch."""
    return FLOAT if dtype.itemsize < FLOAT.itemsize else dtype


def _per_channel(x: jax.Array, values: jax.Array) -> jax.Array:
    return values.reshape((1, -1) + (1,) * (x.ndim - 2))


def _by_channel(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    variance: jax.Array,
    eps: float,
) -> jax.Array:
    """Normalise each channel; the four vectors are folded into one scale and one shift."""
    wide = _wide(x.dtype)
    scale = jax.lax.rsqrt(variance.astype(wide) + as_array(eps, wide))
    if weight is not None:
        scale = scale * weight.astype(wide)
    shift = -mean.astype(wide) * scale
    if bias is not None:
        shift = shift + bias.astype(wide)
    found = x.astype(wide) * _per_channel(x, scale) + _per_channel(x, shift)
    return found.astype(x.dtype)


def _batch_norm(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> jax.Array:
    if training or running_mean is None or running_var is None:
        raise InvalidModel(_TRAINING)
    return _by_channel(input, weight, bias, running_mean, running_var, eps)


def _batch_norm_of_inference(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, NotComputed, NotComputed]:
    # Only training uses the other results.
    return (
        _by_channel(input, weight, bias, running_mean, running_var, eps),
        NOT_COMPUTED,
        NOT_COMPUTED,
    )


def _normalised(
    x: jax.Array, axes: tuple[int, ...], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise over axes; return the result, the mean and the reciprocal standard deviation."""
    wide = x.astype(_wide(x.dtype))
    mean = jnp.mean(wide, axes, keepdims=True)
    centred = wide - mean
    variance = jnp.mean(jnp.square(centred), axes, keepdims=True)
    inverse = jax.lax.rsqrt(variance + as_array(eps, wide.dtype))
    return centred * inverse, mean, inverse


def _native_layer_norm(
    input: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    found, mean, inverse = _normalised(input, axes, eps)
    for values, is_scale in ((weight, True), (bias, False)):
        if values is not None:
            wide = aligned(found, values.astype(found.dtype))[1]
            found = found * wide if is_scale else found + wide
    # PyTorch returns the statistics in the input's dtype on CPUs, in FP32 on GPUs.
    return found.astype(input.dtype), mean.astype(input.dtype), inverse.astype(input.dtype)


def _layer_norm(
    input: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-05,
    cudnn_enable: bool = True,
) -> jax.Array:
    return _native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def _grouped(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, groups: int, eps: float
) -> jax.Array:
    channels = x.shape[1]
    parts = x.reshape((x.shape[0], groups, channels // groups, *x.shape[2:]))
    found = _normalised(parts, tuple(range(2, parts.ndim)), eps)[0].reshape(x.shape)
    if weight is not None:
        found = found * _per_channel(x, weight.astype(found.dtype))
    if bias is not None:
        found = found + _per_channel(x, bias.astype(found.dtype))
    return found.astype(x.dtype)


def _group_norm(
    input: jax.Array,
    num_groups: int,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-05,
    cudnn_enabled: bool = True,
) -> jax.Array:
    return _grouped(input, weight, bias, num_groups, eps)


def _native_group_norm(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[jax.Array, NotComputed, NotComputed]:
    return _grouped(input, weight, bias, group, eps), NOT_COMPUTED, NOT_COMPUTED


def _instance_norm(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> jax.Array:
    if use_input_stats:
        return _grouped(input, weight, bias, input.shape[1], eps)
    if running_mean is None or running_var is None:
        raise InvalidModel("it has no statistics and does not compute them from the input")
    return _by_channel(input, weight, bias, running_mean, running_var, eps)


def _rms_norm(
    input: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None = None,
    eps: float | None = None,
) -> jax.Array:
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    wide = input.astype(_wide(input.dtype))
    least = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    mean = jnp.mean(jnp.square(wide), axes, keepdims=True)
    found = wide * jax.lax.rsqrt(mean + as_array(least, wide.dtype))
    if weight is not None:
        found = found * aligned(found, weight.astype(found.dtype))[1]
    return found.astype(input.dtype)


def _vector_norm(
    self: jax.Array,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: Dtype | None = None,
) -> jax.Array:
    x = jnp.abs(as_array(self, dtype))
    axes = None if dim is None else tuple(dim)
    if math.isinf(ord):
        reduce = jnp.max if ord > 0 else jnp.min
        return reduce(x, axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum((x != 0).astype(x.dtype), axes, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(x, axes, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=keepdim))
    power = as_array(float(ord), x.dtype)
    return jnp.power(jnp.sum(jnp.power(x, power), axes, keepdims=keepdim), 1 / power)


NORMALISATION: Family = {
    "_native_batch_norm_legit_no_training": _batch_norm_of_inference,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "linalg_vector_norm": _vector_norm,
    "native_group_norm": _native_group_norm,
    "native_layer_norm": _native_layer_norm,
    "rms_norm": _rms_norm,
}
