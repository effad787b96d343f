"""Forests of decision trees (TreeEnsemble, TreeEnsembleClassifier, TreeEnsembleRegressor).

All trees are traversed at once for all rows: each iteration of a loop moves every pair of row and
tree one node down, and the deepest tree sets the number of iterations. Behaviour that ONNX does not
specify follows onnxruntime, as models exported from XGBoost, LightGBM and scikit-learn expect.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Attribute, Node
from xlaserve.importers.onnx.operators import post_transform, tree_attributes
from xlaserve.importers.onnx.operators.forest import Forest, Trees, child_bits, forest_of
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import Value, on_device
from xlaserve.tensors import Tensor

_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""Aggregate functions in TreeEnsemble's order."""

_NAMES = "forest_tables"
"""Attribute with the names of a node's table inputs, in order."""


# --- Traversal ---------------------------------------------------------------------------------


def _at(table: jax.Array, index: jax.Array) -> jax.Array:
    found: jax.Array = table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return found


def _keys(x: jax.Array, *, twice: bool) -> jax.Array:
    """Return the integer keys of floats, like `forest.keys_of`; with `twice`, two per column."""
    signed = np.dtype(f"int{8 * x.dtype.itemsize}")
    largest, smallest = (
        np.asarray(n, signed) for n in (np.iinfo(signed).max, np.iinfo(signed).min)
    )
    bits = jax.lax.bitcast_convert_type(x, signed)
    bits = jnp.where(bits == smallest, np.asarray(0, signed), bits)
    ordered = bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & largest)
    missing = jnp.isnan(x)
    keys = jnp.where(missing, largest, ordered)
    if not twice:
        return keys
    both = jnp.stack([keys, jnp.where(missing, smallest, ordered)], axis=-1)
    return both.reshape(x.shape[0], 2 * x.shape[1])


def _rows_of(x: Value) -> jax.Array:
    array = on_device(x)
    if array.ndim not in (1, 2):
        raise InvalidModel(f"its input has {array.ndim} dimensions, expected rows of columns")
    return array.reshape(1, -1) if array.ndim == 1 else array


def _leaves(forest: Forest, x: jax.Array, tables: Mapping[str, jax.Array]) -> jax.Array:
    """Return the leaf that each row reaches in each tree."""
    is_wide = "thresholds" in tables
    if x.dtype == jnp.float64 and not is_wide:
        raise InvalidModel("its input is FP64 but its thresholds are FP32")
    x = x.astype(jnp.float64 if is_wide else jnp.float32)
    if x.shape[1] < forest.columns:
        raise InvalidModel(f"its nodes read {forest.columns} columns, its input has {x.shape[1]}")
    keys = _keys(x, twice=forest.reads_missing)
    roots = tables["roots"]
    nodes = jnp.broadcast_to(roots[None, :], (x.shape[0], roots.shape[0]))
    step = _step_side_by_side if "nodes" in tables else _step
    if forest.depth and x.shape[1]:
        nodes = jax.lax.fori_loop(0, forest.depth, lambda _, at: step(tables, keys, at), nodes)
    if "leaves" in tables:
        return _at(tables["leaves"], nodes)
    return nodes - (tables["children"].shape[0] - tables["weights"].shape[0])


def _step(tables: Mapping[str, jax.Array], keys: jax.Array, nodes: jax.Array) -> jax.Array:
    """Return the next node of each row and tree, from tables with both children of a node."""
    if "tests" in tables:
        test = _at(tables["tests"], nodes)
        column, threshold = (test >> 32).astype(jnp.int32), test.astype(jnp.int32)
    else:
        column, threshold = _at(tables["columns"], nodes), _at(tables["thresholds"], nodes)
    found = jnp.take_along_axis(keys, column, axis=1, mode="promise_in_bounds")
    children = _at(tables["children"], nodes)
    # The upper half is the true child, the lower half the false child.
    return jnp.where(found <= threshold, children >> 32, children).astype(jnp.int32)


def _step_side_by_side(
    tables: Mapping[str, jax.Array], keys: jax.Array, nodes: jax.Array
) -> jax.Array:
    """Return the next node of each row and tree; a false child follows its true sibling."""
    node = _at(tables["nodes"], nodes)
    bits = child_bits(tables["nodes"].shape[0])
    # JAX does not check unsigned indices for negative values.
    below = node.astype(jnp.uint32)
    found = jnp.take_along_axis(keys, below >> bits, axis=1, mode="promise_in_bounds")
    child = (below & np.uint32((1 << bits) - 1)).astype(jnp.int32)
    return child + (found > (node >> 32).astype(jnp.int32)).astype(jnp.int32)


def _scores(
    forest: Forest, x: Value, tables: Mapping[str, jax.Array], aggregate: str
) -> tuple[jax.Array, jax.Array]:
    """Return each target's aggregated score in FP64, and whether any tree contributes to it.

    Sums of FP32 weights are exact in FP64, or nearly, so that the order of trees breaks no ties.
    """
    leaves = _leaves(forest, _rows_of(x), tables)
    rows = leaves.shape[0]
    scored = jnp.broadcast_to(np.asarray(forest.has_score) != 0, (rows, forest.targets))
    if forest.grouped:
        weights = _at(tables["weights"], leaves).reshape(rows, forest.targets, -1)
        return _averaged(jnp.sum(weights, axis=-1, dtype=jnp.float64), forest, aggregate), scored
    weights = _at(tables["weights"], leaves)
    if aggregate in ("SUM", "AVERAGE"):
        total = _averaged(jnp.sum(weights, axis=1, dtype=jnp.float64), forest, aggregate)
        return total, _scored(scored, tables, leaves)
    sign = 1.0 if aggregate == "MIN" else -1.0
    weights = sign * weights.astype(jnp.float64)
    present = _at(tables["present"], leaves) if "present" in tables else scored[:, None, :]
    least = jnp.min(jnp.where(present, weights, jnp.inf), axis=1)
    scored = _scored(scored, tables, leaves)
    return jnp.where(scored, sign * least, 0.0), scored


def _scored(scored: jax.Array, tables: Mapping[str, jax.Array], leaves: jax.Array) -> jax.Array:
    return jnp.any(_at(tables["present"], leaves), axis=1) if "present" in tables else scored


def _averaged(total: jax.Array, forest: Forest, aggregate: str) -> jax.Array:
    return total / forest.trees if aggregate == "AVERAGE" else total


# --- Tables as inputs --------------------------------------------------------------------------


def _trees(node: Node) -> Trees:
    if node.operator == "TreeEnsemble":
        return tree_attributes.numbered(node)
    if node.operator == "TreeEnsembleRegressor":
        return tree_attributes.listed(node, "target", node.integer("n_targets", 1))
    classes = node.texts("classlabels_strings") or node.integers("classlabels_int64s")
    return tree_attributes.listed(node, "class", len(classes))


def _labels(node: Node) -> Sequence[int]:
    """Return the class labels; raises InvalidModel if text labels are needed."""
    names = node.texts("classlabels_strings")
    if names and node.needs(0):
        raise InvalidModel("its labels are strings; keep only its other outputs")
    return range(len(names)) if names else node.integers("classlabels_int64s")


def _sums(node: Node) -> bool:
    """Tell whether the trees are summed or averaged, so that their order does not matter."""
    return node.attributes.get("aggregate_function", "SUM") in ("SUM", "AVERAGE", 0, 1)


def with_tables(node: Node, *, wide: bool) -> tuple[Node, dict[str, Tensor]]:
    """Turn a node's tables into inputs; return the node, and the tables by input name.

    Raises InvalidModel. With `wide`, thresholds become FP64.
    """
    read = _trees(node)
    unknown = [name for name in node.unread() if name not in _KEPT]
    if unknown:
        raise InvalidModel(f"its attribute '{unknown[0]}' is not implemented")
    if wide:
        read = replace(
            read,
            thresholds=read.thresholds.astype(np.float64),
            sets=tuple(values.astype(np.float64) for values in read.sets),
        )
    forest = forest_of(read, groups=_sums(node))
    names = tuple(forest.tables)
    weights = read.entries[2]
    only = len(np.unique(read.entries[1])) == 1
    attributes: dict[str, Attribute] = {
        "depth": forest.depth,
        "columns": forest.columns,
        "reads_missing": int(forest.reads_missing),
        "trees": forest.trees,
        "targets": forest.targets,
        "has_score": forest.has_score,
        "grouped": int(forest.grouped),
        "is_positive": int(bool((weights >= 0).all())),
        "is_binary": int(forest.targets == 2 and only),
        _NAMES: names,
        **{
            name: value
            for name, value in node.attributes.items()
            if name in _KEPT  # the tables hold the other attributes
        },
    }
    prefix = next(filter(None, node.outputs), node.name)
    inputs = tuple(f"{prefix}/{name}" for name in names)
    made = replace(node, inputs=(*node.inputs, *inputs), attributes=attributes, _read=set())
    return made, dict(zip(inputs, forest.tables.values(), strict=True))


_KEPT = frozenset(
    {
        *("aggregate_function", "post_transform", "base_values", "base_values_as_tensor"),
        *("classlabels_strings", "classlabels_int64s", "n_targets"),
    }
)


def _prepared(
    node: Node, x: Value, tables: Sequence[Value]
) -> tuple[Node, Forest, dict[str, jax.Array]]:
    """Return a node, its forest and its tables; compute the tables if they are still attributes."""
    if not node.has(_NAMES):
        made, found = with_tables(node, wide=x.dtype == np.float64)
        node.obeyed(_KEPT)
        return _prepared(made, x, list(found.values()))
    node.obeyed(("is_binary", "is_positive"))
    forest = Forest(
        node.integer("depth"),
        node.integer("columns"),
        bool(node.integer("reads_missing")),
        node.integer("trees"),
        node.integer("targets"),
        node.integers("has_score"),
        grouped=bool(node.integer("grouped")),
        tables={},
    )
    names = node.texts(_NAMES)
    return node, forest, {n: on_device(table) for n, table in zip(names, tables, strict=True)}


# --- operators ---------------------------------------------------------------------------------


def _base(node: Node, sizes: Sequence[int]) -> Tensor:
    base = tree_attributes.numbers(node, "base_values")
    if len(base) not in (0, *sizes):
        raise InvalidModel(
            f"base_values: expected {' or '.join(map(str, sizes))} numbers, got {len(base)}"
        )
    return base


def _regressor(node: Node, x: Value, *tables: Value) -> Value:
    node, forest, found = _prepared(node, x, tables)
    aggregate = node.text("aggregate_function", "SUM")
    if aggregate not in _AGGREGATES:
        raise InvalidModel(
            f"aggregate_function: expected {', '.join(_AGGREGATES)}, got {aggregate}"
        )
    node.integer("n_targets", 1)
    base = _base(node, (1, forest.targets) if forest.targets == 1 else (forest.targets,))
    scores, scored = _scores(forest, x, found, aggregate)
    if len(base):
        scores = scores + base.astype(np.float64)[None, :]
    if forest.targets > 1:
        # As in onnxruntime, a target without a contributing leaf has no base value.
        scores = jnp.where(scored, scores, 0.0)
    return _regressed(forest, scores, post_transform.name_of(node))


def _regressed(forest: Forest, scores: jax.Array, transform: str) -> jax.Array:
    # A single target gets no transform except PROBIT, as in onnxruntime.
    if forest.targets == 1 and transform != "PROBIT":
        return scores.astype(jnp.float32)
    return post_transform.NAMES[transform](scores.astype(jnp.float32))


def _ensemble(node: Node, x: Value, *tables: Value) -> Value:
    node, forest, found = _prepared(node, x, tables)
    aggregate, transform = node.integer("aggregate_function", 1), node.integer("post_transform", 0)
    node.integer("n_targets", 1)
    for name, number, known in (
        ("aggregate_function", aggregate, _AGGREGATES),
        ("post_transform", transform, tuple(post_transform.NAMES)),
    ):
        if not 0 <= number < len(known):
            raise InvalidModel(f"{name}: expected 0 to {len(known) - 1}, got {number}")
    scores, _ = _scores(forest, x, found, _AGGREGATES[aggregate])
    name = tuple(post_transform.NAMES)[transform]
    if x.dtype == np.float64:
        if name != "NONE" and not (forest.targets == 1 and name != "PROBIT"):
            return post_transform.NAMES[name](scores)
        return scores
    return _regressed(forest, scores, name).astype(x.dtype)


def _classifier(node: Node, x: Value, *tables: Value) -> tuple[Value, Value]:
    node, forest, found = _prepared(node, x, tables)
    scores, scored = _scores(forest, x, found, "SUM")
    labels = np.asarray(_labels(node), np.int64)
    transform = post_transform.name_of(node)
    base = _base(node, (1, 2) if forest.targets == 2 else (forest.targets,)).astype(np.float64)
    if forest.targets == 2:
        return _of_two(node, forest, (scores, scored), (labels, base), transform)
    if len(base):
        scores, scored = scores + base[None, :], jnp.ones_like(scored)
    scores = scores.astype(jnp.float32)
    if forest.targets == 1:
        shown = post_transform.probit(scores) if transform == "PROBIT" else scores
        return (scores[:, 0] > 0).astype(jnp.int64), shown
    best = jnp.argmax(jnp.where(scored, scores, -jnp.inf), axis=-1)
    return _at(jnp.asarray(labels), best), post_transform.NAMES[transform](scores)


def _of_two(
    node: Node,
    forest: Forest,
    given: tuple[jax.Array, jax.Array],
    known: tuple[Tensor, Tensor],
    transform: str,
) -> tuple[jax.Array, jax.Array]:
    """Return labels and scores for two classes, of which the trees may score only one."""
    (scores, scored), (labels, base) = given, known
    is_binary, is_positive = (bool(node.integer(name)) for name in ("is_binary", "is_positive"))
    first, second = scored[:, 0], scored[:, 1]
    one, other = scores[:, 0], scores[:, 1]
    if len(base) == 2:
        # As in onnxruntime, the second base value is added to the first class's score.
        one, other = (
            jnp.where(second, -(one + base[1]), one + base[0]),
            jnp.where(second, one + base[1], 0.0),
        )
    elif len(base) == 1:
        one = one + base[0]
    one, other = (value.astype(jnp.float32) for value in (one, other))
    one, other = jnp.where(first, one, 0), jnp.where(second, other, 0)
    winning = jnp.where(second, other, one)
    is_second = winning > (0.5 if is_binary and is_positive else 0.0)
    # As in onnxruntime, the labels are 0 and 1 if trees score both classes.
    chosen = labels if is_binary else np.asarray([0, 1])
    label = jnp.where(is_second, chosen[1], chosen[0])
    both = post_transform.NAMES[transform](jnp.stack([one, other], axis=-1))
    if len(base) == 2 or forest.has_score[1] == 1:
        return label, both
    if transform == "PROBIT" or (len(base) == 1 and not is_binary):
        raise InvalidModel("its second class has no scores, so its result is undefined")
    if transform == "LOGISTIC":
        alone = jnp.stack([post_transform.logistic(-one), post_transform.logistic(one)], axis=-1)
    else:
        alone = jnp.stack([1 - one if is_binary and is_positive else -one, one], axis=-1)
    return label, jnp.where(second[:, None], both, alone)


TREES: Family = {
    "TreeEnsemble": operator(_ensemble),
    "TreeEnsembleClassifier": operator(_classifier),
    "TreeEnsembleRegressor": operator(_regressor),
}
