# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xlaserve
from xlaserve.errors import InvalidModel

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 6, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((3, 3, 1, 4)), jnp.float32)


def _depthwise(x: jax.Array, w: jax.Array = W) -> jax.Array:
    convolved: jax.Array = lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
    )
    return convolved


@jax.custom_jvp
def _jvp(x: jax.Array) -> jax.Array:
    return _depthwise(x)


_jvp.defjvp(lambda primals, tangents: (_jvp(*primals), tangents[0]))


@jax.custom_vjp
def _vjp(x: jax.Array) -> jax.Array:
    return _depthwise(x)


_vjp.defvjp(lambda x: (_vjp(x), None), lambda _, gradient: (gradient,))


def _scan(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(carried: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = _depthwise(carried) * factor + x
        return found, found.sum(axis=(1, 2, 3))

    carried, sums = lax.scan(step, x, jnp.asarray([0.1, 0.2], jnp.float32), reverse=True)
    return carried, sums


def _cond(x: jax.Array) -> jax.Array:
    chosen: jax.Array = lax.cond(x[0, 0, 0, 0] > 0, _depthwise, lambda x: -_depthwise(x), x)
    return chosen


def _while(x: jax.Array) -> Any:
    def goes_on(carried: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (carried[0] < 3) & (jnp.abs(_depthwise(carried[1])).max() < 1e6)

    return lax.while_loop(
        goes_on,
        lambda carried: (carried[0] + 1, _depthwise(carried[1])),
        (jnp.asarray(0, jnp.int32), x),
    )


FUNCTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "plain": _depthwise,
    "jit": jax.jit(_depthwise),
    "checkpoint": jax.checkpoint(_depthwise),
    "custom_jvp": _jvp,
    "custom_vjp": _vjp,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "vmap": lambda x: jax.vmap(_depthwise)(x[:, None]),
    "grad": jax.grad(lambda x: jnp.sin(_depthwise(x)).sum()),
    "nested": jax.jit(lambda x: {"a": [_scan(jax.jit(_cond)(x)), x], "b": (_jvp(x),)}),
}


def _convolutions(function: Callable[..., Any], *arguments: Any) -> int:
    return jax.jit(function).lower(*arguments).as_text().count("stablehlo.convolution")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_optimized_function_gives_the_same_without_a_grouped_convolution(name: str) -> None:
    """The convolution is found in nested calls."""
    function = FUNCTIONS[name]

    optimized = xlaserve.optimize(function)
    expected, got = function(X), jax.jit(optimized)(X)

    assert 0 < _convolutions(function, X)
    assert 0 == _convolutions(optimized, X)
    jax.tree.map(lambda *_: None, expected, got)  # the same pytree structure
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert theirs.dtype == ours.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_convolution_of_grouped_batches_stays_what_it_is() -> None:
    def function(x: jax.Array, w: jax.Array) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", batch_group_count=2)

    x, w = jnp.ones((2, 4, 6, 6)), jnp.ones((4, 4, 1, 1))
    optimized = xlaserve.optimize(function)

    assert 1 == _convolutions(optimized, x, w)
    np.testing.assert_array_equal(optimized(x, w), function(x, w))


def test_optimized_function_takes_and_returns_pytrees_by_position_and_name() -> None:
    def predict(params: dict[str, jax.Array], *, image: jax.Array) -> dict[str, jax.Array]:
        return {"y": _depthwise(image, params["w"]), "same": image}

    got = xlaserve.optimize(predict)({"w": W}, image=X)

    assert ["same", "y"] == sorted(got)
    np.testing.assert_allclose(got["y"], _depthwise(X), rtol=1e-4, atol=1e-5)
    assert "predict" == xlaserve.optimize(predict).__name__


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(InvalidModel, match="optimize: expected a function, got a int"):
        xlaserve.optimize(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
