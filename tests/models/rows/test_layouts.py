"""Every operation along every dimension, for every layout of rows: proved if rows are independent.

Each program permutes a batch, computes along one dimension, and permutes it back. NumPy decides
whether its rows are independent; the proof must agree, except for the cases in a table.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.rows import Inputs, exported, findings_of

INPUTS: Inputs = [((4, 6), "float32")]
WEIGHTS = np.array([[3, 1, 2, 0], [1, 0, 5, 2], [0, 4, 1, 1], [2, 2, 0, 3]], np.float32)
MANY = np.arange(36, dtype=np.float32).reshape(6, 6) % 7
Array = Any
Operation = Callable[[Any, Array, int], Array]

FAST = ("46 b", "4 b6", "4b6")
SLOW = ("b 4 6", "6 b 4", "6 4 b", "b4 6", "4b 6", "b46")
"""Layouts: the contents of each dimension, major to minor."""


def laid_out(xp: Any, x: Array, layout: Sequence[str]) -> Array:
    sizes = dict(zip("b46", x.shape, strict=True))
    order = ["b46".index(one) for one in "".join(layout)]
    shape = [functools.reduce(lambda n, one: n * sizes[one], group, 1) for group in layout]
    return xp.transpose(x, order).reshape(shape)


def laid_back(xp: Any, v: Array, layout: Sequence[str], batch: Any) -> Array:
    sizes = {"b": batch, "4": 4, "6": 6}
    inner = "".join(layout)
    return xp.transpose(v.reshape([sizes[one] for one in inner]), [inner.index(n) for n in "b46"])


def _at(v: Array, axis: int, of: Any) -> Array:
    return v[(slice(None),) * axis + (of,)]


def _counted(xp: Any, v: Array, axis: int) -> Array:
    return xp.arange(v.shape[axis]).reshape([-1 if n == axis else 1 for n in range(v.ndim)])


def _padded(xp: Any, v: Array, axis: int, low: int, high: int) -> Array:
    return xp.pad(v, [(low, high) if n == axis else (0, 0) for n in range(v.ndim)])


def _matrix(xp: Any, v: Array, axis: int) -> Array:
    weights = WEIGHTS if v.shape[axis] == 4 else MANY
    return xp.moveaxis(xp.matmul(xp.moveaxis(v, axis, -1), weights), -1, axis)


def _swapped(xp: Any, v: Array, axis: int) -> Array:
    """Split a dimension in two, and swap the major and the minor half."""
    size = v.shape[axis]
    cut = v.reshape(*v.shape[:axis], size // 2, 2, *v.shape[axis + 1 :])
    return xp.swapaxes(cut, axis, axis + 1).reshape(v.shape)


def _put(xp: Any, v: Array, axis: int) -> Array:
    if xp is jnp:
        return v.at[(slice(None),) * axis + (1,)].set(0.0)
    found = v.copy()
    found[(slice(None),) * axis + (1,)] = 0
    return found


OPERATIONS: Mapping[str, Operation] = {
    "element": lambda xp, v, a: xp.tanh(v) * 2,
    "sum": lambda xp, v, a: v + v.sum(a, keepdims=True),
    "max": lambda xp, v, a: v - v.max(a, keepdims=True),
    "any": lambda xp, v, a: xp.where((v > 4).any(a, keepdims=True), v, -v),
    "first true": lambda xp, v, a: v + xp.argmax(v, a, keepdims=True),
    "sum of ones": lambda xp, v, a: v + xp.ones_like(v).sum(a, keepdims=True),
    "all of ones": lambda xp, v, a: xp.where((xp.ones_like(v) > 0).all(a, keepdims=True), v, -v),
    "sorted": lambda xp, v, a: xp.sort(v, a),
    "summed so far": lambda xp, v, a: xp.cumsum(v, a),
    "turned round": lambda xp, v, a: xp.flip(v, a),
    "turned round twice": lambda xp, v, a: xp.flip(xp.tanh(xp.flip(v, a)), a),
    "rolled": lambda xp, v, a: xp.roll(v, 1, a),
    "first": lambda xp, v, a: v + _at(v, a, slice(0, 1)),
    "last": lambda xp, v, a: v + _at(v, a, slice(-1, None)),
    "but the first": lambda xp, v, a: _padded(xp, _at(v, a, slice(1, None)), a, 1, 0),
    "all of it": lambda xp, v, a: v + _at(v, a, slice(0, v.shape[a])),
    "padded and cut back": lambda xp, v, a: _at(
        xp.tanh(_padded(xp, v, a, 2, 1)), a, slice(2, v.shape[a] + 2)
    ),
    "padded and cut beside": lambda xp, v, a: _at(
        _padded(xp, v, a, 2, 1), a, slice(1, v.shape[a] + 1)
    ),
    "twice, the second": lambda xp, v, a: _at(
        xp.tanh(xp.concatenate([v, v * 2], a)), a, slice(v.shape[a], 2 * v.shape[a])
    ),
    "twice, the first": lambda xp, v, a: _at(
        xp.concatenate([v, v * 2], a), a, slice(0, v.shape[a])
    ),
    "twice, across": lambda xp, v, a: _at(
        xp.concatenate([v, v * 2], a), a, slice(1, v.shape[a] + 1)
    ),
    "stacked": lambda xp, v, a: xp.stack([v, v * 2, v + 1], a).sum(a),
    "counted": lambda xp, v, a: v + _counted(xp, v, a),
    "counted, and forgotten": lambda xp, v, a: v + _counted(xp, v, a) * 0,
    "counted, of some": lambda xp, v, a: xp.where(_counted(xp, v, a) < 2, v, 0),
    "counted, of all": lambda xp, v, a: xp.where(_counted(xp, v, a) >= 0, v, 0),
    "own place": lambda xp, v, a: xp.take_along_axis(v, _counted(xp, v, a), a),
    "next place": lambda xp, v, a: xp.take_along_axis(v, (_counted(xp, v, a) + 1) % v.shape[a], a),
    "place zero": lambda xp, v, a: xp.take(v, np.array([0]), a) + v,
    "by weights": _matrix,
    "halves swapped": _swapped,
    "one is put": _put,
    "with itself": lambda xp, v, a: v * xp.flip(v, a).max(),
}
"""Functions of a module, a value and a dimension; the result has the shape of the value."""


class Program:
    """A function `x -> y` for NumPy and for JAX."""

    def __init__(self, layout: Sequence[str], operation: str, axis: int) -> None:
        self.operation = operation
        self.along = layout[axis]
        self._layout = layout
        self._axis = axis

    def __str__(self) -> str:
        return f"{self.operation} along {self.along}"

    def __call__(self, xp: Any, x: Array) -> Array:
        laid = laid_out(xp, x, self._layout)
        made = OPERATIONS[self.operation](xp, laid, self._axis)
        return laid_back(xp, made, self._layout, x.shape[0])

    def is_independent(self) -> bool:
        """Tell whether a row is the same alone, with other rows, and in batches of other sizes."""
        drawn = np.random.default_rng(5)
        rows = drawn.normal(size=(3, 4, 6)).astype(np.float32)
        whole = self(np, rows)
        for before, behind in ((0, 0), (0, 4), (3, 0), (2, 9)):
            beside = [drawn.normal(size=(n, 4, 6)) * 3 for n in (before, behind)]
            batch = np.concatenate([beside[0], rows, beside[1]]).astype(np.float32)
            found = self(np, batch)[before : before + 3]
            if not np.allclose(found, whole, atol=1e-3):
                return False
        alone = [self(np, row[None])[0] for row in rows]
        return bool(np.allclose(alone, whole, atol=1e-3))


def programs(layout: Sequence[str]) -> list[Program]:
    """Return the programs of a layout that can be written for a symbolic batch size."""
    return [
        Program(layout, name, axis)
        for axis, along in enumerate(layout)
        for name in OPERATIONS
        if (name != "by weights" or along in {"4", "6"})
        and (name != "halves swapped" or along != "b")
    ]


UNPROVED: Mapping[str, tuple[str, str]] = {
    "turned round twice": ("mixed", "b 4b b6 b4 b46 4b6"),
    "own place": ("unknown", "4b b46 4b6"),
}
"""Valid but unproved operations: the verdict they get instead, and the affected dimensions."""

UNCERTAIN = {"summed so far", "padded and cut beside", "halves swapped"}
"""Operations that mix rows, although none of their steps certainly does."""


def expected(program: Program) -> str:
    """Return the expected verdict on a program."""
    if not program.is_independent():
        return "unknown" if program.operation in UNCERTAIN else "mixed"
    said, along = UNPROVED.get(program.operation, ("", ""))
    return said if program.along in along.split() else "proved"


@pytest.mark.parametrize(
    "layout", [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_what_is_computed_along_a_dimension_is_proved_where_it_holds(layout: str) -> None:
    every = programs(layout.split())
    artifact = exported(lambda x: [one(jnp, x) for one in every], INPUTS)
    found = [
        "proved" if one is None else "mixed" if one.mixed else "unknown"
        for one in findings_of(artifact)
    ]

    said = {str(one): word for one, word in zip(every, found, strict=True)}
    assert said == {str(one): expected(one) for one in every}
