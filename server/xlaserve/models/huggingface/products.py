"""Products with matrices that are stored as they are, or quantised to 8 or 4 bits.

A quantised one is a mapping, as `quantising` makes it. A product turns some of its rows at a time
into numbers: all at once would be temporaries as large as the matrix was before. Matrices of
several experts are one array with the expert as its first dimension; rows of one expert are copied
out of it as few at a time, so that the copy stays in the cache of a CPU.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Matrix: TypeAlias = "jax.Array | Mapping[str, jax.Array]"
"""[out, in]; or `int8` [out, in] with a `scale` [out]; or `int4` [out, in / 2], of which the low
bits are the first half of a row, with a `scale` [out, groups]. Those of experts have one dimension
before these."""

_AT_ONCE = 1 << 20
"""Elements of a matrix that are turned into numbers at a time."""
_PLAIN = "plain"
"""The one array of a matrix that is not quantised, among those of a block."""
INT4_ZERO = 8
"""The 4 bits that stand for 0."""


def multiply(x: jax.Array, matrix: Matrix, accumulate: Any = None) -> jax.Array:
    """Return x[..., in] times a matrix, [..., out], in `accumulate` or the dtype of x."""
    if not isinstance(matrix, Mapping):
        return jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=accumulate)
    out = matrix["scale"].shape[0]
    # Two at least: XLA makes no loop of one, and would turn all matrices into numbers ahead.
    blocks = min(out, max(2, -(-out * x.shape[-1] // _AT_ONCE)))

    def of(start: Any, size: int) -> jax.Array:
        cut = {k: lax.dynamic_slice_in_dim(a, start, size) for k, a in matrix.items()}
        return _of_block(x, cut, accumulate)

    return _by_blocks(x, out, blocks, of)


def multiply_one(x: jax.Array, matrices: Matrix, number: jax.Array) -> jax.Array:
    """Return x[..., in] times one of several matrices [n, out, in], [..., out], by its number."""
    stacked = matrices if isinstance(matrices, Mapping) else {_PLAIN: matrices}
    out = next(iter(stacked.values())).shape[1]

    def of(start: Any, size: int) -> jax.Array:
        # One slice of both: rows of a matrix that was taken out before would be a copy of it all.
        cut = {k: _cut(array, number, start, size) for k, array in stacked.items()}
        return _of_block(x, cut, None)

    return _by_blocks(x, out, min(out, -(-out * x.shape[-1] // _AT_ONCE)), of)


def _cut(stacked: jax.Array, number: jax.Array, start: Any, size: int) -> jax.Array:
    """Return rows [size, ...] of one of several arrays [n, rows, ...]."""
    places = (number, jnp.int32(start), *[jnp.int32(0)] * (stacked.ndim - 2))
    sizes = (1, size, *stacked.shape[2:])
    return lax.dynamic_slice(stacked, places, sizes).reshape(sizes[1:])


def _by_blocks(
    x: jax.Array, out: int, blocks: int, of: Callable[[Any, int], jax.Array]
) -> jax.Array:
    """Return the products of so many blocks of rows, side by side; `of` is given start and size."""
    rows = out // blocks
    if blocks == 1:
        return of(0, out)
    starts = jnp.arange(blocks, dtype=jnp.int32) * rows
    found = lax.map(lambda start: of(start, rows), starts)
    parts = [jnp.moveaxis(found, 0, -2).reshape(*x.shape[:-1], blocks * rows)]
    if out > blocks * rows:
        parts.append(of(blocks * rows, out - blocks * rows))
    return jnp.concatenate(parts, -1)


def rows_of(matrix: Matrix, numbers: jax.Array, dtype: Any) -> jax.Array:
    """Return rows of a matrix, [..., in], by their numbers."""
    if not isinstance(matrix, Mapping):
        return matrix[numbers]
    scale = matrix["scale"][numbers][..., None]
    return (matrix["int8"][numbers].astype(jnp.float32) * scale).astype(dtype)


def _of_block(x: jax.Array, block: Mapping[str, jax.Array], accumulate: Any) -> jax.Array:
    if _PLAIN in block:
        return jnp.einsum("...i,oi->...o", x, block[_PLAIN], preferred_element_type=accumulate)
    if "int8" in block:
        numbers = block["int8"].astype(x.dtype)
        found = jnp.einsum("...i,oi->...o", x, numbers, preferred_element_type=jnp.float32)
        scale = block["scale"].reshape((1,) * (x.ndim - 1) + block["scale"].shape)
        return (found * scale).astype(accumulate or x.dtype)
    numbers = _of_int4(block["int4"], block["scale"]).astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, numbers, preferred_element_type=accumulate)


def _of_int4(packed: jax.Array, scale: jax.Array) -> jax.Array:
    halves = [packed & jnp.uint8(15), packed >> jnp.uint8(4)]
    whole = jnp.concatenate(halves, axis=1).astype(jnp.float32) - INT4_ZERO
    groups = whole.reshape(*scale.shape, math.prod(whole.shape) // math.prod(scale.shape))
    return (groups * scale.astype(jnp.float32)[..., None]).reshape(whole.shape)
