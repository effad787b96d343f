"""Exact sums of products of 8-bit quantised tensors minus their zero points.

XLA's CPU backend has fast matrix products of INT8 and convolutions of FP32, but computes INT32 in
plain loops, 20 times slower. So matrices stay INT8, with the zero points subtracted from the
result, and convolutions use FP32, split into parts whose sums are exact.
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
"""FP32 represents all integers up to this one, so sums with a smaller absolute value are exact."""


def matrix_levels(a: Value, a_zero: Value | None, b: Value, b_zero: Value | None) -> jax.Array:
    """Multiply quantised matrices [...,M,K] and [...,K,N]; return INT32.

    `a_zero` is a scalar or has one zero point per row, `b_zero` a scalar or one per column.
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
    """Return a quantised tensor as INT8 with its adjusted zero point, which is None if it is 0."""
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
    """Subtract the zero point: a scalar, or one per row, or one per column if `last`."""
    array = on_device(x).astype(jnp.int32)
    return array if zero is None else array - _point(zero, array.ndim, last=last)


def convolved_levels(
    node: Node, x: Value, x_zero: Value | None, w: Value, w_zero: Value | None
) -> jax.Array:
    """Convolve quantised tensors [N,C,...] and [M,C/group,...]; return INT32.

    Padding is added after the zero point is subtracted, and so represents the zero point.
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
    # With several groups there is one part; otherwise each part has some of the channels.
    parts = (
        (image, kernel)
        if len(edges) == 2
        else (
            lax.slice_in_dim(image, low, high, axis=1),
            lax.slice_in_dim(kernel, low, high, axis=1),
        )
        for low, high in pairwise(edges)
    )
    # HIGHEST keeps backends from using Winograd's algorithm, which multiplies sums of elements that
    # are too large to be exact. A device may use it anyway, with slightly inexact results.
    exactly = partial(convolved, node, precision=lax.Precision.HIGHEST)
    return reduce(add, (jnp.rint(exactly(*part)).astype(jnp.int32) for part in parts))


def _most(dtype: "np.dtype[Any]", zero: Value | None) -> int:
    """Return the largest absolute difference between an element and its zero point."""
    return 255 if zero is not None or dtype == np.uint8 else 128


def _by_filter(x: Value, zero: Value | None) -> jax.Array:
    array = on_device(x).astype(jnp.int32)
    if zero is None:
        return array
    point = on_device(zero).astype(jnp.int32)
    return array - point.reshape((-1,) + (1,) * (array.ndim - 1))
