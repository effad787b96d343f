"""Swish on the CPU equals its definition, within FP32 precision."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xlaserve.authoring.cpu import channels_last
from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.authoring.cpu.swish import swish
from xlaserve.row_proofs import prove
from xlaserve.row_proofs.verdict import Independence

MOST_OFF = 3e-7
"""Maximum relative error, as documented by swish."""
KERNEL = np.random.default_rng(5).standard_normal((4, 4, 1, 1)).astype(np.float32)
IMAGE = np.random.default_rng(6).standard_normal((2, 4, 3, 5)).astype(np.float32)


def _true(x: np.ndarray) -> np.ndarray:
    """Compute swish in FP64."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x.astype(np.float64))))


def _conv(x: jax.Array, kernel: object = KERNEL) -> jax.Array:
    found: jax.Array = lax.conv_general_dilated(
        x, jnp.asarray(kernel).astype(x.dtype), (1, 1), "SAME"
    )
    return found


@pytest.mark.parametrize("most", [1e-3, 1.0, 20.0, 1e3, 1e30])
def test_each_number_is_within_what_is_said(most: float) -> None:
    x = np.linspace(-most, most, 200_001).astype(np.float32)

    found = np.asarray(jax.jit(swish)(x), np.float64)

    assert np.float32 == jax.jit(swish)(x).dtype
    assert (np.abs(found - _true(x)) <= MOST_OFF * np.abs(x)).all()


def test_what_is_no_number_stays_so_and_nothing_stays_nothing() -> None:
    found = jax.jit(swish)(np.asarray([np.nan, np.inf, 0.0, -0.0], np.float32))

    np.testing.assert_array_equal(found, [np.nan, np.inf, 0, 0])


@pytest.fixture
def swished(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of the images whose swish is computed."""
    shapes: list[tuple[int, ...]] = []

    def counted(x: jax.Array) -> jax.Array:
        shapes.append(x.shape)
        return swish(x)

    monkeypatch.setattr(channels_last, "swish", counted)
    return shapes


SWISHES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "jax's": jax.nn.silu,
    "written": lambda x: x * jax.nn.sigmoid(x),
    "the other way round": lambda x: jax.nn.sigmoid(x) * x,
    "jitted": jax.jit(lambda x: x * lax.logistic(x)),
    "its gate once more": lambda x: x * jax.nn.sigmoid(x) + jax.nn.sigmoid(x),
}


@pytest.mark.parametrize("name", SWISHES)
def test_an_image_by_its_logistic_function_is_its_swish(
    name: str, swished: list[tuple[int, ...]]
) -> None:
    def network(x: jax.Array) -> jax.Array:
        return _conv(SWISHES[name](_conv(x)))

    found = jax.jit(optimize(network))(IMAGE)

    assert [(2, 3, 5, 4)] == swished
    np.testing.assert_allclose(found, network(jnp.asarray(IMAGE)), rtol=1e-5, atol=1e-5)


OTHERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "the gate of another image": lambda x: x * jax.nn.sigmoid(x + 1),
    "the gate of a channel": lambda x: x * jax.nn.sigmoid(x.mean((2, 3), keepdims=True)),
    "a gate alone": jax.nn.sigmoid,
    "a gate by another image": lambda x: jax.nn.sigmoid(x) * IMAGE,
    "a gate by a number": lambda x: jax.nn.sigmoid(x) * 2,
    "two gates": lambda x: jax.nn.sigmoid(x) * jax.nn.sigmoid(x),
    "a gate that was changed": lambda x: x * (jax.nn.sigmoid(x) + 1),
    "an image by itself": lambda x: x * x,
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_a_swish(name: str, swished: list[tuple[int, ...]]) -> None:
    def network(x: jax.Array) -> jax.Array:
        return _conv(OTHERS[name](_conv(x)))

    found = jax.jit(optimize(network))(IMAGE)

    assert not swished
    np.testing.assert_allclose(found, network(jnp.asarray(IMAGE)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16])
def test_other_datatypes_keep_their_own_form(dtype: type, swished: list[tuple[int, ...]]) -> None:
    def network(x: jax.Array) -> jax.Array:
        return jax.nn.silu(_conv(x))

    image = jnp.asarray(IMAGE).astype(dtype)

    found = jax.jit(optimize(network))(image)

    assert not swished
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(network(image), np.float64), rtol=0.03, atol=0.03
    )


def _exported(platform: str) -> jax.export.Exported:
    (rows,) = jax.export.symbolic_shape("b")
    return jax.export.export(
        jax.jit(optimize(lambda x: jax.nn.silu(_conv(x)))), platforms=[platform]
    )(jax.ShapeDtypeStruct((rows, *IMAGE.shape[1:]), IMAGE.dtype))


def test_rows_are_proved_independent() -> None:
    assert Independence.PROVED is prove(_exported("cpu"), 0, ["y"], {}).independence


def test_other_platforms_keep_the_logistic_function() -> None:
    kept = {platform: str(_exported(platform).mlir_module()) for platform in ("cpu", "cuda")}

    assert "stablehlo.exponential" not in kept["cpu"]
    assert "stablehlo.exponential" in kept["cuda"]
