"""Post-transforms that classifiers and regressors of ai.onnx.ml apply to their scores."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node

Transform = Callable[[jax.Array], jax.Array]

_ZERO = 1e-7
"""SOFTMAX_ZERO leaves scores within this distance of 0 unchanged."""


def logistic(x: jax.Array) -> jax.Array:
    """Return 1 / (1 + exp(-x)), as onnxruntime calculates it."""
    found = 1 / (1 + jnp.exp(-jnp.abs(x)))
    return jnp.where(x < 0, 1 - found, found)


def probit(x: jax.Array) -> jax.Array:
    """Return the normal quantile, with onnxruntime's approximation."""
    y = 2 * x - 1
    log = jnp.log((1 - y) * (1 + y))
    half = 2 / (3.14159 * 0.147) + 0.5 * log
    root = jnp.sqrt(-half + jnp.sqrt(half * half - log / 0.147))
    return 1.41421356 * jnp.where(y < 0, -root, root)


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax over the last axis."""
    return jax.nn.softmax(x, axis=-1)


def softmax_zero(x: jax.Array) -> jax.Array:
    """Softmax over the non-zero elements of the last axis; zeros stay zero."""
    highest = jnp.max(x, axis=-1, keepdims=True)
    is_zero = jnp.abs(x) <= _ZERO
    raised = jnp.where(is_zero, x * jnp.exp(-highest), jnp.exp(x - highest))
    total = jnp.sum(jnp.where(is_zero, 0, raised), axis=-1, keepdims=True)
    return raised / total


NAMES: MappingProxyType[str, Transform] = MappingProxyType(
    {
        "NONE": lambda x: x,
        "SOFTMAX": softmax,
        "LOGISTIC": logistic,
        "SOFTMAX_ZERO": softmax_zero,
        "PROBIT": probit,
    }
)
"""Post-transforms by name, in TreeEnsemble's numbering."""


def name_of(node: Node) -> str:
    """Return the post_transform of a node; raises InvalidModel if it is unknown."""
    name = node.text("post_transform", "NONE")
    if name not in NAMES:
        raise InvalidModel(f"post_transform: expected {', '.join(NAMES)}, got {name}")
    return name


def of_two(score: jax.Array, name: str) -> jax.Array:
    """Return the scores of two classes, given the second one's [rows, 1], as onnxruntime does.

    Raises InvalidModel for PROBIT, for which onnxruntime returns one score only.
    """
    if name == "PROBIT":
        raise InvalidModel(
            "post_transform: PROBIT is not implemented for two classes with a single score"
        )
    if name == "LOGISTIC":
        return logistic(jnp.concatenate([-score, score], axis=-1))
    return jnp.concatenate([1 - score, score], axis=-1)
