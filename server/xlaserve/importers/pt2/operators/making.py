"""Operators that create tensors from shapes and numbers."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family, Operation
from xlaserve.importers.pt2.values import FLOAT, Dtype, Number, as_array, is_open, number_dtype

Sizes = Sequence[int]


def _full(size: Sizes, fill_value: Number, dtype: Dtype | None = None) -> jax.Array:
    value = as_array(fill_value, dtype or number_dtype(fill_value))
    return jnp.broadcast_to(value, tuple(size))


def _filled(value: int) -> Operation:
    def compute(size: Sizes, dtype: Dtype | None = None) -> jax.Array:
        return _full(size, value, dtype or FLOAT)

    return compute


def _filled_like(value: int) -> Operation:
    def compute(self: jax.Array, dtype: Dtype | None = None) -> jax.Array:
        return _full(self.shape, value, dtype or self.dtype)

    return compute


def _new_filled(value: int) -> Operation:
    def compute(self: jax.Array, size: Sizes, dtype: Dtype | None = None) -> jax.Array:
        return _full(size, value, dtype or self.dtype)

    return compute


def _full_like(self: jax.Array, fill_value: Number, dtype: Dtype | None = None) -> jax.Array:
    return _full(self.shape, fill_value, dtype or self.dtype)


def _new_full(
    self: jax.Array, size: Sizes, fill_value: Number, dtype: Dtype | None = None
) -> jax.Array:
    return _full(size, fill_value, dtype or self.dtype)


def _fill(self: jax.Array, value: Number | jax.Array) -> jax.Array:
    return jnp.broadcast_to(as_array(value, self.dtype), self.shape)


def _zero(self: jax.Array) -> jax.Array:
    return jnp.zeros_like(self)


def _copy(self: jax.Array, src: jax.Array) -> jax.Array:
    return jnp.broadcast_to(
        as_array(src, self.dtype).reshape((1,) * (self.ndim - src.ndim) + src.shape), self.shape
    )


def _arange(end: Number, dtype: Dtype | None = None) -> jax.Array:
    return _arange_from(0, end, 1, dtype)


def _arange_from(
    start: Number, end: Number, step: Number = 1, dtype: Dtype | None = None
) -> jax.Array:
    is_float = any(isinstance(number, float) for number in (start, end, step))
    wanted = dtype or (FLOAT if is_float else np.dtype(np.int64))
    if is_float:
        if any(map(is_open, (start, end, step))):
            raise InvalidModel("it has a fractional step over a dynamic dimension")
        count = max(0, math.ceil((end - start) / step))
        return (jnp.arange(count) * step + start).astype(wanted)
    return jnp.arange(start, end, step, dtype=wanted)


def _linspace(start: Number, end: Number, steps: int, dtype: Dtype | None = None) -> jax.Array:
    return jnp.linspace(start, end, steps, dtype=dtype or FLOAT)


def _eye(n: int, m: int | None = None, dtype: Dtype | None = None) -> jax.Array:
    return jnp.eye(n, m, dtype=dtype or FLOAT)


def _scalar_tensor(s: Number, dtype: Dtype | None = None) -> jax.Array:
    return as_array(s, dtype or FLOAT)


def _one_hot(self: jax.Array, num_classes: int = -1) -> jax.Array:
    if num_classes == -1:
        raise InvalidModel("num_classes depends on data: set a constant")
    return jax.nn.one_hot(self, num_classes, dtype=np.int64)


MAKING: Family = {
    "arange": _arange,
    "arange.start": _arange_from,
    "arange.start_step": _arange_from,
    "copy": _copy,
    "empty": _filled(0),
    "empty_like": _filled_like(0),
    "eye": _eye,
    "fill": _fill,
    "full": _full,
    "full_like": _full_like,
    "linspace": _linspace,
    "new_empty": _new_filled(0),
    "new_full": _new_full,
    "new_ones": _new_filled(1),
    "new_zeros": _new_filled(0),
    "one_hot": _one_hot,
    "ones": _filled(1),
    "ones_like": _filled_like(1),
    "scalar_tensor": _scalar_tensor,
    "zero": _zero,
    "zeros": _filled(0),
    "zeros_like": _filled_like(0),
}
