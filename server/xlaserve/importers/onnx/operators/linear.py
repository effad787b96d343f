"""Matrix products."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.authoring.cpu.products import contracted
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, on_device, with_rank


def _matmul(_: Node, x: Value, y: Value) -> Value:
    return matrix_product(on_device(x), on_device(y))


def matrix_product(x: jax.Array, y: jax.Array, dtype: Any = None) -> jax.Array:
    """Multiply matrices; dimensions before the last two are broadcast.

    `dtype` is the dtype of the sums, by default that of the operands.
    """
    rank = max(x.ndim, y.ndim)
    if min(x.ndim, y.ndim) > 1 and y.ndim not in (x.ndim, 2):
        x, y = on_device(with_rank(x, rank)), on_device(with_rank(y, rank))
    return jnp.matmul(x, y, preferred_element_type=dtype)


def gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Value:
    """Multiply two matrices, scaled and transposed as the node specifies, and add a third."""
    alpha, beta = node.real("alpha", 1.0), node.real("beta", 1.0)
    left, right = on_device(a), on_device(b)
    met = int(not node.integer("transA", 0)), int(bool(node.integer("transB", 0)))
    product = contracted(left, right, met)
    if alpha != 1.0:
        product = product * np.asarray(alpha, product.dtype)
    if c is None:
        return product
    added = on_device(with_rank(on_device(c), product.ndim))
    return product + (added if beta == 1.0 else added * np.asarray(beta, added.dtype))


def _einsum(node: Node, *values: Value) -> Value:
    return jnp.einsum(node.text("equation"), *map(on_device, values))


def _determinant(_: Node, x: Value) -> Value:
    found: jax.Array = jnp.linalg.det(on_device(x))
    return found


LINEAR: Family = {
    "Det": operator(_determinant),
    "Einsum": operator(_einsum),
    "Gemm": operator(gemm),
    "MatMul": operator(_matmul),
}
