"""Datatype conversions, with ONNX's overflow rules."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.datatypes import any_dtype_of, dtype_of
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, is_host, on_device, placed

FEW_BITS = frozenset(
    np.dtype(kind) for kind in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2)
)
_EIGHT_BITS = frozenset(
    np.dtype(kind)
    for kind in (
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
    )
)
_POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)

_NO_NUMBER = 0xFF
"""Biased exponent of FP32 infinities and NaN; also the NaN of FLOAT8E8M0."""

_FRACTION = 0x7FFFFF
_NAN = 0x7FC00000
_HALF = 1 << 22
_NEVER = _FRACTION + 1
_ROUNDED_UP = {"up": (1, 1), "down": (_NEVER, _NEVER), "nearest": (_HALF + 1, _HALF)}
"""Smallest fractions that round up, for subnormal and normal FP32 numbers, by `round_mode` (onnx,
Cast)."""


def _cast(node: Node, x: Value) -> Value:
    return _to(x, any_dtype_of(node.integer("to")), node)


def _cast_like(node: Node, x: Value, like: Value) -> Value:
    """Convert to the datatype of another tensor."""
    return _to(x, np.dtype(np.int64) if like.dtype == np.object_ else like.dtype, node)


def _to(x: Value, dtype: "np.dtype[Any]", node: Node) -> Value:
    saturate = bool(node.integer("saturate", 1))
    mode = node.text("round_mode", "up")
    if x.dtype == dtype:
        return x
    if dtype == _POWERS:
        return _power(converted(x, np.dtype(np.float32)), mode, saturate=saturate)
    numbers = _of_power(x) if x.dtype == _POWERS else x
    return converted(fitted(numbers, dtype, saturate=saturate), dtype)


def _power(x: Value, mode: str, *, saturate: bool) -> Value:
    """Round FP32 to FLOAT8E8M0, an unsigned power of two that stores only FP32's exponent.

    This works on the bits because some XLA backends lack the conversion or flush subnormals.
    """
    if mode not in _ROUNDED_UP:
        raise InvalidModel(f"round_mode: expected {', '.join(_ROUNDED_UP)}, got {mode}")
    module, (x,) = placed(x.shape, x)
    bits = x.view(np.uint32)
    exponent, fraction = (bits >> 23) & _NO_NUMBER, bits & _FRACTION
    may_rise = (exponent < (_NO_NUMBER - 1 if saturate else _NO_NUMBER)).astype(np.uint32)
    rises = (fraction >= module.where(exponent == 0, *_ROUNDED_UP[mode])).astype(np.uint32)
    found: Value = (exponent + may_rise * rises).astype(np.uint8).view(_POWERS)
    return found


def _of_power(x: Value) -> Value:
    """Convert FLOAT8E8M0 to FP32; the smallest value becomes a subnormal."""
    module, (x,) = placed(x.shape, x)
    exponent = x.view(np.uint8).astype(np.uint32)
    least = module.where(exponent == 0, np.uint32(_HALF), exponent << 23)
    found: Value = module.where(exponent == _NO_NUMBER, np.uint32(_NAN), least).view(np.float32)
    return found


def _bit_cast(node: Node, x: Value) -> Value:
    dtype, array = dtype_of(node.integer("to")), on_device(x)
    if dtype.itemsize != array.dtype.itemsize:
        raise InvalidModel(f"expected a type as wide as {array.dtype}, got {dtype}")
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if dtype == np.bool_:
        return jax.lax.bitcast_convert_type(array, jnp.uint8) != 0
    return jax.lax.bitcast_convert_type(array, dtype)


def fitted(x: Value, dtype: "np.dtype[np.generic]", *, saturate: bool) -> Value:
    """Apply ONNX's overflow rules, which differ from XLA's, before a narrowing conversion.

    Conversions to 8-bit floats saturate unless `saturate` is off; conversions to integers of 4 or 2
    bits keep the low bits (onnx, Cast).
    """
    if x.dtype.kind in "iub" or x.dtype == dtype:
        return x
    if dtype in FEW_BITS:
        return converted(x, np.dtype(np.int32))
    if dtype in _EIGHT_BITS and saturate:
        limits = ml_dtypes.finfo(dtype)
        low, high = (np.asarray(limit).astype(x.dtype) for limit in (limits.min, limits.max))
        module, (x,) = placed(x.shape, x)
        clipped: Value = module.minimum(module.maximum(x, low), high)
        return clipped
    return x


def converted(x: Value, dtype: "np.dtype[np.generic]") -> Value:
    """Convert a value with the rules of numpy or XLA."""
    if is_host(x) and x.dtype == np.object_ and dtype in (np.int64, np.int32):
        return x  # symbolic dimensions fit both datatypes
    if x.dtype == dtype:
        return x
    if x.dtype == _POWERS:
        return converted(_of_power(x), dtype)
    module, (x,) = placed(x.shape, x)
    with np.errstate(invalid="ignore", over="ignore"):
        return x.astype(dtype) if module is np else on_device(x).astype(dtype)


CONVERSION: Family = {
    "BitCast": operator(_bit_cast),
    "Cast": operator(_cast),
    "CastLike": operator(_cast_like),
}
