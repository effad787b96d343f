"""Operators of ai.onnx.ml, except trees and support vector machines."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators import post_transform
from xlaserve.importers.onnx.operators.normalisation import divided
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, is_open, on_device, with_rank
from xlaserve.tensors import Tensor


def _floats(x: Value) -> jax.Array:
    return on_device(x).astype(jnp.float32)


def _scaler(node: Node, x: Value) -> Value:
    offset, scale = node.reals("offset", (0.0,)), node.reals("scale", (1.0,))
    array = _floats(x)
    return (array - _row(offset)) * _row(scale)


def _row(numbers: tuple[float, ...]) -> Tensor:
    return np.asarray(numbers, np.float32)[None, :]


_NORMS: MappingProxyType[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "L1": lambda x: jnp.sum(jnp.abs(x), axis=-1, keepdims=True),
        "L2": lambda x: jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)),
        # NaN is never the maximum, as in onnxruntime.
        "MAX": lambda x: jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), axis=-1, keepdims=True),
    }
)


def _normalizer(node: Node, x: Value) -> Value:
    array = _floats(x)
    norm = node.text("norm", "MAX")
    if norm not in _NORMS:
        raise InvalidModel(f"norm: expected {', '.join(_NORMS)}, got {norm}")
    return divided(array, _NORMS[norm](array))


def _scores(node: Node, x: Value, rows: int) -> jax.Array:
    array = _floats(with_rank(x, 2)) if x.ndim < 2 else _floats(x)
    scores = array @ _coefficients(node, rows, array.shape[-1]).T
    intercepts = node.reals("intercepts")
    return scores + _row(intercepts) if intercepts else scores


def _coefficients(node: Node, rows: int, features: int) -> Tensor:
    """Return the coefficients [rows, features] in FP32.

    Raises InvalidModel if there are too few. Like onnxruntime, ignore extra coefficients; its own
    iris example was trained on four features and takes two.
    """
    given = np.asarray(node.reals("coefficients"), np.float32)
    if is_open(features):
        raise InvalidModel(
            f"its input has a dynamic number of features, but it has {given.size} coefficients for"
            f" {rows} outputs: give the input a size with --shape"
        )
    if rows < 1 or given.size < rows * features:
        raise InvalidModel(
            f"coefficients: expected {rows} rows of {features} features, got {given.size}"
        )
    return given[: rows * features].reshape(rows, features)


def _linear_regressor(node: Node, x: Value) -> Value:
    name, targets = post_transform.name_of(node), node.integer("targets", 1)
    scores = _scores(node, x, targets)
    # A single target gets no transform except PROBIT, as in onnxruntime.
    return scores if targets == 1 and name != "PROBIT" else post_transform.NAMES[name](scores)


def _linear_classifier(node: Node, x: Value) -> tuple[Value, Value]:
    labels, names = node.integers("classlabels_ints"), node.texts("classlabels_strings")
    node.integer("multi_class", 0)  # multi_class does not change the result
    name = post_transform.name_of(node)
    classes = len(labels or names)
    intercepts = len(node.reals("intercepts")) or classes
    scores = _scores(node, x, intercepts)
    if names and node.needs(0):
        raise InvalidModel("its labels are strings; keep only its other outputs")
    # Text classes are returned as indices, because JAX has no string tensors.
    known = jnp.asarray(np.asarray(labels or range(classes), np.int64))
    if intercepts == 1 and classes == 2:
        return jnp.take(known, (scores[:, 0] > 0).astype(jnp.int64)), post_transform.of_two(
            scores, name
        )
    if scores.shape[-1] != classes:
        raise InvalidModel(
            f"expected {classes} rows of coefficients, one per class, got {scores.shape[-1]}"
        )
    return jnp.take(known, jnp.argmax(scores, axis=-1)), post_transform.NAMES[name](scores)


def _binarizer(node: Node, x: Value) -> Value:
    array = on_device(x)
    return (array > node.real("threshold", 0.0)).astype(array.dtype)


def _array_feature_extractor(_: Node, x: Value, indices: Value) -> Value:
    picked = jnp.take(on_device(x), on_device(indices).reshape(-1), axis=-1)
    return picked[None, :] if picked.ndim == 1 else picked


def _keyed(node: Node, prefix: str) -> Tensor:
    """Return the keys or values of a LabelEncoder from the attribute that has them."""
    if node.has(f"{prefix}_strings"):
        raise InvalidModel(
            f"its {prefix} are strings, which JAX does not support; encode them before the"
            " request or in a Python model, and export the model without this node"
        )
    for suffix, read, dtype in (
        ("int64s", node.integers, np.int64),
        ("floats", node.reals, np.float32),
    ):
        if node.has(f"{prefix}_{suffix}"):
            return np.asarray(read(f"{prefix}_{suffix}"), dtype)
    return node.tensor(f"{prefix}_tensor")


def _label_encoder(node: Node, x: Value) -> Value:
    keys, values = _keyed(node, "keys"), _keyed(node, "values")
    whole = node.integer("default_int64", -1)
    part = node.real("default_float", -0.0)
    node.text("default_string", "_Unused")
    rest = node.tensor("default_tensor", np.asarray(part if values.dtype.kind == "f" else whole))
    array = on_device(x)
    same = array[..., None] == keys.astype(array.dtype).reshape((1,) * array.ndim + (-1,))
    if keys.dtype.kind == "f":
        missing = jnp.isnan(array)[..., None] & np.isnan(keys).reshape((1,) * array.ndim + (-1,))
        same = same | missing
    found = jnp.take(jnp.asarray(values), jnp.argmax(same, axis=-1))
    return jnp.where(jnp.any(same, axis=-1), found, rest.astype(values.dtype).reshape(()))


def _imputer(node: Node, x: Value) -> Value:
    whole = node.has("imputed_value_int64s")
    kind = "int64" if whole else "float"
    read = node.integers if whole else node.reals
    values = np.asarray(read(f"imputed_value_{kind}s"), x.dtype)
    lost = node.integer("replaced_value_int64", 0) if whole else node.real("replaced_value_float")
    array = on_device(x)
    absent = jnp.isnan(array) if np.isnan(lost) else array == lost
    if not values.size:
        raise InvalidModel("it has no replacement values")
    # One value per column, otherwise the first one for all columns, as in onnxruntime.
    shared = values if values.size == array.shape[-1] else values[:1]
    return jnp.where(absent, shared.reshape((1,) * (array.ndim - 1) + (-1,)), array)


def _one_hot_encoder(node: Node, x: Value) -> Value:
    node.integer("zeros", 1)  # zeros=0 makes unknown categories an error, which JAX cannot raise
    categories = np.asarray(node.integers("cats_int64s"), np.int64)
    given = on_device(x)
    array = given.astype(jnp.int64)
    same = array[..., None] == categories.reshape((1,) * array.ndim + (-1,))
    # NaN matches no category, although XLA converts it to 0.
    return (same & (given == given)[..., None]).astype(jnp.float32)  # noqa: PLR0124


def _feature_vectorizer(node: Node, *values: Value) -> Value:
    node.integers("inputdimensions")
    return jnp.concatenate([_floats(value) for value in values], axis=1)


def _zip_map(node: Node, x: Value) -> Value:
    node.integers("classlabels_int64s")
    node.texts("classlabels_strings")
    return x


MACHINE_LEARNING: Family = {
    "ArrayFeatureExtractor": operator(_array_feature_extractor),
    "Binarizer": operator(_binarizer),
    "FeatureVectorizer": operator(_feature_vectorizer),
    "Imputer": operator(_imputer),
    "LabelEncoder": operator(_label_encoder),
    "LinearClassifier": operator(_linear_classifier),
    "LinearRegressor": operator(_linear_regressor),
    "Normalizer": operator(_normalizer),
    "OneHotEncoder": operator(_one_hot_encoder),
    "Scaler": operator(_scaler),
    # Returns the score tensor, because the V2 protocol has no lists of maps.
    "ZipMap": operator(_zip_map),
}
