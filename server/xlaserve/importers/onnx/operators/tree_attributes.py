"""Reads the attributes of tree ensembles, in both layouts of ai.onnx.ml."""

from types import MappingProxyType

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.forest import MEMBER, Integers, Trees
from xlaserve.tensors import Tensor

_MODES = MappingProxyType(
    {
        name: number
        for number, name in enumerate(
            f"BRANCH_{mode}" for mode in ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ")
        )
    }
)
_LEAF = -1

_MAX_TABLE = 2**31 - 1


def numbers(node: Node, name: str) -> Tensor:
    """Return a list of floats as FP32, or the tensor of the attribute's `_as_tensor` variant."""
    if node.has(f"{name}_as_tensor"):
        return node.tensor(f"{name}_as_tensor").reshape(-1)
    return np.asarray(node.reals(name), np.float32)


def _integers(node: Node, name: str, count: int | None = None) -> Integers:
    found = np.asarray(node.integers(name), np.int64)
    _expect(name, found, count)
    return found


def _expect(name: str, found: Tensor, count: int | None) -> None:
    if count is not None and len(found) != count:
        raise InvalidModel(f"attribute '{name}': expected {count} elements, got {len(found)}")
    if count is None and not len(found):
        raise InvalidModel(f"attribute '{name}' is missing or empty")


def _within(name: str, found: Integers, bound: int) -> None:
    if found.size and not 0 <= found.min() <= found.max() < bound:
        raise InvalidModel(
            f"attribute '{name}': expected 0 to {bound - 1}, got {found.min()} to {found.max()}"
        )


def _missing(node: Node, count: int) -> Integers:
    name = "nodes_missing_value_tracks_true"
    if not node.has(name):
        return np.zeros(count, np.bool_)
    return np.asarray(_integers(node, name, count) == 1)


# --- TreeEnsembleClassifier, TreeEnsembleRegressor ----------------------------------------------


def listed(node: Node, prefix: str, targets: int) -> Trees:
    """Read nodes and leaves that are numbered within each tree; raises InvalidModel.

    `prefix` is the prefix of the weight attributes: class or target.
    """
    tree = _integers(node, "nodes_treeids")
    count = len(tree)
    number = _integers(node, "nodes_nodeids", count)
    modes = _modes(node, count)
    thresholds = numbers(node, "nodes_values")
    _expect("nodes_values", thresholds, count)
    columns = _integers(node, "nodes_featureids", count)
    numbers(node, "nodes_hitrates")
    missing = _missing(node, count)
    inner = modes != _LEAF
    _within("nodes_featureids", columns[inner], _MAX_TABLE // 2)
    found = _Numbering(tree, number)
    places = np.where(inner, np.cumsum(inner) - 1, inner.sum() + np.cumsum(~inner) - 1)
    true, false = (
        places[found.places(name, tree[inner], _integers(node, name, count)[inner])]
        for name in ("nodes_truenodeids", "nodes_falsenodeids")
    )
    weighted = (_integers(node, f"{prefix}_{kind}ids") for kind in ("tree", "node"))
    at = found.places(f"{prefix}_nodeids", *weighted)
    weights = numbers(node, f"{prefix}_weights")
    _expect(f"{prefix}_weights", weights, len(at))
    target = _integers(node, f"{prefix}_ids", len(at))
    _within(f"{prefix}_ids", target, targets)
    is_leaf = ~inner[at]  # weights of inner nodes are ignored
    leaf = places[at] - inner.sum()
    first = np.flatnonzero(np.diff(tree, prepend=tree[0] - 1))
    return Trees(
        columns[inner],
        thresholds[inner],
        modes[inner],
        missing[inner],
        true,
        false,
        (),
        places[first],
        int((~inner).sum()),
        targets,
        (leaf[is_leaf], target[is_leaf], weights[is_leaf]),
    )


def _modes(node: Node, count: int) -> Integers:
    names = node.texts("nodes_modes")
    known = {**_MODES, "LEAF": _LEAF}
    for name in set(names) - known.keys():
        raise InvalidModel(f"nodes_modes: expected one of {', '.join(known)}, got {name}")
    found = np.asarray([known[name] for name in names])
    _expect("nodes_modes", found, count)
    return found


class _Numbering:
    """Maps tree and node ids to positions."""

    def __init__(self, tree: Integers, number: Integers) -> None:
        self._order = np.lexsort((number, tree))
        self._tree, self._number = tree[self._order], number[self._order]
        same = (np.diff(self._tree) == 0) & (np.diff(self._number) == 0)
        if same.any():
            at = int(np.argmax(same))
            raise InvalidModel(f"tree {self._tree[at]} has duplicate node {self._number[at]}")

    def places(self, name: str, tree: Integers, number: Integers) -> Integers:
        """Return the positions of nodes; raises InvalidModel for an unknown node."""
        _expect(name, number, len(tree))
        # Combine tree and node ids into one sorted key, so that one search finds a node.
        numbers_, inverse = np.unique(self._number, return_inverse=True)
        trees_, of = np.unique(self._tree, return_inverse=True)
        keys = of * len(numbers_) + inverse
        tree_places = np.searchsorted(trees_, tree).clip(max=len(trees_) - 1)
        number_places = np.searchsorted(numbers_, number).clip(max=len(numbers_) - 1)
        at = np.searchsorted(keys, tree_places * len(numbers_) + number_places).clip(
            max=len(keys) - 1
        )
        wrong = (self._tree[at] != tree) | (self._number[at] != number)
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise InvalidModel(f"attribute '{name}': tree {tree[bad]} has no node {number[bad]}")
        return np.asarray(self._order[at])


# --- TreeEnsemble -------------------------------------------------------------------------------


def numbered(node: Node) -> Trees:
    """Read nodes and leaves that are numbered across all trees; raises InvalidModel."""
    modes = node.tensor("nodes_modes").reshape(-1).astype(np.int64)
    count = len(modes)
    _within("nodes_modes", modes, MEMBER + 1)
    columns = _integers(node, "nodes_featureids", count)
    _within("nodes_featureids", columns, _MAX_TABLE // 2)
    thresholds = node.tensor("nodes_splits").reshape(-1)
    _expect("nodes_splits", thresholds, count)
    node.tensor("nodes_hitrates", np.empty(0))
    weights = node.tensor("leaf_weights").reshape(-1)
    leaves = len(weights)
    targets = node.integer("n_targets", 1)
    target = _integers(node, "leaf_targetids", leaves)
    _within("leaf_targetids", target, targets)
    true, false = (_children(node, kind, count, leaves) for kind in ("true", "false"))
    roots = _integers(node, "tree_roots")
    _within("tree_roots", roots, count)
    wide = thresholds if thresholds.dtype != np.float16 else thresholds.astype(np.float32)
    return Trees(
        columns,
        wide,
        modes,
        _missing(node, count),
        true,
        false,
        _sets(node, int((modes == MEMBER).sum()), wide.dtype),
        roots,
        leaves,
        targets,
        (np.arange(leaves), target, weights),
    )


def _children(node: Node, kind: str, count: int, leaves: int) -> Integers:
    name = f"nodes_{kind}nodeids"
    numbers_ = _integers(node, name, count)
    is_leaf = _integers(node, f"nodes_{kind}leafs", count) == 1
    _within(name, numbers_[is_leaf], leaves)
    _within(name, numbers_[~is_leaf], count)
    return np.where(is_leaf, numbers_ + count, numbers_)


def _sets(node: Node, count: int, dtype: "np.dtype[np.generic]") -> tuple[Tensor, ...]:
    """Split membership_values into sets, each of which ends with NaN."""
    values = node.tensor("membership_values", np.empty(0, dtype)).reshape(-1).astype(dtype)
    parts = np.split(values, np.flatnonzero(np.isnan(values)) + 1)
    found = tuple(part[~np.isnan(part)] for part in parts if part.size)
    if len(found) != count:
        raise InvalidModel(
            f"membership_values: expected {count} sets, one per node of mode MEMBER, got "
            f"{len(found)}"
        )
    return found
