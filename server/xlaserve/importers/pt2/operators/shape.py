"""Operators on shapes, dtypes and dimension order; joining and splitting."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family, Operation
from xlaserve.importers.pt2.values import (
    Dtype,
    Number,
    aligned,
    as_array,
    axes_of,
    axis_of,
    is_open,
    promoted,
)

Sizes = Sequence[int]

_MOST_PARTS = 4096


def identity(self: jax.Array) -> jax.Array:
    """Return the tensor unchanged."""
    return self


def _view(self: jax.Array, size: Sizes) -> jax.Array:
    return jnp.reshape(self, tuple(size))


def _reshape(self: jax.Array, shape: Sizes) -> jax.Array:
    return jnp.reshape(self, tuple(shape))


def _view_as(self: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.reshape(self, other.shape)


def _flatten(self: jax.Array, start_dim: int = 0, end_dim: int = -1) -> jax.Array:
    first, last = axis_of(start_dim, self.ndim), axis_of(end_dim, self.ndim)
    merged = math.prod(self.shape[first : last + 1])
    return jnp.reshape(self, (*self.shape[:first], merged, *self.shape[last + 1 :]))


def _unflatten(self: jax.Array, dim: int, sizes: Sizes) -> jax.Array:
    axis = axis_of(dim, self.ndim)
    part = list(sizes)
    if -1 in [size for size in part if isinstance(size, int)]:
        known = math.prod(size for size in part if not (isinstance(size, int) and size == -1))
        part[part.index(-1)] = self.shape[axis] // known
    return jnp.reshape(self, (*self.shape[:axis], *part, *self.shape[axis + 1 :]))


def _permute(self: jax.Array, dims: Sizes) -> jax.Array:
    return jnp.transpose(self, axes_of(tuple(dims), self.ndim))


def _transpose(self: jax.Array, dim0: int, dim1: int) -> jax.Array:
    if not self.ndim:
        return self
    return jnp.swapaxes(self, axis_of(dim0, self.ndim), axis_of(dim1, self.ndim))


def _swapaxes(self: jax.Array, axis0: int, axis1: int) -> jax.Array:
    return _transpose(self, axis0, axis1)


def _t(self: jax.Array) -> jax.Array:
    return self.T


def _movedim(self: jax.Array, source: int | Sizes, destination: int | Sizes) -> jax.Array:
    return jnp.moveaxis(self, source, destination)


def _squeeze(self: jax.Array, dim: int | Sizes | None = None) -> jax.Array:
    axes = range(self.ndim) if dim is None else axes_of(dim, self.ndim)
    return jnp.squeeze(self, tuple(axis for axis in axes if _is_one(self.shape, axis)))


def _is_one(shape: Sizes, axis: int) -> bool:
    return axis < len(shape) and isinstance(shape[axis], int) and shape[axis] == 1


def _unsqueeze(self: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(self, axis_of(dim, self.ndim + 1))


def _expand(self: jax.Array, size: Sizes, implicit: bool = False) -> jax.Array:
    before = len(size) - self.ndim
    shape = tuple(
        self.shape[place - before] if isinstance(wanted, int) and wanted == -1 else wanted
        for place, wanted in enumerate(size)
    )
    return jnp.broadcast_to(aligned(self, jnp.empty((1,) * len(shape)))[0], shape)


def _expand_as(self: jax.Array, other: jax.Array) -> jax.Array:
    return _expand(self, other.shape)


def _broadcast_tensors(tensors: Sequence[jax.Array]) -> list[jax.Array]:
    return list(jnp.broadcast_arrays(*aligned(*tensors)))


def _repeat(self: jax.Array, repeats: Sizes) -> jax.Array:
    return jnp.tile(self.reshape((1,) * (len(repeats) - self.ndim) + self.shape), tuple(repeats))


def _tile(self: jax.Array, dims: Sizes) -> jax.Array:
    listed = (1,) * (self.ndim - len(dims)) + tuple(dims)
    return _repeat(self, listed)


def _repeat_interleave(
    self: jax.Array, repeats: int, dim: int | None = None, output_size: int | None = None
) -> jax.Array:
    if isinstance(repeats, jax.Array):
        raise InvalidModel("its repeat counts depend on data")
    x = self.reshape(-1) if dim is None else self
    return jnp.repeat(x, repeats, axis=axis_of(dim or 0, x.ndim))


def _cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    # PyTorch ignores empty vectors among tensors with more dimensions.
    kept = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    common = promoted(*(x.reshape(-1)[:0] for x in kept))[0].dtype
    arrays = [as_array(x, common) for x in kept]
    return jnp.concatenate(arrays, axis_of(dim, arrays[0].ndim))


def _stack(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    return jnp.stack(promoted(*tensors), axis_of(dim, tensors[0].ndim + 1))


def _cut(x: jax.Array, axis: int, sizes: Sizes) -> list[jax.Array]:
    found, start = [], 0
    for size in sizes:
        found.append(jax.lax.slice_in_dim(x, start, start + size, axis=axis))
        start += size
    return found


def part_sizes(target: str, extent: int, arguments: dict[str, object]) -> list[int]:
    """Return the sizes of a split's parts; raises InvalidModel for a dynamic dimension."""
    if is_open(extent):
        raise InvalidModel("it splits a dynamic dimension: give it a size with --dim")
    if target == "unbind":
        _check_count(extent)
        return [1] * extent
    if target == "chunk":
        count = arguments["chunks"]
        size: object = -(-extent // count)  # type: ignore[operator]
    else:
        size = arguments["split_size" if "split_size" in arguments else "split_sizes"]
    if isinstance(size, Sequence):
        return list(size)
    assert isinstance(size, int)
    full, rest = divmod(extent, size) if size else (1, 0)
    _check_count(full)
    return [size] * full + ([rest] if rest else [])


def _check_count(count: int) -> None:
    if count > _MOST_PARTS:
        raise InvalidModel(f"it makes {count} parts, more than {_MOST_PARTS}")


def _split(self: jax.Array, split_size: int | Sizes, dim: int = 0) -> list[jax.Array]:
    axis = axis_of(dim, self.ndim)
    return _cut(self, axis, part_sizes("split", self.shape[axis], {"split_size": split_size}))


def _split_with_sizes(self: jax.Array, split_sizes: Sizes, dim: int = 0) -> list[jax.Array]:
    return _split(self, split_sizes, dim)


def _split_sizes(self: jax.Array, split_size: Sizes, dim: int = 0) -> list[jax.Array]:
    return _split(self, split_size, dim)


def _chunk(self: jax.Array, chunks: int, dim: int = 0) -> list[jax.Array]:
    axis = axis_of(dim, self.ndim)
    return _cut(self, axis, part_sizes("chunk", self.shape[axis], {"chunks": chunks}))


def _unbind(self: jax.Array, dim: int = 0) -> list[jax.Array]:
    axis = axis_of(dim, self.ndim)
    return [
        jnp.squeeze(x, axis) for x in _cut(self, axis, part_sizes("unbind", self.shape[axis], {}))
    ]


def _flip(self: jax.Array, dims: Sizes) -> jax.Array:
    return jnp.flip(self, tuple(axes_of(tuple(dims), self.ndim)) if len(dims) else ())


def _roll(self: jax.Array, shifts: int | Sizes, dims: int | Sizes = ()) -> jax.Array:
    if not isinstance(dims, int) and not dims:
        return jnp.roll(self, shifts)
    return jnp.roll(self, shifts, dims)


def _to(self: jax.Array, dtype: Dtype | None = None, other: jax.Array | None = None) -> jax.Array:
    return as_array(self, other.dtype if other is not None else dtype)


def _type_as(self: jax.Array, other: jax.Array) -> jax.Array:
    return as_array(self, other.dtype)


def _tril(self: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.tril(self, diagonal)


def _triu(self: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.triu(self, diagonal)


def _constant_pad(self: jax.Array, pad: Sizes, value: Number = 0) -> jax.Array:
    return _pad(self, pad, "constant", float(value) if isinstance(value, float) else value)


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(
    self: jax.Array, pad: Sizes, mode: str = "constant", value: Number | None = None
) -> jax.Array:
    if mode not in _MODES:
        raise InvalidModel(f"mode: expected one of {', '.join(_MODES)}, got '{mode}'")
    pairs = [(pad[place], pad[place + 1]) for place in range(0, len(pad), 2)]
    around = [(0, 0)] * (self.ndim - len(pairs)) + pairs[::-1]
    for axis, (before, after) in enumerate(around):
        # Negative padding crops.
        self = jax.lax.slice_in_dim(
            self, max(0, -before), self.shape[axis] - max(0, -after), axis=axis
        )
    around = [(max(0, before), max(0, after)) for before, after in around]
    if mode == "constant":
        return jnp.pad(self, around, constant_values=as_array(value or 0, self.dtype))
    return jnp.pad(self, around, mode=_MODES[mode])


def _mode(mode: str) -> Operation:
    def compute(self: jax.Array, padding: Sizes) -> jax.Array:
        return _pad(self, padding, mode)

    return compute


def _pixel_shuffle(self: jax.Array, upscale_factor: int) -> jax.Array:
    *before, channels, height, width = self.shape
    by = upscale_factor
    x = self.reshape((*before, channels // by**2, by, by, height, width))
    n = len(before)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape((*before, channels // by**2, height * by, width * by))


def _pixel_unshuffle(self: jax.Array, downscale_factor: int) -> jax.Array:
    *before, channels, height, width = self.shape
    by = downscale_factor
    x = self.reshape((*before, channels, height // by, by, width // by, by))
    n = len(before)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape((*before, channels * by**2, height // by, width // by))


def _channel_shuffle(self: jax.Array, groups: int) -> jax.Array:
    rows, channels, *rest = self.shape
    x = self.reshape((rows, groups, channels // groups, *rest))
    return jnp.swapaxes(x, 1, 2).reshape(self.shape)


def _meshgrid(tensors: Sequence[jax.Array], indexing: str = "ij") -> list[jax.Array]:
    return list(jnp.meshgrid(*tensors, indexing=indexing))


def _unfold(self: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    axis = axis_of(dimension, self.ndim)
    count = (self.shape[axis] - size) // step + 1
    starts = jnp.arange(count)[:, None] * step + jnp.arange(size)[None, :]
    return jnp.moveaxis(jnp.take(self, starts, axis=axis), axis + 1, -1)


SHAPE: Family = {
    "_reshape_alias": lambda self, size, stride: _view(self, size),
    "_to_copy": _to,
    "_unsafe_view": _view,
    "alias": identity,
    "broadcast_tensors": _broadcast_tensors,
    "cat": _cat,
    "channel_shuffle": _channel_shuffle,
    "chunk": _chunk,
    "clone": identity,
    "concat": _cat,
    "constant_pad_nd": _constant_pad,
    "contiguous": identity,
    "detach": identity,
    "expand": _expand,
    "expand_as": _expand_as,
    "flatten": _flatten,
    "flip": _flip,
    "lift_fresh_copy": identity,
    "meshgrid": _meshgrid,
    "movedim": _movedim,
    "numpy_T": _t,
    "pad": _pad,
    "permute": _permute,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "positive": identity,
    "reflection_pad1d": _mode("reflect"),
    "reflection_pad2d": _mode("reflect"),
    "repeat": _repeat,
    "repeat_interleave.self_int": _repeat_interleave,
    "replication_pad1d": _mode("replicate"),
    "replication_pad2d": _mode("replicate"),
    "reshape": _reshape,
    "roll": _roll,
    "split": _split,
    "split.sizes": _split_sizes,
    "split_with_sizes": _split_with_sizes,
    "squeeze": _squeeze,
    "stack": _stack,
    "swapaxes": _swapaxes,
    "swapdims": _transpose,
    "t": _t,
    "tile": _tile,
    "to": _to,
    "transpose": _transpose,
    "tril": _tril,
    "triu": _triu,
    "type_as": _type_as,
    "unbind": _unbind,
    "unflatten": _unflatten,
    "unfold": _unfold,
    "unsqueeze": _unsqueeze,
    "view": _view,
    "view_as": _view_as,
}
