"""Operators that return or change a shape and keep the elements."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import (
    Dimensions,
    Value,
    axis_of,
    broadcast_shape,
    dimensions_of,
    host_of,
    integers_of,
    is_concrete,
    is_open,
    on_device,
    placed,
    with_rank,
)


def _shape(node: Node, x: Value) -> Value:
    start = node.integer("start", 0)
    end = node.integer("end", x.ndim)
    return host_of(x.shape[start:end])


def _size(_: Node, x: Value) -> Value:
    return host_of([math.prod(x.shape)]).reshape(())


def _reshape(node: Node, x: Value, shape: Value) -> Value:
    keep_zeros = bool(node.integer("allowzero", 0))
    return reshaped(x, target_shape(x.shape, dimensions_of(shape), keep_zeros=keep_zeros))


def reshaped(x: Value, shape: Sequence[int]) -> Value:
    """Return the same elements in another shape."""
    return x.reshape(tuple(shape)) if is_concrete(shape) else on_device(x).reshape(tuple(shape))


def target_shape(shape: Sequence[int], requested: Sequence[int], *, keep_zeros: bool) -> Dimensions:
    """Return the result shape of Reshape: 0 copies a size unless `keep_zeros`, -1 is inferred.

    Raises InvalidModel if the numbers of elements differ.
    """
    sizes = list(requested)
    for index, size in enumerate(sizes):
        if _is(size, 0) and not keep_zeros:
            if index >= len(shape):
                raise InvalidModel(
                    f"shape {sizes} has a 0 at index {index}, which copies a size, but its input"
                    f" has only {len(shape)} dimensions"
                )
            sizes[index] = shape[index]
    if sum(_is(size, -1) for size in sizes) > 1:
        raise InvalidModel(f"shape {sizes} has -1 more than once")
    open_axis = next((index for index, size in enumerate(sizes) if _is(size, -1)), None)
    known = [size for index, size in enumerate(sizes) if index != open_axis]
    if open_axis is not None:
        sizes[open_axis] = _rest(shape, known)
    elif math.prod(sizes) != math.prod(shape):
        raise InvalidModel(
            f"a tensor of shape {tuple(shape)} cannot be reshaped to {tuple(sizes)}: the numbers"
            " of elements differ"
        )
    return tuple(sizes)


def is_for_one_row(shape: Sequence[int], requested: Sequence[int]) -> bool:
    """Tell whether a Reshape was exported for a batch of 1 and would fit with a dynamic batch."""
    if (
        not shape
        or not requested
        or not is_open(shape[0])
        or requested[0] != 1
        or not is_concrete(requested)
    ):
        return False
    return min(requested) > 0 and bool(math.prod(requested) * shape[0] == math.prod(shape))


def _is(size: int, special: int) -> bool:
    return not is_open(size) and size == special


def _rest(shape: Sequence[int], known: Sequence[int]) -> int:
    """Return the size to use for -1: the elements of the shape divided by the known sizes.

    Sizes that occur in both are cancelled first, because JAX may not be able to divide symbolic
    dimensions exactly.
    """
    left, divisors = list(shape), []
    for size in known:
        if size in left:
            left.remove(size)
        else:
            divisors.append(size)
    elements, divisor = math.prod(left), math.prod(divisors)
    if _is(divisor, 0) or elements % divisor != 0:
        raise InvalidModel(
            f"cannot compute the size for -1: the elements of shape {tuple(shape)} are not a"
            f" multiple of the other sizes {tuple(known)}"
        )
    return elements // divisor


def _flatten(node: Node, x: Value) -> Value:
    axis = node.integer("axis", 1)
    if not -x.ndim <= axis <= x.ndim:
        raise InvalidModel(f"axis {axis} is out of range for a tensor of rank {x.ndim}")
    axis += x.ndim if axis < 0 else 0
    return reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _squeeze(_: Node, x: Value, axes: Value | None = None) -> Value:
    if axes is None:
        chosen = {axis for axis, size in enumerate(x.shape) if _is(size, 1)}
    else:
        chosen = {axis_of(axis, x.ndim) for axis in integers_of(axes)}
    for axis in chosen:
        if x.shape[axis] != 1:
            raise InvalidModel(f"axis {axis} of shape {x.shape}: expected a size of 1")
    return reshaped(x, [size for axis, size in enumerate(x.shape) if axis not in chosen])


def _unsqueeze(_: Node, x: Value, axes: Value) -> Value:
    listed = integers_of(axes)
    rank = x.ndim + len(listed)
    chosen = {axis_of(axis, rank) for axis in listed}
    if len(chosen) != len(listed):
        raise InvalidModel(f"duplicate axis: {listed}")
    sizes = iter(x.shape)
    return reshaped(x, [1 if axis in chosen else next(sizes) for axis in range(rank)])


def _transpose(node: Node, x: Value) -> Value:
    order = node.integers("perm", tuple(reversed(range(x.ndim))))
    module, (x,) = placed(x.shape, x)
    moved: Value = module.transpose(x, order)
    return moved


def _expand(_: Node, x: Value, shape: Value) -> Value:
    target = broadcast_shape(x.shape, dimensions_of(shape))
    module, (x,) = placed(target, x)
    spread: Value = module.broadcast_to(with_rank(x, len(target)), target)
    return spread


def _depth_to_space(node: Node, x: Value) -> Value:
    block, mode = node.integer("blocksize"), node.text("mode", "DCR")
    batch, channels, height, width = x.shape
    depth = channels // block**2
    split, order = {
        "DCR": ((block, block, depth), (0, 3, 4, 1, 5, 2)),
        "CRD": ((depth, block, block), (0, 1, 4, 2, 5, 3)),
    }[mode]
    parts = on_device(x).reshape((batch, *split, height, width))
    return parts.transpose(order).reshape((batch, depth, height * block, width * block))


def _space_to_depth(node: Node, x: Value) -> Value:
    block = node.integer("blocksize")
    mode = node.text("mode", "DCR")
    if mode not in _BLOCKS_LAST:
        raise InvalidModel(f"mode: expected {' or '.join(_BLOCKS_LAST)}, got {mode}")
    batch, channels, height, width = x.shape
    parts = on_device(x).reshape((batch, channels, height // block, block, width // block, block))
    return parts.transpose(_BLOCKS_LAST[mode]).reshape(
        (batch, channels * block**2, height // block, width // block)
    )


_BLOCKS_LAST = {"DCR": (0, 3, 5, 1, 2, 4), "CRD": (0, 1, 3, 5, 2, 4)}
"""Permutations of batch, channels, rows, block rows, columns and block columns, by mode."""


def _trilu(node: Node, x: Value, offset: Value | None = None) -> Value:
    diagonal = 0 if offset is None else integers_of(offset)[0]
    upper = node.integer("upper", 1)
    rows, columns = x.shape[-2:]
    distance = jnp.arange(columns)[None, :] - jnp.arange(rows)[:, None]
    kept = distance >= diagonal if upper else distance <= diagonal
    return jnp.where(with_rank(kept, x.ndim), on_device(x), np.zeros((), x.dtype))


SHAPE: Family = {
    "DepthToSpace": operator(_depth_to_space),
    "Expand": operator(_expand, 1),
    "Flatten": operator(_flatten),
    "Reshape": operator(_reshape, 1),
    "Shape": operator(_shape),
    "Size": operator(_size),
    "SpaceToDepth": operator(_space_to_depth),
    "Squeeze": operator(_squeeze, 1),
    "Transpose": operator(_transpose),
    "Trilu": operator(_trilu, 1),
    "Unsqueeze": operator(_unsqueeze, 1),
}
