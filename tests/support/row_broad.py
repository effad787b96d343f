"""More random program steps: everything in `jax.numpy` and `jax.lax` that applies to a batch."""

# The names of the functions say what each step does.
# mypy: ignore-errors=True
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from support.row_programs import STEPS as USUAL
from support.row_programs import Program, Step, _floats

Array = Any


def _ints(v: Array) -> Array:
    return v if v.dtype == jnp.int32 else jnp.clip(_floats(v), -9, 9).astype(jnp.int32)


def _like(p: Program, v: Array) -> Array:
    """Return one number per row, shaped to broadcast with `v`, whose first axis is the batch."""
    return p.index().reshape((p.batch,) + (1,) * (v.ndim - 1))


def _axes(p: Program, v: Array) -> tuple[int, ...]:
    return tuple({p.axis(v) for _ in range(p.random.choice([1, 1, 2]))})


def _of_several(p: Program, v: Array) -> Array:
    name = p.random.choice(["prod", "min", "any", "all", "std", "ptp", "nansum", "argmin"])
    axis = p.axis(v) if name.startswith("arg") else _axes(p, v)
    found = getattr(jnp, name)(_floats(v), axis=axis, keepdims=p.random.random() < 0.4)
    return found if found.dtype != jnp.bool_ else found.astype(jnp.int32)


def _two_reduced(p: Program, v: Array) -> Array:
    """Reduce values and their indices together."""
    v, axis = _floats(v), p.axis(v)
    places = lax.broadcasted_iota(jnp.int32, v.shape, p.random.choice([axis, axis, p.axis(v)]))

    def larger(a: Any, b: Any) -> Any:
        first = a[0] >= b[0]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    start = (np.float32(-np.inf), np.int32(p.random.choice([0, -1])))
    return lax.reduce((v, places), start, larger, (axis,))[p.random.randrange(2)]


def _bits_reduced(p: Program, v: Array) -> Array:
    return p.random.choice([lax.reduce_and, lax.reduce_or, lax.reduce_xor])(_ints(v), (p.axis(v),))


def _started(p: Program, v: Array) -> Array:
    """Reduce from a non-neutral initial value, which XLA omits for a single element."""
    start = np.float32(p.random.choice([0, 1, 3]))
    how = p.random.choice([lax.add, lax.max, lax.min, lax.mul])
    return lax.reduce(_floats(v), start, how, _axes(p, v))


def _cumulated(p: Program, v: Array) -> Array:
    how = p.random.choice([lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp])
    v = _floats(v) if how is lax.cumlogsumexp else p.random.choice([_floats, _ints])(v)
    return how(v, axis=p.axis(v), reverse=p.random.random() < 0.3)


def _associated(p: Program, v: Array) -> Array:
    return lax.associative_scan(p.random.choice([jnp.add, jnp.maximum]), _floats(v), axis=p.axis(v))


def _sorted_together(p: Program, v: Array) -> Array:
    v = _floats(v)
    operands = [p.random.choice([jnp.floor(v), v, -v]), p.other(v) if v.dtype == v.dtype else v]
    operands.append(lax.broadcasted_iota(jnp.int32, v.shape, p.axis(v)))
    keys = p.random.choice([1, 1, 2, 3])
    found = lax.sort(operands, dimension=p.axis(v), num_keys=keys, is_stable=True)
    return found[p.random.randrange(3)]


def _ranked(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    return jnp.argsort(jnp.argsort(v, axis=axis), axis=axis)


def _searched(p: Program, v: Array) -> Array:
    v = _floats(v)
    table = jnp.sort(p.weights(5)) if p.random.random() < 0.6 else jnp.arange(p.batch) * 1.0
    return p.random.choice([jnp.searchsorted, lambda a, x: jnp.digitize(x, a)])(table, v)


def _counted_up(p: Program, v: Array) -> Array:
    """Count each integer, per row or over all rows."""
    numbers = _ints(v).reshape(p.batch, -1) % 4
    if p.random.random() < 0.6:
        return jax.vmap(lambda row: jnp.bincount(row, length=4))(numbers)
    return jnp.bincount(numbers.reshape(-1), length=4)[numbers]


def _routed(p: Program, v: Array) -> Array:
    """A mixture of experts implemented by sorting tokens, of one row or of all rows."""
    flat = _floats(v).reshape(p.batch, -1)

    def route(tokens: Array) -> Array:
        expert = jnp.argmax(tokens[:, None] * p.weights(1, 3), -1)
        order = jnp.argsort(expert)
        done = tokens[order] * jnp.asarray([1.0, 2.0, 3.0])[expert[order]]
        back = jnp.argsort(order)
        return p.random.choice(
            [lambda: done[back], lambda: jnp.zeros_like(done).at[order].set(done)]
        )()

    if p.random.random() < 0.6:
        return jax.vmap(route)(flat)
    return route(flat.reshape(-1)).reshape(flat.shape)


def _numbers(p: Program, rank: int) -> str:
    spots = ["N", "C", *"HW"[: rank - 2]]
    p.random.shuffle(spots)
    return "".join(spots)


def _convolved_any(p: Program, v: Array) -> Array:
    """Convolve with any dimension as the batch."""
    v = _floats(v)
    rank = p.random.choice([3, 3, 4])
    assert v.ndim == rank
    said = _numbers(p, rank)
    kernel_said = "".join(p.random.sample("OIHW"[:rank], rank))
    features = v.shape[said.index("C")]
    by_batch = v.shape[said.index("N")]
    groups, batch_groups = 1, 1
    if isinstance(features, int) and p.random.random() < 0.3:
        groups = p.random.choice([g for g in (1, 2, 3, features) if features % g == 0])
    elif isinstance(by_batch, int) and p.random.random() < 0.4:
        batch_groups = p.random.choice([g for g in (1, 2, by_batch) if by_batch % g == 0])
    sizes = {"O": 2 * groups * batch_groups, "I": features // groups, "H": 2, "W": 1}
    if not isinstance(features, int):
        kernel = jnp.broadcast_to(p.weights(1)[0], tuple(sizes[one] for one in kernel_said))
    else:
        kernel = p.weights(*(sizes[one] for one in kernel_said))
    return lax.conv_general_dilated(
        v, kernel, (p.random.choice([1, 1, 2]),) * (rank - 2),
        p.random.choice(["SAME", "VALID", [(1, 0)] * (rank - 2)]),
        lhs_dilation=(p.random.choice([1, 1, 2]),) * (rank - 2),
        rhs_dilation=(p.random.choice([1, 1, 2]),) * (rank - 2),
        dimension_numbers=(said, kernel_said, _numbers(p, rank)),
        feature_group_count=groups, batch_group_count=batch_groups,
    )  # fmt: skip


def _multiplied_any(p: Program, v: Array) -> Array:
    """Multiply by weights or another value along any dimensions."""
    v = _floats(v)
    other = p.random.choice([p.other(v), v, _floats(p.random.choice(p.pool))])
    left, right = list(range(v.ndim)), list(range(other.ndim))
    p.random.shuffle(left)
    p.random.shuffle(right)
    batching, contracting = ([], []), ([], [])
    for one, two in zip(left, right, strict=False):
        if str(v.shape[one]) != str(other.shape[two]):
            continue
        into = batching if p.random.random() < 0.5 else contracting
        into[0].append(one)
        into[1].append(two)
    return lax.dot_general(v, other, (contracting, batching))


def _summed(p: Program, v: Array) -> Array:
    names = "bcdef"[: v.ndim]
    left = "".join(p.random.sample(names, v.ndim))
    right = "".join(p.random.sample(names, v.ndim)) if p.random.random() < 0.5 else left
    out = "".join(p.random.sample(names, p.random.randrange(1, v.ndim + 1)))
    return jnp.einsum(f"{left},{right}->{out}", _floats(v), _floats(p.other(v)))


def _scanned_any(p: Program, v: Array) -> Array:
    """Scan along any dimension, with state that other rows or a counter may affect."""
    axis = p.axis(v)
    moved = jnp.moveaxis(_floats(v), axis, 0)

    def step(carry: Any, one: Array) -> Any:
        i, c = carry
        c = p.random.choice([
            lambda: c * 0.5 + one, lambda: jnp.where(one > c, one, c), lambda: c + i,
            lambda: jnp.where(i % 2 == 0, c, one),
        ])()  # fmt: skip
        return (i + 1.0, c), p.random.choice([c, one - c, one])

    found = lax.scan(step, (0.0, moved[0] * 0), moved, reverse=p.random.random() < 0.3)
    return p.random.choice([lambda: jnp.moveaxis(found[1], 0, axis), lambda: found[0][1]])()


def _while_of_all(p: Program, v: Array) -> Array:
    """A loop that stops on a reduction over rows, that freezes finished rows, or neither."""
    v = _floats(v)
    going = p.random.choice([
        lambda s: (jnp.abs(s[1]) > 2).any(), lambda s: jnp.abs(s[1]).max() > 2,
        lambda s: jnp.abs(s[1]).sum() > 2, lambda s: s[0] < p.index()[0],
        lambda s: s[0] < p.index().max(), lambda s: s[0] < 4,
    ])  # fmt: skip
    step = p.random.choice([
        lambda s: s[1] * 0.5, lambda s: jnp.where(jnp.abs(s[1]) > 2, s[1] * 0.5, s[1]),
        lambda s: jnp.where(s[0] < _like(p, v), s[1] + 1, s[1]),
        lambda s: jnp.clip(s[1], -2, 2), lambda s: jnp.minimum(s[1], s[1] * 0.5),
        lambda s: jnp.where(jnp.isnan(s[1]), 0.0, s[1]) * 0.5,
    ])  # fmt: skip
    found = lax.while_loop(lambda s: going(s) & (s[0] < 12), lambda s: (s[0] + 1, step(s)), (0, v))
    return p.random.choice([found[1], found[1], found[1] * found[0]])


def _looped_to(p: Program, v: Array) -> Array:
    """A loop whose bound depends on the row, on all rows, or on the batch size."""
    v, n = _floats(v), p.index()
    how = p.random.randrange(4)
    if how == 0:
        return jax.vmap(lambda r, k: lax.fori_loop(0, k % 5, lambda i, c: c * 0.5 + i, r))(v, n)
    bound = [n.max() % 9, jnp.int32(3), n[0] % 5][how - 1]
    return lax.fori_loop(0, bound, lambda i, c: jnp.where(i < _like(p, v), c + 1, c), v)


def _branched_any(p: Program, v: Array) -> Array:
    v, n = _floats(v), p.index()
    index = p.random.choice([
        (n > 3).any, lambda: n[0] % 2, lambda: n.max() % 2, lambda: jnp.int32(1),
        lambda: jnp.argmax(p.weights(2)), (v > 1).all,
    ])()  # fmt: skip
    sides = [
        lambda c: c, lambda c: jnp.where(_like(p, c) > 3, c + 1, c), lambda c: c * 2,
        lambda c: jnp.where(c > 1, c, c * 1), lambda c: jnp.maximum(c, 1),
    ]  # fmt: skip
    return lax.switch(jnp.int32(index), p.random.choices(sides, k=2), v)


def _put_any(p: Program, v: Array) -> Array:
    v, rows = _floats(v), jnp.arange(p.batch)
    how = p.random.choice(["add", "set", "mul", "min", "max"])
    mode = p.random.choice(["clip", "drop", "promise_in_bounds", None])
    at = p.random.choice([
        lambda: v.at[rows, p.index() % v.shape[1]], lambda: v.at[p.index() % p.batch],
        lambda: v.at[:, p.index()[0]], lambda: v.at[..., np.asarray([0, 1, 0])],
        lambda: v.at[rows // 2], lambda: v.at[rows, p.index()], lambda: v.at[rows + 0],
        lambda: v.reshape(-1).at[rows * int(np.prod(v.shape[1:])) + p.index() % 3],
    ])()  # fmt: skip
    found = getattr(at, how)(2.0, mode=mode if mode != "promise_in_bounds" else None)
    return found.reshape(v.shape)


def _got_any(p: Program, v: Array) -> Array:
    rows, n = jnp.arange(p.batch), p.index()
    mode = p.random.choice(["clip", "fill", "wrap", None])
    at = p.random.choice([
        lambda: v.at[rows, n], lambda: v.at[n % p.batch], lambda: v.at[:, n[0]],
        lambda: v.at[rows[:, None], n[:, None] + jnp.arange(2)], lambda: v.at[rows * 1],
        lambda: v.at[(rows + p.batch) % p.batch], lambda: v.at[rows * 2 - rows],
        lambda: v.at[jnp.minimum(rows, n)], lambda: v.at[jnp.where(n > 0, rows, rows)],
        lambda: v.at[jnp.clip(rows + n, 0, p.batch - 1)], lambda: v.at[-1 - rows],
        lambda: v.at[jnp.cumsum(jnp.ones_like(rows)) - 1], lambda: v.at[jnp.argsort(rows)],
        lambda: v.at[rows.astype(jnp.int8)], lambda: v.at[rows - rows // 2 * 2],
    ])()  # fmt: skip
    return at.get(mode=mode) if mode != "wrap" else at.get(mode="wrap")


def _of_segments(p: Program, v: Array) -> Array:
    v = _floats(v)
    ids = p.random.choice([
        lambda: p.index() % 3, lambda: jnp.arange(p.batch), lambda: jnp.arange(p.batch) // 2,
    ])()  # fmt: skip
    how = p.random.choice([jax.ops.segment_sum, jax.ops.segment_max])
    count = p.random.choice([3, p.batch])
    return how(v, ids, num_segments=count)[ids]


def _along_taken(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    order = p.random.choice([
        lambda: jnp.argsort(v, axis=axis), lambda: _ints(v) % 3,
        lambda: lax.broadcasted_iota(jnp.int32, v.shape, p.axis(v)),
    ])()  # fmt: skip
    return jnp.take_along_axis(v, order, axis, mode=p.random.choice(["clip", "fill"]))


def _sliced_any(p: Program, v: Array) -> Array:
    """Clamped slices whose start comes from data, the batch size, or a counter."""
    axis = p.axis(v)
    size = v.shape[axis]
    at = p.random.choice([
        lambda: p.index()[0], lambda: jnp.int32(p.batch) - 1, lambda: jnp.int32(99),
        lambda: jnp.int32(-5), lambda: jnp.int32(p.batch), lambda: jnp.argmax(p.weights(3)),
        lambda: p.index().sum(),
    ])()  # fmt: skip
    count = p.random.choice([1, 2, size])
    if p.random.random() < 0.5:
        return lax.dynamic_slice_in_dim(v, at, count, axis)
    part = lax.slice_in_dim(_floats(v) * 2, 0, count, axis=axis)
    return lax.dynamic_update_slice_in_dim(_floats(v), part, at, axis)


def _transformed(p: Program, v: Array) -> Array:
    v = _floats(v)
    found = p.random.choice([jnp.fft.fft, jnp.fft.ifft])(v, axis=p.axis(v))
    return p.random.choice([jnp.real, jnp.imag, lambda c: jnp.real(c * jnp.conj(c))])(found)


def _complex(p: Program, v: Array) -> Array:
    whole = lax.complex(_floats(v), _floats(p.other(v)))
    return p.random.choice([
        lambda c: jnp.real(c * c), lambda c: jnp.imag(c * 1j), lambda c: c.real.cumsum(p.axis(v)),
        lambda c: jnp.real(jnp.flip(c, p.axis(v))), lambda c: jnp.imag(c.sum(p.axis(v))),
    ])(whole)  # fmt: skip


def _bitcast(p: Program, v: Array) -> Array:
    v = _floats(v)
    bits = lax.bitcast_convert_type(v, jnp.int32)
    return p.random.choice([
        lambda: bits, lambda: lax.bitcast_convert_type(bits ^ (bits & 1), jnp.float32),
        lambda: bits >> 3, lambda: lax.population_count(bits), lambda: lax.clz(bits),
    ])()  # fmt: skip


def _narrowed(p: Program, v: Array) -> Array:
    to = p.random.choice([jnp.int8, jnp.uint8, jnp.bfloat16, jnp.float16, jnp.int16])
    v = jnp.clip(_floats(v), -100, 100).astype(to)
    v = p.random.choice([lambda a: a, lambda a: a + a, lambda a: a * 3])(v)
    return v.astype(p.random.choice([jnp.float32, jnp.int32]))


def _quantised(p: Program, v: Array) -> Array:
    """Quantize by the maximum of the row, of a feature, or of everything, and multiply."""
    v = _floats(v)
    axes = p.random.choice([tuple(range(1, v.ndim)), (v.ndim - 1,), None, (0,)])
    scale = jnp.abs(v).max(axes, keepdims=True) / 127 + 1e-6
    narrow = jnp.clip(jnp.round(v / scale), -127, 127).astype(jnp.int8)
    weights = p.weights(v.shape[-1], 3).astype(np.int8)
    found = lax.dot_general(
        narrow, weights, (((v.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.int32
    )
    return found * scale if p.random.random() < 0.5 else found


@jax.custom_jvp
def _kinked(x: Array) -> Array:
    return jnp.where(x > 0, x, 0.1 * x)


_kinked.defjvp(lambda primals, tangents: (_kinked(*primals), tangents[0] * 2))


def _differentiated(p: Program, v: Array) -> Array:
    v = _floats(v)
    axis = p.axis(v)
    of = p.random.choice([
        lambda x: _kinked(x).sum(), lambda x: (x * x[::-1]).sum(), lambda x: (x * x).sum(),
        lambda x: nn.softmax(x, axis).max(), lambda x: jnp.sort(x, axis)[..., 0].sum(),
        lambda x: x.mean() * x.sum(), lambda x: jnp.cumsum(x, axis).sum(),
        lambda x: lax.reduce_window(
            x, -jnp.inf, lax.max, tuple(2 if n == axis else 1 for n in range(x.ndim)),
            tuple(2 if n == axis else 1 for n in range(x.ndim)), "VALID").sum(),
    ])  # fmt: skip
    return jax.grad(p.random.choice([of, jax.checkpoint(of)]))(v)


def _windowed_any(p: Program, v: Array) -> Array:
    v, rank = _floats(v), v.ndim
    ones = [1] * rank
    window, strides, base, dilated = (list(ones) for _ in range(4))
    pads = [(0, 0)] * rank
    axis = p.axis(v)
    window[axis] = p.random.choice([1, 2, 3])
    for one in (strides, base, dilated):
        one[p.axis(v)] = p.random.choice([1, 1, 2])
    pads[p.axis(v)] = p.random.choice([(0, 0), (1, 0), (0, 1), (-1, 1), (1, 1), (-1, 0)])
    start, how = p.random.choice([(0.0, lax.add), (-np.inf, lax.max), (1.0, lax.add)])
    return lax.reduce_window(v, np.float32(start), how, window, strides, pads, base, dilated)


def _padded_any(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    if p.random.random() < 0.5:
        pads = [(0, 0, 0)] * v.ndim
        pads[axis] = p.random.choice([(1, 0, 0), (-1, 1, 0), (0, 0, 1), (1, -1, 0), (2, -2, 0)])
        return lax.pad(_floats(v), np.float32(p.random.choice([0, 1])), pads)
    pads = [(0, 0)] * v.ndim
    pads[axis] = p.random.choice([(1, 0), (1, 1)])
    return jnp.pad(v, pads, mode=p.random.choice(["edge", "reflect", "wrap", "constant"]))


def _drawn(p: Program, v: Array) -> Array:
    v = _floats(v)
    key = jax.random.key(p.random.randrange(9))
    return p.random.choice([
        lambda: v + jax.random.uniform(key, v.shape[1:]), lambda: jax.random.permutation(key, v),
        lambda: v + jax.random.bits(key, (p.batch, *(1,) * (v.ndim - 1)), jnp.uint8) * 1.0,
        lambda: jax.random.permutation(key, v, p.axis(v)),
        lambda: v + jax.random.uniform(jax.random.fold_in(key, p.index()[0])),
        lambda: v + jax.vmap(lambda n: jax.random.bits(jax.random.fold_in(key, n)))(
            p.index()).astype(jnp.float32).reshape(_like(p, v).shape),
        lambda: v + jax.random.uniform(jax.random.key(0, impl="rbg"), v.shape),
    ])()  # fmt: skip


def _numbered(p: Program, v: Array) -> Array:
    """Row indices and sizes used as data."""
    kind = p.random.choice([jnp.int32, jnp.int32, jnp.int8, jnp.float32, jnp.uint8])
    rows = jnp.arange(p.batch).astype(kind)
    size = jnp.asarray(p.batch).astype(kind)
    one = p.random.choice([
        lambda: rows * 0, lambda: rows - rows, lambda: rows // 1 - rows, lambda: rows >= 0,
        lambda: rows < size, lambda: rows % 1, lambda: rows == size, lambda: jnp.flip(rows) - rows,
        lambda: rows > 200, lambda: (rows + 1) * 0 + size * 0, lambda: rows + size,
        lambda: jnp.minimum(rows, 0), lambda: size / size, lambda: jnp.maximum(rows, size) - size,
        lambda: jnp.clip(rows, 0, size - 1) - rows, lambda: rows[::-1][::-1] - rows,
        lambda: rows * p.index(), lambda: jnp.where(p.index() > 3, rows, rows) - rows,
        lambda: (rows + p.index()) - rows, lambda: jnp.cumsum(rows * 0 + 1) - 1 - rows,
        lambda: rows.max() + 1 - size, lambda: rows.sum() * 0, lambda: rows.astype(jnp.int8) >= 0,
    ])()  # fmt: skip
    one = jnp.asarray(one).astype(jnp.float32)
    one = one.reshape((p.batch,) + (1,) * (v.ndim - 1)) if one.ndim else one
    return p.random.choice([jnp.add, jnp.multiply])(_floats(v), one)


def _sized_any(p: Program, v: Array) -> Array:
    """An array whose shape depends on the batch size, and rows of it."""
    v = _floats(v)
    width = p.random.choice([2, 3])
    wide = p.random.choice([
        lambda: jnp.tile(v, (width,) + (1,) * (v.ndim - 1)), lambda: jnp.repeat(v, width, 0),
        lambda: jnp.concatenate([v, v * 0]), lambda: jnp.pad(v, [(0, 2)] + [(0, 0)] * (v.ndim - 1)),
        lambda: jnp.concatenate([v, jnp.zeros((2, *v.shape[1:]))]),
        lambda: jnp.concatenate([jnp.zeros((1, *v.shape[1:])), v]), lambda: jnp.stack([v, v * 2]),
    ])()  # fmt: skip
    return p.random.choice([
        lambda: wide[: p.batch], lambda: wide[::width], lambda: wide[-p.batch :],
        lambda: wide.reshape(-1, *v.shape[1:])[: p.batch], lambda: wide[width - 1 :: width],
        lambda: wide.reshape(p.batch, -1), lambda: wide.reshape(width, p.batch, -1)[0],
        lambda: wide[1:][: p.batch],
    ])()  # fmt: skip


def _nested(p: Program, v: Array) -> Array:
    """Nested functions, called more than once."""
    inner = jax.jit(p.random.choice([
        lambda a: jnp.tanh(_floats(a)), lambda a: _floats(a) - _floats(a).max(p.axis(v)),
        lambda a: lax.optimization_barrier(_floats(a) * 2), lambda a: nn.gelu(_floats(a)),
    ]))  # fmt: skip
    return inner(inner(v)) + inner(p.other(v)).astype(jnp.float32)


def _integers(p: Program, v: Array) -> Array:
    v, other = _ints(v), _ints(p.other(v))
    return p.random.choice([
        lambda: v // 3, lambda: v % 3, lambda: lax.rem(v, jnp.int32(4)), lambda: v << 2,
        lambda: v & other, lambda: v | other, lambda: ~v, lambda: jnp.sign(v), lambda: v // other,
        lambda: v * 65537, lambda: lax.shift_right_logical(v, jnp.int32(1)), lambda: -v,
        lambda: jnp.where(v < 0, v + p.batch, v), lambda: v - p.batch + p.batch,
    ])()  # fmt: skip


def _special(p: Program, v: Array) -> Array:
    v = _floats(v)
    return p.random.choice([
        jnp.square, jnp.exp, jnp.log1p, lax.rsqrt, nn.sigmoid, jnp.round, jnp.isnan, jnp.isfinite,
        lambda a: 1 / a, lambda a: a + 0.0, lambda a: jnp.clip(a, -1, 1),
        jnp.nan_to_num,
        lambda a: lax.reduce_precision(a, 5, 10),
        lambda a: jnp.power(a, 2.0), jax.scipy.special.erf,
        lambda a: jnp.atan2(a, 1.0), lambda a: lax.nextafter(a, a + 1), jnp.tan,
    ])(v) * 1.0  # fmt: skip


def _shaped(p: Program, v: Array) -> Array:
    axis = p.axis(v)
    return p.random.choice([
        lambda: jnp.stack([v, p.other(v)], axis),
        lambda: jnp.concatenate(jnp.split(v, 2, axis)[::-1], axis),
        lambda: jnp.moveaxis(v, axis, p.axis(v)), lambda: jnp.rot90(v, axes=(0, 1)),
        lambda: jnp.tril(v), lambda: jnp.diagonal(v, axis1=-2, axis2=-1), lambda: v[:, None],
        lambda: v[None], lambda: v[None].reshape(p.batch, -1), lambda: v.reshape(1, p.batch, -1),
        lambda: jnp.delete(v, 0, axis), lambda: jnp.diff(v, axis=axis), lambda: jnp.ravel(v),
        lambda: jnp.insert(v, 1, 0, axis), lambda: v.reshape(-1, v.shape[-1]), lambda: v.T,
        lambda: jnp.einsum("b...->...b", v), lambda: jnp.triu(v, 1),
        lambda: jnp.swapaxes(v, 0, axis),
    ])()  # fmt: skip


def _rolled_by(p: Program, v: Array) -> Array:
    shift = p.random.choice([1, p.batch, p.index()[0], -1, 2 * p.batch, p.batch - 1])
    return jnp.roll(v, shift, p.axis(v))


def _hot(p: Program, v: Array) -> Array:
    count = p.random.choice([4, 4, p.batch])
    hot = nn.one_hot(p.random.choice([p.index(), jnp.arange(p.batch)]), count)
    return p.random.choice([
        lambda: hot, lambda: hot @ p.weights(4, 3), lambda: hot.T @ _floats(v).reshape(p.batch, -1),
        lambda: jnp.einsum("bk,b...->b...", hot, _floats(v)),
        lambda: hot @ _floats(v).reshape(p.batch, -1),
    ])()  # fmt: skip


def _matrices(p: Program, v: Array) -> Array:
    v = _floats(v)
    return p.random.choice([
        lambda: jnp.linalg.norm(v, axis=p.axis(v)), lambda: jnp.outer(v, v),
        lambda: jnp.kron(v, p.weights(2, 2)),
        lambda: jnp.trace(v, axis1=-1, axis2=-2), lambda: jnp.cov(v.reshape(p.batch, -1)),
        lambda: jnp.matmul(v, jnp.swapaxes(v, -1, -2)), lambda: jnp.vdot(v, v) + v,
        lambda: jnp.cross(v[..., :3], v[..., -3:]),
        lambda: jnp.tensordot(v, p.weights(v.shape[-1], 2), 1),
        lambda: jnp.tensordot(v, v, (0, 0)),
        lambda: jnp.linalg.matrix_power(v @ p.weights(v.shape[-1], v.shape[-2]), 2),
        lambda: jnp.interp(v, np.asarray([0.0, 1.0, 2.0]), np.asarray([1.0, 3.0, 0.0])),
        lambda: jnp.convolve(v.reshape(-1), np.ones(3), "same").reshape(v.shape),
        lambda: jax.vmap(lambda r: jnp.convolve(r, np.ones(3), "same"))(v.reshape(p.batch, -1)),
        lambda: jnp.median(v, axis=p.axis(v)), lambda: jnp.polyval(p.weights(3), v),
    ])()  # fmt: skip


MORE: list[tuple[str, Step]] = [
    (step.__name__.strip("_"), step)
    for step in (
        _of_several, _two_reduced, _bits_reduced, _started, _cumulated, _associated,
        _sorted_together, _ranked, _searched, _counted_up, _routed, _convolved_any, _convolved_any,
        _multiplied_any, _multiplied_any, _summed, _scanned_any, _while_of_all, _looped_to,
        _branched_any, _put_any, _put_any, _got_any, _got_any, _of_segments, _along_taken,
        _sliced_any, _transformed, _complex, _bitcast, _narrowed, _quantised, _differentiated,
        _windowed_any, _windowed_any, _padded_any, _drawn, _numbered, _numbered, _sized_any,
        _sized_any, _nested, _integers, _special, _special, _shaped, _shaped, _rolled_by, _hot,
        _matrices,
    )
]  # fmt: skip

STEPS: list[tuple[str, Step]] = [*USUAL, *MORE]
"""All steps, including the usual ones."""


def plain(program: Program) -> Any:
    """Wrap a program so that its outputs have dtypes that every trial can read."""

    def outputs(*inputs: Array) -> list[Array]:
        return [_plain(one) for one in program(*inputs)]

    return outputs


def _plain(value: Array) -> Array:
    if value.dtype in {jnp.dtype("float32"), jnp.dtype("int32")}:
        return value
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jnp.stack([value.real, value.imag], -1).astype(jnp.float32)
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return value.astype(jnp.float32 if is_float else jnp.int32)
