"""Operators that gather or scatter elements by index."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import (
    Value,
    axis_of,
    dimensions_of,
    integers_of,
    is_concrete,
    is_host,
    is_open,
    on_device,
    placed,
)

_FAR = 10**9
"""Slice bounds from this size on mean the end of a dynamic dimension: exporters use various large
numbers, and no batch has that many rows."""

_OUT_OF_BOUNDS = "fill"
"""Gather mode in which out-of-bounds reads give NaN, or the lowest integer, instead of a wrong
element."""


def _gather(node: Node, x: Value, indices: Value) -> Value:
    axis = axis_of(node.integer("axis", 0), x.ndim)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    if is_host(x) and is_host(indices) and x.dtype == np.object_:
        return np.take(x, indices.astype(np.int64), axis)
    module, (x, indices) = placed(shape, x, indices)
    if module is np:
        return np.take(np.asarray(x), np.asarray(indices), axis)
    return jnp.take(
        on_device(x), _wrapped(on_device(indices), x.shape[axis]), axis, mode=_OUT_OF_BOUNDS
    )


def _wrapped(indices: jax.Array, size: int) -> jax.Array:
    """Resolve negative indices, which count from the end."""
    indices = indices.astype(jnp.int64)
    return jnp.where(indices < 0, indices + size, indices)


def _gather_elements(node: Node, x: Value, indices: Value) -> Value:
    axis = axis_of(node.integer("axis", 0), x.ndim)
    array, picked = on_device(x), on_device(indices)
    if _without(array.shape, axis) == _without(picked.shape, axis):
        # `take_along_axis` keeps rows aligned, so that they can be proven independent; explicit row
        # indices would prevent that.
        wrapped = _wrapped(picked, array.shape[axis])
        return jnp.take_along_axis(array, wrapped, axis, mode=_OUT_OF_BOUNDS)
    positions = _positions(picked, array.shape[axis], axis)
    return array.at[positions].get(mode=_OUT_OF_BOUNDS)


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _positions(indices: jax.Array, size: int, axis: int) -> tuple[jax.Array, ...]:
    """Return the index of each element, with `indices` in place of its position along `axis`."""
    grid = [jax.lax.broadcasted_iota(jnp.int64, indices.shape, a) for a in range(indices.ndim)]
    grid[axis] = _wrapped(indices, size)
    return tuple(grid)


def _gather_nd(node: Node, x: Value, indices: Value) -> Value:
    batch = node.integer("batch_dims", 0)
    array, picked = on_device(x), on_device(indices)

    def gather(part: jax.Array, where: jax.Array) -> jax.Array:
        return part.at[_columns(where, part.shape)].get(mode=_OUT_OF_BOUNDS)

    for _ in range(batch):
        gather = jax.vmap(gather)
    return gather(array, picked)


def _columns(indices: jax.Array, shape: Sequence[int]) -> tuple[jax.Array, ...]:
    return tuple(_wrapped(indices[..., axis], shape[axis]) for axis in range(indices.shape[-1]))


_SCATTERS = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}
"""Names of JAX scatter methods, by the attribute `reduction`."""


def _scattered(
    x: jax.Array, positions: tuple[jax.Array, ...], updates: jax.Array, reduction: str
) -> jax.Array:
    if reduction not in _SCATTERS:
        raise InvalidModel(f"reduction: expected {', '.join(_SCATTERS)}, got {reduction}")
    target = x.at[positions]
    scattered: jax.Array = getattr(target, _SCATTERS[reduction])(updates)
    return scattered


def _scatter_elements(node: Node, x: Value, indices: Value, updates: Value) -> Value:
    axis = axis_of(node.integer("axis", 0), x.ndim)
    reduction = node.text("reduction", "none")
    positions = _positions(on_device(indices), x.shape[axis], axis)
    return _scattered(on_device(x), positions, on_device(updates), reduction)


def _scatter_nd(node: Node, x: Value, indices: Value, updates: Value) -> Value:
    reduction = node.text("reduction", "none")
    if is_host(x) and is_host(indices) and is_host(updates) and x.dtype == np.object_:
        changed = x.copy()
        changed[tuple(np.moveaxis(indices, -1, 0))] = updates
        return changed
    array = on_device(x)
    return _scattered(array, _columns(on_device(indices), x.shape), on_device(updates), reduction)


def _slice(
    _: Node,
    x: Value,
    starts: Value,
    ends: Value,
    axes: Value | None = None,
    steps: Value | None = None,
) -> Value:
    begin, end = dimensions_of(starts), dimensions_of(ends)
    along = range(len(begin)) if axes is None else integers_of(axes)
    step = [1] * len(begin) if steps is None else integers_of(steps)
    for axis, *bounds in zip(along, begin, end, step, strict=True):
        x = _sliced(x, axis_of(axis, x.ndim), *bounds)
    return x


def _sliced(x: Value, axis: int, start: int, end: int, step: int) -> Value:
    size = x.shape[axis]
    picked = slice_of(size, start, end, step)
    if is_concrete([size, start, end]) or not (is_open(start) or is_open(end)):
        return x[(slice(None),) * axis + (picked,)]
    # JAX cannot slice unless it can prove that symbolic bounds are in range; `take` reads NaN
    # outside.
    first, last = picked.start or 0, size if picked.stop is None else picked.stop
    return jnp.take(on_device(x), jnp.arange(first, last, step), axis, mode=_OUT_OF_BOUNDS)


def slice_of(size: int, start: int, end: int, step: int) -> slice:
    """Return the slice of a dimension, with bounds clamped and negative ones counted from the end.

    Symbolic bounds are assumed to be in range.
    """
    if step == 0:
        raise InvalidModel("the step of a slice is 0")
    if not any(map(is_open, (size, start, end))):
        found = range(*slice(start, end, step).indices(size))
        stop = found.stop if found.stop >= 0 else None
        return slice(found.start, stop, step) if found else slice(0, 0)
    return slice(_bound(start), None if end == size else _bound(end), step)


def _bound(bound: int) -> int | None:
    return None if not is_open(bound) and abs(bound) >= _FAR else bound


def _reverse_sequence(node: Node, x: Value, lengths: Value) -> Value:
    time, batch = node.integer("time_axis", 0), node.integer("batch_axis", 1)
    rows = jnp.moveaxis(on_device(x), (batch, time), (0, 1))
    count = on_device(lengths)[:, None]
    step = jnp.arange(rows.shape[1], dtype=count.dtype)[None, :]
    order = jnp.where(step < count, count - 1 - step, step)
    shaped = order.reshape(order.shape + (1,) * (rows.ndim - 2))
    turned = jnp.take_along_axis(rows, jnp.broadcast_to(shaped, rows.shape), axis=1)
    return jnp.moveaxis(turned, (0, 1), (batch, time))


INDEXING: Family = {
    "Gather": operator(_gather),
    "GatherElements": operator(_gather_elements),
    "GatherND": operator(_gather_nd),
    "ReverseSequence": operator(_reverse_sequence),
    "ScatterElements": operator(_scatter_elements),
    "ScatterND": operator(_scatter_nd),
    "Slice": operator(_slice, 1, 2, 3, 4),
}
