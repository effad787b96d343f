"""Winograd's F(2x2, 3x3): a convolution as matrix products, with 4/9 of the multiplications."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

KERNEL = 3
"""Height and width of the kernel."""
RESULT = 2
"""Height and width of a tile's result."""
TILE = KERNEL + RESULT - 1
"""Height and width of a tile. Adjacent tiles overlap by KERNEL - 1 pixels."""

Parts: TypeAlias = Sequence[jax.Array]


def padding_of(positions: Sequence[int]) -> list[int]:
    """Return the padding that completes the last tile, per dimension."""
    return [-size % RESULT for size in positions]


def convolved(image: jax.Array, kernel: jax.Array, positions: Sequence[int]) -> jax.Array:
    """Convolve a padded image [N,H,W,C] by a kernel [3,3,C,O] to [N,*positions,O].

    The image must have the padding of `padding_of`. A value that is not finite makes all results of
    its tiles NaN.
    """
    down, across = (-(-size // RESULT) for size in positions)
    # The barrier separates the two passes of the transform; otherwise XLA would compute each pixel
    # from its whole tile. XLA also compiles this form a third faster.
    lines = lax.optimization_barrier(
        _of_tile([_every_second(image, 1, start, down) for start in range(TILE)])
    )
    products = [
        _multiplied(
            _of_tile([_every_second(line, 2, start, across) for start in range(TILE)]), matrices
        )
        for line, matrices in zip(lines, _filters(kernel), strict=True)
    ]
    halves = [_of_products(list(each)) for each in products]
    results = [_of_products(column) for column in zip(*halves, strict=True)]
    joined = jnp.stack([jnp.stack(line, axis=3) for line in zip(*results, strict=True)], axis=2)
    rows, features = image.shape[0], kernel.shape[-1]
    whole = joined.reshape((rows, RESULT * down, RESULT * across, features))
    return lax.slice(whole, (0, 0, 0, 0), (rows, *positions, features))


def _every_second(image: jax.Array, axis: int, start: int, count: int) -> jax.Array:
    """Return one line of each tile along an axis."""
    return lax.slice_in_dim(image, start, start + RESULT * (count - 1) + 1, RESULT, axis)


def _multiplied(tiles: Parts, matrices: Parts) -> jax.Array:
    """Multiply four positions of all tiles by one matrix each, in a single batched product.

    XLA distributes one product over several threads, but runs small ones on a single thread.
    """
    vectors = jnp.stack(tiles)
    product = lax.dot_general(
        vectors, jnp.stack(matrices), (((vectors.ndim - 1,), (1,)), ((0,), (0,)))
    )
    # If XLA fused the product with its consumers, it would not use the matrix library.
    held: jax.Array = lax.optimization_barrier(product)
    return held


def _filters(kernel: jax.Array) -> list[Parts]:
    """Return the transformed kernel, row by row."""
    columns = [
        _of_kernel([kernel[line, column] for line in range(KERNEL)]) for column in range(KERNEL)
    ]
    return [_of_kernel(line) for line in zip(*columns, strict=True)]


def _of_kernel(parts: Parts) -> Parts:
    first, second, third = parts
    outer = (first + third) * 0.5
    inner = second * 0.5
    return first, outer + inner, outer - inner, third


def _of_tile(parts: Parts) -> Parts:
    first, second, third, fourth = parts
    return first - third, second + third, third - second, second - fourth


def _of_products(parts: Parts) -> Parts:
    first, second, third, fourth = parts
    return first + second + third, second - third - fourth
