"""Pooling operators."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family, Operation
from xlaserve.importers.pt2.values import (
    NOT_COMPUTED,
    NotComputed,
    as_array,
    is_floating,
    is_open,
    spread,
)

Sizes = int | Sequence[int]

_MOST_WINDOWS = 1024


def _windows(
    x: jax.Array,
    count: int,
    sizes: tuple[int, ...],
    steps: tuple[int, ...],
    pads: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> list[tuple[int, int]]:
    """Return the padding before and after each dimension, including that for `ceil_mode`."""
    found = []
    for size, step, pad, gap, extent in zip(
        sizes, steps, pads, dilation, x.shape[-count:], strict=True
    ):
        if 2 * pad > size * gap:
            raise InvalidModel(f"padding {pad} is more than half of the window {size}")
        reach = gap * (size - 1) + 1
        extra = 0
        if ceil_mode:
            if is_open(extent):
                raise InvalidModel("ceil_mode over a dynamic dimension: give it a size with --dim")
            places = -(-(extent + 2 * pad - reach) // step) + 1
            # The last window must begin within the tensor or the padding before it.
            places -= (places - 1) * step >= extent + pad
            extra = max(0, (places - 1) * step + reach - extent - 2 * pad)
        found.append((pad, pad + extra))
    return found


def _reduced(
    x: jax.Array,
    start: jax.Array,
    function: Callable[..., jax.Array],
    sizes: tuple[int, ...],
    steps: tuple[int, ...],
    padding: Sequence[tuple[int, int]],
    dilation: tuple[int, ...],
) -> jax.Array:
    before = x.ndim - len(sizes)
    ones = (1,) * before
    found: jax.Array = jax.lax.reduce_window(
        x,
        start,
        function,
        ones + sizes,
        ones + steps,
        ((0, 0),) * before + tuple(padding),
        window_dilation=ones + dilation,
    )
    return found


def _lowest(dtype: "np.dtype[np.generic]") -> jax.Array:
    if is_floating(dtype):
        return jnp.asarray(-jnp.inf, dtype)
    return jnp.asarray(jnp.iinfo(dtype).min, dtype)


def _max_pool(count: int) -> Operation:
    def compute(
        self: jax.Array,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> jax.Array:
        sizes = spread(kernel_size, count)
        steps = spread(stride or sizes, count)
        gaps, pads = spread(dilation, count), spread(padding, count)
        around = _windows(self, count, sizes, steps, pads, gaps, ceil_mode)
        lowest = _lowest(self.dtype)
        return _reduced(self, lowest, jax.lax.max, sizes, steps, around, gaps)

    return compute


def _max_pool_with_places(count: int) -> Operation:
    pooled = _max_pool(count)

    def compute(
        self: jax.Array,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> tuple[jax.Array, NotComputed]:
        # Only backward passes and unpooling use the indices; `NOT_COMPUTED` rejects their readers.
        return pooled(self, kernel_size, stride, padding, dilation, ceil_mode), NOT_COMPUTED

    return compute


def _avg_pool(count: int) -> Operation:
    def compute(
        self: jax.Array,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> jax.Array:
        sizes = spread(kernel_size, count)
        steps = spread(stride or sizes, count)
        pads, gaps = spread(padding, count), (1,) * count
        around = _windows(self, count, sizes, steps, pads, gaps, ceil_mode)
        zero = jnp.zeros((), self.dtype)
        total = _reduced(self, zero, jax.lax.add, sizes, steps, around, gaps)
        if divisor_override is not None:
            return total / as_array(divisor_override, total.dtype)
        counted = jnp.ones((1,) * (self.ndim - count) + self.shape[-count:], self.dtype)
        if count_include_pad:
            # Padding for `ceil_mode` never counts towards the mean.
            inside = [(0, 0)] * (self.ndim - count) + [(pad, pad) for pad in pads]
            counted = jnp.pad(counted, inside, constant_values=1)
            around = [(0, end - pad) for pad, (_, end) in zip(pads, around, strict=True)]
        return total / _reduced(counted, zero, jax.lax.add, sizes, steps, around, gaps)

    return compute


def _parts(extent: int, wanted: int) -> list[tuple[int, int]]:
    """Return the start and end of each window of an adaptive pooling along one dimension."""
    if wanted > _MOST_WINDOWS:
        raise InvalidModel(f"{wanted} windows of unequal sizes are more than {_MOST_WINDOWS}")
    return [(i * extent // wanted, -(-(i + 1) * extent // wanted)) for i in range(wanted)]


def _adaptive(
    x: jax.Array, sizes: Sizes, count: int, function: Callable[..., jax.Array]
) -> jax.Array:
    """Reduce each dimension to the requested number of windows, whose sizes differ by at most 1."""
    for place, wanted in enumerate(spread(sizes, count)):
        axis = x.ndim - count + place
        extent = x.shape[axis]
        if wanted == 1:
            x = function(x, axis=axis, keepdims=True)
            continue
        if is_open(extent):
            raise InvalidModel("adaptive pooling of a dynamic dimension: give it a size with --dim")
        if extent == wanted:
            continue
        if extent % wanted == 0:
            shape = (*x.shape[:axis], wanted, extent // wanted, *x.shape[axis + 1 :])
            x = function(x.reshape(shape), axis=axis + 1)
            continue
        windows = [
            function(jax.lax.slice_in_dim(x, start, end, axis=axis), axis=axis, keepdims=True)
            for start, end in _parts(extent, wanted)
        ]
        x = jnp.concatenate(windows, axis)
    return x


def _adaptive_mean(count: int) -> Operation:
    def compute(self: jax.Array, output_size: Sizes) -> jax.Array:
        return _adaptive(self, output_size, count, jnp.mean)

    return compute


def _adaptive_max(count: int) -> Operation:
    def compute(self: jax.Array, output_size: Sizes) -> tuple[jax.Array, NotComputed]:
        return _adaptive(self, output_size, count, jnp.max), NOT_COMPUTED

    return compute


POOLING: Family = {
    "_adaptive_avg_pool2d": _adaptive_mean(2),
    "_adaptive_avg_pool3d": _adaptive_mean(3),
    "adaptive_avg_pool1d": _adaptive_mean(1),
    "adaptive_avg_pool2d": _adaptive_mean(2),
    "adaptive_avg_pool3d": _adaptive_mean(3),
    "adaptive_max_pool1d": _adaptive_max(1),
    "adaptive_max_pool2d": _adaptive_max(2),
    "avg_pool1d": _avg_pool(1),
    "avg_pool2d": _avg_pool(2),
    "avg_pool3d": _avg_pool(3),
    "max_pool1d": _max_pool(1),
    "max_pool2d": _max_pool(2),
    "max_pool2d_with_indices": _max_pool_with_places(2),
    "max_pool3d": _max_pool(3),
    "max_pool3d_with_indices": _max_pool_with_places(3),
}
