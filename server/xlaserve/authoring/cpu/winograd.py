"""Winograd's F(2x2, 3x3): a convolution in 4/9 of the multiplications, as products of matrices."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

KERNEL = 3
"""The height and width of a kernel."""
RESULT = 2
"""Height and width of a tile's result."""
TILE = KERNEL + RESULT - 1
"""The height and width of a tile. Neighbours have KERNEL - 1 pixels in common."""

Parts: TypeAlias = Sequence[jax.Array]


def padding_of(positions: Sequence[int]) -> list[int]:
    """Return the extra padding for whole tiles."""
    return [-size % RESULT for size in positions]


def convolved(image: jax.Array, kernel: jax.Array, positions: Sequence[int]) -> jax.Array:
    """Convolve a padded image [N,H,W,C] by a kernel [3,3,C,O] to [N,*positions,O].

    The image is padded as `padding_of` says. Numbers that are not finite make NaN of what their
    tiles give.
    """
    down, across = (-(-size // RESULT) for size in positions)
    # What is computed is held between the two passes, and never transformed pixel by pixel from
    # all of a tile: XLA compiles that a third faster.
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
    """Multiply the vectors at four places of the tiles by a matrix for each, in one product.

    XLA divides one product among threads, but not the small ones that each would be alone.
    """
    vectors = jnp.stack(tiles)
    product = lax.dot_general(
        vectors, jnp.stack(matrices), (((vectors.ndim - 1,), (1,)), ((0,), (0,)))
    )
    # Where it is fused with what is computed from it, the library does not multiply it.
    held: jax.Array = lax.optimization_barrier(product)
    return held


def _filters(kernel: jax.Array) -> list[Parts]:
    """Return the transformed kernel, line by line."""
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
