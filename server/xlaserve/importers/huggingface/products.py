"""Products with matrices stored as they are, or quantised to 8 or 4 bits.

A quantised one is a mapping, as `quantising` makes it. A product turns some of its rows at a time
into numbers: all at once would be temporaries as large as the matrix was before. Matrices of
several experts are one array with the expert as its first dimension; rows of one expert are copied
out of it as few at a time, so that the copy stays in the cache of a CPU.

On a CPU, XLA has quick products for some forms only, and a step of a generator is little else than
reading matrices: each datatype is multiplied in the form that was measured to be quick for it.
Other platforms are given the plain product.
"""

# Much of jax is typed, but not all that is called here.
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
"""[out, in]; or `int8` [out, in] with a `scale` [out]; or `int4` [out, in / 2], of which the low
bits are the first half of a row, with a `scale` [out, groups]. Those of experts have one dimension
before these."""

_AT_ONCE = 1 << 20
"""Elements of a matrix that are turned into numbers at a time."""
_PLAIN = "plain"
"""The only array of an unquantised matrix."""
INT4_ZERO = 8
"""The 4 bits that stand for 0."""


def multiply(
    x: jax.Array, matrix: Matrix, accumulate: Any = None, *, few: bool = False
) -> jax.Array:
    """Return x[..., in] times a matrix, [..., out], in `accumulate` or the dtype of x.

    `few` says that the rows of x are those of slots, and not those of a text.
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
    """Return the product with the matrix in front, which is read as it lies."""
    flat = x.reshape(-1, x.shape[-1])
    found = lax.dot_general(
        matrix, flat.T, (((1,), (0,)), ((), ())), preferred_element_type=accumulate
    )
    # XLA would put x in front again, and rearrange the matrix for that in every step.
    kept: jax.Array = lax.optimization_barrier(found)
    return kept.T.reshape(*x.shape[:-1], matrix.shape[0])


def _with_spare_row(accumulate: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return the product of one row more: for a single one, XLA turns a whole matrix into FP32."""
    flat = x.reshape(-1, x.shape[-1])
    spare = jnp.zeros((1, x.shape[-1]), x.dtype)
    found = _plain(accumulate, jnp.concatenate([flat, spare]), matrix)
    return found[:-1].reshape(*x.shape[:-1], matrix.shape[0])


def _by_rows(accumulate: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return the product of some rows of the matrix at a time: XLA turns all FP16 into FP32."""
    return _of_rows_at_a_time(x, {_PLAIN: matrix}, accumulate)


_Form: TypeAlias = Callable[[Any, jax.Array, jax.Array], jax.Array]
_CPU_OF_MANY: Mapping[str, _Form] = MappingProxyType({"float16": _by_rows})
_CPU_OF_FEW: Mapping[str, _Form] = MappingProxyType(
    {"float32": _turned, "bfloat16": _with_spare_row, "float16": _by_rows}
)
"""Forms for few rows on a CPU, by datatype of the matrix; `_plain` for others."""


def _of_rows_at_a_time(x: jax.Array, stored: Mapping[str, jax.Array], accumulate: Any) -> jax.Array:
    out, size = next(iter(stored.values())).shape[0], x.shape[-1]
    # Two at least: XLA makes no loop of one, and would turn all matrices into numbers ahead.
    blocks = min(out, max(2, -(-out * size // _AT_ONCE)))

    def of(start: Any, rows: int) -> jax.Array:
        cut = {k: lax.dynamic_slice_in_dim(a, start, rows) for k, a in stored.items()}
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
    """Compute products block by block of rows; `of` gets start and size."""
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
        # Numbers of FP16 are wider than they: XLA would widen them too, and do so in memory.
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
