"""Activation functions, and operators that have no effect in inference."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.elementwise import clamp, real
from xlaserve.importers.pt2.operators.table import Family, Operation
from xlaserve.importers.pt2.values import Dtype, Number, as_array, axis_of

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _relu(self: jax.Array) -> jax.Array:
    return jnp.maximum(self, jnp.zeros_like(self))


def _relu6(self: jax.Array) -> jax.Array:
    return clamp(self, 0, 6)


def _leaky_relu(self: jax.Array, negative_slope: float = 0.01) -> jax.Array:
    return jnp.where(self > 0, self, self * as_array(negative_slope, self.dtype))


def _elu(
    self: jax.Array, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1
) -> jax.Array:
    below = jnp.expm1(self * as_array(input_scale, self.dtype)) * as_array(alpha, self.dtype)
    return jnp.where(self > 0, self, below) * as_array(scale, self.dtype)


def _selu(self: jax.Array) -> jax.Array:
    return _elu(self, _SELU_ALPHA, _SELU_SCALE)


def _celu(self: jax.Array, alpha: float = 1.0) -> jax.Array:
    return _elu(self, alpha, 1, 1 / alpha)


def _gelu(self: jax.Array, approximate: str = "none") -> jax.Array:
    if approximate not in ("none", "tanh"):
        raise InvalidModel(f"approximate: expected none or tanh, got '{approximate}'")
    if approximate == "tanh":
        return jax.nn.gelu(self, approximate=True)
    half = as_array(np.sqrt(0.5).item(), self.dtype)
    return self * (1 + jax.lax.erf(self * half)) / 2


def _hardswish(self: jax.Array) -> jax.Array:
    return self * clamp(self + 3, 0, 6) / 6


def _hardsigmoid(self: jax.Array) -> jax.Array:
    return clamp(self + 3, 0, 6) / 6


def _hardtanh(self: jax.Array, min_val: Number = -1, max_val: Number = 1) -> jax.Array:
    return clamp(self, min_val, max_val)


def _softplus(self: jax.Array, beta: Number = 1, threshold: Number = 20) -> jax.Array:
    scaled = self * as_array(beta, self.dtype)
    soft = jnp.log1p(jnp.exp(scaled)) / as_array(beta, self.dtype)
    return jnp.where(scaled > as_array(threshold, self.dtype), self, soft)


def _threshold(self: jax.Array, threshold: Number, value: Number) -> jax.Array:
    return jnp.where(self <= as_array(threshold, self.dtype), as_array(value, self.dtype), self)


def _mish(self: jax.Array) -> jax.Array:
    return self * jnp.tanh(jax.nn.softplus(self))


def _prelu(self: jax.Array, weight: jax.Array) -> jax.Array:
    shape = [1] * self.ndim
    if self.ndim > 1:
        shape[1] = weight.size
    elif self.ndim == 1:
        shape[0] = weight.size
    return jnp.where(self > 0, self, self * weight.reshape(shape))


def _glu(self: jax.Array, dim: int = -1) -> jax.Array:
    value, gate = jnp.split(self, 2, axis_of(dim, self.ndim))
    return value * jax.nn.sigmoid(gate)


def _hardshrink(self: jax.Array, lambd: Number = 0.5) -> jax.Array:
    inside = jnp.abs(self) <= as_array(lambd, self.dtype)
    return jnp.where(inside, jnp.zeros_like(self), self)


def _softshrink(self: jax.Array, lambd: Number = 0.5) -> jax.Array:
    by = as_array(lambd, self.dtype)
    zero = jnp.zeros_like(self)
    return jnp.where(self > by, self - by, jnp.where(self < -by, self + by, zero))


def _along(function: Callable[..., jax.Array]) -> Operation:
    def compute(self: jax.Array, dim: int, dtype: Dtype | None = None) -> jax.Array:
        x = as_array(self, dtype)
        return function(x, axis=axis_of(dim, x.ndim)) if x.ndim else function(x.reshape(1))[0]

    return compute


def _along_decomposed(function: Callable[..., jax.Array]) -> Operation:
    def compute(self: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
        return _along(function)(self, dim, np.dtype(np.float32) if half_to_float else None)  # type: ignore[no-any-return]

    return compute


def _no_dropout(input: jax.Array, p: float, train: bool) -> jax.Array:
    if train and p:
        raise InvalidModel(
            "it applies dropout, as in training: call model.eval() before the export"
        )
    return input


def _no_native_dropout(
    input: jax.Array, p: float, train: bool | None
) -> tuple[jax.Array, jax.Array]:
    return _no_dropout(input, p, train is not False), jnp.ones(input.shape, np.bool_)


ACTIVATION: Family = {
    "_log_softmax": _along_decomposed(jax.nn.log_softmax),
    "_softmax": _along_decomposed(jax.nn.softmax),
    "alpha_dropout": _no_dropout,
    "celu": _celu,
    "dropout": _no_dropout,
    "elu": _elu,
    "feature_dropout": _no_dropout,
    "gelu": _gelu,
    "glu": _glu,
    "hardshrink": _hardshrink,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "hardtanh": _hardtanh,
    "leaky_relu": _leaky_relu,
    "log_sigmoid": real(jax.nn.log_sigmoid),
    "log_softmax": _along(jax.nn.log_softmax),
    "mish": _mish,
    "native_dropout": _no_native_dropout,
    "prelu": _prelu,
    "relu": _relu,
    "relu6": _relu6,
    "selu": _selu,
    "sigmoid": real(jax.nn.sigmoid),
    "silu": real(jax.nn.silu),
    "softmax": _along(jax.nn.softmax),
    "softplus": _softplus,
    "softshrink": _softshrink,
    "threshold": _threshold,
}
