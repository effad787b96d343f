"""Quantized matrices stay close to the originals, and multiply accordingly."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from support.checkpoints import DATA, write_tensors

from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface import (
    agreement,
    checkpoint,
    configuration,
    forward,
    products,
    quantising,
)
from xlaserve.tensors import Tensor

OUT, IN = 21, 96


def matrix(seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((OUT, IN)).astype(np.float32)


def numbers_of(stored: dict[str, Tensor]) -> npt.NDArray[np.float32]:
    """Return a dequantized matrix, computed column by column."""
    identity = jnp.eye(IN, dtype=jnp.float32)
    return np.asarray(products.multiply(identity, {k: jnp.asarray(a) for k, a in stored.items()})).T


@pytest.mark.parametrize(("kind", "most"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("at_once", [1 << 20, 4 * IN])
def test_every_number_is_within_half_a_step(
    kind: str, most: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a matrix is multiplied in blocks of rows, of which the last is smaller."""
    monkeypatch.setattr(products, "_AT_ONCE", at_once)
    plain = matrix()
    size = IN if kind == "int8" else 16
    largest = np.abs(plain.reshape(OUT, IN // size, size)).max(-1).repeat(size, -1)
    found = numbers_of(quantising.KINDS[kind](plain, "q"))

    # The scale of int4 is rounded to BF16 (8 bits), and values out of its range are clipped.
    slack = 1e-6 if kind == "int8" else 1 / 256
    assert (np.abs(found - plain) <= largest * (0.5 / most + slack)).all()


def test_no_two_matrices_are_numbers_at_a_time() -> None:
    """Without a loop XLA would dequantize all matrices in advance."""
    matrix = {
        "int8": jnp.zeros((1024, 1024), jnp.int8),
        "scale": jnp.zeros((1024,), jnp.float32),
    }

    def chained(x: jax.Array, matrices: list[dict[str, jax.Array]]) -> jax.Array:
        for one in matrices:
            x = products.multiply(x, one)
        return x

    x = jnp.zeros((1, 1024), jnp.float32)
    memory = jax.jit(chained).lower(x, [matrix] * 6).compile().memory_analysis()

    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * 1024 * 1024


def test_zeros_stay_zeros_and_rows_of_an_embedding_are_found() -> None:
    plain = matrix()
    plain[3] = 0
    stored = quantising.int8(plain, "embedding")
    on_device = {name: jnp.asarray(array) for name, array in stored.items()}
    rows = products.rows_of(on_device, jnp.asarray([[3, 5]]), jnp.float32)

    assert not np.asarray(rows)[0, 0].any()
    np.testing.assert_allclose(np.asarray(rows)[0, 1], plain[5], atol=np.abs(plain[5]).max() / 250)


def test_sizes_are_half_and_quarter_of_two_bytes() -> None:
    plain = matrix().astype(ml_dtypes.bfloat16)
    sizes = {k: sum(a.nbytes for a in f(plain, "q").values()) for k, f in quantising.KINDS.items()}

    assert OUT * IN + 4 * OUT == sizes["int8"]
    assert OUT * IN // 2 + 2 * OUT * IN // 16 == sizes["int4"]


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    with pytest.raises(InvalidModel, match="'q': expected rows of a multiple of 16 .*got 12"):
        quantising.int4(np.zeros((4, 12), np.float32), "q")
    with pytest.raises(InvalidModel, match="'head': cannot quantize non-finite numbers"):
        quantising.int8(np.full((2, 4), np.inf, np.float32), "head")


@pytest.mark.parametrize(
    ("name", "kind", "least", "most"),
    [
        ("gpt2", "int4", 0.02, 0.5),
        pytest.param("gpt2", "int8", 1e-4, 0.05, marks=pytest.mark.slow),
        pytest.param("qwen2-moe", "int4", 0.02, 0.5, marks=pytest.mark.slow),
        pytest.param("qwen2-moe", "int8", 1e-4, 0.05, marks=pytest.mark.slow),
    ],
)
def test_logits_agree(name: str, kind: str, least: float, most: float, tmp_path: Path) -> None:
    """The error is larger for 4 bits than for 8, and neither is zero."""
    write_tensors(tmp_path, name)
    form = configuration.read(DATA / name)
    params = checkpoint.read(tmp_path, form)
    found = agreement.measure(form, params, quantising.quantised(params, kind))

    assert least < found.off < most
    assert 0.5 < found.same <= 1


def test_logits_of_all_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    write_tensors(tmp_path, "gpt2")
    form = configuration.read(DATA / "gpt2")
    with np.load(DATA / "gpt2/references.npz") as stored:
        tokens, logits = stored["tokens"], stored["logits"]
    program = jax.jit(partial(forward.all_logits, form))
    found = program(checkpoint.read(tmp_path, form), tokens)

    np.testing.assert_allclose(np.asarray(found)[-len(logits) - 1 : -1], logits, atol=1e-5)
