"""Activation functions."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, Operation, operator
from xlaserve.importers.onnx.values import Value, aligned, axis_of, on_device

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def plain(function: Callable[[jax.Array], jax.Array]) -> Operation:
    """Wrap a function of one array as an operation without attributes."""

    def compute(_: Node, x: Value) -> Value:
        return function(on_device(x))

    return compute


def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, jnp.zeros((), x.dtype).reshape((1,) * x.ndim))


def _mish(x: jax.Array) -> jax.Array:
    return x * jnp.tanh(jax.nn.softplus(x))


def _hard_swish(x: jax.Array) -> jax.Array:
    return x * jnp.clip(x / 6 + 0.5, 0, 1)


def _softsign(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.abs(x))


def _leaky_relu(node: Node, x: Value) -> Value:
    alpha, x = node.real("alpha", 0.01), on_device(x)
    return jnp.where(x >= 0, x, x * alpha)


def _elu(node: Node, x: Value) -> Value:
    alpha, x = node.real("alpha", 1.0), on_device(x)
    return jnp.where(x > 0, x, alpha * jnp.expm1(x))


def _selu(node: Node, x: Value) -> Value:
    alpha, gamma = node.real("alpha", SELU_ALPHA), node.real("gamma", SELU_GAMMA)
    x = on_device(x)
    return gamma * jnp.where(x > 0, x, alpha * jnp.expm1(x))


def _celu(node: Node, x: Value) -> Value:
    return jax.nn.celu(on_device(x), node.real("alpha", 1.0))


def _hard_sigmoid(node: Node, x: Value) -> Value:
    alpha, beta = node.real("alpha", 0.2), node.real("beta", 0.5)
    return jnp.clip(on_device(x) * alpha + beta, 0, 1)


def _thresholded_relu(node: Node, x: Value) -> Value:
    alpha, x = node.real("alpha", 1.0), on_device(x)
    return jnp.where(x > alpha, x, jnp.zeros_like(x))


def _shrink(node: Node, x: Value) -> Value:
    bias, limit = node.real("bias", 0.0), node.real("lambd", 0.5)
    x = on_device(x)
    inside = jnp.where(x > limit, x - bias, jnp.zeros_like(x))
    return jnp.where(x < -limit, x + bias, inside).astype(x.dtype)


def _swish(node: Node, x: Value) -> Value:
    alpha, x = node.real("alpha", 1.0), on_device(x)
    return x * jax.nn.sigmoid(x * alpha)


def _swiglu(node: Node, gate: Value, x: Value) -> Value:
    if gate.shape != x.shape:
        raise InvalidModel(f"expected two inputs of equal shape, got {gate.shape} and {x.shape}")
    return _swish(node, gate) * on_device(x)


def _gelu(node: Node, x: Value) -> Value:
    approximate = node.text("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise InvalidModel(f"approximate: expected none or tanh, got {approximate}")
    return jax.nn.gelu(on_device(x), approximate=approximate == "tanh")


def _prelu(_: Node, x: Value, slope: Value) -> Value:
    if x.ndim > 2 and slope.shape == (x.shape[1],) and x.shape[1] != x.shape[-1]:
        # Before opset 7 there was a slope per channel, which onnx's version converter does not
        # change.
        slope = slope.reshape(slope.shape + (1,) * (x.ndim - 2))
    module, (x, slope) = aligned(x, slope)
    chosen: Value = module.where(x >= 0, x, x * slope)
    return chosen


def _along_axis(function: Callable[..., jax.Array]) -> Operation:
    def compute(node: Node, x: Value) -> Value:
        axis = axis_of(node.integer("axis", -1), x.ndim)
        return function(on_device(x), axis=axis)

    return compute


def _hardmax(x: jax.Array, axis: int) -> jax.Array:
    first = jnp.argmax(x, axis=axis, keepdims=True)
    return (jax.lax.broadcasted_iota(first.dtype, x.shape, axis) == first).astype(x.dtype)


ACTIVATION: Family = {
    "Celu": operator(_celu),
    "Elu": operator(_elu),
    "Gelu": operator(_gelu),
    "HardSigmoid": operator(_hard_sigmoid),
    "HardSwish": operator(plain(_hard_swish)),
    "Hardmax": operator(_along_axis(_hardmax)),
    "LeakyRelu": operator(_leaky_relu),
    "LogSoftmax": operator(_along_axis(jax.nn.log_softmax)),
    "Mish": operator(plain(_mish)),
    "PRelu": operator(_prelu),
    "Relu": operator(plain(_relu)),
    "Selu": operator(_selu),
    "Shrink": operator(_shrink),
    "Sigmoid": operator(plain(jax.nn.sigmoid)),
    "Softmax": operator(_along_axis(jax.nn.softmax)),
    "Softplus": operator(plain(jax.nn.softplus)),
    "Softsign": operator(plain(_softsign)),
    "SwiGLU": operator(_swiglu),
    "Swish": operator(_swish),
    "ThresholdedRelu": operator(_thresholded_relu),
}
