"""Matrix products whose weights are plain, or quantised to 8 or 4 bits.

A quantised matrix is a mapping of arrays, see `quantising`. It is dequantised some rows at a time,
because a dequantised copy of the whole matrix would take as much memory as the original did. The
matrices of several experts form one array with the expert as its first dimension; a block of one
expert's rows is small enough to stay in the CPU cache.

A decoding step is limited by the speed of reading the weights, and on CPUs XLA has fast kernels
only for some product forms. So each datatype uses the form that was measured to be fastest there;
other platforms use the plain product.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Matrix: TypeAlias = "jax.Array | Mapping[str, jax.Array]"
"""An array [out, in]; or `int8` [out, in] with `scale` [out]; or `int4` [out, in / 2] with `scale`
[out, groups], whose low nibbles hold the first half of a row. Matrices of experts have an
additional leading dimension."""

_AT_ONCE = 1 << 20
"""Matrix elements that are dequantised at a time."""
_PLAIN = "plain"
"""Key for the array of an unquantised matrix."""
INT4_ZERO = 8
"""The nibble that represents 0."""


def multiply(
    x: jax.Array, matrix: Matrix, accumulate: Any = None, *, few: bool = False
) -> jax.Array:
    """Multiply x [..., in] by a matrix; return [..., out] in `accumulate` or the dtype of x.

    `few` tells whether x is a decoding step, with one row per slot.
    """
    if isinstance(matrix, Mapping):
        return _of_rows_at_a_time(x, matrix, accumulate)
    forms = _CPU_OF_FEW if few else _CPU_OF_MANY
    found: jax.Array = lax.platform_dependent(
        x,
        matrix,
        cpu=partial(forms.get(matrix.dtype.name, _plain), accumulate),
        default=partial(_plain, accumulate),
    )
    return found


def _plain(accumulate: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=accumulate)


def _turned(accumulate: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Compute the product with the matrix as left operand, so that it is read in memory order."""
    flat = x.reshape(-1, x.shape[-1])
    found = lax.dot_general(
        matrix, flat.T, (((1,), (0,)), ((), ())), preferred_element_type=accumulate
    )
    # Without the barrier XLA would swap the operands and transpose the matrix in every step.
    kept: jax.Array = lax.optimization_barrier(found)
    return kept.T.reshape(*x.shape[:-1], matrix.shape[0])


def _with_spare_row(accumulate: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply with one extra row: for a single row XLA converts the whole matrix to FP32."""
    flat = x.reshape(-1, x.shape[-1])
    spare = jnp.zeros((1, x.shape[-1]), x.dtype)
    found = _plain(accumulate, jnp.concatenate([flat, spare]), matrix)
    return found[:-1].reshape(*x.shape[:-1], matrix.shape[0])


def _by_rows(accumulate: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply by blocks of matrix rows, because XLA converts FP16 matrices to FP32."""
    return _of_rows_at_a_time(x, {_PLAIN: matrix}, accumulate)


_Form: TypeAlias = Callable[[Any, jax.Array, jax.Array], jax.Array]
_CPU_OF_MANY: Mapping[str, _Form] = MappingProxyType({"float16": _by_rows})
_CPU_OF_FEW: Mapping[str, _Form] = MappingProxyType(
    {"float32": _turned, "bfloat16": _with_spare_row, "float16": _by_rows}
)
"""Product forms for few rows on a CPU, by datatype of the matrix; `_plain` for others."""


def _of_rows_at_a_time(x: jax.Array, stored: Mapping[str, jax.Array], accumulate: Any) -> jax.Array:
    out, size = next(iter(stored.values())).shape[0], x.shape[-1]
    # At least two blocks: XLA removes a loop of one iteration, and would dequantise ahead of the
    # step.
    blocks = min(out, max(2, -(-out * size // _AT_ONCE)))

    def of(start: Any, rows: int) -> jax.Array:
        cut = {k: lax.dynamic_slice_in_dim(a, start, rows) for k, a in stored.items()}
        return _of_block(x, cut, accumulate)

    return _by_blocks(x, out, blocks, of)


def multiply_one(x: jax.Array, matrices: Matrix, number: jax.Array) -> jax.Array:
    """Multiply x [..., in] by the matrix at index `number` of several; return [..., out]."""
    stacked = matrices if isinstance(matrices, Mapping) else {_PLAIN: matrices}
    out = next(iter(stacked.values())).shape[1]

    def of(start: Any, size: int) -> jax.Array:
        # Slice expert and rows at once; slicing the expert first would copy its whole matrix.
        cut = {k: _cut(array, number, start, size) for k, array in stacked.items()}
        return _of_block(x, cut, None)

    return _by_blocks(x, out, min(out, -(-out * x.shape[-1] // _AT_ONCE)), of)


def _cut(stacked: jax.Array, number: jax.Array, start: Any, size: int) -> jax.Array:
    """Return `size` rows from `start` on of the array at index `number`."""
    places = (number, jnp.int32(start), *[jnp.int32(0)] * (stacked.ndim - 2))
    sizes = (1, size, *stacked.shape[2:])
    return lax.dynamic_slice(stacked, places, sizes).reshape(sizes[1:])


def _by_blocks(
    x: jax.Array, out: int, blocks: int, of: Callable[[Any, int], jax.Array]
) -> jax.Array:
    """Compute the product in blocks of matrix rows; `of` gets the start and the size of a block."""
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
    """Look up rows of an embedding matrix, [..., in], by their indices."""
    if not isinstance(matrix, Mapping):
        return matrix[numbers]
    scale = matrix["scale"][numbers][..., None]
    return (matrix["int8"][numbers].astype(jnp.float32) * scale).astype(dtype)


def _of_block(x: jax.Array, block: Mapping[str, jax.Array], accumulate: Any) -> jax.Array:
    if _PLAIN in block:
        # Convert explicitly: XLA multiplies FP16 in FP32 anyway, and would convert the whole
        # matrix.
        wide = jnp.float32 if block[_PLAIN].dtype == jnp.float16 else x.dtype
        numbers = block[_PLAIN].astype(wide)
        found = jnp.einsum(
            "...i,oi->...o", x.astype(wide), numbers, preferred_element_type=accumulate
        )
        return found.astype(accumulate or x.dtype)
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
