"""Matrix products and attention."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.authoring.cpu.products import contracted
from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family
from xlaserve.importers.pt2.values import NOT_COMPUTED, NotComputed, Number, aligned, as_array


def matmul(self: jax.Array, other: jax.Array) -> jax.Array:
    """Multiply vectors or matrices; further dimensions are broadcast."""
    if min(self.ndim, other.ndim) > 1 and other.ndim not in (2, self.ndim):
        self, other = aligned(self, other)
    return jnp.matmul(self, other)


def linear(input: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Multiply rows by a transposed matrix and add a vector."""
    product = contracted(input, weight, (input.ndim - 1, weight.ndim - 1))
    return product if bias is None else product + aligned(product, bias)[1]


def _mm(self: jax.Array, mat2: jax.Array) -> jax.Array:
    return jnp.matmul(self, mat2)


def _mv(self: jax.Array, vec: jax.Array) -> jax.Array:
    return jnp.matmul(self, vec)


def _dot(self: jax.Array, tensor: jax.Array) -> jax.Array:
    return jnp.dot(self, tensor)


def _added(self: jax.Array, product: jax.Array, beta: Number, alpha: Number) -> jax.Array:
    if alpha != 1:
        product = product * as_array(alpha, product.dtype)
    if beta == 0:
        return product
    added = aligned(product, self)[1]
    return product + (added if beta == 1 else added * as_array(beta, added.dtype))


def _addmm(
    self: jax.Array, mat1: jax.Array, mat2: jax.Array, beta: Number = 1, alpha: Number = 1
) -> jax.Array:
    return _added(self, jnp.matmul(mat1, mat2), beta, alpha)


def _baddbmm(
    self: jax.Array, batch1: jax.Array, batch2: jax.Array, beta: Number = 1, alpha: Number = 1
) -> jax.Array:
    return _added(self, jnp.matmul(batch1, batch2), beta, alpha)


def _addmv(
    self: jax.Array, mat: jax.Array, vec: jax.Array, beta: Number = 1, alpha: Number = 1
) -> jax.Array:
    return _added(self, jnp.matmul(mat, vec), beta, alpha)


def _einsum(
    equation: str, tensors: Sequence[jax.Array], path: Sequence[int] | None = None
) -> jax.Array:
    # `path` is the order of the products, which does not change the result.
    return jnp.einsum(equation, *tensors)


def _outer(self: jax.Array, vec2: jax.Array) -> jax.Array:
    return self[:, None] * vec2[None, :]


# --- Attention ---------------------------------------------------------------------------------


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    if dropout_p:
        raise InvalidModel(
            f"dropout_p is {dropout_p}, as in training: call model.eval() before the export"
        )
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(x, times, axis=x.ndim - 3) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = matmul(query, jnp.swapaxes(key, -1, -2)) * as_array(float(factor), query.dtype)
    if attn_mask is not None:
        scores = _masked(scores, attn_mask)
    if is_causal:
        rows, columns = (
            jax.lax.broadcasted_iota(np.int32, scores.shape, scores.ndim - k) for k in (2, 1)
        )
        scores = _masked(scores, columns <= rows)
    weights = jax.nn.softmax(scores, axis=-1)
    if attn_mask is not None and attn_mask.dtype == np.bool_:
        # A fully masked row gives zeros, as in PyTorch, not NaN.
        weights = jnp.where(jnp.isnan(weights), jnp.zeros_like(weights), weights)
    return matmul(weights, value)


def _masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
    scores, mask = aligned(scores, mask)
    if mask.dtype != np.bool_:
        return scores + mask.astype(scores.dtype)
    return jnp.where(mask, scores, as_array(-math.inf, scores.dtype))


def _flash_attention_on_cpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, NotComputed]:
    # Only a backward pass uses the second result.
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale), NOT_COMPUTED


LINEAR: Family = {
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention_on_cpu,
    "addmm": _addmm,
    "addmv": _addmv,
    "baddbmm": _baddbmm,
    "bmm": _mm,
    "dot": _dot,
    "einsum": _einsum,
    "linear": linear,
    "matmul": matmul,
    "mm": _mm,
    "mv": _mv,
    "outer": _outer,
    "scaled_dot_product_attention": _attention,
}
