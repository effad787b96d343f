"""Products of matrices."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.models.onnx.graph import Node
from xlaserve.models.onnx.operators.table import Family, operator
from xlaserve.models.onnx.values import Value, on_device, with_rank


def _matmul(_: Node, x: Value, y: Value) -> Value:
    return matrix_product(on_device(x), on_device(y))


def matrix_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply matrices, with any number of dimensions before them, which are broadcast."""
    rank = max(x.ndim, y.ndim)
    if min(x.ndim, y.ndim) > 1 and y.ndim not in (x.ndim, 2):
        x, y = on_device(with_rank(x, rank)), on_device(with_rank(y, rank))
    return jnp.matmul(x, y)


def _gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Value:
    alpha, beta = node.real("alpha", 1.0), node.real("beta", 1.0)
    left, right = on_device(a), on_device(b)
    left = left.T if node.integer("transA", 0) else left
    right = right.T if node.integer("transB", 0) else right
    product = jnp.matmul(left, right)
    if alpha != 1.0:
        product = product * np.asarray(alpha, product.dtype)
    if c is None:
        return product
    added = on_device(with_rank(on_device(c), product.ndim))
    return product + (added if beta == 1.0 else added * np.asarray(beta, added.dtype))


def _einsum(node: Node, *values: Value) -> Value:
    return jnp.einsum(node.text("equation"), *map(on_device, values))


LINEAR: Family = {
    "Einsum": operator(_einsum),
    "Gemm": operator(_gemm),
    "MatMul": operator(_matmul),
}
