"""Operators on sequences of tensors and on optionals; sequence lengths are known."""

from collections.abc import Sequence
from itertools import pairwise

import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, Operator
from xlaserve.importers.onnx.sequences import MAX_ITEMS, Absent, AnyValue, Sequenced, tensor_of
from xlaserve.importers.onnx.values import (
    Value,
    axis_of,
    dimensions_of,
    integers_of,
    is_host,
    is_open,
    on_device,
    scalar_of,
)


def _items(value: AnyValue) -> tuple[Value, ...]:
    if not isinstance(value, Sequenced):
        raise InvalidModel("its first input is not a sequence")
    return value.items


def _position(value: Value, last: int) -> int:
    """Return a non-negative position; raises InvalidModel if it is beyond `last`."""
    position = scalar_of(value)
    count = last + 1
    if is_open(position) or not -count <= position <= last:
        raise InvalidModel(
            f"position {position} is out of range for a sequence, expected 0 to {last}"
        )
    return position % count


def _construct(_: Node, *values: AnyValue) -> AnyValue:
    return Sequenced(tuple(tensor_of(value, "an item") for value in values))


def _empty(node: Node) -> AnyValue:
    node.integer("dtype", 1)
    return Sequenced(())


def _at(_: Node, sequence: AnyValue, position: Value) -> AnyValue:
    items = _items(sequence)
    return items[_position(position, len(items) - 1)]


def _insert(
    _: Node, sequence: AnyValue, tensor: AnyValue, position: Value | None = None
) -> AnyValue:
    items = _items(sequence)
    # A negative position counts from the end of the sequence before the insertion.
    place = len(items) if position is None else scalar_of(position)
    if is_open(place) or not -len(items) <= place <= len(items):
        raise InvalidModel(
            f"position {place} is out of range for a sequence of {len(items)} tensors"
        )
    place = place + len(items) if place < 0 else place
    return Sequenced((*items[:place], tensor_of(tensor, "an item"), *items[place:]))


def _erase(_: Node, sequence: AnyValue, position: Value | None = None) -> AnyValue:
    items = _items(sequence)
    last = len(items) - 1
    place = last if position is None else _position(position, last)
    if last < 0:
        raise InvalidModel("it reads a tensor from an empty sequence")
    return Sequenced((*items[:place], *items[place + 1 :]))


def _length(_: Node, sequence: AnyValue) -> AnyValue:
    return np.asarray(len(_items(sequence)))


def _concatenated(node: Node, sequence: AnyValue) -> AnyValue:
    items = _items(sequence)
    if not items:
        raise InvalidModel("it concatenates an empty sequence")
    rank = items[0].ndim
    is_new = bool(node.integer("new_axis", 0))
    axis = axis_of(node.integer("axis"), rank + 1 if is_new else rank)
    module = np if all(map(is_host, items)) else jnp
    ready = list(items) if module is np else [on_device(item) for item in items]
    joined: Value = module.stack(ready, axis) if is_new else module.concatenate(ready, axis)
    return joined


def _split(node: Node, x: Value, split: Value | None = None) -> AnyValue:
    axis = axis_of(node.integer("axis", 0), x.ndim)
    keeps = bool(node.integer("keepdims", 1))
    size = x.shape[axis]
    if is_open(size):
        raise InvalidModel(
            "it splits a dynamic dimension, so the number of tensors is unknown: set its size with"
            " --dim"
        )
    bounds = _bounds(size, split)
    parts = [x[(slice(None),) * axis + (slice(*bound),)] for bound in bounds]
    # `keepdims` applies only without `split`.
    if split is None and not keeps:
        parts = [part.reshape(x.shape[:axis] + x.shape[axis + 1 :]) for part in parts]
    return Sequenced(tuple(parts))


def _bounds(size: int, split: Value | None) -> Sequence[tuple[int, int]]:
    if split is None or split.ndim == 0:
        each = 1 if split is None else scalar_of(split)
        if is_open(each) or each < 1 or -(-size // each) > MAX_ITEMS:
            raise InvalidModel(
                f"split: expected parts of 1 or more, at most {MAX_ITEMS} of them, got parts of"
                f" {each} for {size} elements"
            )
        return [(start, min(start + each, size)) for start in range(0, size, each)]
    sizes = integers_of(split)
    if sum(sizes) != size or any(part < 0 for part in sizes):
        raise InvalidModel(
            f"split: expected sizes of 0 or more that add up to {size}, got {dimensions_of(split)}"
        )
    ends = np.cumsum([0, *sizes]).tolist()
    return list(pairwise(ends))


def _optional(node: Node, value: AnyValue | None = None) -> AnyValue:
    if node.has("type"):
        raise InvalidModel("an optional without a value is not implemented")
    return Absent() if value is None else value


def _has_element(_: Node, value: AnyValue | None = None) -> AnyValue:
    return np.asarray(value is not None and not isinstance(value, Absent))


def _get_element(_: Node, value: AnyValue) -> AnyValue:
    if isinstance(value, Absent):
        raise InvalidModel("it reads the element of an empty optional")
    return value


def _row(operation: object, *static: int) -> Operator:
    return Operator(operation, frozenset(static), takes_sequences=True)  # type: ignore[arg-type]


SEQUENCE: Family = {
    "ConcatFromSequence": _row(_concatenated),
    "Optional": _row(_optional),
    "OptionalGetElement": _row(_get_element),
    "OptionalHasElement": _row(_has_element),
    "SequenceAt": _row(_at, 1),
    "SequenceConstruct": _row(_construct),
    "SequenceEmpty": _row(_empty),
    "SequenceErase": _row(_erase, 1),
    "SequenceInsert": _row(_insert, 2),
    "SequenceLength": _row(_length),
    "SplitToSequence": _row(_split, 1),
}
