"""Elementwise operators."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family, Operation
from xlaserve.importers.pt2.values import (
    Number,
    Operand,
    aligned,
    as_array,
    common_dtype,
    fractional,
    is_floating,
    promoted,
)

_MOST_INTEGER_POWER = 8


def unary(function: Callable[[jax.Array], jax.Array]) -> Operation:
    """Wrap a function as an operation that keeps the dtype."""

    def compute(self: jax.Array) -> jax.Array:
        return function(self)

    return compute


def real(function: Callable[[jax.Array], jax.Array]) -> Operation:
    """Wrap a function as an operation that converts integers to floats."""

    def compute(self: jax.Array) -> jax.Array:
        return function(fractional(self)[0])

    return compute


def binary(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Operation:
    """Wrap a function of two arrays as an operation that promotes both to one dtype."""

    def compute(self: Operand, other: Operand) -> jax.Array:
        return function(*promoted(self, other))

    return compute


def _integral(function: Callable[[jax.Array], jax.Array]) -> Operation:
    """Wrap a rounding function as an operation that leaves integers unchanged."""

    def compute(self: jax.Array) -> jax.Array:
        return function(self) if is_floating(self.dtype) else self

    return compute


def _add(self: Operand, other: Operand, alpha: Number = 1) -> jax.Array:
    x, y = promoted(self, other)
    if x.dtype == np.bool_:
        return x | y
    return x + _scaled(y, alpha)


def _sub(self: Operand, other: Operand, alpha: Number = 1) -> jax.Array:
    x, y = promoted(self, other)
    return x - _scaled(y, alpha)


def _rsub(self: Operand, other: Operand, alpha: Number = 1) -> jax.Array:
    return _sub(other, self, alpha)


def _scaled(x: jax.Array, factor: Number) -> jax.Array:
    return x if isinstance(factor, int) and factor == 1 else x * as_array(factor, x.dtype)


def _mul(self: Operand, other: Operand) -> jax.Array:
    x, y = promoted(self, other)
    return x & y if x.dtype == np.bool_ else x * y


def _div(self: Operand, other: Operand, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode is None:
        x, y = fractional(self, other)
        return x / y
    x, y = promoted(self, other)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if rounding_mode == "trunc":
        return (
            jnp.trunc(x / y) if is_floating(x.dtype) else jax.lax.div(*jnp.broadcast_arrays(x, y))
        )
    raise InvalidModel(f"rounding_mode: expected floor or trunc, got '{rounding_mode}'")


def _fmod(self: Operand, other: Operand) -> jax.Array:
    return jnp.fmod(*promoted(self, other))


def _pow(self: Operand, exponent: Operand) -> jax.Array:
    dtype = common_dtype(self, exponent)
    x = as_array(self, dtype)
    if isinstance(exponent, int | float) and not isinstance(exponent, bool):
        if exponent == 0.5:
            return jnp.sqrt(x)
        if float(exponent).is_integer() and 0 <= exponent <= _MOST_INTEGER_POWER:
            return jax.lax.integer_pow(x, int(exponent))
    x, y = promoted(x, exponent, dtype=dtype)
    return jnp.power(x, y)


def _pow_scalar(self: Number, exponent: jax.Array) -> jax.Array:
    return jnp.power(*promoted(self, exponent))


def _logical(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Operation:
    def compute(self: jax.Array, other: jax.Array) -> jax.Array:
        x, y = promoted(self, other)
        return function(x != 0, y != 0)

    return compute


def _where(condition: jax.Array, self: Operand, other: Operand) -> jax.Array:
    mask, x, y = aligned(condition != 0, *promoted(self, other))
    return jnp.where(mask, x, y)


def _masked_fill(self: jax.Array, mask: jax.Array, value: Operand) -> jax.Array:
    chosen, filled, x = aligned(mask, as_array(value, self.dtype), self)
    return jnp.where(chosen, filled, x)


def clamp(self: jax.Array, min: Operand | None = None, max: Operand | None = None) -> jax.Array:
    """Limit each element to a range; NaN stays NaN."""
    bounds = [bound for bound in (min, max) if bound is not None]
    dtype = common_dtype(self, *bounds)
    x = as_array(self, dtype)
    if min is not None:
        x = jnp.maximum(*promoted(x, min, dtype=dtype))
    if max is not None:
        x = jnp.minimum(*promoted(x, max, dtype=dtype))
    return x


def _clamp_min(self: jax.Array, min: Operand) -> jax.Array:
    return clamp(self, min)


def _clamp_max(self: jax.Array, max: Operand) -> jax.Array:
    return clamp(self, None, max)


def _round(self: jax.Array, decimals: int = 0) -> jax.Array:
    return jnp.round(self, decimals) if is_floating(self.dtype) else self


def _lerp(self: jax.Array, end: jax.Array, weight: Operand) -> jax.Array:
    x, y, part = promoted(self, end, weight)
    return jnp.where(jnp.abs(part) < 0.5, x + part * (y - x), y - (y - x) * (1 - part))


def _addcmul(
    self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Number = 1
) -> jax.Array:
    x, y, z = promoted(self, tensor1, tensor2)
    return x + _scaled(y * z, value)


def _addcdiv(
    self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: Number = 1
) -> jax.Array:
    x, y, z = fractional(self, tensor1, tensor2)
    return x + _scaled(y / z, value)


def _nan_to_num(
    self: jax.Array,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> jax.Array:
    if not is_floating(self.dtype):
        return self
    return jnp.nan_to_num(self, nan=nan or 0.0, posinf=posinf, neginf=neginf)


_BINARY: Mapping[str, Callable[..., jax.Array]] = {
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "eq": jnp.equal,
    "floor_divide": jnp.floor_divide,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lt": jnp.less,
    "max.other": jnp.maximum,
    "maximum": jnp.maximum,
    "min.other": jnp.minimum,
    "minimum": jnp.minimum,
    "ne": jnp.not_equal,
    "remainder": jnp.remainder,
}

ELEMENTWISE: Family = {
    **{
        name: unary(function)
        for name, function in {
            "abs": jnp.abs,
            "bitwise_not": jnp.bitwise_not,
            "isfinite": jnp.isfinite,
            "isinf": jnp.isinf,
            "isnan": jnp.isnan,
            "logical_not": jnp.logical_not,
            "neg": jnp.negative,
            "sgn": jnp.sign,
            "sign": jnp.sign,
            "square": jnp.square,
        }.items()
    },
    **{
        name: _integral(function)
        for name, function in {"ceil": jnp.ceil, "floor": jnp.floor, "trunc": jnp.trunc}.items()
    },
    **{
        name: real(function)
        for name, function in {
            "acos": jnp.arccos,
            "acosh": jnp.arccosh,
            "asin": jnp.arcsin,
            "asinh": jnp.arcsinh,
            "atan": jnp.arctan,
            "atanh": jnp.arctanh,
            "cos": jnp.cos,
            "cosh": jnp.cosh,
            "erf": jax.lax.erf,
            "erfc": jax.lax.erfc,
            "exp": jnp.exp,
            "exp2": jnp.exp2,
            "expm1": jnp.expm1,
            "log": jnp.log,
            "log10": jnp.log10,
            "log1p": jnp.log1p,
            "log2": jnp.log2,
            "reciprocal": jnp.reciprocal,
            "rsqrt": jax.lax.rsqrt,
            "sin": jnp.sin,
            "sinh": jnp.sinh,
            "sqrt": jnp.sqrt,
            "tan": jnp.tan,
            "tanh": jnp.tanh,
        }.items()
    },
    **{name: binary(function) for name, function in _BINARY.items()},
    **{
        name: _logical(function)
        for name, function in {
            "logical_and": jnp.logical_and,
            "logical_or": jnp.logical_or,
            "logical_xor": jnp.logical_xor,
        }.items()
    },
    "add": _add,
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "atan2": lambda self, other: jnp.arctan2(*fractional(self, other)),
    "clamp": clamp,
    "clamp_max": _clamp_max,
    "clamp_min": _clamp_min,
    "clip": clamp,
    "div": _div,
    "divide": _div,
    "fmod": _fmod,
    "lerp": _lerp,
    "masked_fill": _masked_fill,
    "mul": _mul,
    "multiply": _mul,
    "nan_to_num": _nan_to_num,
    "pow": _pow,
    "pow.Scalar": _pow_scalar,
    "round": _round,
    "rsub": _rsub,
    "sub": _sub,
    "subtract": _sub,
    "true_divide": _div,
    "where": _where,
}
