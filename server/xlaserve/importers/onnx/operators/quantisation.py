"""Quantisation and dequantisation, and operators on quantised tensors."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.datatypes import any_dtype_of, dtype_of, is_narrow
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.conversion import FEW_BITS, converted, fitted
from xlaserve.importers.onnx.operators.convolution import per_channel
from xlaserve.importers.onnx.operators.levels import convolved_levels, matrix_levels
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, axis_of, divided, on_device

_UINT8 = 2


def _spread(node: Node, x: jax.Array, value: Value) -> jax.Array:
    """Reshape scales or zero points to broadcast over x: per tensor, per axis, or per block."""
    axis, block = node.integer("axis", 1), node.integer("block_size", 0)
    array = on_device(value)
    if array.size == 1:
        return array.reshape((1,) * x.ndim)
    axis = axis_of(axis, x.ndim)
    if array.ndim == 1 and not block:
        return array.reshape([-1 if place == axis else 1 for place in range(x.ndim)])
    repeated = jnp.repeat(array, block, axis=axis)
    return jax.lax.slice_in_dim(repeated, 0, x.shape[axis], axis=axis)


def quantize(node: Node, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """Quantise a tensor as the node and the scales specify (QuantizeLinear)."""
    saturate = bool(node.integer("saturate", 1))
    node.integer("precision", 0)
    declared = any_dtype_of(node.integer("output_dtype", _UINT8) or _UINT8)
    dtype = declared if zero is None else zero.dtype
    array = on_device(x)
    steps = _spread(node, array, scale)
    levels = divided(array.astype(steps.dtype), steps)
    if is_narrow(dtype) and dtype not in FEW_BITS:
        # Floats have no zero point other than 0, and the conversion rounds them.
        return converted(fitted(levels, dtype, saturate=saturate), dtype)
    offset = None if zero is None else _spread(node, array, zero)
    return rounded(levels, offset, dtype)


def rounded(x: jax.Array, zero: jax.Array | None, dtype: "np.dtype[Any]") -> jax.Array:
    """Round to integers of a datatype, add the zero point, and clip."""
    if dtype.kind not in "iu" and dtype not in FEW_BITS:
        raise InvalidModel(f"quantization to {dtype} is not implemented")
    limits = ml_dtypes.iinfo(dtype)
    level = jnp.rint(x)
    shifted = level if zero is None else level + zero.astype(level.dtype)
    return jnp.clip(shifted, int(limits.min), int(limits.max)).astype(dtype)


def dequantize(node: Node, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """Return the numbers that quantised values represent (DequantizeLinear)."""
    declared = node.integer("output_dtype", 0)
    array = on_device(x)
    steps = _spread(node, array, scale)
    level = array.astype(steps.dtype)
    if zero is not None:
        level = level - _spread(node, array, zero).astype(steps.dtype)
    result = level * steps
    return result.astype(dtype_of(declared)) if declared else result


def dynamic(_: Node, x: Value) -> tuple[Value, ...]:
    """Quantise to UINT8; return values, scale and zero point (DynamicQuantizeLinear)."""
    return dynamic_levels(on_device(x))


def dynamic_levels(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantise a tensor to UINT8 with a computed scale; return values, scale and zero point."""
    zero = jnp.zeros((), array.dtype)
    low, high = jnp.minimum(array.min(), zero), jnp.maximum(array.max(), zero)
    # For a tensor of zeros any scale except 0 works; onnxruntime uses 1.
    scale = jnp.where(high > low, divided(high - low, jnp.asarray(255, array.dtype)), 1)
    point = jnp.clip(jnp.rint(-low / scale), 0, 255)
    level = jnp.clip(jnp.rint(array / scale) + point, 0, 255)
    return level.astype(jnp.uint8), scale.astype(array.dtype), point.astype(jnp.uint8)


def _matmul_integer(
    _: Node, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None
) -> Value:
    return matrix_levels(a, a_zero, b, b_zero)


def _conv_integer(
    node: Node, x: Value, w: Value, x_zero: Value | None = None, w_zero: Value | None = None
) -> Value:
    return convolved_levels(node, x, x_zero, w, w_zero)


def _quantised_matmul(
    _: Node,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    y_scale: Value,
    y_zero: Value,
) -> Value:
    total = matrix_levels(a, a_zero, b, b_zero)
    scale = on_device(a_scale) * on_device(b_scale) / on_device(y_scale)
    factor = scale.reshape((1,) * (total.ndim - scale.ndim) + scale.shape)
    zero = on_device(y_zero).reshape((1,) * total.ndim)
    return rounded(total.astype(scale.dtype) * factor, zero, y_zero.dtype)


def quantised_conv(
    node: Node,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    w: Value,
    w_scale: Value,
    w_zero: Value,
    y_scale: Value,
    y_zero: Value,
    bias: Value | None = None,
) -> Value:
    """Convolve quantised tensors and requantise the result."""
    total = convolved_levels(node, x, x_zero, w, w_zero)
    if bias is not None:
        total = total + per_channel(bias, total.ndim)
    scale = on_device(x_scale).reshape(()) * on_device(w_scale).reshape(-1)
    factor = per_channel(scale / on_device(y_scale).reshape(()), total.ndim)
    zero = on_device(y_zero).reshape((1,) * total.ndim)
    return rounded(total.astype(factor.dtype) * factor, zero, y_zero.dtype)


QUANTISATION: Family = {
    "ConvInteger": operator(_conv_integer),
    "DequantizeLinear": operator(dequantize),
    "DynamicQuantizeLinear": operator(dynamic),
    "MatMulInteger": operator(_matmul_integer),
    "QLinearConv": operator(quantised_conv),
    "QLinearMatMul": operator(_quantised_matmul),
    "QuantizeLinear": operator(quantize),
}
