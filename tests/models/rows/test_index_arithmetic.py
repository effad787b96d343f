"""Integer arithmetic for indexing into rows: proved if each row only reads its own elements.

NumPy decides whether a row reads others, for all integers that a client may send.
"""

# Some of the jax functions called here are untyped.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.rows import Inputs, exported, findings_of

K = 4
"""Elements per row."""
INPUTS: Inputs = [((K,), "float32"), ((), "int32")]
Array = Any
Index = Callable[[Any, Array, Array], Array]
"""Arguments: module, row number, and an integer for each row."""


def _stacked(xp: Any, *columns: Array) -> Array:
    return xp.concatenate([one[:, None] for one in columns], 1)


def _barrier(xp: Any, v: Array) -> Array:
    return lax.optimization_barrier(v) if xp is jnp else v


def _rem(xp: Any, v: Array, by: int) -> Array:
    return lax.rem(v, jnp.int32(by)) if xp is jnp else np.fmod(v, by)


def _div(xp: Any, v: Array, by: int) -> Array:
    return lax.div(v, jnp.int32(by)) if xp is jnp else np.trunc(v / by).astype(np.int32)


INDICES: Mapping[str, Index] = {
    "sum": lambda xp, r, n: r * K + xp.clip(n, 0, 3),
    "sum, from four on": lambda xp, r, n: r * K + xp.clip(n, 0, 4),
    "sum, from below": lambda xp, r, n: r * K + xp.clip(n, -1, 3),
    "sum, the other way round": lambda xp, r, n: xp.clip(n, 0, 3) + K * r,
    "sum of anything": lambda xp, r, n: r * K + n,
    "difference": lambda xp, r, n: (r + 1) * K - 1 - xp.clip(n, 0, 3),
    "difference, one too far": lambda xp, r, n: (r + 1) * K - xp.clip(n, 0, 3),
    "from the end": lambda xp, r, n: r * K + 3 - xp.clip(n, 0, 3),
    "the row before": lambda xp, r, n: r * K - xp.clip(n, 1, 3),
    "negated": lambda xp, r, n: r * K - (-xp.clip(n, 0, 3)),
    "row negated": lambda xp, r, n: -(-r * K) + xp.clip(n, 0, 3),
    "twice the row": lambda xp, r, n: r * 2 * K + xp.clip(n, 0, 3),
    "of strides": lambda xp, r, n: r * 5 - r + xp.clip(n, 0, 3),
    "of rows and itself": lambda xp, r, n: r * K + xp.clip(n, 0, 3) + (r - r),
    "of three": lambda xp, r, n: r * 3 + xp.clip(n, 0, 3),
    "times none": lambda xp, r, n: r * K + r * 0 + xp.clip(n, 0, 3),
    "product": lambda xp, r, n: r * K + xp.clip(n, 0, 1) * xp.clip(n, 0, 3),
    "large product": lambda xp, r, n: r * K + xp.clip(n, 0, 2) * xp.clip(n, 0, 3),
    "shifted to the left": lambda xp, r, n: (r * K + xp.clip(n, 0, 3)) - r * K + r * K,
    "half": lambda xp, r, n: _div(xp, r * 2 * K + xp.clip(n, 0, 7), 2),
    "half, too far": lambda xp, r, n: _div(xp, r * 2 * K + xp.clip(n, 0, 8), 2),
    "half of what is no multiple": lambda xp, r, n: _div(xp, r * K, 3) * K,
    "quotient": lambda xp, r, n: r * K + _div(xp, xp.clip(n, 0, 11), 3),
    "quotient, too far": lambda xp, r, n: r * K + _div(xp, xp.clip(n, 0, 12), 3),
    "remainder": lambda xp, r, n: r * K + _rem(xp, xp.clip(n, 0, 99), K),
    "remainder of what is less": lambda xp, r, n: r * K + _rem(xp, xp.clip(n, 0, 3), 9),
    "remainder of what is as large": lambda xp, r, n: r * K + _rem(xp, xp.clip(n, 0, K), K),
    "remainder of one or more": lambda xp, r, n: r * K - 1 + _rem(xp, xp.clip(n, 1, 3), K),
    "remainder of anything": lambda xp, r, n: r * K + _rem(xp, n, K),
    "remainder, always positive": lambda xp, r, n: r * K + n % K,
    "larger remainder": lambda xp, r, n: r * K + _rem(xp, xp.clip(n, 0, 99), 5),
    "least": lambda xp, r, n: xp.minimum(r * K + xp.clip(n, 0, 9), r * K + 3),
    "least of anything": lambda xp, r, n: xp.minimum(r * K + 3, n),
    "largest": lambda xp, r, n: xp.maximum(r * K + xp.clip(n, -9, 3), r * K),
    "largest of bounds": lambda xp, r, n: r * K + xp.maximum(xp.minimum(n, 3), 0),
    "largest of wider bounds": lambda xp, r, n: r * K + xp.maximum(xp.minimum(n, 4), 0),
    "of the row, whatever": lambda xp, r, n: xp.maximum(r * K, r * 0 - 5),
    "clamped to the row": lambda xp, r, n: xp.clip(r * K + xp.clip(n, -9, 9), r * K, r * K + 3),
    "sign": lambda xp, r, n: r * K + 1 + xp.sign(n),
    "sign, below": lambda xp, r, n: r * K + xp.sign(n),
    "sign of what is none or more": lambda xp, r, n: r * K + xp.sign(xp.clip(n, 0, 9)),
    "sign of the row": lambda xp, r, n: r * K + xp.sign(r),
    "sign of less": lambda xp, r, n: r * K + 1 + xp.sign(xp.clip(n, -9, -1)),
    "sign of more": lambda xp, r, n: r * K + 4 - xp.sign(xp.clip(n, 1, 9)),
    "magnitude": lambda xp, r, n: r * K + xp.abs(xp.clip(n, 0, 3)),
    "magnitude of less": lambda xp, r, n: r * K + xp.abs(xp.clip(n, -3, 3)),
    "magnitude of anything": lambda xp, r, n: r * K + xp.abs(n),
    "truth": lambda xp, r, n: r * K + (n > 2).astype(np.int32),
    "truth times four": lambda xp, r, n: r * K + (n > 2).astype(np.int32) * K,
    "truth of the row": lambda xp, r, n: r * K + (r >= 0).astype(np.int32),
    "not": lambda xp, r, n: r * K + xp.logical_not(n > 2).astype(np.int32),
    "exclusive": lambda xp, r, n: r * K + xp.logical_xor(n > 2, n < 9).astype(np.int32),
    "both": lambda xp, r, n: r * K + ((n > 2) & (n < 9)).astype(np.int32) * 3,
    "either": lambda xp, r, n: r * K + ((n > 2) | (n < 9)).astype(np.int32) * 3,
    "bits": lambda xp, r, n: r * K + (n & 3),
    "bits that are more": lambda xp, r, n: r * K + (n & 4),
    "bits of both": lambda xp, r, n: r * K + (xp.clip(n, 0, 1) | 2),
    "as a truth": lambda xp, r, n: r * K + n.astype(bool).astype(np.int32),
    "as a truth that it is": lambda xp, r, n: r * K + 3 * xp.clip(n, 1, 9).astype(bool),
    "as a truth below": lambda xp, r, n: r * K + 3 * xp.clip(n, -9, -1).astype(bool),
    "as a truth that it is not": lambda xp, r, n: r * K + 4 * (n * 0).astype(bool),
    "chosen": lambda xp, r, n: xp.where(n > 2, r * K + xp.clip(n, 0, 3), r * K),
    "chosen from the first": lambda xp, r, n: xp.where(n > 2, r * K + 1, 0),
    "chosen from the next": lambda xp, r, n: xp.where(n > 2, r * K, r * K + K),
    "chosen where it fits": lambda xp, r, n: r * K + xp.where((n >= 0) & (n < K), n, 0),
    "chosen where it may not": lambda xp, r, n: r * K + xp.where((n >= 0) | (n < K), n, 0),
    "chosen unless it does not fit": lambda xp, r, n: r * K + xp.where(
        xp.logical_not((n < 0) | (n >= K)), n, 0
    ),
    "chosen unless it fits nowhere": lambda xp, r, n: r * K + xp.where(
        xp.logical_not((n < 0) & (n >= K)), n, 0
    ),
    "chosen where it is true that it fits": lambda xp, r, n: r * K + xp.where(
        xp.not_equal((n < 0) | (n >= K), True), n, 0
    ),
    "chosen where it is true that it does not": lambda xp, r, n: r * K + xp.where(
        xp.equal((n < 0) | (n >= K), True), n, 0
    ),
    "chosen by what is known": lambda xp, r, n: xp.where(r >= 0, r * K, 0),
    "chosen by the row": lambda xp, r, n: r * K + xp.where(r < 1, 1, 2),
    "wrapped": lambda xp, r, n: r * K + xp.where(
        xp.clip(n, -4, 3) < 0, xp.clip(n, -4, 3) + K, xp.clip(n, -4, 3)
    ),
    "put together": lambda xp, r, n: _stacked(xp, r * K, xp.clip(n, 0, 3)).sum(1),
    "taken apart": lambda xp, r, n: _stacked(xp, r * K, n, xp.clip(n, 0, 3))[:, 0] + 1,
    "taken apart, the third": lambda xp, r, n: _stacked(xp, r, n, xp.clip(n, 0, 3))[:, 2] + r * K,
    "taken apart, another": lambda xp, r, n: _stacked(xp, r * K, n, xp.clip(n, 0, 3))[:, 1],
    "taken apart, two": lambda xp, r, n: _stacked(xp, r, r * K, n)[:, 0:2][:, 1],
    "taken apart, turned": lambda xp, r, n: _stacked(xp, r * K, n).T[0],
    "taken apart, stepwise": lambda xp, r, n: _stacked(xp, r * K, n, r, n)[:, ::2][:, 0],
    "least of some": lambda xp, r, n: r * K + _stacked(xp, n * 0, xp.clip(n, 0, 3)).min(1),
    "largest of some": lambda xp, r, n: r * K + _stacked(xp, n * 0, xp.clip(n, 0, 3)).max(1),
    "largest of many": lambda xp, r, n: r * K + _stacked(xp, n * 0, xp.clip(n, 0, 4)).max(1),
    "sorted": lambda xp, r, n: r * K + xp.sort(_stacked(xp, n & 1, xp.clip(n, 0, 3)), 1)[:, 1],
    "all of some": lambda xp, r, n: r * K + _stacked(xp, n > 2, r >= 0).all(1).astype(np.int32),
    "any of some": lambda xp, r, n: r * K + _stacked(xp, n > 2, r >= 0).any(1).astype(np.int32),
    "any, times four": lambda xp, r, n: r * K + K * _stacked(xp, n > 2, r < 0).any(1),
    "barred": lambda xp, r, n: _barrier(xp, r * K) + _barrier(xp, xp.clip(n, 0, 3)),
    "narrow": lambda xp, r, n: r * K + xp.clip(n, 0, 3).astype(np.int8).astype(np.int32),
    "turned round": lambda xp, r, n: r * K + xp.flip(xp.clip(_stacked(xp, n, n), 0, 3), 1)[:, 0],
    "of the last row": lambda xp, r, n: (xp.flip(r, 0)) * K,
    "of the next row": lambda xp, r, n: (r + 1) * K,
}  # fmt: skip

UNPROVED = frozenset(
    {
        "row negated",
        "least",
        "largest",
        "clamped to the row",
        "magnitude of less",
        "bits of both",
        "put together",
        "taken apart, two",
        "taken apart, stepwise",
    }
)
"""True but not proved."""


def looked_up(xp: Any, name: str, x: Array, n: Array) -> Array:
    """Return what each row reads from the flattened batch."""
    row = xp.arange(x.shape[0], dtype=np.int32)
    index = INDICES[name](xp, row, n)
    flat = x.reshape(-1)
    if xp is jnp:
        return flat.at[index].get(mode="clip")
    return flat[np.clip(index, 0, len(flat) - 1)]


def is_independent(name: str) -> bool:
    """Tell whether a row reads the same elements alone and in a batch, for every index."""
    asked = [1 - 2**31, -9, -5, -4, -3, -1, 0, 1, 2, 3, 4, 5, 8, 9, 12, 99]
    integers = np.array(asked, np.int32)
    rows = np.random.default_rng(3).normal(size=(len(integers), K)).astype(np.float32)
    alone = [looked_up(np, name, rows[i : i + 1], integers[i : i + 1])[0] for i in range(len(rows))]
    for order in (slice(None), slice(None, None, -1), slice(3, 9)):
        if not np.array_equal(looked_up(np, name, rows[order], integers[order]), alone[order]):
            return False
    return True


@pytest.fixture(scope="module")
def proved() -> frozenset[str]:
    artifact = exported(lambda x, n: [looked_up(jnp, one, x, n) for one in INDICES], INPUTS)
    found = zip(INDICES, findings_of(artifact), strict=True)
    return frozenset(name for name, finding in found if finding is None)


def test_an_index_is_proved_where_it_stays_in_its_row(proved: frozenset[str]) -> None:
    assert proved == {one for one in INDICES if is_independent(one)} - UNPROVED


def test_what_is_not_proved_holds() -> None:
    assert UNPROVED == {one for one in UNPROVED if is_independent(one)}
