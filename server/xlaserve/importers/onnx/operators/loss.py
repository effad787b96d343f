"""Loss operators, which some models compute in addition to their predictions."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, on_device

_REDUCTIONS = ("none", "sum", "mean")


def _likelihood(node: Node, x: Value, target: Value, weight: Value | None = None) -> Value:
    return _loss(node, on_device(x), on_device(target), weight)


def _loss(node: Node, x: jax.Array, target: jax.Array, weight: Value | None) -> jax.Array:
    """Return the negative log-likelihood, weighted and reduced as the node specifies."""
    reduction = node.text("reduction", "mean")
    if reduction not in _REDUCTIONS:
        raise InvalidModel(f"reduction: expected {', '.join(_REDUCTIONS)}, got {reduction}")
    ignored = jnp.zeros(target.shape, jnp.bool_)
    if node.has("ignore_index"):
        ignored = target == node.integer("ignore_index")
    classes = jnp.where(ignored, 0, target)
    picked = jnp.take_along_axis(x, classes[:, None], axis=1, mode="fill")[:, 0]
    share = jnp.ones(target.shape, x.dtype)
    if weight is not None:
        share = jnp.take(on_device(weight), classes, mode="fill").astype(x.dtype)
    share = jnp.where(ignored, 0, share).astype(x.dtype)
    loss = jnp.where(ignored, 0, -picked * share).astype(x.dtype)
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    return total if reduction == "sum" else total / jnp.sum(share)


def _cross_entropy(
    node: Node, scores: Value, labels: Value, weights: Value | None = None
) -> tuple[Value, ...]:
    logarithms = jax.nn.log_softmax(on_device(scores), axis=1)
    return _loss(node, logarithms, on_device(labels), weights), logarithms


LOSS: Family = {
    "NegativeLogLikelihoodLoss": operator(_likelihood),
    "SoftmaxCrossEntropyLoss": operator(_cross_entropy),
}
