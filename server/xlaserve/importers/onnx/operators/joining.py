"""Operators that join, split, repeat, pad or create tensors."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.datatypes import dtype_of
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import (
    HOST_ELEMENTS,
    Value,
    axis_of,
    dimensions_of,
    integers_of,
    is_concrete,
    is_host,
    on_device,
    placed,
    scalar_of,
)


def _constant(node: Node) -> Value:
    for name, read, dtype in (
        ("value_int", node.integer, np.int64),
        ("value_float", node.real, np.float32),
        ("value_ints", node.integers, np.int64),
        ("value_floats", node.reals, np.float32),
    ):
        if node.has(name):
            return np.asarray(read(name), dtype)
    return node.tensor("value")


def _constant_of_shape(node: Node, shape: Value) -> Value:
    value = node.tensor("value", np.zeros(1, np.float32))
    target = dimensions_of(shape)
    module, _ = placed(target)
    filled: Value = module.full(target, value.reshape(-1)[0], dtype=value.dtype)
    return filled


def _range(_: Node, start: Value, limit: Value, delta: Value) -> Value:
    dtype = start.dtype if start.dtype != np.object_ else np.dtype(np.int64)
    if dtype.kind == "f":
        return _float_range(_float(start), _float(limit), _float(delta), dtype)
    begin, end, step = scalar_of(start), scalar_of(limit), scalar_of(delta)
    if is_concrete([begin, end, step]) and len(range(begin, end, step)) <= HOST_ELEMENTS:
        return np.fromiter(range(begin, end, step), dtype)
    return jnp.arange(begin, end, step, dtype)


def _float_range(start: float, limit: float, delta: float, dtype: "np.dtype[Any]") -> Value:
    count = max(math.ceil((limit - start) / delta), 0)
    # Not jnp.arange, which computes the whole range on the host, however long.
    steps = jax.lax.iota(np.dtype(np.int64), count).astype(dtype)
    return steps * np.asarray(delta, dtype) + np.asarray(start, dtype)


def _float(value: Value) -> float:
    if not is_host(value):
        raise InvalidModel("its length depends on data")
    return float(value.item())


def _concat(node: Node, *values: Value) -> Value:
    axis = axis_of(node.integer("axis"), values[0].ndim)
    sizes = [value.shape[axis] for value in values]
    shape = (*values[0].shape[:axis], sum(sizes), *values[0].shape[axis + 1 :])
    module, ready = placed(shape, *values)
    joined: Value = module.concatenate(ready, axis=axis)
    return joined


def _split(node: Node, x: Value, given: Value | None = None) -> tuple[Value, ...]:
    axis = axis_of(node.integer("axis", 0), x.ndim)
    count = node.integer("num_outputs", len(node.outputs))
    sizes = even_parts(x.shape[axis], count) if given is None else dimensions_of(given)
    if len(sizes) != len(node.outputs) or sum(sizes) != x.shape[axis]:
        raise InvalidModel(
            f"axis {axis} has size {x.shape[axis]}, which cannot be split into"
            f" {len(node.outputs)} outputs of sizes {list(sizes)}"
        )
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(_part(x, axis, end - size, end) for size, end in zip(sizes, ends, strict=True))


def even_parts(size: int, count: int) -> tuple[int, ...]:
    """Split a size into `count` equal parts, the last one smaller if needed."""
    part = -(-size // count)
    return (*[part] * (count - 1), size - part * (count - 1))


def _part(x: Value, axis: int, start: int, end: int) -> Value:
    if is_host(x):
        return x[(slice(None),) * axis + (slice(start, end),)]
    return jax.lax.slice_in_dim(x, start, end, axis=axis)


def _tile(_: Node, x: Value, repeats: Value) -> Value:
    counts = dimensions_of(repeats)
    if len(counts) != x.ndim:
        raise InvalidModel(
            f"repeats: expected {x.ndim} numbers, one per dimension, got {len(counts)}"
        )
    shape = [size * count for size, count in zip(x.shape, counts, strict=True)]
    # Insert a dimension of size 1 before each one, and broadcast it. This supports symbolic counts.
    pairs = [part for size in x.shape for part in (1, size)]
    spread = [part for pair in zip(counts, x.shape, strict=True) for part in pair]
    module, (x,) = placed(shape, x)
    tiled: Value = module.broadcast_to(x.reshape(tuple(pairs)), tuple(spread))
    return tiled.reshape(tuple(shape))


def _pad(
    node: Node, x: Value, pads: Value, value: Value | None = None, given: Value | None = None
) -> Value:
    mode = node.text("mode", "constant")
    axes = range(x.ndim) if given is None else [axis_of(a, x.ndim) for a in integers_of(given)]
    widths = [(0, 0)] * x.ndim
    amounts = dimensions_of(pads)
    if len(amounts) != 2 * len(axes):
        raise InvalidModel(
            f"pads: expected {2 * len(axes)} numbers, two per axis, got {len(amounts)}"
        )
    for index, axis in enumerate(axes):
        widths[axis] = (amounts[index], amounts[index + len(axes)])
    array = on_device(x)
    if mode == "constant":
        fill = jnp.zeros((), x.dtype) if value is None else on_device(value).reshape(())
        # Unlike jnp.pad, lax.pad accepts negative widths, which crop.
        return jax.lax.pad(array, fill, [(low, high, 0) for low, high in widths])
    return jnp.pad(_cut(array, widths), _positive(widths), mode=mode)


def _cut(x: jax.Array, widths: Sequence[tuple[int, int]]) -> jax.Array:
    cuts = [(min(low, 0), min(high, 0), 0) for low, high in widths]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), cuts)


def _positive(widths: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(max(low, 0), max(high, 0)) for low, high in widths]


def _center_crop_pad(node: Node, x: Value, shape: Value) -> Value:
    wanted = dimensions_of(shape)
    axes = node.integers("axes", range(x.ndim))
    if len(axes) != len(wanted):
        raise InvalidModel(f"expected {len(axes)} sizes, one per axis, got {len(wanted)}")
    widths = [(0, 0, 0)] * x.ndim
    for place, size in zip(axes, wanted, strict=True):
        axis = axis_of(place, x.ndim)
        if size == x.shape[axis]:
            continue
        if not is_concrete([size, x.shape[axis]]):
            raise InvalidModel(
                f"its axis {axis} is dynamic and cannot be cropped or padded to {size}: set a size"
                " with --dim"
            )
        # If the difference is odd, the extra element is padded or cropped at the end.
        more = abs(size - x.shape[axis]) // 2
        low = more if size > x.shape[axis] else -more
        widths[axis] = (low, size - x.shape[axis] - low, 0)
    return jax.lax.pad(on_device(x), jnp.zeros((), x.dtype), widths)


def _eye_like(node: Node, x: Value) -> Value:
    offset = node.integer("k", 0)
    dtype = dtype_of(node.integer("dtype")) if node.has("dtype") else x.dtype
    return jnp.eye(x.shape[0], x.shape[1], k=offset, dtype=dtype)


def _one_hot(node: Node, indices: Value, depth: Value, values: Value) -> Value:
    classes = scalar_of(depth)
    axis = axis_of(node.integer("axis", -1), indices.ndim + 1)
    index = jnp.expand_dims(on_device(indices).astype(jnp.int64), axis)
    counted = jnp.where(index < 0, index + classes, index)
    shape = (*indices.shape[:axis], classes, *indices.shape[axis:])
    hot = jax.lax.broadcasted_iota(jnp.int64, shape, axis) == counted
    off, on = on_device(values)
    return jnp.where(hot, on, off)


JOINING: Family = {
    "CenterCropPad": operator(_center_crop_pad, 1),
    "Concat": operator(_concat),
    "Constant": operator(_constant),
    "ConstantOfShape": operator(_constant_of_shape, 0),
    "EyeLike": operator(_eye_like),
    "OneHot": operator(_one_hot, 1),
    "Pad": operator(_pad, 1, 3),
    "Range": operator(_range, 0, 1, 2),
    "Split": operator(_split, 1),
    "Tile": operator(_tile, 1),
}
