"""Random small `jax.numpy` programs on a batch, some of which mix its rows.

Whatever the analysis proves about a program must hold when it runs.
"""

# The names of the functions say what each step does.
# mypy: ignore-errors=True
# pyright: reportArgumentType=false, reportOperatorIssue=false

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

INPUTS = ((4, 6), "float32"), ((3,), "int32")
"""Shapes without the batch dimension, and dtypes."""

Array = Any
Step = Callable[["Program", Array], Array]


class Program:
    """A function `(x, n) -> outputs`, determined by its seed."""

    def __init__(
        self, seed: int, steps: int = 7, of: Sequence[tuple[str, Step]] | None = None
    ) -> None:
        self._seed = seed
        self._steps = steps
        self._of = of or STEPS
        self.random = random.Random(seed)
        self.batch: Any = None
        self.indices: Array = None
        self.pool: list[Array] = []
        self.taken: list[str] = []
        """Names of the steps, for debugging."""

    def __call__(self, x: Array, n: Array) -> list[Array]:
        self.random = random.Random(self._seed)
        self.batch, self.indices, self.pool, self.taken = x.shape[0], n, [x], []
        while len(self.taken) < self._steps:
            name, step = self.random.choice(self._of)
            value = self.random.choice(self.pool[-3:])
            try:
                made = step(self, value)
            # The step does not fit its operand, or cannot be traced with a symbolic batch.
            except Exception:
                continue
            if isinstance(made, jax.Array) and made.ndim <= 5 and self._is_small(made):
                self.taken.append(name)
                self.pool.append(made)
        outputs = [one for one in self.pool[1:] if self._is_output(one)]
        return outputs[-3:] or [x]

    def _is_small(self, value: Array) -> bool:
        static = [size for size in value.shape if isinstance(size, int)]
        return int(np.prod(static)) <= 600 and len(value.shape) - len(static) <= 2

    def _is_output(self, value: Array) -> bool:
        first, *rest = value.shape or (0,)
        return str(first) == "b" and all(isinstance(size, int) for size in rest)

    def axis(self, value: Array) -> int:
        """Choose a dimension, rarely the batch."""
        axes = list(range(value.ndim))
        static = [axis for axis in axes if isinstance(value.shape[axis], int)]
        return self.random.choice(axes if not static or self.random.random() < 0.15 else static)

    def weights(self, *shape: int) -> np.ndarray:
        """Return small weights."""
        drawn = np.random.default_rng(self.random.randrange(1 << 30)).integers(-2, 3, shape)
        return drawn.astype(np.float32) / 2

    def other(self, value: Array) -> Array:
        """Return another value of the same shape and dtype."""
        found = [one for one in self.pool if one.shape == value.shape and one.dtype == value.dtype]
        return self.random.choice(found)

    def index(self) -> Array:
        """Return an index for each row."""
        return self.indices[:, self.random.randrange(3)]


def _floats(value: Array) -> Array:
    return value if value.dtype == jnp.float32 else value.astype(jnp.float32)


def _along(p: Program, v: Array, *choices: Callable[..., Array]) -> Array:
    return p.random.choice(choices)(v, p.axis(v))


def _elementwise(p: Program, v: Array) -> Array:
    v = _floats(v)
    return p.random.choice([jnp.tanh, jnp.abs, nn.relu, jnp.floor, lambda a: -a, jnp.sign])(v)


def _binary(p: Program, v: Array) -> Array:
    v = _floats(v)
    return p.random.choice([jnp.add, jnp.subtract, jnp.multiply, jnp.maximum])(v, p.other(v))


def _selected(p: Program, v: Array) -> Array:
    v = _floats(v)
    return jnp.where(v > p.other(v), v, 0.5)


def _outer(p: Program, v: Array) -> Array:
    return _floats(v)[:, None] * p.random.choice([v[:, None], v[None, :]])


def _split(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    size = v.shape[axis]
    cut = p.random.choice([n for n in (2, 3, 4) if size % n == 0])
    shape = (*v.shape[:axis], size // cut, cut, *v.shape[axis + 1 :])
    return v.reshape(shape)


def _merged(p: Program, v: Array) -> Array:
    axis = p.random.randrange(v.ndim - 1)
    return v.reshape(*v.shape[:axis], v.shape[axis] * v.shape[axis + 1], *v.shape[axis + 2 :])


def _regrouped(p: Program, v: Array) -> Array:
    sizes = [size for size in v.shape if isinstance(size, int)]
    assert len(sizes) == v.ndim - 1
    return v.reshape(p.batch, -1) if v.size == p.batch * int(np.prod(sizes)) else None


def _flat_and_back(p: Program, v: Array) -> Array:
    shape = v.shape
    return jnp.tanh(_floats(v).reshape(-1)).reshape(shape)


def _transposed(p: Program, v: Array) -> Array:
    order = list(range(v.ndim))
    p.random.shuffle(order)
    return v.transpose(order)


def _batch_first(p: Program, v: Array) -> Array:
    axis = next(n for n, size in enumerate(v.shape) if str(size) == "b")
    return jnp.moveaxis(v, axis, 0)


def _reduced(p: Program, v: Array) -> Array:
    v = _floats(v)
    return p.random.choice([jnp.sum, jnp.max, jnp.mean, jnp.argmax])(
        v, axis=p.axis(v), keepdims=p.random.random() < 0.5
    )


def _normalised(p: Program, v: Array) -> Array:
    v, axis = _floats(v), p.axis(v)
    return v - v.mean(axis, keepdims=True)


def _scanned(p: Program, v: Array) -> Array:
    def step(carry: Array, one: Array) -> tuple[Array, Array]:
        carry = carry * 0.5 + one
        return carry, carry

    axis = p.axis(v)
    moved = jnp.moveaxis(_floats(v), axis, 0)
    return jnp.moveaxis(lax.scan(step, moved[0] * 0, moved)[1], 0, axis)


def _scanned_alone(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    moved = jnp.moveaxis(_floats(v), axis, 0)
    return jnp.moveaxis(lax.map(lambda one: one - one.max(), moved), 0, axis)


def _sliced(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    cut = p.random.choice([slice(1, None), slice(None, -1), slice(None, None, 2), slice(0, 1)])
    return v[(slice(None),) * axis + (cut,)]


def _taken(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    return jnp.take(v, np.asarray([0, 1, 1]), axis=axis, mode=p.random.choice(["clip", "fill"]))


def _padded(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    pads = [(0, 0)] * v.ndim
    pads[axis] = p.random.choice([(1, 0), (0, 1), (1, 1)])
    return jnp.pad(v, pads)


def _joined(p: Program, v: Array) -> Array:
    return jnp.concatenate([v, p.other(v)], p.axis(v))


def _multiplied(p: Program, v: Array) -> Array:
    v = _floats(v)
    return v @ p.weights(v.shape[-1], p.random.choice([2, 4, 6]))


def _contracted(p: Program, v: Array) -> Array:
    v = _floats(v)
    return p.random.choice([
        lambda: jnp.einsum("b...i,b...i->b...", v, v),
        lambda: jnp.einsum("bij,bkj->bik", v, v),
        lambda: jnp.einsum("bij,cij->bc", v, v),
        lambda: jnp.einsum("b...,b->b...", v, v.reshape(p.batch, -1)[:, 0]),
        lambda: v.T @ v,
    ])()  # fmt: skip


def _counted(p: Program, v: Array) -> Array:
    return _floats(v) + lax.broadcasted_iota(jnp.float32, v.shape, p.axis(v))


def _sized(p: Program, v: Array) -> Array:
    return _floats(v) * p.random.choice([p.batch, p.batch + 1, 2 * p.batch])


def _sized_and_not(p: Program, v: Array) -> Array:
    size = jnp.asarray(p.batch)
    return _floats(v) + p.random.choice([
        lambda: (size // 4), lambda: (size % 4), lambda: jnp.maximum(size - 4, 0),
        lambda: jnp.minimum(size, 5), lambda: (size > 4), lambda: size - size,
        lambda: (size >= 1), lambda: jnp.maximum(size, 1) - size,
    ])().astype(jnp.float32)  # fmt: skip


def _noisy(p: Program, v: Array) -> Array:
    return _floats(v) + jax.random.normal(jax.random.key(p.random.randrange(9)), v.shape)


def _noisy_for_each(p: Program, v: Array) -> Array:
    def one(row: Array, seed: Array) -> Array:
        return row + jax.random.normal(jax.random.key(seed), row.shape)

    return jax.vmap(one)(_floats(v), p.index())


def _at_each(p: Program, v: Array) -> Array:
    rows = jnp.arange(p.batch)
    return v[p.random.choice([rows, rows, rows[::-1], rows - 1]), p.index() % v.shape[1]]


def _set_at_each(p: Program, v: Array) -> Array:
    rows = jnp.arange(p.batch)
    at = _floats(v).at[p.random.choice([rows, rows, rows // 2]), p.index() % v.shape[1]]
    return p.random.choice([lambda: at.set(1.0), lambda: at.add(2.0), lambda: at.max(0.1)])()


def _set(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    at = _floats(v).at[(slice(None),) * axis + (np.asarray([0, 1, 0]),)]
    return p.random.choice([lambda: at.set(1.0), lambda: at.add(2.0)])()


def _set_by_rows(p: Program, v: Array) -> Array:
    return jnp.zeros((9, *v.shape[1:]), jnp.float32).at[p.index()].add(_floats(v))[p.index()]


def _looked_up(p: Program, v: Array) -> Array:
    return _floats(v) + jnp.asarray(p.weights(9))[p.index()].reshape(
        (p.batch,) + (1,) * (v.ndim - 1)
    )


def _sorted_along(p: Program, v: Array) -> Array:
    order = jnp.argsort(v, axis=(axis := p.axis(v)))
    return p.random.choice([
        lambda: jnp.sort(v, axis), lambda: order, lambda: jnp.take_along_axis(v, order, axis),
    ])()  # fmt: skip


def _sliced_for_each(p: Program, v: Array) -> Array:
    return jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, 2, 0))(v, p.index())


def _updated_for_each(p: Program, v: Array) -> Array:
    v = _floats(v)
    return jax.vmap(lambda row, n: lax.dynamic_update_slice_in_dim(row, row[:1] + 1, n, 0))(
        v, p.index()
    )


def _updated(p: Program, v: Array) -> Array:
    at = p.random.choice([0, jnp.argmax(p.weights(3)), jnp.argmax(_floats(v).reshape(-1))])
    return lax.dynamic_update_slice_in_dim(v, v[:, :1] * 2, at, 1)


def _while_for_each(p: Program, v: Array) -> Array:
    def one(row: Array) -> Array:
        return lax.while_loop(
            lambda c: (c[0] > 1).any() & (c[1] < 9), lambda c: (c[0] * 0.5, c[1] + 1), (row, 0)
        )[p.random.choice([0, 0, 1])]

    return jax.vmap(one)(_floats(v))


def _while_for_all(p: Program, v: Array) -> Array:
    def step(c: tuple[Array, Array]) -> tuple[Array, Array]:
        going = (c[0] > 1).any(tuple(range(1, v.ndim)), keepdims=True)
        return jnp.where(going, c[0] * 0.5, c[0]), c[1] + 1

    found = lax.while_loop(lambda c: (c[0] > 1).any() & (c[1] < 9), step, (_floats(v), 0))
    return p.random.choice([found[0], found[0] + found[1].astype(jnp.float32)])


def _repeated(p: Program, v: Array) -> Array:
    v = _floats(v)
    count = p.random.choice([3, 3, p.batch])
    step = p.random.choice([
        lambda n, c: c * 0.5 + 1.0, lambda n, c: c + c.mean(0, keepdims=True),
        lambda n, c: jnp.roll(c, 1, axis=-1), lambda n, c: c + n.astype(jnp.float32),
    ])  # fmt: skip
    return lax.fori_loop(0, count, step, v)


def _branched(p: Program, v: Array) -> Array:
    v = _floats(v)
    on = p.random.choice([
        lambda: v.sum() > 0, lambda: jnp.asarray(True), lambda: jnp.asarray(p.batch) > 3,
        lambda: p.weights(2).sum() > 0,
    ])()  # fmt: skip
    return lax.cond(on, lambda c: c * 2, lambda c: c[::-1] if p.random.random() < 0.3 else c + 1, v)


def _branched_for_each(p: Program, v: Array) -> Array:
    return jax.vmap(
        lambda row, n: lax.switch(n, [lambda c: c, lambda c: c * 2, lambda c: c[::-1]], row)
    )(_floats(v), p.index())


def _asked_for(p: Program, v: Array) -> Array:
    """A branch taken if any row asks for it; some variants change the other rows as well."""
    v = _floats(v)
    asks = (p.index() > p.random.choice([0, 3, 7])).reshape((p.batch,) + (1,) * (v.ndim - 1))
    on = p.random.choice([
        asks.any, lambda: ~asks.all(), (~asks).all, asks.all,
        (~asks).any, lambda: asks.any() & (p.weights(1)[0] > -9),
    ])()  # fmt: skip
    new = v * 2 + 1
    sides = [
        lambda: v, lambda: v, lambda: jnp.where(asks, new, v), lambda: jnp.where(asks, new, v),
        lambda: jnp.where(~asks, new, v), lambda: new, lambda: jnp.where(asks, v, new),
    ]  # fmt: skip
    return lax.cond(on, p.random.choice(sides), p.random.choice(sides))


def _generated(p: Program, v: Array) -> Array:
    """Generate tokens until all rows are done; some variants keep writing into finished rows."""
    flat = jnp.abs(_floats(v).reshape(p.batch, -1))[:, :4]
    most, room = p.random.choice([(6, 6), (6, 6), (5, 7), (7, 5)])
    fill, filler = p.random.choice([(3, 3), (3, 3), (3, 3), (0, 0), (3, 4)])
    first = p.random.choice([0, 0, 2])
    ask, halt, put = (p.random.randrange(n) for n in (4, 4, 6))
    is_counted = p.random.random() < 0.8
    begun = jnp.full((p.batch, room), fill, jnp.int32)
    if first:
        # The prompt; the remaining positions are generated.
        told = p.random.choice([first, first, first + 1])
        asked = jnp.clip(flat[:, :1] * jnp.ones((1, told)), 0, 8).astype(jnp.int32)
        begun = jnp.concatenate([asked, begun[:, told:]], 1)

    def goes_on(s: tuple[Array, ...]) -> Array:
        i, _, done, _, n = s
        rows = [
            lambda: ~done.all(), (~done).any, lambda: ~done.all(),
            lambda: n.max() > i if halt == 3 else ~(done.all()),
        ][ask]()  # fmt: skip
        return (i < most) & rows if is_counted or ask == 3 else rows & (i < 20)

    def step(s: tuple[Array, ...]) -> tuple[Array, ...]:
        i, tokens, done, cache, n = s
        cache = cache * 0.5 + flat.sum(1) + i
        new = (cache * 3).astype(jnp.int32) % 5
        kept = [
            lambda: tokens.at[:, i].set(jnp.where(done, filler, new)),
            lambda: tokens.at[:, i].set(jnp.where(done, filler, new)),
            lambda: jnp.where(done[:, None], tokens, tokens.at[:, i].set(new)),
            lambda: tokens.at[:, i].set(new),
            lambda: lax.dynamic_update_slice(
                tokens, jnp.where(done, filler, new)[:, None], (0, i)
            ),
            lambda: tokens.at[:, i + 1].set(jnp.where(done, filler, new)),
        ][put]()  # fmt: skip
        ends = [
            lambda: done | (new == 2), lambda: jnp.where(done, True, new == 2),
            lambda: (new == 2), lambda: done | (i >= p.index()),
        ][halt]()  # fmt: skip
        return i + 1, kept, ends, cache, n + (~done).astype(jnp.int32)

    counted = p.index() * 0 if halt != 3 else p.index()
    begin = (jnp.int32(first), begun, jnp.zeros(p.batch, bool), flat.sum(1), counted)
    found = lax.while_loop(goes_on, step, begin)
    return [found[1], found[1], found[3], found[4], found[1] + found[0]][p.random.randrange(5)]


def _until_all_are_long(p: Program, v: Array) -> Array:
    v, n = _floats(v), p.index()
    shape = (p.batch,) + (1,) * (v.ndim - 1)
    bound = p.random.choice([n.max, n.max, n.min, n.sum])
    within = p.random.choice([
        lambda i: i < n, lambda i: i < n, lambda i: i <= n, lambda i: n > i, lambda i: ~(i >= n),
        lambda i: i > n,
    ])  # fmt: skip
    step = p.random.choice([1, 1, 2, 0])

    def go(s: tuple[Array, Array]) -> tuple[Array, Array]:
        i, c = s
        return i + step, jnp.where(within(i).reshape(shape), c * 0.5 + 1, c)

    found = lax.while_loop(
        lambda s: (s[0] < bound()) & (step > 0), go, (p.random.choice([0, 1]), v)
    )
    return p.random.choice([found[1], found[1], found[1] + found[0]])


def _convolved(p: Program, v: Array) -> Array:
    v = _floats(v)
    size, features = v.shape[-2:]
    flat = v.reshape(-1, size, features)
    out = lax.conv_general_dilated(
        flat, p.weights(3, features, 2), (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return out.reshape(*v.shape[:-1], 2)


def _windowed(p: Program, v: Array) -> Array:
    window = [1] * v.ndim
    window[p.axis(v)] = 2
    return lax.reduce_window(_floats(v), -jnp.inf, lax.max, window, (1,) * v.ndim, "SAME")


def _broadcast(p: Program, v: Array) -> Array:
    axis = p.random.randrange(v.ndim + 1)
    size = p.random.choice([2, 2, p.batch])
    wide = jnp.expand_dims(v, axis)
    return jnp.broadcast_to(wide, (*v.shape[:axis], size, *v.shape[axis:]))


def _masked(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    place = lax.broadcasted_iota(jnp.int32, v.shape, axis)
    bound = p.random.choice([2, p.batch, p.batch - 1, v.shape[axis]])
    return jnp.where(p.random.choice([place < bound, place >= 0, place == 1]), _floats(v), 0.0)


def _identity(p: Program, v: Array) -> Array:
    size = v.shape[p.axis(v)]
    return jnp.einsum("ij,j...->i...", jnp.eye(size), jnp.moveaxis(_floats(v), p.axis(v), 0))


STEPS: list[tuple[str, Step]] = [
    (step.__name__.strip("_"), step)
    for step in (
        _elementwise, _elementwise, _binary, _binary, _selected, _outer, _split, _split, _merged,
        _merged, _regrouped, _flat_and_back, _transposed, _transposed, _batch_first, _batch_first,
        _reduced, _reduced, _normalised, _scanned, _scanned_alone, _sliced, _taken, _padded,
        _joined, _multiplied, _contracted, _counted, _sized, _sized_and_not, _noisy,
        _noisy_for_each, _at_each, _set_at_each, _set, _set_by_rows, _looked_up, _sorted_along,
        _sliced_for_each, _updated_for_each, _updated, _while_for_each, _while_for_all, _repeated,
        _branched, _asked_for, _asked_for, _generated, _generated, _until_all_are_long,
        _branched_for_each, _convolved, _windowed, _broadcast, _masked, _identity,
    )
] + [
    ("cumsum", lambda p, v: _along(p, _floats(v), jnp.cumsum, lax.cummax)),
    ("turned", lambda p, v: _along(p, v, jnp.flip)),
    ("rolled", lambda p, v: jnp.roll(v, 1, p.axis(v))),
    ("softmax", lambda p, v: nn.softmax(_floats(v), p.axis(v))),
    ("top_k", lambda p, v: lax.top_k(_floats(v), 2)[p.random.randrange(2)]),
    ("repeat", lambda p, v: jnp.repeat(v, 2, p.axis(v))),
    ("squeezed", lambda p, v: v[..., 0]),
    ("fourier", lambda p, v: jnp.abs(jnp.fft.rfft(_floats(v), int(v.shape[-1])))),
    ("one_hot", lambda p, v: nn.one_hot(p.index(), 4)),
    ("index", lambda p, v: p.index() + jnp.arange(3)[p.random.randrange(3)]),
]  # fmt: skip
"""Steps by name; a step that does not fit a value is skipped and not counted."""
