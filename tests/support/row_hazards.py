"""Functions whose rows affect one another, or depend on their index or on the batch size.

Each comes with the operation that the verdict must name; none if it may be unknown.
"""

# A table of functions whose names say what they are.
# mypy: ignore-errors=True
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# ruff: noqa: PLW0108

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

Inputs = Sequence[tuple[Sequence[int], str]]
Hazard = tuple[Callable[..., Any], Inputs, str | None]

_RANDOM = np.random.default_rng(5)
F4 = [((4,), "float32")]
INT = [((), "int32")]
SEQUENCE = [((5, 4), "float32")]
IMAGE = [((8, 8, 3), "float32")]


def w(*shape: int) -> np.ndarray:
    return (_RANDOM.standard_normal(shape) * 0.3).astype(np.float32)


def rows(x):
    return jnp.arange(x.shape[0])


def size(x):
    return jnp.asarray(x.shape[0])


def per_tensor_int8(x):
    s = jnp.abs(x).max() / 127.0
    return jnp.round(x / s) * s


def capacity(x):
    gate = nn.softmax(x @ w(4, 2))[:, 0] > 0.5
    place = jnp.cumsum(gate.astype(jnp.int32))
    return jnp.where((gate & (place <= 2))[:, None], x * 2, x)


def loop_for_all(x):
    return lax.while_loop(lambda v: jnp.abs(v).max() > 1e-2, lambda v: v * 0.5, x)


def loop_for_any(x):
    return lax.while_loop(lambda v: (jnp.abs(v) > 1e-2).any(), lambda v: v * 0.5, x)


def unfrozen_counter(x):
    def step(c):
        v, n = c
        going = (jnp.abs(v) > 1e-2).any(-1)
        return jnp.where(going[:, None], v * 0.5, v), n + 1

    v, n = lax.while_loop(lambda c: (jnp.abs(c[0]) > 1e-2).any(), step, (x, 0))
    return v + n.astype(jnp.float32)


def frozen_by_another(x):
    def step(v):
        return jnp.where((v > 0.5).any(-1)[:, None], v * 0.5, v + 0.01)

    return lax.while_loop(lambda v: (v > 1e-1).any(), step, x)


def frozen_by_a_captured_value(x):
    """Freeze rows by a predicate of identical form that captures another value."""
    limit, other = x * 0.0 + 0.1, x * 0.0 + 0.9

    def step(v):
        return jnp.where((v > other).any(-1)[:, None], v * 0.5, v * 0.9)

    return lax.while_loop(lambda v: (v > limit).any(-1).any(), step, x)


def loop_to_the_size(x):
    return lax.fori_loop(0, x.shape[0], lambda n, v: v * 1.01, x)


def loop_over_rows(x):
    return lax.fori_loop(0, x.shape[0], lambda n, v: v.at[n].add(v[0]), x)


def cond_on_any(x):
    return lax.cond((x > 3).any(), lambda v: v * 2, lambda v: v, x)


def masked(reduced, mask, old=lambda x, other: x):
    """Return a function that changes masked rows if a reduction over all rows holds."""
    return lambda x: lax.cond(
        reduced(x[:, 0] > 3),
        lambda v: jnp.where(mask(v)[:, None], v * 2, old(v, x)),
        lambda v: v,
        x,
    )


def cond_on_size(x):
    return lax.cond(size(x) > 50, lambda v: v + v.sum(0)[None], lambda v: v, x)


def switch_on_size(x):
    return lax.switch(size(x) // 50, [lambda v: v, lambda v: v * v.sum()], x)


def batch_norm(x):
    return (x - x.mean(0)[None]) / (x.std(0)[None] + 1e-3)


def in_a_loop(x):
    return lax.fori_loop(0, 3, lambda n, v: v + 0.1 * v.mean(0, keepdims=True), x)


def in_a_scan(x):
    return lax.scan(lambda v, t: (v + t, (v * t).max()), x, jnp.ones((3, 1, 4)))[0][:, 0:4] + (
        lax.scan(lambda v, t: (v, (v * t).max()), x, jnp.ones((3, 1, 4)))[1].sum()
    )


def handed_on_in_a_loop(x):
    def step(_, carry):
        a, c, d = carry
        return d, a, c + a.sum()

    return lax.fori_loop(0, 4, step, (x, x, x))[0]


def in_a_branch_of_a_row(x):
    total = x.sum()
    return jax.vmap(lambda r: lax.cond(r[0] > 9, lambda v: v + total, lambda v: v, r))(x)


def attention_over_rows(x):
    return nn.softmax(x @ x.T) @ x


def pairs(x):
    return jnp.abs(x[:, None] - x[None]).min(1)


def reshape_that_leaks(x):
    return x.reshape(4, -1).T.reshape(-1, 4) + 0.0


def merged_and_normalised(x):
    y = x.reshape(-1, 2)
    y = (y - y.mean(0)[None]) / (y.std(0)[None] + 1)
    return y.reshape(x.shape)


def heads_and_rows_swapped(x):
    return x.transpose(1, 0, 2).reshape(x.shape)


def scatter_over_rows(x, n):
    return x.at[n].set(1.0)


def gather_over_rows(x, n):
    return x[jnp.clip(n, 0, x.shape[0] - 1)]


def vmapped_gather_of_all(x, n):
    return jax.vmap(lambda k: x[k % 3])(n)


def sized_padding(x):
    return jnp.pad(x, ((0, 3), (0, 0)))[: x.shape[0]] + x.shape[0]


def bigger_than_forty(x):
    return x + jnp.maximum(size(x) - 40, 0)[None, None].astype(jnp.float32)


def quarter(x):
    return x * (size(x) // 4).astype(jnp.float32)


def modulo(x):
    return x + (size(x) % 8).astype(jnp.float32)


def up_to_sixteen(x):
    return x / jnp.minimum(size(x), 16).astype(jnp.float32)


def up_to_thirty(x):
    return x * (jnp.minimum(size(x), 30) == 30).astype(jnp.float32)


def equal_to_eight(x):
    return jnp.where(size(x) == 8, x * 2, x)


def shape_of_the_quarter(x):
    return x + jnp.ones(x.shape[0] // 4).sum()


def hidden_in_bfloat(x):
    return x + (size(x) + 100_000).astype(jnp.bfloat16).astype(jnp.float32)


def bits_of_the_size(x):
    return x + (size(x) >> 6).astype(jnp.float32)


def size_through_a_mask(x):
    return x * (jnp.arange(64) < x.shape[0]).sum().astype(jnp.float32)


def row_in_the_first_half(x):
    return jnp.where((rows(x) * 2 < x.shape[0])[:, None], x, -x)


def last_of_a_mask(x):
    mask = rows(x) == x.shape[0] - 1
    return jnp.where(mask[:, None], x * 2, x)


def sum_of_constants(x):
    return x + (rows(x) * 0 + 1).sum().astype(jnp.float32)


def shared_noise(x):
    return x + jax.random.normal(jax.random.key(0), x.shape)


def dropout(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.9, x.shape), x, 0)


def split_keys(x):
    keys = jax.random.split(jax.random.key(0), x.shape[0])
    return jax.vmap(lambda r, k: r + jax.random.normal(k, r.shape))(x, keys)


def index_past_the_row_number(x):
    return x[rows(x) + 1, 0][:, None] + x


def index_before_the_row_number(x):
    return x[rows(x) - 1] + x


def scatter_at_another_row(x):
    return x.at[(rows(x) + 1) % x.shape[0]].add(x)


def diagonal(x):
    return x[:, 0] * jnp.zeros((x.shape[0],) * 2).at[rows(x), rows(x)].set(1.0)[:, 0]


def diagonal_of_each(x):
    of_one = jax.vmap(lambda zeros, at: zeros.at[at].set(1.0))
    return x[:, 0] * of_one(jnp.zeros((x.shape[0],) * 2), rows(x))[:, 0]


def cut_of_rows(n):
    """Slice out the first row's integer, with a computation between slice and use."""
    return lax.slice(n, (0,), (1,)) + 1


def repeated_to(x):
    """Repeat each index once per row, then keep four; the batch size decides which."""
    places = jnp.broadcast_to(jnp.arange(5)[:, None], (5, x.shape[0])).reshape(-1)
    return lax.slice(places, (0,), (4,))


def one_of_repeated(x):
    places = jnp.broadcast_to(jnp.arange(5)[:, None], (5, x.shape[0])).reshape(-1)
    return lax.slice(places, (3,), (4,)) + 1


def scatter_the_sum(x):
    return jnp.zeros_like(x).at[:, jnp.zeros(3, jnp.int32)].add(1.0).at[0].add(x.sum(0))


def time_major(x):
    """Treat the batch dimension as time."""

    def step(h, v):
        h = jnp.tanh(v @ w(4, 4) + h)
        return h, h

    return lax.scan(step, jnp.zeros(4, jnp.float32), x)[1]


def triangle(x):
    return jnp.tril(jnp.ones((x.shape[0], x.shape[0]))) @ x


def one_hot_of_the_place(x):
    return x + nn.one_hot(rows(x), 4)


def flip_in_a_cond(x):
    return lax.cond(x.shape[1] > 3, lambda v: v[::-1], lambda v: v, x)


def rank_in_the_batch(x):
    return jnp.argsort(jnp.argsort(x[:, 0]))[:, None] + x


def sort_with_keys(x):
    keys, values = lax.sort((x[:, 0], x[:, 1]), dimension=0, num_keys=1)
    return jnp.stack([keys, values], 1)


def convolution_over_rows(x):
    return lax.conv_general_dilated(x.T[:, None], w(1, 1, 3), (1,), "SAME")[:, 0].T


def convolution_with_rows_as_features(x):
    image = x[None]
    kernel = jnp.ones((3, x.shape[0], 1), jnp.float32)
    mixed = lax.conv_general_dilated(
        image.transpose(0, 2, 1), kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return x + mixed[0, 0, 0]


def pooling_over_rows(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")


def covariance(x):
    return x @ jnp.linalg.inv(x.T @ x + jnp.eye(4))


def segments(x, n):
    return jax.ops.segment_sum(x, n % 4, 4)[n % 4]


def softmax_over_rows(x):
    return nn.softmax(x, axis=0)


def map_with_a_carry(x):
    return lax.scan(lambda n, r: (n + 1, r * n), 1.0, x)[1]


def mean_in_a_checkpoint(x):
    return jax.checkpoint(lambda v: v - jnp.sin(v).mean(0)[None])(x)


def gradient_of_a_shared_maximum(x):
    return x - jax.grad(lambda v: jnp.abs(v).max())(x)


def second_output_leaks(x):
    return x * 2, x + x.sum(0)[None]


def count_of_rows_that_hold(x):
    return x * (x[:, 0] > 0).sum().astype(jnp.float32)


def infinity_in_any_row(x):
    return jnp.where(jnp.isfinite(x).all(), x, 0.0)


def two_rows_in_turn(x):
    return x.at[1:].add(x[:-1])


def first_row(x):
    return x - x[0]


def last_row(x):
    return x - x[-1]


def concatenated(x):
    return jnp.concatenate([x[1:], x[:1]])


def padded_and_shifted(x):
    return jnp.pad(x, ((1, 0), (0, 0)))[:-1]


def strided(x):
    return jnp.repeat(x[::2], 2, axis=0, total_repeat_length=x.shape[0])


def dynamic_row(x):
    return x + lax.dynamic_slice(x, (jnp.argmax(x[0]), 0), (1, 4))


def dynamic_write(x):
    return lax.dynamic_update_slice(x, jnp.ones((1, 4)), (jnp.argmax(w(3)), 0))


def looked_up_by_place(x):
    return x + jnp.asarray(w(64, 4))[rows(x)]


def looked_up_by_the_sum(x):
    return x + jnp.asarray(w(64, 4))[jnp.clip(x.sum(), 0, 63).astype(int)]


def looked_up_by_the_size(x):
    return x + jnp.asarray(w(64, 4))[jnp.asarray(x.shape[0])]


def branch_on_a_count(x):
    return lax.cond((rows(x) * 0 + 1).sum() > 50, lambda v: v * 2, lambda v: v, x)


def chosen_by_a_constant(x):
    return jnp.where(jnp.asarray(False), x, x * x.sum())


HAZARDS: Mapping[str, Hazard] = {
    "divided by the maximum": (lambda x: x / jnp.abs(x).max(), F4, "stablehlo.reduce"),
    "numbered": (lambda x: x + rows(x)[:, None], F4, "stablehlo.add"),
    "cumulative sum": (lambda x: jnp.cumsum(x, 0), F4, "stablehlo.reduce_window"),
    "int8 of all": (per_tensor_int8, F4, "stablehlo.reduce"),
    "noise": (shared_noise, F4, "stablehlo.add"),
    "scan of rows": (time_major, F4, "stablehlo.while"),
    "capacity": (capacity, F4, "stablehlo.reduce_window"),
    "centred": (lambda x: x - x.mean(0)[None], F4, "stablehlo.reduce"),
    "divided by the size": (lambda x: x / x.shape[0], F4, "stablehlo.divide"),
    "multiplied by the size": (lambda x: x * x.shape[0], F4, "stablehlo.multiply"),
    "rolled": (lambda x: jnp.roll(x, 1, 0), F4, "stablehlo.slice"),
    "batch norm in training": (batch_norm, F4, "stablehlo.reduce"),
    "branch on any": (cond_on_any, F4, "stablehlo.case"),
    "masked by another predicate": (masked(jnp.any, lambda x: x[:, 1] > 3), F4, "stablehlo.case"),
    "masked by less": (masked(jnp.any, lambda x: x[:, 0] > 2), F4, "stablehlo.case"),
    "masked by the contrary": (masked(jnp.any, lambda x: ~(x[:, 0] > 3)), F4, "stablehlo.case"),
    "masked where all": (masked(jnp.all, lambda x: x[:, 0] > 3), F4, "stablehlo.case"),
    "masked, and others change": (
        masked(jnp.any, lambda x: x[:, 0] > 3, lambda v, x: v + 1), F4, "stablehlo.case",
    ),
    "first row": (first_row, F4, None),
    "last row": (last_row, F4, None),
    "dropout": (dropout, F4, "stablehlo.select"),
    "keys split for rows": (split_keys, F4, None),
    "segments": (segments, [((4,), "float32"), ((), "int32")], "stablehlo.scatter"),
    "row 0 set": (lambda x: x.at[0].set(1.0), F4, "stablehlo.scatter"),
    "argmax over rows": (lambda x: x + jnp.argmax(x, 0)[None], F4, "stablehlo.reduce"),
    "identity matrix": (lambda x: jnp.eye(x.shape[0]) @ x, F4, "stablehlo.dot_general"),
    "triangle": (triangle, F4, "stablehlo.dot_general"),
    "largest of the column": (lambda x: x + lax.top_k(x[:, 0], 1)[0], F4, "chlo.top_k"),
    "standard deviation of all": (lambda x: x / (x.std() + 1), F4, "stablehlo.reduce"),
    "norm of all": (lambda x: x / jnp.linalg.norm(x), F4, "stablehlo.reduce"),
    "loop for all": (loop_for_all, F4, "stablehlo.while"),
    "loop for any": (loop_for_any, F4, None),
    "reshape that leaks": (reshape_that_leaks, F4, None),
    "counter that is not frozen": (unfrozen_counter, F4, None),
    "frozen by another predicate": (frozen_by_another, F4, None),
    "frozen by a captured value": (frozen_by_a_captured_value, F4, None),
    "loop to the size": (loop_to_the_size, F4, "stablehlo.while"),
    "loop over rows": (loop_over_rows, F4, "stablehlo.dynamic_slice"),
    "branch on the size": (cond_on_size, F4, None),
    "switch on the size": (switch_on_size, F4, None),
    "mean in a loop": (in_a_loop, F4, "stablehlo.reduce"),
    "maximum in a scan": (in_a_scan, F4, "stablehlo.reduce"),
    "handed on in a loop": (handed_on_in_a_loop, F4, "stablehlo.reduce"),
    "in a branch of a row": (in_a_branch_of_a_row, F4, "stablehlo.reduce"),
    "attention over rows": (attention_over_rows, F4, "stablehlo.dot_general"),
    "pairs": (pairs, F4, "stablehlo.subtract"),
    "merged and normalised": (merged_and_normalised, F4, "stablehlo.reduce"),
    "heads and rows swapped": (heads_and_rows_swapped, SEQUENCE, None),
    "scatter over rows": (scatter_over_rows, [F4[0], INT[0]], "stablehlo.scatter"),
    "gather over rows": (gather_over_rows, [F4[0], INT[0]], "stablehlo.gather"),
    "vmapped gather of all": (vmapped_gather_of_all, [F4[0], INT[0]], "stablehlo.gather"),
    "padding and the size": (sized_padding, F4, None),
    "above forty": (bigger_than_forty, F4, None),
    "quarter of the size": (quarter, F4, None),
    "size modulo eight": (modulo, F4, None),
    "size up to sixteen": (up_to_sixteen, F4, None),
    "size up to thirty": (up_to_thirty, F4, None),
    "size of eight": (equal_to_eight, F4, None),
    "shape of a quarter": (shape_of_the_quarter, F4, None),
    "size hidden in bfloat16": (hidden_in_bfloat, F4, None),
    "bits of the size": (bits_of_the_size, F4, None),
    "size through a mask": (size_through_a_mask, F4, None),
    "first half": (row_in_the_first_half, F4, None),
    "last of a mask": (last_of_a_mask, F4, None),
    "sum of ones": (sum_of_constants, F4, None),
    "next row": (index_past_the_row_number, F4, None),
    "row before": (index_before_the_row_number, F4, None),
    "scatter to the next": (scatter_at_another_row, F4, None),
    "a diagonal": (diagonal, F4, "stablehlo.scatter"),
    "a diagonal, row by row": (diagonal_of_each, F4, "stablehlo.scatter"),
    "integer of the first row": (
        lambda x, n: x * cut_of_rows(n), [F4[0], INT[0]], "stablehlo.slice"
    ),
    "column of the first row": (
        lambda x, n: x[:, cut_of_rows(n)[0] % 4], [F4[0], INT[0]], "stablehlo.slice"
    ),
    "places that move": (lambda x: x * (repeated_to(x) + 1), F4, None),
    "columns that move": (lambda x: x[:, repeated_to(x) + 0], F4, None),
    "place that moves": (lambda x: x * one_of_repeated(x), F4, None),
    "column that moves": (lambda x: x[:, one_of_repeated(x)], F4, None),
    "scatter of a sum": (scatter_the_sum, F4, "stablehlo.reduce"),
    "one hot of the place": (one_hot_of_the_place, F4, None),
    "turned in a branch": (flip_in_a_cond, F4, "stablehlo.gather"),
    "turned": (lambda x: lax.rev(x, (0,)), F4, "stablehlo.reverse"),
    "rank in the batch": (rank_in_the_batch, F4, "stablehlo.sort"),
    "sorted with keys": (sort_with_keys, F4, "stablehlo.sort"),
    "convolution over rows": (convolution_over_rows, F4, "stablehlo.convolution"),
    "rows as features": (convolution_with_rows_as_features, F4, "stablehlo.convolution"),
    "pooling over rows": (pooling_over_rows, F4, "stablehlo.reduce_window"),
    "covariance": (covariance, F4, "stablehlo.dot_general"),
    "softmax over rows": (softmax_over_rows, F4, "stablehlo.reduce"),
    "scan with a counter": (map_with_a_carry, F4, None),
    "mean in a checkpoint": (mean_in_a_checkpoint, F4, "stablehlo.reduce"),
    "gradient of a maximum": (gradient_of_a_shared_maximum, F4, "stablehlo.reduce"),
    "second output": (second_output_leaks, F4, "stablehlo.reduce"),
    "count of rows": (count_of_rows_that_hold, F4, "stablehlo.reduce"),
    "infinity in any": (infinity_in_any_row, F4, "stablehlo.reduce"),
    "two in turn": (two_rows_in_turn, F4, None),
    "concatenated": (concatenated, F4, None),
    "padded and shifted": (padded_and_shifted, F4, "stablehlo.pad"),
    "every second": (strided, F4, None),
    "row at an index": (dynamic_row, F4, None),
    "row written at an index": (dynamic_write, F4, None),
    "branch on a count": (branch_on_a_count, F4, "stablehlo.case"),
    "chosen by a constant": (chosen_by_a_constant, F4, "stablehlo.reduce"),
    "looked up by place": (looked_up_by_place, F4, None),
    "looked up by the sum": (looked_up_by_the_sum, F4, "stablehlo.reduce"),
    "looked up by the size": (looked_up_by_the_size, F4, None),
    "places": (lambda x: rows(x), F4, ""),
}  # fmt: skip
