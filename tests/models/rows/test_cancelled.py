"""Row numbers that cancel out, for all datatypes."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.row_texts import verdict_of
from support.rows import Inputs, exported, findings_of

from xlaserve.row_proofs import Independence

Array = Any
MANY = 300
"""A number of rows that neither 8 bits nor bfloat16 can count."""
INPUTS: Inputs = [((), "float32"), ((), "int32")]


def _as(dtype: str, of: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda r, n: of(r.astype(dtype))


def _in(
    dtypes: str, name: str, of: Callable[[Array], Array]
) -> Mapping[str, Callable[[Array, Array], Array]]:
    return {f"{name}, {dtype}": _as(dtype, of) for dtype in dtypes.split()}


def _of_float(dtype: str) -> Callable[[Array, Array], Array]:
    # An integer type keeps the low bits that fit, a float type the nearest representable integer.
    return lambda r, n: (r * 200).astype("float32").astype(dtype) - (r * 200).astype(dtype)


_INTEGERS = "int8 uint8 int16 int32"
_ALL = f"{_INTEGERS} float32"

PROVED: Mapping[str, Callable[[Array, Array], Array]] = {
    **_in(_ALL, "times zero", lambda r: r * 0),
    **_in(_ALL, "less itself", lambda r: r - r),
    **_in(_ALL, "twice less itself", lambda r: r * 2 - r - r),
    **_in(_ALL, "divided by one", lambda r: r // 1 - r),
    **_in(_ALL, "rest by one", lambda r: r % 1),
    **_in("float32", "rounded", lambda r: jnp.floor(r) + jnp.ceil(r) - jnp.round(r) - r),
    **_in(_ALL, "chosen of the same", lambda r: jnp.where(r > 3, r, r) - r),
    **_in("int32 float32", "least", lambda r: jnp.minimum(r, 0)),
    **_in("int32 float32", "from zero", lambda r: r >= 0),
    **_in("int32 float32", "divided by itself", lambda r: (r * 0 + 3) / (r * 0 + 3)),
    "narrowed twice": lambda r, n: r.astype("int16").astype("int8") - r.astype("int8"),
    "of two signs": lambda r, n: r.astype("int8").astype("uint8") - r.astype("uint8"),
    "added and taken away": lambda r, n: (r + n) - r,
    "times more than bits": lambda r, n: (r * 0x1000_0000 + n) - r * 0x1000_0000,
    "added to columns and taken away": lambda r, n: (
        (lax.broadcasted_iota(jnp.int32, (*r.shape, 4), 1) + r[:, None]) - r[:, None]
    ).max(1),
    "summed up": lambda r, n: jnp.cumsum(r * 0 + 2) - 2 * r,
    "turned round twice": lambda r, n: lax.rev(lax.rev(r, (0,)), (0,)) - r,
    "rest by the size": lambda r, n: (r + r.shape[0]) % r.shape[0] - r,
    "rest by a larger size": lambda r, n: r % (r.shape[0] + 1) - r,
    "clamped by the size": lambda r, n: lax.clamp(0, r, jnp.int32(r.shape[0] - 1)) - r,
    "below the largest integer": lambda r, n: (
        jnp.minimum(jnp.int32(r.shape[0]), 0x7FFF_FFFF) - r.shape[0]
    ),
}

OTHERS: Mapping[str, Callable[[Array, Array], Array]] = {
    **_in("int8 int16", "from zero, narrow", lambda r: (r * 300) >= 0),
    **_in("int8 uint8", "one more", lambda r: r + 1 > r),
    **_in("int8 uint8", "halves", lambda r: r // 2),
    **_in("int8", "sign", jnp.sign),
    **_in("int8", "least, narrow", lambda r: jnp.minimum(r, 0)),
    **_in("int8", "magnitude", lambda r: jnp.abs(r) - r),
    **_in("bfloat16", "rounding, narrow", lambda r: (r + 1) - r),
    **_in("float32", "rounding", lambda r: (r + 16_777_216.0) - 16_777_216.0 - r),
    **_in("float32", "infinite", lambda r: r * 3e38 - r * 3e38),
    **_in("float32", "negative zero of a product", lambda r: 1 / ((r - 5) * 0.0)),
    **_in("float32", "negative zero of a negative", lambda r: 1 / -(r * (r > 5))),
    **_in("float32", "halved", lambda r: r / 2 - jnp.floor(r / 2)),
    **_in("float32", "by itself", lambda r: r / r),
    **{f"cut off of a float, {dtype}": _of_float(dtype) for dtype in ("int8", "uint8", "int16")},
    "cut off below zero of a float": lambda r, n: (
        (r.astype("float32") - 5).astype("uint32") - (r - 5).astype("uint32")
    ),
    "added in a float": lambda r, n: (r.astype("float32") + n) - r,
    "narrow, less the wide": lambda r, n: r.astype("int8").astype("int32") - r,
    "summed up from behind": lambda r, n: lax.cumsum(r * 0 + 1, reverse=True) - r,
    "summed up without the last": lambda r, n: jnp.cumsum(r) - r,
    "turned round": lambda r, n: lax.rev(r, (0,)) - r,
    "rest by less": lambda r, n: (r + 2 * r.shape[0] - 1) % r.shape[0] - r,
    "rest below zero": lambda r, n: lax.rem(r - r.shape[0], jnp.int32(r.shape[0])),
    "clamped by less than the size": lambda r, n: lax.clamp(0, r, jnp.int32(r.shape[0] - 2)) - r,
    "clamped above the first": lambda r, n: lax.clamp(1, r, jnp.int32(r.shape[0])) - r,
}


@cache
def _exported() -> Any:
    def every(x: Array, n: Array) -> list[Array]:
        r = lax.iota(jnp.int32, x.shape[0])
        return [x + of(r, n).astype("float32") for of in (*PROVED.values(), *OTHERS.values())]

    return exported(every, INPUTS)


def test_what_cancels_out_is_proved_and_nothing_else() -> None:
    names = [*PROVED, *OTHERS]
    proved = [name for name, one in zip(names, findings_of(_exported()), strict=True) if not one]

    assert proved == list(PROVED)


def test_what_cancels_out_is_the_same_in_a_large_batch() -> None:
    random = np.random.default_rng(1)
    x = random.integers(-3, 4, MANY).astype(np.float32)
    n = random.choice([0, 3, -5, 100, 2**31 - 1, -(2**31)], MANY).astype(np.int32)
    run = jax.jit(_exported().call)
    whole = [np.asarray(one) for one in run(x, n)]
    alone = [run(x[place : place + 1], n[place : place + 1]) for place in range(MANY)]

    singles = [np.concatenate(one) for one in zip(*alone, strict=True)]
    names = zip([*PROVED, *OTHERS], whole, singles, strict=True)
    alike = {name for name, one, other in names if np.array_equal(one, other, equal_nan=True)}
    # The XLA of jax 0.10 adds both constants first, and so rounds nothing.
    assert set(PROVED) == alike - {"rounding, float32"}


LARGE = """
%r = stablehlo.iota dim = 0 : tensor<Bxi64>
%most = stablehlo.constant dense<9223372036854705807> : tensor<i64>
%large = stablehlo.broadcast_in_dim %most, dims = [] : (tensor<i64>) -> tensor<Bxi64>
%sum = stablehlo.add %r, %large : tensor<Bxi64>
%left = stablehlo.subtract %sum, %r : tensor<Bxi64>
%below = stablehlo.constant dense<-1048576> : tensor<Bxi64>
%is_larger = stablehlo.compare GT, %left, %below : (tensor<Bxi64>, tensor<Bxi64>) -> tensor<Bxi1>
%rows = stablehlo.reverse %x, dims = [0] : tensor<Bxf32>
%y = stablehlo.select %is_larger, CHOSEN : tensor<Bxi1>, tensor<Bxf32>
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("%rows, %x", Independence.UNKNOWN), ("%x, %rows", Independence.PROVED)],
)
def test_the_side_is_followed_that_is_taken_by_an_integer_whose_difference_overflows(
    chosen: str, expected: Independence
) -> None:
    body = LARGE.replace("CHOSEN", chosen)

    found = verdict_of(body, "%y : tensor<Bxf32>", "%x: tensor<Bxf32>")

    assert found.independence is expected
