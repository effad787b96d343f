"""Matrix products in their fast CPU form equal the plain form, without copying matrices."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlaserve.importers.huggingface import forward, products
from xlaserve.importers.huggingface.form import Form, Layout, Rope

OUT, IN, CHAINED = 1024, 1024, 4
DTYPES = ("float32", "bfloat16", "float16")
COPIES_BF16 = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
"""Whether XLA lacks a native BF16 product on the CPU: true of the last jax for Python 3.11."""
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("shape", [(1,), (5,), (1, 1), (3, 1), (2, 7)])
@pytest.mark.parametrize("accumulate", [None, jnp.float32])
def test_every_form_gives_the_plain_product(
    dtype: str, few: bool, shape: tuple[int, ...], accumulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a matrix whose rows do not divide evenly into blocks."""
    monkeypatch.setattr(products, "_AT_ONCE", 4 * 24)
    random = np.random.default_rng(0)
    x, matrix = (jnp.asarray(random.normal(size=s), dtype) for s in ((*shape, 24), (21, 24)))
    wanted = np.einsum("...i,oi->...o", *(np.asarray(a, np.float64) for a in (x, matrix)))

    found = products.multiply(x, matrix, accumulate, few=few)

    assert (accumulate or jnp.dtype(dtype)) == found.dtype
    assert (*shape, 21) == found.shape
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, 0, 8 * TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_no_matrix_is_copied_for_a_step(dtype: str, rows: int) -> None:
    """XLA would convert each whole matrix to FP32: BF16 for one row, FP16 for any number."""
    if COPIES_BF16 and dtype == "bfloat16":
        pytest.skip("the XLA of jax 0.10 copies it in every form")
    matrices = [jnp.zeros((OUT, IN), dtype)] * CHAINED

    def chained(x: jax.Array, matrices: list[jax.Array]) -> jax.Array:
        for one in matrices:
            x = products.multiply(x, one, few=True)
        return x

    lowered = jax.jit(chained).lower(jnp.zeros((rows, IN), dtype), matrices)
    memory = lowered.compile().memory_analysis()

    assert memory is not None
    # For FP16 some rows are in FP32 at a time, twice if two products overlap.
    limit = 4 * OUT * IN if dtype == "float16" else OUT * IN
    assert memory.temp_size_in_bytes <= limit


@pytest.mark.parametrize("rows", [2, 16])
def test_a_matrix_of_fp32_is_read_as_it_lies(rows: int) -> None:
    """The matrix is the first operand: as the second, XLA would transpose it in every step."""
    matrix, x = jnp.zeros((OUT, IN), jnp.float32), jnp.zeros((rows, IN), jnp.float32)

    program = jax.jit(partial(products.multiply, few=True)).lower(x, matrix).compile()

    results = [
        line for line in (program.as_text() or "").splitlines() if "dot" in line and " = " in line
    ]
    assert any(f" = f32[{OUT},{rows}]" in line for line in results)
    assert not any(f" = f32[{rows},{OUT}]" in line for line in results if " dot(" in line)


def _form(heads: int, kv_heads: int) -> Form:
    return Form(
        vocab=64,
        hidden=heads * 16,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=16,
        intermediate=32,
        max_length=256,
        windows=(None,),
        ropes=(Rope(),),
        norm_epsilon=1e-5,
        centred=False,
        norm_offset=0.0,
        attention_scale=0.25,
        attention_cap=None,
        logit_cap=None,
        embedding_scale=1.0,
        activation="silu",
        post_norms=False,
        tied=True,
        stop_tokens=(2,),
        layout=Layout((), (), "", ()),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("count", [1, 5])
def test_attention_is_that_of_each_query_alone(
    dtype: str, heads: tuple[int, int], count: int
) -> None:
    """For every number of heads per group, in steps and in pieces of prompts."""
    form, length = _form(*heads), 9
    random = np.random.default_rng(1)
    q, keys, values = (
        jnp.asarray(random.normal(size=shape), dtype)
        for shape in ((2, count, heads[0], 16), *[(2, heads[1], length, 16)] * 2)
    )
    positions = np.array([range(3, 3 + count), range(count)])
    seen = np.arange(length)[None, None] <= positions[:, :, None]

    found = np.asarray(forward._attention(form, q, keys, values, jnp.asarray(seen)), np.float64)

    wide = [np.asarray(array, np.float64) for array in (q, keys, values)]
    for b, c, h in np.ndindex(2, count, heads[0]):
        of, until = h * heads[1] // heads[0], positions[b, c] + 1
        scores = np.exp(wide[1][b, of, :until] @ wide[0][b, c, h] * form.attention_scale)
        wanted = scores / scores.sum() @ wide[2][b, of, :until]
        np.testing.assert_allclose(
            found[b, c, 16 * h : 16 * h + 16], wanted, 0, 2 * TOLERANCES[dtype]
        )


@pytest.mark.skipif(COPIES_BF16, reason="the XLA of jax 0.10 copies them in every form")
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_keys_and_values_of_bf16_are_not_copied_for_a_step(heads: tuple[int, int]) -> None:
    """XLA would convert all of them to FP32 if each key head has one query head."""
    form, slots, length = _form(*heads), 4, 512
    q = jnp.zeros((slots, 1, heads[0], 16), jnp.bfloat16)
    stored = jnp.zeros((slots, heads[1], length, 16), jnp.bfloat16)
    seen = jnp.ones((slots, 1, length), bool)

    program = jax.jit(partial(forward._attention, form)).lower(q, stored, stored, seen).compile()

    assert f"f32[{slots},{heads[1]},{length},16]" not in (program.as_text() or "f32")
