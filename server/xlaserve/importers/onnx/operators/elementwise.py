"""Elementwise operators: arithmetic, comparison, logic."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from functools import reduce

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, Operation, operator
from xlaserve.importers.onnx.values import Value, aligned, divided, is_host, on_device, placed


def unary(name: str) -> Operation:
    """Return an operation that calls the numpy or jax.numpy function of this name."""

    def compute(_: Node, x: Value) -> Value:
        module, (x,) = placed(x.shape, x)
        found: Value = getattr(module, name)(x)
        return found

    return compute


def binary(name: str) -> Operation:
    """Return an operation that calls the numpy or jax.numpy function of two broadcast values."""

    def compute(_: Node, x: Value, y: Value) -> Value:
        return _apply(name, x, y)

    return compute


def variadic(name: str) -> Operation:
    """Return an operation that folds a binary function over any number of values."""

    def compute(_: Node, *values: Value) -> Value:
        return reduce(lambda x, y: _apply(name, x, y), values)

    return compute


def _apply(name: str, x: Value, y: Value) -> Value:
    module, (x, y) = aligned(x, y)
    if name in _OF_DIMENSIONS and np.object_ in (x.dtype, y.dtype):
        return np.asarray(_OF_DIMENSIONS[name](x, y), np.object_)
    found: Value = getattr(module, name)(x, y)
    return found


# numpy cannot compare symbolic sizes; these functions return symbolic results.
_OF_DIMENSIONS = {
    "maximum": np.frompyfunc(jax.core.max_dim, 2, 1),
    "minimum": np.frompyfunc(jax.core.min_dim, 2, 1),
}


def _reciprocal(_: Node, x: Value) -> Value:
    return 1 / on_device(x)


def _erf(_: Node, x: Value) -> Value:
    return jax.scipy.special.erf(on_device(x))


def _is_inf(node: Node, x: Value) -> Value:
    negative, positive = node.integer("detect_negative", 1), node.integer("detect_positive", 1)
    x = on_device(x)
    return (jnp.isposinf(x) & bool(positive)) | (jnp.isneginf(x) & bool(negative))


def _divide(_: Node, x: Value, y: Value) -> Value:
    is_constant = is_host(y)
    module, (x, y) = aligned(x, y)
    if x.dtype.kind in "iu":
        # ONNX rounds towards zero, numpy towards negative infinity.
        quotient = module.abs(x) // module.abs(y)
        rounded: Value = quotient * module.sign(x) * module.sign(y)
        return rounded if x.dtype.kind == "i" else x // y
    if x.dtype == np.object_:
        return x // y  # sizes are not negative, so rounding does not differ
    if is_constant and module is jnp:
        return divided(on_device(x), y)
    return x / y


def _modulo(node: Node, x: Value, y: Value) -> Value:
    return _apply("fmod" if node.integer("fmod", 0) else "mod", x, y)


def _power(_: Node, x: Value, y: Value) -> Value:
    if is_host(y) and y.size == 1 and y.item() in (2, 3) and not is_host(x):
        return jax.lax.integer_pow(x, int(y.item())).reshape(_at_least(x, y.ndim))
    module, (x, y) = aligned(x, y)
    if x.dtype == y.dtype:
        return _apply("power", x, y)
    # The result has the dtype of the base.
    wide = module.float64 if y.dtype.kind == "f" else x.dtype
    computed: Value = module.power(x.astype(wide), y.astype(wide)).astype(x.dtype)
    return computed


def _at_least(x: Value, rank: int) -> tuple[int, ...]:
    return (1,) * (rank - x.ndim) + x.shape


def _mean(_: Node, *values: Value) -> Value:
    total = reduce(lambda x, y: _apply("add", x, y), values)
    return total / np.asarray(len(values), total.dtype)


def _bit_shift(node: Node, x: Value, y: Value) -> Value:
    names = {"LEFT": "left_shift", "RIGHT": "right_shift"}
    return _apply(names[node.text("direction")], x, y)


def _where(_: Node, condition: Value, x: Value, y: Value) -> Value:
    module, (condition, x, y) = aligned(condition, x, y)
    chosen: Value = module.where(condition, x, y)
    return chosen


def _clip(_: Node, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    if low is not None:
        x = _apply("maximum", x, low)
    return x if high is None else _apply("minimum", x, high)


def _identity(_: Node, x: Value) -> Value:
    return x


def _dropout(
    node: Node, x: Value, ratio: Value | None = None, training: Value | None = None
) -> Value | tuple[Value, ...]:
    node.integer("seed", 0)
    if training is not None and bool(np.any(training)) and bool(np.any(ratio)):
        raise InvalidModel("training_mode is on, which serving does not support")
    return (x, jnp.ones(x.shape, jnp.bool_)) if node.needs(1) else x


_UNARY = {
    "Abs": "abs",
    "Acos": "arccos",
    "Acosh": "arccosh",
    "Asin": "arcsin",
    "Asinh": "arcsinh",
    "Atan": "arctan",
    "Atanh": "arctanh",
    "BitwiseNot": "invert",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Exp": "exp",
    "Floor": "floor",
    "IsNaN": "isnan",
    "Log": "log",
    "Neg": "negative",
    "Not": "logical_not",
    "Round": "rint",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
}
"""Unary operators with the names of their numpy and jax.numpy functions."""

_BINARY = {
    "Add": "add",
    "And": "logical_and",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Equal": "equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Mul": "multiply",
    "Or": "logical_or",
    "Sub": "subtract",
    "Xor": "logical_xor",
}

_VARIADIC = {"Max": "maximum", "Min": "minimum", "Sum": "add"}

ELEMENTWISE: Family = {
    **{name: operator(unary(called)) for name, called in _UNARY.items()},
    **{name: operator(binary(called)) for name, called in _BINARY.items()},
    **{name: operator(variadic(called)) for name, called in _VARIADIC.items()},
    "BitShift": operator(_bit_shift),
    "Clip": operator(_clip),
    "Div": operator(_divide),
    "Dropout": operator(_dropout, 1, 2),
    "Erf": operator(_erf),
    "Identity": operator(_identity),
    "IsInf": operator(_is_inf),
    "Mean": operator(_mean),
    "Mod": operator(_modulo),
    "Pow": operator(_power),
    "Reciprocal": operator(_reciprocal),
    "Where": operator(_where),
}
