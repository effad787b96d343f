"""Pooling operators."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.operators.windows import Window, rounded_up, window_of
from xlaserve.importers.onnx.values import Value, dimensions_of, on_device
from xlaserve.tensors import Tensor


def _window(node: Node, x: Value) -> tuple[Window, Window]:
    """Return the node's window, and the window with padding for `ceil_mode`."""
    window = window_of(node, x.shape[2:], node.integers("kernel_shape"))
    extended = rounded_up(window, x.shape[2:]) if node.integer("ceil_mode", 0) else window
    return window, extended


def _max_pool(node: Node, x: Value) -> Value | tuple[Value, Value]:
    by_columns = node.integer("storage_order", 0)
    array = on_device(x)
    lowest = -np.inf if jnp.issubdtype(array.dtype, jnp.floating) else np.iinfo(array.dtype).min
    start = np.asarray(lowest, array.dtype)
    _, window = _window(node, x)
    if not node.needs(1):
        return _reduced(array, start, jax.lax.max, window)
    greatest, places = _greatest(array, _places(array), start, window)
    return greatest, _by_columns(places, array.shape[2:]) if by_columns else places


def _places(x: jax.Array) -> jax.Array:
    """Return the flat index of each element in the tensor, including batch and channels."""
    count = math.prod(x.shape[2:])
    spatial = jnp.arange(count, dtype=np.int64).reshape((1, 1, *x.shape[2:]))
    images = jnp.arange(x.shape[0] * x.shape[1], dtype=np.int64)
    return images.reshape(x.shape[:2] + (1,) * (x.ndim - 2)) * count + spatial


def _by_columns(places: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Convert the indices within an image to column-major order."""
    count = math.prod(sizes)
    spatial = places % count
    found, step = places - spatial, 1
    for axis, size in enumerate(sizes):
        found += spatial // math.prod(sizes[axis + 1 :]) % size * step
        step *= size
    return found


def _greatest(
    x: jax.Array, places: jax.Array, start: Tensor, window: Window
) -> tuple[jax.Array, jax.Array]:
    """Return the maximum of each window and its lowest index."""

    def combine(
        one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        is_one = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        return jnp.where(is_one, one[0], other[0]), jnp.where(is_one, one[1], other[1])

    found: tuple[jax.Array, jax.Array] = jax.lax.reduce_window(
        (x, places),
        (start[()], np.int64(np.iinfo(np.int64).max)),
        combine,
        window_dimensions=(1, 1, *window.kernel),
        window_strides=(1, 1, *window.strides),
        window_dilation=(1, 1, *window.dilations),
        padding=((0, 0), (0, 0), *window.pads),
    )
    return found


def _reduced(
    x: jax.Array,
    start: Tensor,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    window: Window,
) -> jax.Array:
    reduced: jax.Array = jax.lax.reduce_window(
        x,
        start[()],
        combine,
        window_dimensions=(1, 1, *window.kernel),
        window_strides=(1, 1, *window.strides),
        window_dilation=(1, 1, *window.dilations),
        padding=((0, 0), (0, 0), *window.pads),
    )
    return reduced


def _sums(x: jax.Array, window: Window) -> jax.Array:
    return _reduced(x, np.zeros((), x.dtype), jax.lax.add, window)


def average_pool(node: Node, x: Value) -> Value:
    """Return the mean of each window."""
    array = on_device(x)
    plain, window = _window(node, x)
    counted = jnp.ones((1, 1, *array.shape[2:]), array.dtype)
    if node.integer("count_include_pad", 0):
        # The node's padding counts towards the mean; padding for `ceil_mode` does not.
        counted = jnp.pad(counted, ((0, 0), (0, 0), *plain.pads), constant_values=1)
        left = [
            (0, extended[1] - pads[1])
            for extended, pads in zip(window.pads, plain.pads, strict=True)
        ]
        counts = _sums(
            counted, Window(window.kernel, window.strides, window.dilations, tuple(left))
        )
    else:
        counts = _sums(counted, window)
    return _sums(array, window) / counts


def _lp_pool(node: Node, x: Value) -> Value:
    p = node.integer("p", 2)
    _, window = _window(node, x)
    powers = jnp.abs(on_device(x)) ** p
    return _sums(powers, window) ** (1.0 / p)


def _spatial(x: Value) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _global_average(_: Node, x: Value) -> Value:
    return jnp.mean(on_device(x), axis=_spatial(x), keepdims=True)


def _global_max(_: Node, x: Value) -> Value:
    return jnp.max(on_device(x), axis=_spatial(x), keepdims=True)


def _global_lp(node: Node, x: Value) -> Value:
    p = node.integer("p", 2)
    return jnp.sum(jnp.abs(on_device(x)) ** p, axis=_spatial(x), keepdims=True) ** (1.0 / p)


def _max_unpool(node: Node, x: Value, indices: Value, shape: Value | None = None) -> Value:
    array = on_device(x)
    window = window_of(node, x.shape[2:], node.integers("kernel_shape"))
    inferred = [
        (size - 1) * stride + kernel - sum(pads)
        for size, stride, kernel, pads in zip(
            x.shape[2:], window.strides, window.kernel, window.pads, strict=True
        )
    ]
    # The indices are flat indices of the whole tensor, including batch and channels.
    whole = (*x.shape[:2], *inferred)
    zeros = jnp.zeros(whole, array.dtype).reshape(-1)
    places = on_device(indices).reshape(-1)
    found = zeros.at[places].set(array.reshape(-1)).reshape(whole)
    if shape is None:
        return found
    more = [(0, wanted - size) for wanted, size in zip(dimensions_of(shape), whole, strict=True)]
    if any(extra < 0 for _, extra in more[2:]):
        raise InvalidModel(
            f"output_shape: expected at least {whole}, the unpooled shape, got"
            f" {dimensions_of(shape)}"
        )
    return jnp.pad(found, more)


POOLING: Family = {
    "AveragePool": operator(average_pool),
    "GlobalAveragePool": operator(_global_average),
    "GlobalLpPool": operator(_global_lp),
    "GlobalMaxPool": operator(_global_max),
    "LpPool": operator(_lp_pool),
    "MaxPool": operator(_max_pool),
    "MaxUnpool": operator(_max_unpool, 2),
}
