"""Quantised operators of com.microsoft.

Operators with quantised inputs and outputs dequantise to FP32, compute, and requantise once.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.levels import matrix_levels
from xlaserve.importers.onnx.operators.pooling import average_pool
from xlaserve.importers.onnx.operators.quantisation import (
    dequantize,
    dynamic,
    quantised_conv,
    quantize,
    rounded,
)
from xlaserve.importers.onnx.operators.table import Family, Operation, operator
from xlaserve.importers.onnx.values import Value, axis_of, divided, on_device, with_rank


def _real(x: Value, scale: Value, zero: Value | None) -> jax.Array:
    """Dequantise a tensor with one scale."""
    step = on_device(scale).reshape(())
    level = on_device(x).astype(step.dtype)
    return (
        level if zero is None else level - on_device(zero).reshape(()).astype(step.dtype)
    ) * step


def _levels(x: jax.Array, scale: Value, zero: Value | None, like: Value) -> jax.Array:
    point = None if zero is None else on_device(zero).reshape(())
    quotient = divided(x, on_device(scale).reshape((1,) * x.ndim))
    return rounded(quotient, point, np.dtype(like.dtype))


def _binary(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Operation:
    def compute(
        _: Node,
        a: Value,
        a_scale: Value,
        a_zero: Value | None,
        b: Value,
        b_scale: Value,
        b_zero: Value | None,
        y_scale: Value,
        y_zero: Value | None = None,
    ) -> Value:
        rank = max(a.ndim, b.ndim)
        left, right = _real(a, a_scale, a_zero), _real(b, b_scale, b_zero)
        found = function(on_device(with_rank(left, rank)), on_device(with_rank(right, rank)))
        return _levels(found, y_scale, y_zero, a)

    return compute


def _unary(function: Callable[[Node, jax.Array], jax.Array]) -> Operation:
    def compute(
        node: Node,
        x: Value,
        x_scale: Value,
        x_zero: Value | None,
        y_scale: Value,
        y_zero: Value | None = None,
    ) -> Value:
        found = function(node, _real(x, x_scale, x_zero))
        return _levels(found, y_scale, y_zero, x)

    return compute


def _leaky_relu(node: Node, x: jax.Array) -> jax.Array:
    return jnp.where(x >= 0, x, x * node.real("alpha", 0.01))


def _sigmoid(_: Node, x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(x)


def _softmax(node: Node, x: jax.Array) -> jax.Array:
    axis = axis_of(node.integer("axis", -1), x.ndim)
    if node.integer("opset") >= 13:
        return jax.nn.softmax(x, axis=axis)
    return jax.nn.softmax(x, axis=tuple(range(axis, x.ndim)))


def _channels_first(
    node: Node, x: jax.Array, function: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Apply a channels-first function; transpose if the node has `channels_last`."""
    if not node.integer("channels_last", 0):
        return function(x)
    return jnp.moveaxis(function(jnp.moveaxis(x, -1, 1)), 1, -1)


def _average_pool(node: Node, x: jax.Array) -> jax.Array:
    return _channels_first(node, x, lambda image: on_device(average_pool(node, image)))


def _global_average(node: Node, x: jax.Array) -> jax.Array:
    def mean(image: jax.Array) -> jax.Array:
        return jnp.mean(image, axis=tuple(range(2, image.ndim)), keepdims=True)

    return _channels_first(node, x, mean)


def _conv(node: Node, x: Value, *rest: Value) -> Value:
    def convolve(image: jax.Array) -> jax.Array:
        return on_device(quantised_conv(node, image, *rest))

    return _channels_first(node, on_device(x), convolve)


def _concat(node: Node, y_scale: Value, y_zero: Value, *parts: Value) -> Value:
    if len(parts) % 3:
        raise InvalidModel(f"expected tensors with a scale and a zero point each, got {len(parts)}")
    triples = zip(parts[0::3], parts[1::3], parts[2::3], strict=True)
    whole = jnp.concatenate([_real(*triple) for triple in triples], axis=node.integer("axis"))
    return _levels(whole, y_scale, y_zero, parts[0])


def _where(
    _: Node,
    condition: Value,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    y: Value,
    y_scale: Value,
    y_zero: Value,
    z_scale: Value,
    z_zero: Value,
) -> Value:
    rank = max(condition.ndim, x.ndim, y.ndim)
    chosen, left, right = (
        on_device(with_rank(value, rank))
        for value in (condition, _real(x, x_scale, x_zero), _real(y, y_scale, y_zero))
    )
    return _levels(jnp.where(chosen, left, right), z_scale, z_zero, x)


# --- products ----------------------------------------------------------------------------------


def _to_float(
    _: Node,
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero: Value | None = None,
    b_zero: Value | None = None,
    bias: Value | None = None,
) -> Value:
    if a_scale.size != 1:
        raise InvalidModel(f"its a_scale: expected one element, got {a_scale.size}")
    total = matrix_levels(a, a_zero, b, b_zero)
    steps = on_device(a_scale).reshape(()) * on_device(b_scale)
    factor = steps.reshape(-1) if steps.ndim < 2 else steps
    found = total.astype(steps.dtype) * on_device(with_rank(factor, total.ndim))
    return found if bias is None else found + on_device(with_rank(on_device(bias), found.ndim))


def _dynamic(
    node: Node,
    a: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value | None = None,
    bias: Value | None = None,
) -> Value:
    levels, scale, zero = dynamic(node, a)
    return _to_float(node, levels, b, scale, b_scale, zero, b_zero, bias)


def _gemm(
    node: Node,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    c: Value | None = None,
    y_scale: Value | None = None,
    y_zero: Value | None = None,
) -> Value:
    left = on_device(a).T if node.integer("transA", 0) else a
    right = on_device(b).T if node.integer("transB", 0) else b
    total = matrix_levels(left, on_device(a_zero).reshape(()), right, on_device(b_zero).reshape(-1))
    if c is not None:
        total = total + on_device(with_rank(on_device(c), 2))
    steps = on_device(a_scale).reshape(()) * on_device(b_scale).reshape(-1)
    alpha = node.real("alpha", 1.0)
    found = total.astype(steps.dtype) * (steps * np.asarray(alpha, steps.dtype))[None, :]
    if y_scale is None:
        return found
    if y_zero is None:
        raise InvalidModel("its output has a scale but no zero point")
    return _levels(found, y_scale, y_zero, y_zero)


QUANTISED: Family = {
    "DequantizeLinear": operator(dequantize),
    "DynamicQuantizeMatMul": operator(_dynamic),
    "MatMulIntegerToFloat": operator(_to_float),
    "QGemm": operator(_gemm),
    "QLinearAdd": operator(_binary(jnp.add)),
    "QLinearAveragePool": operator(_unary(_average_pool)),
    "QLinearConcat": operator(_concat),
    "QLinearConv": operator(_conv),
    "QLinearGlobalAveragePool": operator(_unary(_global_average)),
    "QLinearLeakyRelu": operator(_unary(_leaky_relu)),
    "QLinearMul": operator(_binary(jnp.multiply)),
    "QLinearSigmoid": operator(_unary(_sigmoid)),
    "QLinearSoftmax": operator(_unary(_softmax)),
    "QLinearWhere": operator(_where),
    "QuantizeLinear": operator(quantize),
}
