"""Loops that run until all rows are done, and branches taken if any row requests it."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.special import betainc
from support.rows import verdict_of

from xlaserve.row_proofs import Independence

F4 = [((4,), "float32")]
WEIGHTS = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
END, PAD, LENGTH = 2, 3, 7

Array = jax.Array
Step = Callable[[Array, Array, Array, Array], Array]
"""Takes tokens, done flags, new tokens and their position; returns the tokens."""


ZERO: Any = 0
"""A Python number, which has a weak type in JAX."""


def generated(
    x: Array,
    *,
    put: Step,
    begin: Callable[[Array], Array] | None = None,
    first: int = 0,
    goes_on: Callable[[Array], Array] = lambda done: ~done.all(),
    ends: Callable[[Array, Array], Array] = lambda done, new: done | (new == END),
    done: Callable[[Array], Array] = lambda x: jnp.zeros(x.shape[0], bool),
    is_counted: bool = True,
) -> tuple[Array, ...]:
    """Generate until all rows are done: count, tokens, done flags, lengths, and a cache."""
    b = x.shape[0]
    tokens = jnp.full((b, LENGTH), PAD, jnp.int32) if begin is None else begin(x)

    def step(s: tuple[Array, ...]) -> tuple[Array, ...]:
        i, tokens, done, lengths, cache = s
        cache = cache * 0.9 + x
        new = jnp.argmax(cache @ WEIGHTS, -1).astype(jnp.int32)
        lengths = lengths + (~done).astype(jnp.int32)
        return i + 1, put(tokens, done, new, i), ends(done, new), lengths, cache

    begun: Any = (first, tokens, done(x), jnp.zeros(b, jnp.int32), x)
    return lax.while_loop(
        lambda s: ((s[0] < LENGTH) & goes_on(s[2])) if is_counted else goes_on(s[2]), step, begun
    )


def pad_is_put(tokens: Array, done: Array, new: Array, i: Array) -> Array:
    return tokens.at[:, i].set(jnp.where(done, PAD, new))


def pad_is_put_behind(tokens: Array, done: Array, new: Array, i: Array) -> Array:
    return tokens.at[:, i + 1].set(jnp.where(done, PAD, new))


def pad_slice_is_put(tokens: Array, done: Array, new: Array, i: Array) -> Array:
    return lax.dynamic_update_slice(tokens, jnp.where(done, PAD, new)[:, None], (0, i))


def pad_slice_is_put_behind(tokens: Array, done: Array, new: Array, i: Array) -> Array:
    return lax.dynamic_update_slice(tokens, jnp.where(done, PAD, new)[:, None], (0, i + 1))


def token_is_put(tokens: Array, done: Array, new: Array, i: Array) -> Array:
    return tokens.at[:, i].set(new)


def token_is_put_behind(tokens: Array, done: Array, new: Array, i: Array) -> Array:
    return tokens.at[:, i + 1].set(new)


def done_are_kept(tokens: Array, done: Array, new: Array, i: Array) -> Array:
    return jnp.where(done[:, None], tokens, tokens.at[:, i].set(new))


def added(place: Array, number: int, *, times: int) -> Array:
    """Add a number several times, without simplification."""
    for _ in range(times):
        place = place + jnp.int32(number)
    return place


def by_both(done: Step, going: Step) -> Step:
    """Apply `done` to rows that are done, and `going` to the others."""

    def put(tokens: Array, is_done: Array, new: Array, i: Array) -> Array:
        before = done(tokens, is_done, new, i), going(tokens, is_done, new, i)
        return jnp.where(is_done[:, None], *before)

    return put


def behind_a_prompt(x: Array, told: int = 3) -> Array:
    asked = (x[:, :told] > 0).astype(jnp.int32)
    return jnp.pad(asked, ((0, 0), (0, LENGTH - told)), constant_values=PAD)


def joined_to_a_prompt(x: Array) -> Array:
    rest = jnp.full((x.shape[0], LENGTH - 3), PAD, jnp.int32)
    return jnp.concatenate([(x[:, :3] > 0).astype(jnp.int32), rest], 1)


def put_into_padding(x: Array, at: int = 0) -> Array:
    asked = (x[:, :3] > 0).astype(jnp.int32)
    whole = jnp.full((x.shape[0], LENGTH), PAD, jnp.int32)
    return lax.dynamic_update_slice(whole, asked, (0, at))


def halved(x: Array, which: int) -> Any:
    """Halve each row until it is at most 1, and count the trips of all rows."""

    def step(s: tuple[Array, Array]) -> tuple[Array, Array]:
        going = (s[1] > 1).any(-1, keepdims=True)
        return s[0] + 1, jnp.where(going, s[1] * 0.5, s[1])

    found = lax.while_loop(lambda s: (s[1] > 1).any() & (s[0] < 9), step, (ZERO, x))
    return found[which] if which < 2 else found[1] + found[0]


def up_to_lengths(x: Array, within: Callable[[Array, Array], Array], bound: str = "max") -> Array:
    n = jnp.abs(x[:, 0]).astype(jnp.int32)

    def step(s: tuple[Array, Array]) -> tuple[Array, Array]:
        return s[0] + 1, jnp.where(within(s[0], n)[:, None], jnp.tanh(s[1] + 1), s[1])

    return lax.while_loop(lambda s: s[0] < getattr(n, bound)(), step, (ZERO, x))[1]


def in_two_dimensions(x: Array, axis: int) -> Array:
    """Rows that are done write a column, the others a row, or a column at another counter."""

    def step(s: tuple[Array, ...]) -> tuple[Array, ...]:
        i, j, v, n = s
        column = lax.dynamic_update_slice(v, jnp.zeros_like(v[:, :, :1]), (0, 0, i))
        other = lax.dynamic_update_slice(
            v, jnp.ones_like(v[:, :1] if axis else v[:, :, :1]), (0, i, 0) if axis else (0, 0, j)
        )
        going = n > 0
        v = jnp.where(going[:, None, None], other, column)
        return i + 1, j + 2, v, jnp.where(going, n - 1, n)

    count, n = jnp.int32(0), jnp.abs(x[:, 0]).astype(jnp.int32)
    begun: Any = (count, count, jnp.zeros((x.shape[0], 4, 4), jnp.int32), n)
    found: Array = lax.while_loop(
        lambda s: (s[0] < 4) & (s[1] < 4) & (s[3] > 0).any(), step, begun
    )[2]
    return found


def at_first_further(x: Array) -> tuple[Array, ...]:
    """Write two positions ahead in the first trips, in which no row is done."""

    def step(s: tuple[Array, ...]) -> tuple[Array, ...]:
        i, tokens, n = s
        place = i + lax.select(i < 3, jnp.int32(2), jnp.int32(0))
        token = jnp.where(going(i, n), 1, PAD)[:, None]
        return i + 1, lax.dynamic_update_slice(tokens, token, (ZERO, place)), n

    def going(i: Array, n: Array) -> Array:
        return (n > i) | lax.broadcast(i < 3, n.shape)

    begun: Any = (
        jnp.int32(0),
        jnp.full((x.shape[0], LENGTH), PAD),
        jnp.abs(x[:, 0]).astype(jnp.int32),
    )
    return lax.while_loop(lambda s: (s[0] < LENGTH) & going(s[0], s[2]).any(), step, begun)


def while_below(
    x: Array,
    *,
    bound: Callable[[Array], Array] = lambda n: n,
    step: Callable[[Array], Array] = lambda i: i + 1,
) -> Array:
    """Count up to the length of each row; both may change with each trip."""
    n = jnp.abs(x[:, 0]).astype(jnp.int32)

    def body(s: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, n, v = s
        return step(i), bound(n), jnp.where((i < n)[:, None], jnp.tanh(v + 1), v)

    found: Array = lax.while_loop(lambda s: (s[0] < s[1]).any(), body, (ZERO, n, x))[2]
    return found


def bounded_often(x: Array, *, is_asked_first: bool) -> Array:
    """Halve rows in a loop with more conditions than are analysed; other rows may end it too."""

    def goes_on(s: tuple[Array, ...]) -> Array:
        i, v, n = s
        bounds = [i < jnp.int32(100 + number) for number in range(70)]
        first = [(n > 0).any()] if is_asked_first else []
        asked: Array = functools.reduce(operator.and_, [*first, *bounds, (v > 1).any()])
        return asked

    def step(s: tuple[Array, ...]) -> tuple[Array, ...]:
        i, v, n = s
        return i + 1, jnp.where(v > 1, v * 0.5, v), jnp.where(n > 0, n - 1, n)

    begun: Any = (jnp.int32(0), x * 100, jnp.abs(x[:, 0]).astype(jnp.int32))
    found: Array = lax.while_loop(goes_on, step, begun)[1]
    return found


def branched(x: Array, *branches: Callable[[Array], Array]) -> Array:
    """Take one of several branches, chosen by a number in the first row."""
    found: Array = lax.switch(x[0, 0].astype(jnp.int32), branches, x)
    return found


def bounded(
    x: Array, holds: Callable[[Array], Array], bound: Callable[[Array], Array], *, where: int = 1
) -> Array:
    """Bound all rows if a condition holds for all of them, written as a switch with clamping."""
    branches = [lambda x: x, bound]
    found: Array = lax.switch(holds(x).all().astype(jnp.int32), branches[:: 2 * where - 1], x)
    return found


def positive(x: Array) -> Array:
    return x[:, :1] > 0


def asked(
    on: Callable[[Array], Array],
    where: Callable[[Array, Array], Array],
    other: Callable[[Array, Array], Array],
) -> Callable[[Array], Array]:
    def model(x: Array) -> Array:
        asks = positive(x)
        found: Array = lax.cond(on(asks), lambda: where(asks, x), lambda: other(asks, x))
        return found

    return model


PROVED: dict[str, Callable[[Array], Any]] = {
    "padding is put where padding is": lambda x: generated(x, put=pad_is_put)[1],
    "which rows are done": lambda x: generated(x, put=pad_is_put)[2],
    "lengths": lambda x: generated(x, put=pad_is_put)[3],
    "tokens of rows that are done are kept": lambda x: generated(x, put=done_are_kept)[1],
    "any that is not done": lambda x: generated(
        x, put=pad_is_put, goes_on=lambda done: (~done).any()
    )[1],
    "done by a selection": lambda x: generated(
        x, put=done_are_kept, ends=lambda done, new: jnp.where(done, True, new == END)
    )[1],
    "behind a prompt": lambda x: generated(x, put=pad_is_put, begin=behind_a_prompt, first=3)[1],
    "joined to a prompt": lambda x: generated(x, put=pad_is_put, begin=joined_to_a_prompt, first=3)[
        1
    ],
    "a slice of padding is put": lambda x: generated(x, put=pad_slice_is_put)[1],
    "a slice behind a prompt": lambda x: generated(
        x, put=pad_slice_is_put, begin=behind_a_prompt, first=3
    )[1],
    "a slice behind a prompt that was put": lambda x: generated(
        x, put=pad_slice_is_put, begin=put_into_padding, first=3
    )[1],
    "the first trip overwrites a prompt": lambda x: generated(
        x, put=pad_is_put, begin=lambda x: behind_a_prompt(x, 4), first=3
    )[1],
    "lengths beside a place that is no counter": lambda x: generated(
        x, put=lambda t, done, new, i: pad_is_put(t, done, new, i + i)
    )[3],
    "at a place that nothing is added to": lambda x: generated(
        x, put=lambda t, done, new, i: pad_is_put(t, done, new, i + jnp.zeros_like(i))
    )[1],
    "one place further": lambda x: generated(
        x, put=pad_is_put_behind, begin=behind_a_prompt, first=2
    )[1],
    "put at the same place by both": lambda x: generated(x, put=by_both(pad_is_put, token_is_put))[
        1
    ],
    "put one place before by those that go on": lambda x: generated(
        x, put=by_both(pad_is_put_behind, token_is_put)
    )[1],
    "a slice put at the same place by both": lambda x: generated(
        x, put=by_both(pad_slice_is_put, token_is_put)
    )[1],
    "put twice by those that go on": lambda x: generated(
        x, put=by_both(pad_is_put_behind, lambda t, *s: token_is_put(pad_is_put_behind(t, *s), *s))
    )[1],
    "frozen beside a count": lambda x: halved(x, 1),
    "up to the longest": lambda x: up_to_lengths(x, lambda i, n: i < n),
    "up to the longest, the other way round": lambda x: up_to_lengths(x, lambda i, n: ~(n <= i)),
    "up to the longest, by a selection": lambda x: up_to_lengths(
        x, lambda i, n: jnp.where(i < n, True, False)
    ),
    "below each length": while_below,
    "below each length, by twos": lambda x: while_below(x, step=lambda i: i + 2),
    "halved within many bounds": lambda x: bounded_often(x, is_asked_first=False),
    "gamma distribution": lambda x: jax.scipy.stats.gamma.cdf(jnp.abs(x), 2.0),
    "where any asks": asked(lambda a: a.any(), lambda a, x: jnp.where(a, x * 2, x), lambda a, x: x),
    "where all are done": asked(
        lambda a: a.all(), lambda a, x: x, lambda a, x: jnp.where(a, x, x * 2)
    ),
    "where not all are done": asked(
        lambda a: ~a.all(), lambda a, x: jnp.where(~a, x * 2, x), lambda a, x: x
    ),
    "where any asks, and a parameter": asked(
        lambda a: a.any() & (jnp.asarray(WEIGHTS)[0, 0] > 0),
        lambda a, x: jnp.where(a, x * 2, x),
        lambda a, x: jnp.where(a, x, x),
    ),
    "bounded where all are above": lambda x: bounded(
        x, lambda x: x > 1, lambda x: jnp.maximum(x, 1)
    ),
    "bounded where all are below": lambda x: bounded(
        x, lambda x: x < 1, lambda x: jnp.minimum(1, x)
    ),
    "bounded where some are not above": lambda x: bounded(
        x, lambda x: x > 1, lambda x: jnp.maximum(x, 1), where=0
    ),
    "the same in all branches": lambda x: branched(
        x, lambda x: jnp.where(x > 1, jnp.tanh(x), jnp.tanh(x)), jnp.tanh, jnp.tanh
    ),
}

NOT_PROVED: dict[str, Callable[[Array], Any]] = {
    "something else is put": lambda x: generated(
        x, put=lambda t, done, new, i: t.at[:, i].set(jnp.where(done, PAD + 1, new))
    )[1],
    "tokens go on": lambda x: generated(x, put=lambda t, done, new, i: t.at[:, i].set(new))[1],
    "written before": lambda x: generated(
        x, put=pad_is_put, begin=lambda x: behind_a_prompt(x, 4), first=2
    )[1],
    "written before, and done from the first": lambda x: generated(
        x,
        put=pad_is_put,
        begin=lambda x: behind_a_prompt(x, 4),
        first=3,
        done=lambda x: x[:, 0] > 0,
    )[1],
    "a slice is put at the last place again": lambda x: generated(x, put=pad_slice_is_put_behind)[
        1
    ],
    "a slice, of so many trips as it takes": lambda x: generated(
        x, put=pad_slice_is_put, is_counted=False
    )[1],
    "a slice that is put behind what was begun": lambda x: generated(
        x, put=pad_slice_is_put, begin=lambda x: put_into_padding(x, 2), first=3
    )[1],
    "a place that is counted in few bits": lambda x: generated(
        x, put=lambda t, done, new, i: pad_is_put(t, done, new, i.astype(jnp.int8))
    )[1],
    "a place that begins below the first": lambda x: generated(
        x, put=lambda t, done, new, i: pad_is_put(t, done, new, i - 1)
    )[1],
    "a place that is counted round all bits": lambda x: generated(
        x,
        put=lambda t, done, new, i: pad_is_put(t, done, new, added(i, 2**30, times=4)),
        begin=lambda x: behind_a_prompt(x, 4),
        first=1,
        done=lambda x: x[:, 0] > 0,
    )[1],
    "a place that is far beyond": lambda x: generated(
        x, put=lambda t, done, new, i: pad_is_put(t, done, new, added(i, 2**20, times=1))
    )[1],
    "put at one place again and again": lambda x: generated(
        x, put=lambda t, done, new, i: t.at[:, 0 * i].set(jnp.where(done, PAD, new))
    )[1],
    "the last place again and again": lambda x: generated(
        x,
        put=lambda t, done, new, i: lax.dynamic_update_slice(
            t[:, :5], jnp.where(done, PAD, new)[:, None], (0, i)
        ),
        begin=lambda x: jnp.full((x.shape[0], 5), PAD, jnp.int32),
    )[1],
    "another padding behind a prompt": lambda x: generated(
        x,
        put=pad_is_put,
        begin=lambda x: jnp.pad(
            (x[:, :3] > 0).astype(jnp.int32), ((0, 0), (0, LENGTH - 3)), constant_values=PAD + 1
        ),
        first=3,
    )[1],
    "padding before a prompt": lambda x: generated(
        x,
        put=pad_is_put,
        begin=lambda x: jnp.pad(
            (x[:, :3] > 0).astype(jnp.int32), ((0, 0), (LENGTH - 3, 0)), constant_values=PAD
        ),
        first=3,
    )[1],
    "padding between a prompt": lambda x: generated(
        x,
        put=pad_is_put,
        begin=lambda x: lax.pad(
            (x[:, :3] > 0).astype(jnp.int32), jnp.int32(PAD), [(0, 0, 0), (0, LENGTH - 5, 1)]
        ),
        first=3,
    )[1],
    "another padding joined to a prompt": lambda x: generated(
        x,
        put=pad_is_put,
        begin=lambda x: joined_to_a_prompt(x).at[:, 5:].set(PAD + 1),
        first=3,
    )[1],
    "padding that is added": lambda x: generated(
        x, put=lambda t, done, new, i: t.at[:, i].add(jnp.where(done, PAD, new))
    )[1],
    "padding that is larger": lambda x: generated(
        x, put=lambda t, done, new, i: t.at[:, i].max(jnp.where(done, PAD + 1, new))
    )[1],
    "a place that is counted down to": lambda x: generated(
        x, put=lambda t, done, new, i: pad_is_put(t, done, new, LENGTH - 1 - i)
    )[1],
    "two places in each trip": lambda x: generated(
        x,
        put=lambda t, done, new, i: lax.dynamic_update_slice(
            t, jnp.stack([jnp.where(done, PAD, new), new], 1), (0, i)
        ),
    )[1],
    "all places are changed by those that go on": lambda x: generated(
        x, put=by_both(pad_is_put, lambda t, done, new, i: t + 1)
    )[1],
    "all places are changed before one is put": lambda x: generated(
        x, put=by_both(pad_is_put, lambda t, *rest: token_is_put(t + 1, *rest))
    )[1],
    "put one place further by those that go on": lambda x: generated(
        x, put=by_both(pad_is_put, token_is_put_behind)
    )[1],
    "put one place further, and where it was": lambda x: generated(
        x, put=by_both(pad_is_put, lambda t, *s: token_is_put(token_is_put_behind(t, *s), *s))
    )[1],
    "a slice put one place further by those that go on": lambda x: generated(
        x, put=by_both(pad_slice_is_put, token_is_put_behind)
    )[1],
    "put along another dimension by those that go on": lambda x: in_two_dimensions(x, 1),
    "put at another counter by those that go on": lambda x: in_two_dimensions(x, 0),
    "something is added to those that go on": lambda x: generated(
        x, put=lambda t, done, *rest: pad_is_put(t, done, *rest) + (~done)[:, None]
    )[1],
    "further in the first trips, while all rows go on": lambda x: at_first_further(x)[1],
    "halved until others end, beside many bounds": lambda x: bounded_often(x, is_asked_first=True),
    "the trips": lambda x: generated(x, put=pad_is_put)[0] + x,
    "the cache": lambda x: generated(x, put=pad_is_put)[4],
    "done no more": lambda x: generated(x, put=pad_is_put, ends=lambda done, new: new == END)[1],
    "until any is done": lambda x: generated(x, put=pad_is_put, goes_on=lambda done: ~done.any())[
        1
    ],
    "a count of the trips": lambda x: halved(x, 0) + x,
    "with a count of the trips": lambda x: halved(x, 2),
    "below lengths that grow": lambda x: while_below(x, bound=lambda n: n + 2),
    "below lengths, counting down": lambda x: while_below(x, step=lambda i: i - 1),
    "below lengths, where both change": lambda x: while_below(
        x, bound=lambda n: n * 2, step=lambda i: i * 2
    ),
    "one trip too many": lambda x: up_to_lengths(x, lambda i, n: i <= n),
    "others go on, by a selection": lambda x: up_to_lengths(
        x, lambda i, n: jnp.where(n > 3, True, i < n)
    ),
    "begun after the end": lambda x: up_to_lengths(x, lambda i, n: i > n),
    "up to the shortest": lambda x: up_to_lengths(x, lambda i, n: i < n, "min"),
    "up to all together": lambda x: up_to_lengths(x, lambda i, n: i < n, "sum"),
    "all are changed where any asks": asked(lambda a: a.any(), lambda a, x: x * 2, lambda a, x: x),
    "others are changed where any asks": asked(
        lambda a: a.any(), lambda a, x: jnp.where(~a, x * 2, x), lambda a, x: x
    ),
    "others are changed where all are done": asked(
        lambda a: a.all(), lambda a, x: x, lambda a, x: jnp.where(a, x + 1, x * 2)
    ),
    "those that ask are changed where all do": asked(
        lambda a: a.all(), lambda a, x: jnp.where(a, x * 2, x), lambda a, x: x
    ),
    "bounded where all are above another bound": lambda x: bounded(
        x, lambda x: x > 1, lambda x: jnp.maximum(x, 2)
    ),
    "bounded from below where all are below": lambda x: bounded(
        x, lambda x: x < 1, lambda x: jnp.maximum(x, 1)
    ),
    # The larger one of 0 and -0 is 0.
    "bounded by zero where all are from zero on": lambda x: bounded(
        x, lambda x: x >= 0, lambda x: jnp.maximum(x, 0)
    ),
    "another in the last branch": lambda x: branched(x, jnp.tanh, jnp.tanh, jnp.sin),
    "another in the branch between": lambda x: branched(x, jnp.tanh, jnp.sin, jnp.tanh),
    "another that is chosen in one branch": lambda x: branched(
        x, lambda x: jnp.where(x > 1, jnp.tanh(x), x), jnp.tanh, jnp.tanh
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_rows_that_are_done_are_left_alone(name: str) -> None:
    verdict = verdict_of(PROVED[name], F4)

    assert str(verdict) == "proved"


def test_the_beta_distribution_is_proved_where_jax_leaves_done_rows_alone() -> None:
    """Before jax 0.10, done rows went on until the last one was done, which changed their bits."""

    def beta(x: Array) -> Array:
        return betainc(jnp.abs(x) + 1.0, 2.0, jax.nn.sigmoid(x))

    call, random = jax.jit(beta), np.random.default_rng(1)
    rows = (100.0 ** random.random((60, 1, 1)) * random.normal(size=(60, 3, 4))).astype("float32")
    alone = [[call(np.stack([row] * 3))[0] for row in batch] for batch in rows]
    is_kept = np.array_equal(alone, [call(batch) for batch in rows], equal_nan=True)

    assert (str(verdict_of(beta, F4)) == "proved") == is_kept


@pytest.mark.parametrize("name", NOT_PROVED)
def test_rows_that_others_change_are_not_proved(name: str) -> None:
    verdict = verdict_of(NOT_PROVED[name], F4)

    assert verdict.independence == Independence.UNKNOWN
    assert verdict.operation in {"stablehlo.while", "stablehlo.case"}
