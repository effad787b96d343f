"""Exact sums of products of 8-bit integers less a zero point.

XLA's CPU backend multiplies matrices of INT8 in machine instructions for them, and convolves FP32
as quickly as it can; INT32 it does in plain loops, 20 times slower. So matrices stay INT8, with the
zero points taken off the result, and convolutions are FP32, in parts that are exact.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from functools import partial, reduce
from itertools import pairwise
from math import prod
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.convolution import convolved
from xlaserve.importers.onnx.operators.linear import matrix_product
from xlaserve.importers.onnx.values import Value, on_device, with_rank

_BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
_EXACT = 1 << 24
"""The largest integer up to which FP32 represents all: sums below it in absolute value are exact.
"""


def matrix_levels(a: Value, a_zero: Value | None, b: Value, b_zero: Value | None) -> jax.Array:
    """Multiply matrices of levels: [...,M,K] by [...,K,N] in INT32.

    The zero point of `a` is one for all or one for each row, that of `b` one for each column.
    """
    if a.dtype not in _BYTES or b.dtype not in _BYTES or min(a.ndim, b.ndim) < 2:
        return matrix_product(centred(a, a_zero, last=False), centred(b, b_zero, last=True))
    rank = max(a.ndim, b.ndim)
    left, left_zero = _signed(a, a_zero, rank, last=False)
    right, right_zero = _signed(b, b_zero, rank, last=True)
    total = matrix_product(left, right, jnp.int32)
    if left_zero is not None:
        ones = jnp.ones((1, right.shape[-2]), jnp.int8)
        columns = with_rank(matrix_product(ones, right, jnp.int32), rank)
        total = total - left_zero * columns
    if right_zero is not None:
        ones = jnp.ones((left.shape[-1], 1), jnp.int8)
        rows = on_device(with_rank(matrix_product(left, ones, jnp.int32), rank))
        if left_zero is not None:
            rows = rows - left_zero * left.shape[-1]
        total = total - rows * right_zero
    return total


def _signed(
    x: Value, zero: Value | None, rank: int, *, last: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return levels as INT8 with their zero point; None if it is 0."""
    array = on_device(x)
    point = None if zero is None else _point(zero, rank, last=last)
    if array.dtype == np.int8:
        return array, point
    moved = lax.bitcast_convert_type(array ^ np.uint8(128), jnp.int8)
    return moved, jnp.full((1,) * rank, -128, jnp.int32) if point is None else point - 128


def _point(zero: Value, rank: int, *, last: bool) -> jax.Array:
    point = on_device(zero).astype(jnp.int32)
    if point.ndim == 1 and point.size > 1:
        point = point[None, :] if last else point[:, None]
    return point.reshape((1,) * (rank - point.ndim) + point.shape)


def centred(x: Value, zero: Value | None, *, last: bool) -> jax.Array:
    """Return integers less their zero point, one for all or one for each row or column."""
    array = on_device(x).astype(jnp.int32)
    return array if zero is None else array - _point(zero, array.ndim, last=last)


def convolved_levels(
    node: Node, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None
) -> jax.Array:
    """Convolve levels [N,C,...] with levels [M,C/group,...], in INT32.

    Padding stands for the zero point: it is added to what is centred already.
    """
    image, kernel = centred(x, x_zero, last=True), _by_filter(w, w_zero)
    channels, *places = kernel.shape[1:]
    if x.dtype not in _BYTES or w.dtype not in _BYTES or not all(kernel.shape):
        return convolved(node, image, kernel)
    terms = _EXACT // (_most(x.dtype, x_zero) * _most(w.dtype, w_zero))
    step = terms // prod(places)
    if step < 1 or (step < channels and channels != image.shape[1]):
        return convolved(node, image, kernel)
    edges = [*range(0, channels, step), channels]
    image, kernel = image.astype(jnp.float32), kernel.astype(jnp.float32)
    # Of several groups there is one part; of one group each part has some of the channels.
    parts = (
        (image, kernel)
        if len(edges) == 2
        else (
            lax.slice_in_dim(image, low, high, axis=1),
            lax.slice_in_dim(kernel, low, high, axis=1),
        )
        for low, high in pairwise(edges)
    )
    # Beyond the default, so that products are added up as they are: Winograd's form multiplies sums
    # of levels, which are too large. A device may do so all the same, and be off by a little.
    exactly = partial(convolved, node, precision=lax.Precision.HIGHEST)
    return reduce(add, (jnp.rint(exactly(*part)).astype(jnp.int32) for part in parts))


def _most(dtype: "np.dtype[Any]", zero: Value | None) -> int:
    """Return the largest absolute difference of a level and its zero point."""
    return 255 if zero is not None or dtype == np.uint8 else 128


def _by_filter(x: Value, zero: Value | None) -> jax.Array:
    array = on_device(x).astype(jnp.int32)
    if zero is None:
        return array
    point = on_device(zero).astype(jnp.int32)
    return array - point.reshape((-1,) + (1,) * (array.ndim - 1))
