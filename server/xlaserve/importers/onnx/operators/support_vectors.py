"""Support vector machines (SVMClassifier, SVMRegressor).

Behaviour that ONNX does not specify follows onnxruntime, as models exported from scikit-learn
expect.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Attribute, Node
from xlaserve.importers.onnx.operators import post_transform
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, on_device
from xlaserve.tensors import Tensor

_TABLES = ("vectors", "coefficients")
"""Names of the inputs that replace attributes."""

_ROUNDS = 100
_LEAST_PROBABILITY = 1e-7


# --- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The kernel_params of a node."""

    gamma: float
    offset: float
    degree: float


def _products(x: jax.Array, vectors: jax.Array) -> jax.Array:
    return jnp.matmul(x, vectors.T, precision="highest")


def _poly(x: jax.Array, vectors: jax.Array, numbers: _Numbers) -> jax.Array:
    base = numbers.gamma * _products(x, vectors) + numbers.offset
    if numbers.degree in (2, 3):
        return base ** int(numbers.degree)
    return jnp.power(base, np.float32(numbers.degree))


def _rbf(x: jax.Array, vectors: jax.Array, numbers: _Numbers) -> jax.Array:
    # Subtract directly: with a matrix product, points close to a vector would lose most digits.
    gaps = x[:, None, :] - vectors[None, :, :]
    return jnp.exp(-numbers.gamma * jnp.sum(gaps * gaps, axis=-1))


_KERNELS: MappingProxyType[str, Callable[[jax.Array, jax.Array, _Numbers], jax.Array]] = (
    MappingProxyType(
        {
            "LINEAR": lambda x, vectors, _: _products(x, vectors),
            "POLY": _poly,
            "RBF": _rbf,
            "SIGMOID": lambda x, vectors, n: jnp.tanh(n.gamma * _products(x, vectors) + n.offset),
        }
    )
)


def _kernel(node: Node, x: Value, vectors: Value) -> jax.Array:
    name = node.text("kernel_type", "LINEAR")
    if name not in _KERNELS:
        raise InvalidModel(f"kernel_type: expected {', '.join(_KERNELS)}, got {name}")
    parameters = node.reals("kernel_params") or (0.0, 0.0, 0.0)
    if len(parameters) != 3:
        raise InvalidModel(
            f"kernel_params: expected gamma, coef0 and degree, got {list(parameters)}"
        )
    array, table = on_device(x).astype(jnp.float32), on_device(vectors)
    array = array.reshape(1, -1) if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] != table.shape[1]:
        raise InvalidModel(
            f"expected rows of {table.shape[1]} columns, got the shape {list(array.shape)}"
        )
    return _KERNELS[name](array, table, _Numbers(*parameters))


# --- tables ------------------------------------------------------------------------------------


def with_tables(node: Node, *, wide: bool) -> tuple[Node, dict[str, Tensor]]:
    """Turn a node's vectors into inputs; return the node, and the vectors by input name.

    Raises InvalidModel. `wide` has no effect, because the kernels always use FP32.
    """
    del wide
    coefficients = np.asarray(node.reals("coefficients"), np.float32)
    vectors = np.asarray(node.reals("support_vectors"), np.float32)
    attributes: dict[str, Attribute] = {
        name: value
        for name, value in node.attributes.items()
        if name not in ("coefficients", "support_vectors")
    }
    if node.operator == "SVMRegressor":
        count = node.integer("n_supports", 0)
        rows, weights = count or 1, coefficients[:, None]
    else:
        sizes = node.integers("vectors_per_class")
        count, classes = sum(sizes), _classes(node)
        if count and (len(sizes) != classes or min(sizes) < 0 or classes < 2):
            raise InvalidModel(f"vectors_per_class: expected {classes} numbers, got {list(sizes)}")
        rows = count or classes
        weights = _of_pairs(coefficients, sizes) if count else coefficients[:, None]
        attributes["is_positive"] = int(bool((coefficients >= 0).all()))
    table = vectors if count else coefficients
    if not table.size or table.size % rows or (count and len(weights) != count):
        raise InvalidModel(
            f"expected {rows} vectors and as many coefficients, got {table.size} numbers of "
            f"vectors and {len(coefficients)} coefficients"
        )
    attributes["vectors"] = count
    tables = (table.reshape(rows, -1), weights if count else np.zeros((0, 0), np.float32))
    prefix = next(filter(None, node.outputs), node.name)
    inputs = tuple(f"{prefix}/{name}" for name in _TABLES)
    made = replace(node, inputs=(*node.inputs, *inputs), attributes=attributes, _read=set())
    return made, dict(zip(inputs, tables, strict=True))


def _classes(node: Node) -> int:
    return len(node.texts("classlabels_strings") or node.integers("classlabels_ints"))


def _of_pairs(coefficients: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the weight of each vector for each pair of classes; 0 if it belongs to neither."""
    classes, count = len(sizes), sum(sizes)
    if len(coefficients) != (classes - 1) * count:
        raise InvalidModel(
            f"coefficients: expected {(classes - 1) * count} numbers, got {len(coefficients)}"
        )
    table = coefficients.reshape(classes - 1, count)
    ends = np.cumsum(sizes)
    pairs = list(combinations(range(classes), 2))
    found = np.zeros((count, len(pairs)), np.float32)
    for at, (one, other) in enumerate(pairs):
        for own, row in ((one, other - 1), (other, one)):
            of = slice(int(ends[own]) - sizes[own], int(ends[own]))
            found[of, at] = table[row, of]
    return found


def _prepared(node: Node, tables: Sequence[Value]) -> tuple[Node, Value, Value]:
    if node.has("vectors"):
        vectors, weights = tables
        return node, vectors, weights
    made, found = with_tables(node, wide=False)
    node.obeyed(node.attributes)
    vectors, weights = found.values()
    return made, vectors, weights


# --- operators ---------------------------------------------------------------------------------


def _all_obeyed(node: Node) -> None:
    if node.unread():
        raise InvalidModel(f"its attribute '{node.unread()[0]}' is not implemented")


def _regressor(node: Node, x: Value, *tables: Value) -> Value:
    node, vectors, weights = _prepared(node, tables)
    one_class, count = node.integer("one_class", 0), node.integer("vectors")
    node.integer("n_supports", 0)
    node.text("post_transform", "NONE")  # onnxruntime ignores the attribute too
    rho = _rho(node, 1)
    scores = _machine(node, x, vectors, weights, rho) if count else _linear(node, x, vectors, rho)
    _all_obeyed(node)
    if one_class:
        return jnp.where(scores > 0, np.float32(1), np.float32(-1))
    return scores.astype(jnp.float32)


def _machine(node: Node, x: Value, vectors: Value, weights: Value, rho: Tensor) -> jax.Array:
    """Return the weighted sums of the kernels, in FP64, plus rho."""
    kernels = _kernel(node, x, vectors).astype(jnp.float64)
    table = on_device(weights).astype(jnp.float64)
    return jnp.matmul(kernels, table) + rho.astype(np.float64)[None, :]


def _linear(node: Node, x: Value, vectors: Value, rho: Tensor) -> jax.Array:
    node.text("kernel_type", "LINEAR")
    plain = replace(node, attributes={"kernel_type": "LINEAR"}, _read=set())
    node.reals("kernel_params")
    return _kernel(plain, x, vectors) + rho[None, :1]


def _rho(node: Node, count: int) -> Tensor:
    found = np.asarray(node.reals("rho"), np.float32)
    if len(found) < count:
        raise InvalidModel(f"rho: expected {count} numbers, got {len(found)}")
    return found[:count]


def _classifier(node: Node, x: Value, *tables: Value) -> tuple[Value, Value]:
    node, vectors, weights = _prepared(node, tables)
    names = node.texts("classlabels_strings")
    if names and node.needs(0):
        raise InvalidModel("its labels are strings; keep only its other outputs")
    labels = np.asarray(range(len(names)) if names else node.integers("classlabels_ints"), np.int64)
    node.integers("vectors_per_class")
    transform = post_transform.name_of(node)
    is_positive = bool(node.integer("is_positive"))
    platt = tuple(np.asarray(node.reals(name), np.float32) for name in ("prob_a", "prob_b"))
    count, classes = node.integer("vectors"), len(labels)
    pairs = classes * (classes - 1) // 2
    if len(platt[0]) != len(platt[1]) or len(platt[0]) not in (0, pairs):
        raise InvalidModel(f"prob_a, prob_b: expected {pairs} numbers, got {len(platt[0])}")
    if count:
        scores = _machine(node, x, vectors, weights, _rho(node, pairs))
        votes = _votes(scores, classes)
        best, highest = jnp.argmax(votes, axis=-1), jnp.zeros((scores.shape[0],), jnp.float32)
        scores = scores.astype(jnp.float32)
    else:
        scores = _linear(node, x, vectors, _rho(node, 1))
        best, highest = jnp.argmax(scores, axis=-1), jnp.max(scores, axis=-1)
    _all_obeyed(node)
    has_probabilities = bool(len(platt[0]))
    if pairs == 1 and not has_probabilities:
        best = jnp.where(highest >= 0.5 if is_positive else highest > 0, 1, best)
    label = jnp.take(jnp.asarray(labels), best)
    if count and has_probabilities:
        scores = _probabilities(scores, classes, platt)
    elif count and pairs == 1:
        if transform == "NONE":
            return label, jnp.concatenate([-scores, scores], axis=-1)
        return label, post_transform.of_two(scores, transform)
    return label, post_transform.NAMES[transform](scores)


def _votes(scores: jax.Array, classes: int) -> jax.Array:
    """Return how many pairs each class wins."""
    table = np.zeros((2, scores.shape[-1], classes), np.int64)
    for at, (one, other) in enumerate(combinations(range(classes), 2)):
        table[0, at, one] = table[1, at, other] = 1
    won = (scores > 0)[:, :, None]
    return jnp.sum(jnp.where(won, table[0][None], table[1][None]), axis=1)


# --- probabilities -----------------------------------------------------------------------------


def _probabilities(scores: jax.Array, classes: int, platt: Sequence[Tensor]) -> jax.Array:
    """Return class probabilities from pairwise ones (Wu, Lin and Weng, 2004)."""
    pairwise = 1 - post_transform.logistic(scores * platt[0][None, :] + platt[1][None, :])
    pairwise = jnp.clip(pairwise, _LEAST_PROBABILITY, 1 - np.float32(_LEAST_PROBABILITY))
    places = np.zeros((classes, classes), np.int64)
    upper = np.triu(np.ones((classes, classes), np.bool_), 1)
    for at, pair in enumerate(combinations(range(classes), 2)):
        places[pair] = places[pair[::-1]] = at
    full = jnp.take(pairwise, places.reshape(-1), axis=1).reshape(-1, classes, classes)
    wins = jnp.where(upper[None], full, jnp.where(upper.T[None], 1 - full, 0))
    lost = jnp.swapaxes(wins, 1, 2)
    diagonal = np.eye(classes, dtype=np.bool_)[None]
    own = jnp.broadcast_to(jnp.sum(lost * lost, axis=2)[:, :, None], wins.shape)
    return jax.vmap(_coupled)(jnp.where(diagonal, own, -lost * wins))


def _coupled(matrix: jax.Array) -> jax.Array:
    """Return the probabilities p that minimise p' Q p for one row, with libsvm's stopping rule."""
    classes = matrix.shape[0]
    enough = 0.005 / classes

    def products(p: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = jnp.sum(matrix * p[None, :], axis=1)
        return found, jnp.sum(p * found)

    def goes_on(state: tuple[Any, jax.Array]) -> jax.Array:
        number, p = state
        found, whole = products(p)
        return jnp.asarray((number < _ROUNDS) & (jnp.max(jnp.abs(found - whole)) >= enough))

    def round_of(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        number, p = state
        found, whole = products(p)
        for at in range(classes):
            own = matrix[at, at]
            step = (whole - found[at]) / own
            p = p + step * np.eye(classes, dtype=np.float32)[at]
            whole = (whole + step * (step * own + 2 * found[at])) / (1 + step) / (1 + step)
            found = (found + step * matrix[at]) / (1 + step)
            p = p / (1 + step)
        return number + 1, p

    start = jnp.full((classes,), 1 / classes, jnp.float32)
    found: jax.Array = jax.lax.while_loop(goes_on, round_of, (0, start))[1]
    return found


SUPPORT_VECTORS: Family = {
    "SVMClassifier": operator(_classifier),
    "SVMRegressor": operator(_regressor),
}
