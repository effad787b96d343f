"""Operators that read or replace parts of tensors by index."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family
from xlaserve.importers.pt2.values import Number, as_array, axis_of, is_open

_ENDLESS = 2**63 - 1
_READ = "fill"
"""Gather mode in which out-of-bounds reads give NaN or the lowest integer; PyTorch raises an error.
"""


def _bound(place: int | None, extent: int, default: int) -> int:
    """Return a slice bound as a non-negative index within the dimension."""
    if place is None:
        return default
    if isinstance(place, int) and place >= _ENDLESS:
        return extent
    if is_open(place) or is_open(extent):
        counted = place + extent if isinstance(place, int) and place < 0 else place
        if is_open(counted) and is_open(extent) and str(counted) == str(extent):
            return extent
        return counted
    return min(max(place + extent if place < 0 else place, 0), extent)


def bounds(shape: Sequence[int], axis: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the start and the end of a slice."""
    extent = shape[axis]
    first, last = _bound(start, extent, 0), _bound(end, extent, extent)
    if not is_open(first) and not is_open(last):
        last = max(first, last)
    return first, last


def _slice(
    self: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    axis = axis_of(dim, self.ndim)
    first, last = bounds(self.shape, axis, start, end)
    return jax.lax.slice_in_dim(self, first, last, step, axis)


def _narrow(self: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    axis = axis_of(dim, self.ndim)
    return jax.lax.slice_in_dim(self, start, start + length, axis=axis)


def _select(self: jax.Array, dim: int, index: int) -> jax.Array:
    axis = axis_of(dim, self.ndim)
    return jax.lax.index_in_dim(self, _place(index, self.shape[axis]), axis, keepdims=False)


def _place(index: int, extent: int) -> int:
    place = index + extent if isinstance(index, int) and index < 0 else index
    if not (is_open(place) or is_open(extent)) and not 0 <= place < extent:
        raise InvalidModel(f"index {index} is out of range for size {extent}")
    return place


def where_of(
    shape: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> tuple[Any, ...]:
    """Return the index of a slice along one dimension, for use with `array.at`."""
    axis = axis_of(dim, len(shape))
    first, last = bounds(shape, axis, start, end)
    return (*[slice(None)] * axis, slice(first, last, step))


def _slice_scatter(
    self: jax.Array,
    src: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    return self.at[where_of(self.shape, dim, start, end, step)].set(as_array(src, self.dtype))


def _select_scatter(self: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    axis = axis_of(dim, self.ndim)
    place = (*[slice(None)] * axis, _place(index, self.shape[axis]))
    return self.at[place].set(as_array(src, self.dtype))


def _indices(indices: Sequence[jax.Array | None]) -> tuple[Any, ...]:
    for index in indices:
        if index is not None and index.dtype == np.bool_:
            raise InvalidModel(
                "a boolean index selects a data-dependent number of elements: use torch.where or"
                " multiply by the mask"
            )
    return tuple(slice(None) if index is None else index for index in indices)


def _index(self: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    return self.at[_indices(indices)].get(mode=_READ)


def _index_put(
    self: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
) -> jax.Array:
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == np.bool_:
        if values.ndim:
            raise InvalidModel("it writes a data-dependent number of elements")
        mask = indices[0].reshape(indices[0].shape + (1,) * (self.ndim - indices[0].ndim))
        new = as_array(values, self.dtype)
        return jnp.where(mask, self + new if accumulate else new, self)
    target = self.at[_indices(indices)]
    return target.add(values) if accumulate else target.set(values)


def _index_select(self: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    return jnp.take(self, index.reshape(-1), axis=axis_of(dim, self.ndim), mode=_READ)


def _gather(self: jax.Array, dim: int, index: jax.Array, sparse_grad: bool = False) -> jax.Array:
    axis = axis_of(dim, self.ndim)
    for other in range(self.ndim):
        if other != axis and str(index.shape[other]) != str(self.shape[other]):
            self = jax.lax.slice_in_dim(self, 0, index.shape[other], axis=other)
    return jnp.take_along_axis(self, index, axis, mode=_READ)


def _take_along_dim(self: jax.Array, indices: jax.Array, dim: int | None = None) -> jax.Array:
    return jnp.take_along_axis(self, indices, dim, mode=_READ)


def _embedding(
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    # The other arguments affect only the backward pass.
    return jnp.take(weight, indices, axis=0, mode=_READ)


def _scatter(
    self: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array | None = None,
    value: Number | None = None,
) -> jax.Array:
    new = as_array(value or 0, self.dtype) if src is None else _matching(src, index)
    return self.at[_places(index, axis_of(dim, self.ndim))].set(new)


def _scatter_add(self: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return self.at[_places(index, axis_of(dim, self.ndim))].add(_matching(src, index))


def _places(index: jax.Array, axis: int) -> tuple[jax.Array, ...]:
    """Return indices for all dimensions, with `index` along `axis`."""
    return tuple(
        index if other == axis else jax.lax.broadcasted_iota(index.dtype, index.shape, other)
        for other in range(index.ndim)
    )


def _matching(src: jax.Array, index: jax.Array) -> jax.Array:
    found: jax.Array = src[tuple(slice(0, size) for size in index.shape)]
    return found


def _diagonal(self: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    found: jax.Array = jnp.diagonal(self, offset, dim1, dim2)
    return found


INDEXING: Family = {
    "diagonal": _diagonal,
    "embedding": _embedding,
    "gather": _gather,
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    "narrow": _narrow,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "select": _select,
    "select_scatter": _select_scatter,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "take_along_dim": _take_along_dim,
}
