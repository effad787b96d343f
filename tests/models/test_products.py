"""Matrix products in the program that the CPU executes."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlaserve.authoring.cpu.products import contracted


@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 6), (2, 3, 6)])
def test_last_axis_is_multiplied_by_the_rows_of_a_matrix(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, weights = random.standard_normal(shape), random.standard_normal((4, 6))

    found = contracted(jnp.asarray(x), jnp.asarray(weights), (x.ndim - 1, 1))

    np.testing.assert_allclose(found, x @ weights.T, rtol=1e-12)


def test_first_axes_are_multiplied_too() -> None:
    random = np.random.default_rng(1)
    x, weights = random.standard_normal((6, 3)), random.standard_normal((6, 4))

    found = contracted(jnp.asarray(x), jnp.asarray(weights), (0, 0))

    np.testing.assert_allclose(found, x.T @ weights, rtol=1e-12)


def test_a_single_row_is_multiplied_without_a_copy_of_the_matrix() -> None:
    """For a transposed matrix, XLA makes the copy that this function avoids."""
    row, matrix = jax.ShapeDtypeStruct((1, 96), jnp.float32), jnp.ones((160, 96), jnp.float32)

    def compiled(multiply: jax.stages.Wrapped) -> str:
        return str(multiply.lower(row, matrix).compile().as_text())

    assert "f32[96,160]{1,0} copy(" in compiled(jax.jit(lambda x, y: x @ y.T))
    assert "f32[96,160]" not in compiled(jax.jit(lambda x, y: contracted(x, y, (1, 1))))
