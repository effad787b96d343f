"""Reductions, cumulative sums, and sorting."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.importers.pt2.operators.table import Family, Operation
from xlaserve.importers.pt2.values import Dtype, Number, as_array, axes_of, axis_of, is_floating

Dims = int | Sequence[int] | None


def _summed(function: Callable[..., jax.Array]) -> Operation:
    """Wrap a reduction as an operation that converts integers to INT64."""

    def compute(
        self: jax.Array, dim: Dims = None, keepdim: bool = False, dtype: Dtype | None = None
    ) -> jax.Array:
        wide = dtype or (self.dtype if is_floating(self.dtype) else np.dtype(np.int64))
        x = as_array(self, wide)
        return function(x, axes_of(dim, x.ndim), keepdims=keepdim)

    return compute


def _mean(
    self: jax.Array, dim: Dims = None, keepdim: bool = False, dtype: Dtype | None = None
) -> jax.Array:
    x = as_array(self, dtype)
    return jnp.mean(x, axes_of(dim, x.ndim), keepdims=keepdim)


def _extreme(function: Callable[..., jax.Array]) -> Operation:
    def compute(self: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
        return function(self, axes_of(dim, self.ndim), keepdims=keepdim)

    return compute


def _all_or_any(function: Callable[..., jax.Array]) -> Operation:
    def compute(self: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
        return function(self != 0, axes_of(dim, self.ndim), keepdims=keepdim)

    return compute


def _extreme_with_place(
    function: Callable[..., jax.Array], place: Callable[..., jax.Array]
) -> Operation:
    def compute(self: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
        axis = axis_of(dim, self.ndim)
        return function(self, axis, keepdims=keepdim), _places(place, self, axis, keepdim)

    return compute


def _places(
    function: Callable[..., jax.Array], x: jax.Array, axis: int | None, keepdim: bool
) -> jax.Array:
    return function(x, axis, keepdims=keepdim).astype(np.int64)


def _place(function: Callable[..., jax.Array]) -> Operation:
    def compute(self: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
        axis = None if dim is None else axis_of(dim, self.ndim)
        return _places(function, self, axis, keepdim)

    return compute


def _variance(
    self: jax.Array, dim: Dims, correction: Number, keepdim: bool
) -> tuple[jax.Array, jax.Array]:
    axes = axes_of(dim, self.ndim)
    mean = jnp.mean(self, axes, keepdims=True)
    total = jnp.sum(jnp.square(self - mean), axes, keepdims=keepdim)
    count: Number = 1
    for axis in axes:
        count = count * self.shape[axis]
    divisor = as_array(count, np.dtype(np.int64)).astype(self.dtype)
    divisor = jnp.maximum(divisor - as_array(float(correction), self.dtype), 0)
    return total / divisor, mean if keepdim else jnp.squeeze(mean, axes)


def _correction(unbiased: bool | None, correction: Number | None) -> Number:
    if unbiased is not None:
        return int(unbiased)
    return 1 if correction is None else correction


def _spread(result: Callable[[jax.Array, jax.Array], Any]) -> Operation:
    """Wrap a function of variance and mean as an operation."""

    def compute(
        self: jax.Array,
        dim: Dims = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        correction: Number | None = None,
    ) -> Any:
        return result(*_variance(self, dim, _correction(unbiased, correction), keepdim))

    return compute


def _logsumexp(self: jax.Array, dim: Dims, keepdim: bool = False) -> jax.Array:
    return jax.nn.logsumexp(self, axes_of(dim, self.ndim), keepdims=keepdim)


def _cumulative(function: Callable[..., jax.Array]) -> Operation:
    def compute(self: jax.Array, dim: int, dtype: Dtype | None = None) -> jax.Array:
        wide = dtype or (self.dtype if is_floating(self.dtype) else np.dtype(np.int64))
        x = as_array(self, wide)
        return function(x, axis=axis_of(dim, x.ndim)) if x.ndim else x

    return compute


def _sorted(
    self: jax.Array, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[jax.Array, jax.Array]:
    # Always sort stably: otherwise PyTorch does not specify the order of equal elements.
    axis = axis_of(dim, self.ndim)
    order = jnp.argsort(self, axis, stable=True, descending=descending)
    return jnp.take_along_axis(self, order, axis), order.astype(np.int64)


def _argsort(
    self: jax.Array, dim: int = -1, descending: bool = False, stable: bool = False
) -> jax.Array:
    return _sorted(self, dim, descending, stable)[1]


def _topk(
    self: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    axis = axis_of(dim, self.ndim)
    values, order = _sorted(self, axis, largest)
    return tuple(jax.lax.slice_in_dim(x, 0, k, axis=axis) for x in (values, order))  # type: ignore[return-value]


REDUCTION: Family = {
    "all": _all_or_any(jnp.all),
    "amax": _extreme(jnp.max),
    "amin": _extreme(jnp.min),
    "any": _all_or_any(jnp.any),
    "argmax": _place(jnp.argmax),
    "argmin": _place(jnp.argmin),
    "argsort": _argsort,
    "cumprod": _cumulative(jnp.cumprod),
    "cumsum": _cumulative(jnp.cumsum),
    "logsumexp": _logsumexp,
    "max": _extreme(jnp.max),
    "max.dim": _extreme_with_place(jnp.max, jnp.argmax),
    "mean": _mean,
    "min": _extreme(jnp.min),
    "min.dim": _extreme_with_place(jnp.min, jnp.argmin),
    "prod": _summed(jnp.prod),
    "sort": _sorted,
    "std": _spread(lambda variance, mean: jnp.sqrt(variance)),
    "sum": _summed(jnp.sum),
    "topk": _topk,
    "var": _spread(lambda variance, mean: variance),
    "var_mean": _spread(lambda variance, mean: (variance, mean)),
}
