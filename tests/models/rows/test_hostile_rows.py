"""Adversarial values that let rows affect each other: each leak is found, none is proved."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.export import Exported
from support.row_texts import verdict_of as verdict_of_text
from support.rows import Inputs, exported, verdict_of

from xlaserve.artifact import computation
from xlaserve.row_proofs import Independence, proof, prove_each, refining, size_arithmetic
from xlaserve.row_proofs.rules.tracing import Assumed, Part, Place, Tracing

Array = Any
LARGEST = 2**31 - 1
NUMBER: Inputs = [((), "float32")]
COUNTED: Inputs = [((), "float32"), ((), "int32")]
COUNTERS: Inputs = [((), "int32"), ((), "int32")]


class Case(NamedTuple):
    """A function of rows, and input rows of which at least one depends on the others."""

    model: Callable[..., Array]
    inputs: Inputs
    rows: Sequence[Sequence[float]]


def while_any_is_below(counter: int, step: int) -> Callable[..., Array]:
    """Count up from `counter` until it has passed `n` in every row."""

    def model(x: Array, n: Array) -> Array:
        def body(s: tuple[Array, ...]) -> tuple[Array, ...]:
            i, trips, x = s
            return i + step, trips + 1, jnp.where(i <= n, x + 1, x)

        begun: Any = (jnp.int32(counter), jnp.int32(0), x)
        found: Array = lax.while_loop(lambda s: (s[0] <= n).any() & (s[1] < 6), body, begun)[2]
        return found

    return model


def while_own_counter_is_below(c: Array, n: Array) -> Array:
    def body(s: tuple[Array, ...]) -> tuple[Array, ...]:
        c, found = s
        return c + 1, jnp.where(c < n, found + 1, found)

    return lax.while_loop(lambda s: (s[0] < n).any(), body, (c, jnp.zeros_like(c)))[1]


def padding_put_where_tokens_are(x: Array, n: Array) -> Array:
    """Write padding at a counter that overflows back to the first position."""

    def body(s: tuple[Array, ...]) -> tuple[Array, ...]:
        i, tokens, n = s
        going = n > 0
        tokens = tokens.at[:, i].set(jnp.where(going, n, 9))
        return i + 2**30, tokens, jnp.where(going, n - 1, n)

    tokens = jnp.full((x.shape[0], 4), 9, jnp.int32)
    found: Array = lax.while_loop(lambda s: (s[2] > 0).any(), body, (jnp.int32(0), tokens, n))[1]
    return found


def nothing_added_to_negative_zero(dtype: str) -> Callable[..., Array]:
    def model(x: Array, n: Array) -> Array:
        def body(s: tuple[Array, Array]) -> tuple[Array, Array]:
            x, n = s
            going = n > 0
            return x + going.astype(x.dtype), jnp.where(going, n - 1, n)

        x, _ = lax.while_loop(lambda s: (s[1] > 0).any(), body, (x.astype(dtype), n))
        return 1 / jnp.real(x)

    return model


def nothing_added_in_a_branch(x: Array, n: Array) -> Array:
    going = n > 0
    return 1 / lax.cond(going.any(), lambda: x + going.astype(x.dtype), lambda: x)


def repeated_table(stride: int) -> Callable[[Array], Array]:
    """Read element `i * stride + stride - 1` of a table that repeats with the batch size."""

    def model(x: Array) -> Array:
        b = x.shape[0]
        table = jnp.broadcast_to(jnp.arange(b)[None], (stride, b)).reshape(stride * b)
        return x + table[jnp.arange(b) * stride + stride - 1][:1].astype(x.dtype)

    return model


def kernels_shared_out(x: Array) -> Array:
    """Convolve in two groups: the total number of kernels decides which group a kernel is in."""
    image, kernel = jnp.array([1.0, 10.0]).reshape(1, 1, 2), jnp.ones((1, 1, 4 * x.shape[0]))
    found = lax.conv_general_dilated(
        image,
        kernel,
        (1,),
        "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=2,
    )
    return x + found[0, 0, 3:4]


def sliced_size(least: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Compute with the batch size, read through a slice of the whole array."""

    def model(x: Array) -> Array:
        sizes = jnp.full((1,), x.shape[0], jnp.int32)
        return x * least(lax.dynamic_slice(sizes, (lax.iota(jnp.int32, 1)[0],), (1,)))

    return model


def all_of_those_beside(x: Array) -> Array:
    return jnp.where(jnp.all(jnp.zeros((x.shape[0] - 1,), bool)), x, -x)


def any_of_copies_beside(x: Array) -> Array:
    b = x.shape[0]
    return jnp.any(jnp.broadcast_to(x[:, None] > 0, (b, b - 1)), axis=1).astype("float32")


def largest_of_those_beside(number: float, start: float) -> Callable[[Array], Array]:
    def model(x: Array) -> Array:
        beside = jnp.full((x.shape[0] - 1,), number)
        largest = lax.reduce(beside, beside.dtype.type(start), lax.max, (0,))
        return x + (largest == number)

    return model


CASES = {
    "all of those beside, of which there may be none": Case(all_of_those_beside, NUMBER, [[1, 1]]),
    "any of copies, of which there may be none": Case(any_of_copies_beside, NUMBER, [[1, 1]]),
    "the largest of numbers, of which there may be none": Case(
        largest_of_those_beside(3.0, -np.inf), NUMBER, [[1, 1]]
    ),
    "the largest of integers, of which there may be none": Case(
        largest_of_those_beside(3, -LARGEST - 1), NUMBER, [[1, 1]]
    ),
    "a counter of large steps": Case(while_any_is_below(0, 2**30), COUNTED, [[0, 0], [5, LARGEST]]),
    "a counter of fewer trips than bits": Case(
        while_any_is_below(0, 2**29), COUNTED, [[0, 0], [5, LARGEST]]
    ),
    "a counter that begins late": Case(
        while_any_is_below(LARGEST - 1, 1), COUNTED, [[0, 0], [5, LARGEST]]
    ),
    "a counter that a client begins": Case(
        while_own_counter_is_below, COUNTERS, [[LARGEST, 0], [4 - 2**31, 3]]
    ),
    "padding at a counter that begins again": Case(
        padding_put_where_tokens_are, COUNTED, [[0, 0], [2, 7]]
    ),
    "zero added to a negative one": Case(
        nothing_added_to_negative_zero("float32"), COUNTED, [[-0.0, 1], [0, 3]]
    ),
    "zero added to a negative one of 16 bits": Case(
        nothing_added_to_negative_zero("bfloat16"), COUNTED, [[-0.0, 1], [0, 3]]
    ),
    "zero added to a negative one in a branch": Case(
        nothing_added_in_a_branch, COUNTED, [[-0.0, 1], [0, 3]]
    ),
    "a repeated table": Case(repeated_table(3), NUMBER, [[0, 0, 0, 0]]),
    "a table repeated twice": Case(repeated_table(2), NUMBER, [[0, 0, 0, 0]]),
    "kernels shared out among groups": Case(kernels_shared_out, NUMBER, [[0, 0, 0, 0]]),
    "the smaller of the size": Case(
        sliced_size(lambda size: jnp.minimum(size, 16)), NUMBER, [[1, 1, 1]]
    ),
    "the larger of the size": Case(
        sliced_size(lambda size: jnp.maximum(size - 50, 0) + jnp.minimum(size, 2)),
        NUMBER,
        [[1, 1, 1]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_that_see_others_are_not_proved(name: str) -> None:
    model, inputs, columns = CASES[name]
    found = exported(model, inputs)
    call = jax.jit(found.call)
    rows = [np.array(column, kind) for column, (_, kind) in zip(columns, inputs, strict=True)]

    together = np.asarray(call(*rows)[0])
    alone = [np.asarray(call(*(one[i : i + 1] for one in rows))[0][0]) for i in range(len(rows[0]))]
    verdict = verdict_of(model, inputs)

    assert any(not np.array_equal(*both) for both in zip(together, alone, strict=True))
    assert verdict.independence is Independence.UNKNOWN


LOOP = """
%zero = stablehlo.constant dense<0.0> : tensor<f32>
%no = stablehlo.constant dense<false> : tensor<i1>
%i = stablehlo.constant dense<0> : tensor<i32>
%one = stablehlo.constant dense<1> : tensor<i32>
%some = stablehlo.constant dense<3> : tensor<i32>
%many = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<Bxf32>
%found:2 = stablehlo.while(%n = %i, %v = %y) : tensor<i32>, tensor<Bxf32>
cond {
  %p = stablehlo.compare LT, %x, %many, FLOAT : (tensor<Bxf32>, tensor<Bxf32>) -> tensor<Bxi1>
  %any = stablehlo.reduce(%p init: %no) applies stablehlo.or across dimensions = [0]
    : (tensor<Bxi1>, tensor<i1>) -> tensor<i1>
  %less = stablehlo.compare LT, %n, %some : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %on = stablehlo.and %any, %less : tensor<i1>
  stablehlo.return %on : tensor<i1>
} do {
  %p = stablehlo.compare LT, %x, %many, ORDER : (tensor<Bxf32>, tensor<Bxf32>) -> tensor<Bxi1>
  %more = stablehlo.add %v, %v : tensor<Bxf32>
  %kept = stablehlo.select %p, %more, %v : tensor<Bxi1>, tensor<Bxf32>
  %next = stablehlo.add %n, %one : tensor<i32>
  stablehlo.return %next, %kept : tensor<i32>, tensor<Bxf32>
}"""
"""Rows below 0 continue; in the total order, -0.0 is also below 0.0."""


@pytest.mark.parametrize(
    ("order", "expected"),
    [("FLOAT", Independence.PROVED), ("TOTALORDER", Independence.UNKNOWN)],
)
def test_an_order_is_not_another_one(order: str, expected: Independence) -> None:
    verdict = verdict_of_text(
        LOOP.replace("ORDER", order),
        "%found#1 : tensor<Bxf32>",
        "%x: tensor<Bxf32>, %y: tensor<Bxf32>",
    )

    assert verdict.independence is expected


def test_a_number_of_one_platform_is_not_the_size_of_another() -> None:
    """At the analysed batch size, both platforms' computations are equal except for locations."""
    (rows, _), *_ = proof.PAIRS

    def model(x: Array) -> Array:
        return lax.platform_dependent(
            x, cpu=lambda x: x * jnp.int32(rows), cuda=lambda x: x * jnp.int32(x.shape[0])
        )

    found = exported(model, [((), "int32")], platforms=("cpu", "cuda"))
    found = dataclasses.replace(found, mlir_module_serialized=without_lines(found))

    verdicts = prove_each(found, 0, ["y"])

    assert verdicts["cpu"].independence is Independence.PROVED
    assert verdicts["cuda"].independence is Independence.UNKNOWN


def without_lines(found: Exported) -> bytes:
    return computation.neutral(found.mlir_module_serialized)


# --- what a proof may cost ---------------------------------------------------------------------

DEEP = 60
"""Number of operations that each use the previous one twice: a naive walk visits 2 ** DEEP."""


def chained_truths(x: Array, n: Array) -> Array:
    def going(n: Array) -> Array:
        found = n > 0
        for _ in range(DEEP):
            found = found & found
        return found

    def body(s: tuple[Array, Array]) -> tuple[Array, Array]:
        x, n = s
        return jnp.where(going(n), x + 1, x), jnp.where(going(n), n - 1, n)

    return lax.while_loop(lambda s: going(s[1]).any(), body, (x, n))[0]


def chained_sides(x: Array, n: Array) -> Array:
    def body(s: tuple[Array, Array]) -> tuple[Array, Array]:
        x, n = s
        found = x
        for k in range(DEEP):
            found = jnp.where(x > k, found, found)
        return jnp.where(n > 0, x + 1, found), jnp.where(n > 0, n - 1, n)

    return lax.while_loop(lambda s: (s[1] > 0).any(), body, (x, n))[0]


def chained_limits(x: Array, n: Array) -> Array:
    """Loop while a counter is below a limit, which a long chain of operations tests again."""

    def body(s: tuple[Array, Array]) -> tuple[Array, Array]:
        i, x = s
        return i + 1, jnp.where(i < n, x + 1, x)

    def going(s: tuple[Array, Array]) -> Array:
        found = s[0] < n
        for _ in range(DEEP):
            found = found | found
        return found.any()

    return lax.while_loop(going, body, (jnp.int32(0), x))[1]


@pytest.mark.parametrize("model", [chained_truths, chained_sides, chained_limits])
def test_what_is_taken_twice_is_looked_at_once(model: Callable[..., Array]) -> None:
    assert verdict_of(model, COUNTED).independence is Independence.PROVED


def test_what_a_selection_assumes_is_looked_at_where_it_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An assumption about a value says nothing about its operands."""
    looked_at: list[int] = []
    followed = Tracing._followed

    def counted(self: Tracing, number: int, part: Part | None, assumed: Assumed) -> Place | None:
        looked_at.append(number)
        return followed(self, number, part, assumed)

    monkeypatch.setattr(Tracing, "_followed", counted)

    def model(x: Array) -> Array:
        found = x + jnp.arange(x.shape[0])
        for k in range(DEEP):
            found = jnp.where(found > k, found * 3 + k, found)
        return found

    verdict = verdict_of(model, [((), "int32")])

    assert verdict.independence is Independence.UNKNOWN
    assert len(looked_at) < 50 * DEEP


def test_integers_of_four_bits_are_read() -> None:
    table = np.array([1, 2, 3], jnp.int4)

    verdict = verdict_of(lambda x: x + jnp.asarray(table).astype("float32"), [((3,), "float32")])

    assert verdict.independence is Independence.PROVED


# --- assumptions of the walk -------------------------------------------------------------------

SIZED = "%b = stablehlo.get_dimension_size %x, dim = 0 : (tensor<Bx4xi32>) -> tensor<i32>\n"
BESIDE_DATA = {
    "select": "%r = stablehlo.select %p, %v, %v : tensor<i1>, tensor<1xi32>",
    "multiply": "%z = stablehlo.subtract %e, %e : tensor<1xi32>\n"
    "%r = stablehlo.add %z, %v : tensor<1xi32>",
    "iota": "%i = stablehlo.iota dim = 0 : tensor<1xi32>\n"
    "%r = stablehlo.add %i, %v : tensor<1xi32>",
    "dynamic_slice": "%r = stablehlo.dynamic_slice %v, %d, sizes = [1] "
    ": (tensor<1xi32>, tensor<i32>) -> tensor<1xi32>",
    "dynamic_update_slice": "%r = stablehlo.dynamic_update_slice %e, %v, %d "
    ": (tensor<1xi32>, tensor<1xi32>, tensor<i32>) -> tensor<1xi32>",
    "concatenate": "%c = stablehlo.concatenate %e, %v, dim = 0 "
    ": (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>\n"
    "%r = stablehlo.slice %c [1:2] : (tensor<2xi32>) -> tensor<1xi32>",
    "pad": "%r = stablehlo.pad %v, %d, low = [0], high = [0], interior = [0] "
    ": (tensor<1xi32>, tensor<i32>) -> tensor<1xi32>",
    "clamp": "%r = stablehlo.clamp %v, %e, %v : tensor<1xi32>",
    "if": '%r = "stablehlo.if"(%p) ({ stablehlo.return %v : tensor<1xi32> }, '
    "{ stablehlo.return %v : tensor<1xi32> }) : (tensor<i1>) -> tensor<1xi32>",
    "reduce": "%s = stablehlo.reduce(%v init: %d) applies stablehlo.maximum "
    "across dimensions = [0] "
    ": (tensor<1xi32>, tensor<i32>) -> tensor<i32>\n"
    "%r = stablehlo.reshape %s : (tensor<i32>) -> tensor<1xi32>",
    "barrier": "%q:2 = stablehlo.optimization_barrier %v, %e : tensor<1xi32>, tensor<1xi32>\n"
    "%r = stablehlo.minimum %q#0, %q#0 : tensor<1xi32>",
}


@pytest.mark.parametrize("name", BESIDE_DATA)
def test_a_size_that_refinement_folds_is_seen(name: str) -> None:
    """Values computed from sizes and data are not folded, or are checked before refinement."""
    body = (
        f"{SIZED}%v = stablehlo.reshape %b : (tensor<i32>) -> tensor<1xi32>\n"
        "%e = stablehlo.reshape %d : (tensor<i32>) -> tensor<1xi32>\n"
        f"{BESIDE_DATA[name]}\n%most = stablehlo.constant dense<16> : tensor<1xi32>\n"
        "%y = stablehlo.minimum %r, %most : tensor<1xi32>\nreturn %y : tensor<1xi32>"
    )
    text = (
        "func.func public @main(%x: tensor<Bx4xi32>, %p: tensor<i1>, %d: tensor<i32>) "
        f"-> tensor<1xi32> {{\n{body}\n}}"
    )
    rows = proof.PAIRS[0][0]
    with refining.parsing():
        module = refining.parse(text.replace("B", str(rows)))
        is_seen = size_arithmetic.question(module, {0}) is not None
        read = str(refining.parse(refining.Refinery.with_sizes(module)))

    assert is_seen or "stablehlo.minimum" in read
