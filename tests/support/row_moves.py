"""Random programs that rearrange a batch's elements, for numpy and `jax.numpy` alike.

Sizes are pairs `(per_row, fixed)`, so that a program is valid for every batch size and can be
checked without compiling it.
"""

# Arrays are numpy's or JAX's; `xp` is the module they belong to.
# mypy: ignore-errors=True

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

INPUTS = ((5, 6), "float32"), ((3, 6), "float32"), ((2,), "float32")
"""Shapes without the batch dimension, and dtypes."""

Array = Any
Size = tuple[int, int]
Shape = tuple[Size, ...]
Move = Callable[[Any, Any, list[Array]], Array]
"""Takes the module, the batch size, and all previous values."""

_MOST = 400
_TABLE = np.arange(96, dtype=np.float32) * 7 % 31


def _at(size: Size, b: Any) -> Any:
    # A plain number: a symbolic expression times 0 stays symbolic.
    return size[0] * b + size[1] if size[0] else size[1]


def _sizes(shape: Shape, b: Any) -> tuple[Any, ...]:
    return tuple(_at(size, b) for size in shape)


def _is_at_most(left: Size, right: Size) -> bool:
    return left[0] <= right[0] and sum(left) <= sum(right)


def _times(left: Size, right: Size) -> Size | None:
    if left[0] and right[0]:
        return None
    return left[0] * right[1] + right[0] * left[1], left[1] * right[1]


class Moves:
    """A function `(xp, b, *inputs) -> outputs`, determined by its seed."""

    def __init__(self, seed: int, steps: int = 9) -> None:
        self.random = random.Random(seed)
        self.shapes: list[Shape] = [((1, 0), *((0, size) for size in shape)) for shape, _ in INPUTS]
        self.moves: list[Move] = []
        self.taken: list[str] = []
        """Names of the steps, for debugging."""
        while len(self.taken) < steps:
            step = self.random.choice(STEPS)
            count = len(self.moves)
            made = step(self)
            if made is None:
                del self.moves[count:], self.shapes[count + len(INPUTS) :]
                continue
            self.taken.append(f"{step.__name__.strip('_')} {made}")
        self.outputs = self._outputs()

    def __call__(self, xp: Any, *inputs: Array) -> list[Array]:
        b = inputs[0].shape[0]
        values = list(inputs)
        for move in self.moves:
            values.append(move(xp, b, values))
        return [values[place].reshape((b, *sizes)) for place, sizes in self.outputs]

    def _outputs(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the indices of the outputs, and their shapes without the batch dimension."""
        found = []
        for place, shape in enumerate(self.shapes):
            if place < len(INPUTS):
                continue
            rows = [size for size in shape if size[0]]
            if len(rows) != 1 or rows[0][1]:
                continue
            rest = [size[1] for size in shape if not size[0]]
            if shape[0] == (1, 0):
                found.append((place, tuple(rest)))
            elif self.random.random() < 0.7:
                found.append((place, (rows[0][0] * int(np.prod(rest)),)))
        return found[-4:]

    # --- for the steps

    def pick(self) -> tuple[int, Shape]:
        """Choose a value, preferring recent ones."""
        places = range(len(self.shapes))
        place = self.random.choice([*places, *places[-3:], *places[-3:]])
        return place, self.shapes[place]

    def axis(self, shape: Shape) -> int:
        """Choose a dimension, preferring those that grow with the batch."""
        axes = list(range(len(shape)))
        grow = [axis for axis in axes if shape[axis][0]]
        return self.random.choice(axes if not grow or self.random.random() < 0.5 else grow)

    def bound(self, size: Size) -> Size:
        """Choose an index in a dimension, possibly one that depends on the batch size."""
        return self.random.choice([
            (0, 0), (0, 1), (0, 2), (0, 3), size, (1, 0), (2, 0), (3, 0), (5, 0), (size[0], 0),
            (max(size[0] - 1, 0), size[1]), (size[0], size[1] - 1), (size[0] // 2, size[1] // 2),
            (1, 1), (1, 4), (0, max(size[1] - 1, 0)),
        ])  # fmt: skip

    def put(self, shape: Shape, move: Move) -> bool:
        """Append a value; return False if it is too large or empty."""
        elements: Size | None = (0, 1)
        for size in shape:
            elements = elements and _times(elements, size)
            if size[0] < 0 or sum(size) < 1 or elements is None or sum(elements) > _MOST:
                return False
        self.shapes.append(shape)
        self.moves.append(move)
        return True


def _merged(p: Moves) -> str | None:
    place, shape = p.pick()
    if len(shape) < 2:
        return None
    axis = p.random.randrange(len(shape) - 1)
    size = _times(shape[axis], shape[axis + 1])
    if size is None:
        return None
    new = (*shape[:axis], size, *shape[axis + 2 :])
    made = p.put(new, lambda xp, b, values: values[place].reshape(_sizes(new, b)))
    return f"{place} at {axis}" if made else None


def _split(p: Moves) -> str | None:
    place, shape = p.pick()
    axis = p.axis(shape)
    size = shape[axis]
    count = p.random.choice([2, 3, 4, 5, 6])
    if size[0] and not size[1] and p.random.random() < 0.7:
        both = ((1, 0), (0, size[0]))
    elif size[0] % count == size[1] % count == 0:
        both = ((size[0] // count, size[1] // count), (0, count))
    else:
        return None
    if p.random.random() < 0.4:
        both = both[::-1]
    new = (*shape[:axis], *both, *shape[axis + 1 :])
    made = p.put(new, lambda xp, b, values: values[place].reshape(_sizes(new, b)))
    return f"{place} at {axis} into {both}" if made and len(new) < 6 else None


def _transposed(p: Moves) -> str | None:
    place, shape = p.pick()
    order = list(range(len(shape)))
    p.random.shuffle(order)
    new = tuple(shape[axis] for axis in order)
    made = p.put(new, lambda xp, b, values: xp.transpose(values[place], order))
    return f"{place} by {order}" if made else None


def _joined(p: Moves) -> str | None:
    place, shape = p.pick()
    axis = p.axis(shape)
    fit = [
        other
        for other, found in enumerate(p.shapes)
        if len(found) == len(shape)
        and found[:axis] == shape[:axis]
        and found[axis + 1 :] == shape[axis + 1 :]
    ]
    places = [place, *(p.random.choice(fit) for _ in range(p.random.choice([1, 1, 2, 3])))]
    p.random.shuffle(places)
    per_row, fixed = (sum(p.shapes[one][axis][n] for one in places) for n in range(2))
    size = per_row, fixed
    new = (*shape[:axis], size, *shape[axis + 1 :])
    made = p.put(new, lambda xp, b, values: xp.concatenate([values[n] for n in places], axis))
    return f"{places} at {axis}" if made else None


def _joined_flat(p: Moves) -> str | None:
    """Flatten and concatenate rows of different lengths, then slice the result somewhere."""
    places = [p.pick()[0] for _ in range(p.random.choice([2, 2, 3]))]
    width = p.random.choice([1, 2, 3, 6])
    sizes = []
    for place in places:
        elements: Size | None = (0, 1)
        for size in p.shapes[place]:
            elements = elements and _times(elements, size)
        if elements is None or elements[0] % width or elements[1] % width:
            return None
        sizes.append((elements[0] // width, elements[1] // width))
    whole = sum(one[0] for one in sizes), sum(one[1] for one in sizes)

    def join(xp: Any, b: Any, values: list[Array]) -> Array:
        flat = [
            values[n].reshape((_at(one, b), width)) for n, one in zip(places, sizes, strict=True)
        ]
        return xp.concatenate(flat)

    at = len(p.shapes)
    if not p.put((whole, (0, width)), join):
        return None
    edges = [(0, 0)]
    for one in sizes:
        edges.append((edges[-1][0] + one[0], edges[-1][1] + one[1]))
    first = p.random.choice(edges[:-1])
    last = p.random.choice(edges[1:])
    if p.random.random() < 0.4:
        first = p.bound(whole)
    if p.random.random() < 0.3:
        last = p.bound(whole)
    return _cut(p, at, 0, first, last, 1)


def _cut(p: Moves, place: int, axis: int, first: Size, last: Size, stride: int) -> str | None:
    shape = p.shapes[place]
    if not _is_at_most((0, 0), first) or not _is_at_most(last, shape[axis]):
        return None
    size = last[0] - first[0], last[1] - first[1]
    if stride > 1:
        if size[0] % stride or size[1] % stride:
            return None
        size = size[0] // stride, size[1] // stride
    new = (*shape[:axis], size, *shape[axis + 1 :])

    def cut(xp: Any, b: Any, values: list[Array]) -> Array:
        del xp
        bounds = slice(_at(first, b), _at(last, b), stride)
        return values[place][(slice(None),) * axis + (bounds,)]

    return f"{place} at {axis} {first}:{last}:{stride}" if p.put(new, cut) else None


def _sliced(p: Moves) -> str | None:
    place, shape = p.pick()
    axis = p.axis(shape)
    first, last = p.bound(shape[axis]), p.bound(shape[axis])
    return _cut(p, place, axis, first, last, 1)


def _strided(p: Moves) -> str | None:
    place, shape = p.pick()
    axis = p.axis(shape)
    size = shape[axis]
    stride = p.random.choice([2, 3, max(size[0], 2)])
    start = p.random.randrange(stride)
    # Otherwise the new size could not be written as (per_row, fixed).
    if size[0] % stride or size[1] % stride:
        return None
    new = (*shape[:axis], (size[0] // stride, size[1] // stride), *shape[axis + 1 :])
    made = p.put(
        new,
        lambda xp, b, values: values[place][(slice(None),) * axis + (slice(start, None, stride),)],
    )
    return f"{place} at {axis} {start}::{stride}" if made else None


def _split_apart(p: Moves) -> str | None:
    """One piece of `split`, in equal parts or at an index."""
    place, shape = p.pick()
    axis = p.axis(shape)
    size = shape[axis]
    count = p.random.choice([2, 3, 4])
    if size[0] % count or size[1] % count or not sum(size):
        return None
    part = size[0] // count, size[1] // count
    n = p.random.randrange(count)
    first = part[0] * n, part[1] * n
    return _cut(p, place, axis, first, (first[0] + part[0], first[1] + part[1]), 1)


def _padded(p: Moves) -> str | None:
    place, shape = p.pick()
    axis = p.axis(shape)
    low, high = (p.random.choice([(0, 0), (0, 0), (0, 1), (0, 2), (1, 0)]) for _ in range(2))
    filler = p.random.choice([0.0, 0.0, 1.0])
    per_row, fixed = (low[n] + shape[axis][n] + high[n] for n in range(2))
    size = per_row, fixed
    new = (*shape[:axis], size, *shape[axis + 1 :])

    def pad(xp: Any, b: Any, values: list[Array]) -> Array:
        pads = [(0, 0)] * len(shape)
        pads[axis] = (_at(low, b), _at(high, b))
        return xp.pad(values[place], pads, constant_values=filler)

    return f"{place} at {axis} by {low}, {high}" if p.put(new, pad) else None


def _padded_and_cut(p: Moves) -> str | None:
    at = len(p.shapes)
    made = _padded(p)
    if made is None:
        return None
    axis = p.axis(p.shapes[at])
    size = p.shapes[at][axis]
    ends = p.random.choice([((0, 1), size), ((0, 0), (size[0], size[1] - 1)), ((1, 0), size)])
    found = _cut(p, at, axis, *ends, 1)
    return found and f"{made}, {found}"


def _taken(p: Moves) -> str | None:
    """Elements at computed indices."""
    place, shape = p.pick()
    axis = p.axis(shape)
    size = shape[axis]
    count = p.random.choice([(1, 0), (1, 0), (2, 0), (0, 2), size, (size[0], 0)])
    step = p.random.choice([1, 1, 2, 3, 5, max(size[0], 1), -1])
    start = p.random.choice([0, 0, 1, 2])
    kind = p.random.choice([0, 0, 1, 2])

    def take(xp: Any, b: Any, values: list[Array]) -> Array:
        at = xp.arange(_at(count, b)) * step + start
        if kind == 1:
            at = at % _at(size, b)
        if kind == 2:
            at = at // 2
        return xp.take(values[place], at, axis=axis, mode="clip")

    new = (*shape[:axis], count, *shape[axis + 1 :])
    how = f"{start}+{step}*i, {kind}"
    return f"{place} at {axis}, {count} of {how}" if p.put(new, take) else None


def _taken_of_each(p: Moves) -> str | None:
    """One or more elements of each row: `v[arange(b), ...]`."""
    place, shape = p.pick()
    if len(shape) < 2 or shape[0] != (1, 0) or shape[1][0]:
        return None
    column = p.random.randrange(shape[1][1])
    back = p.random.choice([False, False, True])

    def take(xp: Any, b: Any, values: list[Array]) -> Array:
        rows = xp.arange(b)
        if back:
            rows = b - 1 - rows
        return values[place][rows, column]

    return f"{place}, {column}, {back}" if p.put((shape[0], *shape[2:]), take) else None


def _turned(p: Moves) -> str | None:
    place, shape = p.pick()
    axis = p.axis(shape)
    made = p.put(shape, lambda xp, b, values: xp.flip(values[place], axis))
    return f"{place} at {axis}" if made else None


def _repeated(p: Moves) -> str | None:
    place, shape = p.pick()
    axis = p.axis(shape)
    count = p.random.choice([2, 3])
    new = (*shape[:axis], (shape[axis][0] * count, shape[axis][1] * count), *shape[axis + 1 :])
    if p.random.random() < 0.5:
        made = p.put(new, lambda xp, b, values: xp.repeat(values[place], count, axis=axis))
    else:
        times = [1] * len(shape)
        times[axis] = count
        made = p.put(new, lambda xp, b, values: xp.tile(values[place], times))
    return f"{place} at {axis}, {count}" if made else None


def _counted(p: Moves) -> str | None:
    """An iota or a table, sliced at an index that may depend on the batch size."""
    first = p.random.choice([(0, 0), (1, 0), (0, 2)])
    size = p.random.choice([(0, 4), (0, 6), (1, 0), (2, 0), (0, 3)])
    is_table = p.random.random() < 0.5
    if is_table and (first[0] or size[0]) and first[0] + size[0] > 1:
        return None

    def count(xp: Any, b: Any, values: list[Array]) -> Array:
        del values
        end = first[0] + size[0], first[1] + size[1]
        if is_table:
            return xp.asarray(_TABLE)[_at(first, b) : _at(end, b)]
        return xp.arange(_at(end, b), dtype=np.float32)[_at(first, b) :]

    return f"{first}, {size}, {is_table}" if p.put((size,), count) else None


def _added(p: Moves) -> str | None:
    place, shape = p.pick()
    fit = [n for n, found in enumerate(p.shapes) if found == shape or found == shape[-1:]]
    other = p.random.choice(fit)
    made = p.put(shape, lambda xp, b, values: values[place] + values[other])
    return f"{place} + {other}" if made else None


def _doubled(p: Moves) -> str | None:
    place, shape = p.pick()
    made = p.put(shape, lambda xp, b, values: values[place] * np.float32(2))
    return f"{place}" if made else None


def _sliced_at(p: Moves) -> str | None:
    """A clamped dynamic slice whose index comes from a table, the batch size, or the data."""
    place, shape = p.pick()
    axis = p.axis(shape)
    size = shape[axis]
    taken = p.random.choice([(0, 1), (0, 2), size, (1, 0), (size[0], 0)])
    if not _is_at_most(taken, size):
        return None
    start, kind = p.bound(size), p.random.choice([0, 1, 1, 2])
    new = (*shape[:axis], taken, *shape[axis + 1 :])

    def cut(xp: Any, b: Any, values: list[Array]) -> Array:
        at = _place(xp, _at(start, b), kind, values)
        return _Dynamic(xp).slice(values[place], at, _at(taken, b), axis)

    return f"{place} at {axis} {start} ({kind}), {taken}" if p.put(new, cut) else None


def _put_at(p: Moves) -> str | None:
    """Write a slice of one value into another at a computed index."""
    place, shape = p.pick()
    axis = p.axis(shape)
    fit = [
        other
        for other, found in enumerate(p.shapes)
        if len(found) == len(shape)
        and (*found[:axis], *found[axis + 1 :]) == (*shape[:axis], *shape[axis + 1 :])
        and _is_at_most(found[axis], shape[axis])
    ]
    other = p.random.choice(fit)
    start, kind = p.bound(shape[axis]), p.random.choice([0, 1, 1, 2])

    def put(xp: Any, b: Any, values: list[Array]) -> Array:
        at = _place(xp, _at(start, b), kind, values)
        return _Dynamic(xp).update(values[place], values[other], at, axis)

    return f"{other} into {place} at {axis} {start} ({kind})" if p.put(shape, put) else None


def _taken_flat(p: Moves) -> str | None:
    """Elements of a flattened value at indices that combine two iotas."""
    place, shape = p.pick()
    elements: Size | None = (0, 1)
    for size in shape:
        elements = elements and _times(elements, size)
    if elements is None:
        return None
    width = p.random.choice([1, 2, 3, 6])
    stride = p.random.choice([elements[0], elements[0], width, 1, 2, 6])
    start = p.random.choice([0, 0, 0, 1, 2])
    step, kind = p.random.choice([1, 1, 2, -1]), p.random.choice([0, 0, 1, 2, 3])

    def take(xp: Any, b: Any, values: list[Array]) -> Array:
        at = xp.arange(b)[:, None] * stride + xp.arange(width)[None] * step + start
        count = _at(elements, b)
        if kind == 1:
            at = at % count
        if kind == 2:
            at = xp.where(at < 0, at + count, at)
        if kind == 3:
            at = at // width * width + at % width
        return xp.take(values[place].reshape(-1), at, mode="clip")

    made = p.put(((1, 0), (0, width)), take)
    return f"{place} {start}+{stride}*i+{step}*j, {kind}" if made else None


def _place(xp: Any, start: Any, kind: int, values: list[Array]) -> Any:
    """Return an index: a constant, a comparison's result, or one from a row's data."""
    at = xp.asarray(start)
    if kind == 1:
        at = xp.where(at < 0, at + 1, at)
    if kind == 2:
        at = at + (values[0].reshape(-1)[0] > 5000)
    return at


class _Dynamic:
    """Clamped dynamic slices, for numpy or JAX."""

    def __init__(self, xp: Any) -> None:
        self._is_plain = xp is np

    def slice(self, value: Array, at: Any, size: Any, axis: int) -> Array:
        if not self._is_plain:
            return lax.dynamic_slice_in_dim(value, at, size, axis)
        at = min(max(int(at), 0), value.shape[axis] - size)
        return value[(slice(None),) * axis + (slice(at, at + size),)]

    def update(self, value: Array, part: Array, at: Any, axis: int) -> Array:
        if not self._is_plain:
            return lax.dynamic_update_slice_in_dim(value, part, at, axis)
        at = min(max(int(at), 0), value.shape[axis] - part.shape[axis])
        found = value.copy()
        found[(slice(None),) * axis + (slice(at, at + part.shape[axis]),)] = part
        return found


STEPS = (
    _merged, _merged, _split, _split, _transposed, _transposed, _joined, _joined, _joined_flat,
    _joined_flat, _sliced, _sliced, _strided, _split_apart, _padded, _padded_and_cut, _taken,
    _taken, _taken_of_each, _turned, _repeated, _counted, _added, _doubled, _sliced_at,
    _put_at, _taken_flat,
)  # fmt: skip


# --- Trial ---------------------------------------------------------------------------------------

_ALONE = 3
_BATCHES = (1, 2, 3, 5, 8)


def leaks(program: Moves, seed: int = 0) -> list[str]:
    """Return, for each output, what its rows depend on besides themselves; empty if nothing."""
    draw = np.random.default_rng(seed)
    rows = [
        draw.permutation(10_000)[: _ALONE * int(np.prod(shape))]
        .reshape(_ALONE, *shape)
        .astype(dtype)
        for shape, dtype in INPUTS
    ]
    alone = [program(np, *(one[n : n + 1] for one in rows)) for n in range(_ALONE)]
    found = [""] * len(program.outputs)
    for size in _BATCHES:
        for turn in range(2):
            places = draw.permutation(size)[:_ALONE]
            batch = [
                draw.integers(10_000, 20_000, (size, *one.shape[1:])).astype(one.dtype)
                for one in rows
            ]
            which = range(len(places)) if turn else draw.permutation(_ALONE)[: len(places)]
            for one, whole in zip(rows, batch, strict=True):
                whole[places] = one[list(which)]
            for number, output in enumerate(program(np, *batch)):
                for place, n in zip(places, which, strict=True):
                    if not np.array_equal(output[place], alone[n][number][0]):
                        found[number] = f"row {place} of {size}"
    return found
