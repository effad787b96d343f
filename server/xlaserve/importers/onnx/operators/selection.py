"""Operators with a data-dependent number of result rows: padded to a bound, with a count."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, Operator, operator
from xlaserve.importers.onnx.sequences import AnyValue, Counted
from xlaserve.importers.onnx.values import (
    Value,
    axis_of,
    is_concrete,
    is_host,
    on_device,
    scalar_of,
)

_Box: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Minimum and maximum x of boxes, then minimum and maximum y."""

_BOX_RANK = 3


def _check_closed(*values: Value) -> None:
    for value in values:
        if not is_concrete(value.shape):
            raise InvalidModel(
                "its number of output rows depends on data, and their maximum on a dynamic"
                " dimension of its input: set its size with --shape or --dim"
            )


def _first(is_real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a permutation that moves true elements to the front, and their number."""
    return jnp.argsort(~is_real, stable=True), jnp.sum(is_real, dtype=jnp.int64)


# --- NonZero, Compress -------------------------------------------------------------------------


def _non_zero(_: Node, x: Value) -> AnyValue:
    if not x.ndim:
        raise InvalidModel(
            "its input is a scalar, for which onnxruntime and the ONNX specification differ"
        )
    if is_host(x):
        return np.stack(np.nonzero(x)).astype(np.int64)
    _check_closed(x)
    places, count = _first((x != jnp.zeros((), x.dtype)).reshape(-1))
    lines = jnp.stack(jnp.unravel_index(places, x.shape))
    return Counted(lines.astype(jnp.int64), count, axis=1)


def _compress(node: Node, x: Value, condition: Value) -> AnyValue:
    flat = on_device(x).reshape(-1) if not node.has("axis") else on_device(x)
    axis = axis_of(node.integer("axis", 0), flat.ndim)
    # A shorter condition drops the elements beyond it; a longer one is cut.
    chosen = condition[: flat.shape[axis]]
    if is_host(chosen):
        return jnp.take(flat, np.flatnonzero(np.asarray(chosen)), axis)
    _check_closed(flat, chosen)
    places, count = _first(on_device(chosen))
    return Counted(jnp.take(flat, places, axis), count, axis)


# --- Unique ------------------------------------------------------------------------------------


def _unique(node: Node, x: Value) -> Sequence[AnyValue]:
    _check_closed(x)
    array = on_device(x) if node.has("axis") else on_device(x).reshape(-1)
    axis = axis_of(node.integer("axis", 0), array.ndim)
    if not array.size:
        raise InvalidModel("Unique of an empty tensor is not implemented")
    most = array.shape[axis]
    found, first, inverse, counts = jnp.unique(
        array,
        return_index=True,
        return_inverse=True,
        return_counts=True,
        axis=axis,
        size=most,
    )
    count = jnp.sum(counts > 0, dtype=jnp.int64)
    inverse = inverse.reshape(-1)
    if not node.integer("sorted", 1):
        order = jnp.argsort(jnp.where(counts > 0, first, most), stable=True)
        found, first, counts = jnp.take(found, order, axis), first[order], counts[order]
        inverse = jnp.argsort(order)[inverse]
    return [
        Counted(found, count, axis),
        Counted(first.astype(jnp.int64), count, 0),
        inverse.astype(jnp.int64),
        Counted(counts.astype(jnp.int64), count, 0),
    ]


# --- NonMaxSuppression -------------------------------------------------------------------------


def _non_max_suppression(
    node: Node,
    boxes: Value,
    scores: Value,
    most: Value | None = None,
    overlap: Value | None = None,
    least: Value | None = None,
) -> AnyValue:
    """Select boxes by descending score, skipping those that overlap a selected one too much.

    Of boxes with equal scores the lower index comes first, as in onnxruntime. Rows are ordered by
    batch, class and score.
    """
    is_centred = bool(node.integer("center_point_box", 0))
    _check_closed(boxes, scores)
    if boxes.ndim != _BOX_RANK or scores.ndim != _BOX_RANK or boxes.shape[-1] != len("yxyx"):
        raise InvalidModel(
            "expected boxes [batch,boxes,4] and scores [batch,classes,boxes], got "
            f"{list(boxes.shape)} and {list(scores.shape)}"
        )
    each = 0 if most is None else min(max(scalar_of(most), 0), boxes.shape[1])
    if not each:
        return np.zeros((0, 3), np.int64)
    score = on_device(scores)
    order = jnp.argsort(-score, axis=-1, stable=True)
    sides = _sides(on_device(boxes), is_centred=is_centred)
    ordered = _along(tuple(side[:, None, :] for side in sides), order)
    is_left = jnp.ones(score.shape, jnp.bool_)
    if least is not None:
        is_left = jnp.take_along_axis(score > on_device(least).reshape(()), order, axis=-1)
    limit = jnp.zeros((), score.dtype) if overlap is None else on_device(overlap).reshape(())
    picked = _picked(is_left, ordered, each, limit)
    indices = jnp.take_along_axis(order, jnp.maximum(picked, 0), axis=-1)
    batch, kind = (jax.lax.broadcasted_iota(jnp.int64, picked.shape, axis) for axis in (0, 1))
    rows = jnp.stack([batch, kind, indices.astype(jnp.int64)], axis=-1).reshape(-1, 3)
    places, count = _first((picked >= 0).reshape(-1))
    return Counted(rows[places], count, axis=0)


def _sides(boxes: jax.Array, *, is_centred: bool) -> _Box:
    first, second, third, fourth = (boxes[..., place] for place in range(4))
    if is_centred:
        width, height = third / 2, fourth / 2
        return first - width, first + width, second - height, second + height
    return (
        jnp.minimum(second, fourth),
        jnp.maximum(second, fourth),
        jnp.minimum(first, third),
        jnp.maximum(first, third),
    )


def _along(box: Sequence[jax.Array], places: jax.Array) -> _Box:
    """Gather boxes at these positions, per batch and class."""
    shape = (*places.shape[:2], box[0].shape[-1])
    left, right, low, high = (
        jnp.take_along_axis(jnp.broadcast_to(side, shape), places, axis=-1) for side in box
    )
    return left, right, low, high


def _picked(is_left: jax.Array, boxes: _Box, each: int, limit: jax.Array) -> jax.Array:
    """Return the indices of the selected boxes, at most `each` per class, padded with -1."""
    place = jax.lax.broadcasted_iota(jnp.int64, is_left.shape, 2)

    def goes_on(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        step, left, _ = state
        return (step < each) & jnp.any(left)

    def picks(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        step, left, picked = state
        first = jnp.argmax(left, axis=-1, keepdims=True)
        found = jnp.where(jnp.any(left, axis=-1, keepdims=True), first, -1)
        picked = jax.lax.dynamic_update_slice_in_dim(picked, found, step, axis=2)
        left &= (place != first) & ~_overlaps(_along(boxes, first), boxes, limit)
        return step + 1, left, picked

    picked = jnp.full((*is_left.shape[:2], each), -1, jnp.int64)
    return jax.lax.while_loop(goes_on, picks, (jnp.zeros((), jnp.int64), is_left, picked))[2]


def _overlaps(one: _Box, other: _Box, limit: jax.Array) -> jax.Array:
    """Tell which boxes have an intersection over union above the limit; empty boxes have none.

    The order of operations is that of onnxruntime, because the last bit decides at the limit.
    """
    width = jnp.minimum(one[1], other[1]) - jnp.maximum(one[0], other[0])
    height = jnp.minimum(one[3], other[3]) - jnp.maximum(one[2], other[2])
    shared = width * height
    first, second = _area(one), _area(other)
    union = first + second - shared
    are_areas = (width > 0) & (height > 0) & (shared > 0) & (first > 0) & (second > 0)
    return are_areas & (union > 0) & (shared / union > limit)


def _area(box: _Box) -> jax.Array:
    return (box[1] - box[0]) * (box[3] - box[2])


SELECTION: Family = {
    "Compress": Operator(_compress, preferred=frozenset({1})),
    "NonMaxSuppression": operator(_non_max_suppression, 2),
    "NonZero": Operator(_non_zero, preferred=frozenset({0})),
    "Unique": operator(_unique),
}
