"""Pooling: one number for each window."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.models.onnx.graph import Node
from xlaserve.models.onnx.operators.table import Family, operator
from xlaserve.models.onnx.operators.windows import Window, rounded_up, window_of
from xlaserve.models.onnx.values import Value, on_device
from xlaserve.tensors import Tensor


def _window(node: Node, x: Value) -> tuple[Window, Window]:
    """Return the window as the node has it, and as ceil_mode extends it."""
    window = window_of(node, x.shape[2:], node.integers("kernel_shape"))
    extended = rounded_up(window, x.shape[2:]) if node.integer("ceil_mode", 0) else window
    return window, extended


def _max_pool(node: Node, x: Value) -> Value:
    node.integer("storage_order", 0)  # of the indices
    if node.needs(1):
        raise InvalidModel("its second output, the indices, is not implemented")
    array = on_device(x)
    lowest = -np.inf if jnp.issubdtype(array.dtype, jnp.floating) else np.iinfo(array.dtype).min
    _, window = _window(node, x)
    return _reduced(array, np.asarray(lowest, array.dtype), jax.lax.max, window)


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


def _average_pool(node: Node, x: Value) -> Value:
    array = on_device(x)
    plain, window = _window(node, x)
    counted = jnp.ones((1, 1, *array.shape[2:]), array.dtype)
    if node.integer("count_include_pad", 0):
        # What ceil_mode adds behind does not count, what the node pads does.
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


POOLING: Family = {
    "AveragePool": operator(_average_pool),
    "GlobalAveragePool": operator(_global_average),
    "GlobalMaxPool": operator(_global_max),
    "LpPool": operator(_lp_pool),
    "MaxPool": operator(_max_pool),
}
