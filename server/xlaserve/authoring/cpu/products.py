"""Matrix products in the form that XLA's CPU backend computes fastest."""

import jax
from jax import lax


def contracted(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Multiply two arrays, summing over one axis of each; the other axes keep their order.

    Does not transpose: if a single row is multiplied by a transposed matrix, XLA copies the matrix
    in each call, which takes 15 times as long as the product.
    """
    left, right = axes
    product: jax.Array = lax.dot_general(x, y, (((left,), (right,)), ((), ())))
    return product
