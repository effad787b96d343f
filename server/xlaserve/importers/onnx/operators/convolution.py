"""Convolution operators."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlaserve.authoring.cpu.convolutions import Convolution
from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.operators.windows import Window, halves, window_of
from xlaserve.importers.onnx.values import Value, integers_of, on_device
from xlaserve.tensors import Tensor


def _conv(node: Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return with_bias(convolved(node, on_device(x), on_device(weight)), bias)


def convolved(
    node: Node, x: jax.Array, weight: jax.Array, *, precision: lax.Precision | None = None
) -> jax.Array:
    """Convolve [N,C,...] with [M,C/group,...] as specified by a node's attributes.

    Integers are summed in INT32.
    """
    kernel = node.integers("kernel_shape", weight.shape[2:])
    window = window_of(node, x.shape[2:], kernel)
    convolution = Convolution.plain(
        window.strides,
        window.pads,
        kernel_dilation=window.dilations,
        groups=node.integer("group", 1),
        precision=precision,
        dtype=jnp.int32 if x.dtype.kind in "iu" else None,
    )
    return convolution(x, weight)


def with_bias(x: jax.Array, bias: Value | None) -> jax.Array:
    """Add one number per channel, if there is a bias."""
    return x if bias is None else x + per_channel(bias, x.ndim)


def per_channel(value: Value, rank: int) -> jax.Array:
    """Reshape one number per channel to broadcast over an image."""
    return on_device(value).reshape((1, -1) + (1,) * (rank - 2))


def _conv_transpose(node: Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    image, filters = on_device(x), on_device(weight)
    groups = node.integer("group", 1)
    window, extra = _transposed_window(node, image.shape[2:], filters.shape[2:])
    padding = [
        (extent - 1 - low, extent - 1 - high + more)
        for extent, (low, high), more in zip(window.extents, window.pads, extra, strict=True)
    ]
    convolution = Convolution.plain(
        (1,) * len(padding),
        padding,
        image_dilation=window.strides,
        kernel_dilation=window.dilations,
        groups=groups,
    )
    return with_bias(convolution(image, _transposed(filters, groups)), bias)


def _transposed(filters: jax.Array, groups: int) -> jax.Array:
    """Flip a kernel [C,M/group,...] and return it as [M,C/group,...], for a plain convolution."""
    channels, outputs, *kernel = filters.shape
    split = filters.reshape((groups, channels // groups, outputs, *kernel))
    swapped = jnp.swapaxes(split, 1, 2).reshape((-1, channels // groups, *kernel))
    return jnp.flip(swapped, tuple(range(2, swapped.ndim)))


def _transposed_window(
    node: Node, sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[Window, tuple[int, ...]]:
    rank = len(sizes)
    extra = node.integers("output_padding", (0,) * rank)
    output_sizes = node.integers("output_shape")[-rank:]
    automatic = node.text("auto_pad", "NOTSET")
    window = window_of(node, sizes, node.integers("kernel_shape", kernel))
    if len(extra) != rank:
        raise InvalidModel(
            f"output_padding: expected {rank} numbers, one per spatial dimension, got {extra}"
        )
    if not output_sizes and automatic in ("SAME_UPPER", "SAME_LOWER"):
        output_sizes = tuple(
            size * stride for size, stride in zip(sizes, window.strides, strict=True)
        )
    if not output_sizes:
        return window, extra
    totals = [
        stride * (size - 1) + more + extent - wanted
        for size, stride, extent, more, wanted in zip(
            sizes, window.strides, window.extents, extra, output_sizes, strict=True
        )
    ]
    pads = tuple(halves(max(total, 0), more_behind=automatic == "SAME_UPPER") for total in totals)
    # If `output_shape` is larger than the computed size, the rest is padding at the end.
    extra = tuple(more + max(-total, 0) for more, total in zip(extra, totals, strict=True))
    return Window(window.kernel, window.strides, window.dilations, pads), extra


def _columns_to_image(node: Node, x: Value, image_shape: Value, block_shape: Value) -> Value:
    sizes, block = integers_of(image_shape), integers_of(block_shape)
    window = window_of(node, sizes, block)
    array = on_device(x)
    batch, rows, count = array.shape
    steps = [
        (size + low + high - extent) // stride + 1
        for size, (low, high), extent, stride in zip(
            sizes, window.pads, window.extents, window.strides, strict=True
        )
    ]
    taps = math.prod(block)
    if rows % taps or count != math.prod(steps):
        raise InvalidModel(
            f"expected a multiple of {taps} rows and {math.prod(steps)} columns, since blocks of"
            f" {block} make an image of {sizes}, got {rows} rows and {count} columns"
        )
    places, inside = _places_of_columns(window, sizes, steps)
    columns = array.reshape((batch, rows // taps, taps * count))
    kept = jnp.where(inside[None, None, :], columns, jnp.zeros((), array.dtype))
    empty = jnp.zeros((batch, rows // taps, math.prod(sizes)), array.dtype)
    return empty.at[:, :, places].add(kept).reshape((batch, rows // taps, *sizes))


def _places_of_columns(
    window: Window, sizes: Sequence[int], steps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the flat image position of each column element, and whether it is in the image."""
    rank = len(sizes)
    taps = np.indices(window.kernel).reshape((rank, -1, 1))
    starts = np.indices(steps).reshape((rank, 1, -1))
    flat, inside = np.zeros((), np.int64), np.ones((), np.bool_)
    for axis, size in enumerate(sizes):
        place = starts[axis] * window.strides[axis] + taps[axis] * window.dilations[axis]
        place = place - window.pads[axis][0]
        inside = inside & (place >= 0) & (place < size)
        flat = flat * size + np.clip(place, 0, size - 1)
    return flat.reshape(-1), inside.reshape(-1)


CONVOLUTION: Family = {
    "Col2Im": operator(_columns_to_image, 1, 2),
    "Conv": operator(_conv),
    "ConvTranspose": operator(_conv_transpose),
}
