"""Decision forests as tables in which each node compares one column with a threshold.

All comparisons are `column <= threshold` on integers. The integers have the order of the floats
that they represent, so comparisons are exact, including denormals, and other tests can be reduced
to this one: `x < t` is `x <= t - 1`, and `x == t` takes two comparisons. If any node sends missing
values to its true branch, each column is stored twice: a missing value is the largest integer in
the first copy and the smallest in the second, which such nodes read.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

Integers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(7)
"""Comparison modes, with the numbers of TreeEnsemble."""

MAX_DEPTH = 1000
"""Maximum number of nodes on the path to a leaf."""


@dataclass(frozen=True, slots=True)
class Trees:
    """The nodes and leaves of all trees, concatenated, as read from a model.

    A child index from the number of nodes on is a leaf, counted from there.
    """

    columns: Integers
    thresholds: Tensor
    """Thresholds, in the dtype of the comparison."""
    modes: Integers
    sends_missing: Integers
    """Whether each node sends missing values to its true branch."""
    true: Integers
    false: Integers
    sets: tuple[Tensor, ...]
    """The sets of values of the MEMBER nodes, in order."""
    roots: Integers
    leaves: int
    targets: int
    entries: tuple[Integers, Integers, Tensor]
    """Leaf, target and weight of each contribution to a target."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Tables of a forest; a traversal takes `depth` steps from the roots."""

    depth: int
    columns: int
    """Minimum number of input columns."""
    reads_missing: bool
    """Whether some node sends missing values to its true branch, so that columns are duplicated."""
    trees: int
    targets: int
    has_score: tuple[int, ...]
    """For each target: 1 if every row has a score, 0 if none has, -1 if it depends on the leaf."""
    grouped: bool
    """Whether each tree contributes to one target only, with the trees in equal-sized groups, one
    per target."""
    tables: dict[str, Tensor]


def keys_of(values: Tensor) -> Integers:
    """Return integers in the order of the floats; NaN is above all others, -0.0 equals 0.0."""
    signed = np.dtype(f"int{8 * values.dtype.itemsize}")
    bits = np.ascontiguousarray(values).view(signed)
    largest = np.iinfo(signed).max
    bits = np.where(bits == np.iinfo(signed).min, signed.type(0), bits)
    ordered = bits ^ ((bits >> (8 * values.dtype.itemsize - 1)) & largest)
    return np.where(np.isnan(values), largest, ordered).astype(signed)


# --- Comparisons -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Nodes:
    """Nodes that all test `<=`."""

    columns: Integers
    thresholds: Integers
    sends_missing: Integers
    true: Integers
    false: Integers


def _uniform(trees: Trees) -> tuple[_Nodes, Integers]:
    """Reduce all tests to `<=`; return the nodes and the roots.

    Leaves have negative indices from -1.
    """
    nodes = len(trees.columns)
    true, false = (np.where(c >= nodes, nodes - 1 - c, c) for c in (trees.true, trees.false))
    roots = np.where(trees.roots >= nodes, nodes - 1 - trees.roots, trees.roots)
    keys = keys_of(trees.thresholds)
    lowest = _below_all(trees.thresholds.dtype)
    # Comparisons with NaN are false, except `!=`.
    modes, never = trees.modes, np.isnan(trees.thresholds) & (trees.modes != MEMBER)
    swapped = np.isin(modes, (GT, GTE)) & ~never | (modes == NEQ)
    missing = np.where(swapped, ~trees.sends_missing & (modes != NEQ), trees.sends_missing)
    true, false = np.where(swapped, false, true), np.where(swapped, true, false)
    strict = np.isin(modes, (LT, GTE))
    keys = np.where(never, lowest, keys - strict.astype(keys.dtype))
    made = _Nodes(trees.columns, keys, missing, true, false)
    sets = iter(trees.sets)
    several = [
        (int(at), keys_of(next(sets)) if modes[at] == MEMBER else keys[at : at + 1])
        for at in np.flatnonzero(np.isin(modes, (EQ, NEQ, MEMBER)) & ~never)
    ]
    return _with_sets(made, several, lowest), roots


def _below_all(dtype: "np.dtype[Any]") -> Any:
    """Return a key below that of -inf, but above the smallest key of a missing value."""
    return keys_of(np.asarray([-np.inf], dtype))[0] - 1


def _with_sets(nodes: _Nodes, several: list[tuple[int, Integers]], lowest: Any) -> _Nodes:
    """Replace each node that tests for a set of keys by a search tree."""
    added: list[tuple[int, int, bool, int, int]] = []
    first = len(nodes.columns)
    changed: dict[int, tuple[int, int, bool, int, int]] = {}
    for at, keys in several:
        true, false = int(nodes.true[at]), int(nodes.false[at])
        column, missing = int(nodes.columns[at]), bool(nodes.sends_missing[at])
        parts = _parts(keys, true, false, lowest=int(lowest) if missing else None)

        def build(
            low: int,
            high: int,
            parts: list[tuple[int, int]] = parts,
            column: int = column,
            missing: bool = missing,
        ) -> int:
            """Return the root of a subtree for the intervals from low to high."""
            if low == high:
                return parts[low][1]
            middle = (low + high) // 2
            at = first + len(added)
            added.append((0, 0, False, 0, 0))
            children = build(low, middle), build(middle + 1, high)
            added[at - first] = (column, parts[middle][0], missing, *children)
            return at

        top = build(0, len(parts) - 1)
        # The root of the search tree replaces the node.
        changed[at] = added[top - first]
    if not several:
        return nodes
    return _Nodes(
        *(
            _joined(column, place, changed, added)
            for place, column in enumerate(
                (nodes.columns, nodes.thresholds, nodes.sends_missing, nodes.true, nodes.false)
            )
        )
    )


def _joined(
    column: Integers,
    place: int,
    changed: dict[int, tuple[int, int, bool, int, int]],
    added: list[tuple[int, int, bool, int, int]],
) -> Integers:
    found = np.concatenate([column, np.asarray([one[place] for one in added], column.dtype)])
    for at, one in changed.items():
        found[at] = one[place]
    return found


def _parts(keys: Integers, true: int, false: int, *, lowest: int | None) -> list[tuple[int, int]]:
    """Split the integers into intervals; return the end of each and the child it leads to.

    With `lowest`, missing values are below it and lead to the true branch; otherwise they are above
    all keys.
    """
    parts = [] if lowest is None else [(lowest, true)]
    for key in map(int, np.unique(keys[keys != np.iinfo(keys.dtype).max])):
        if not parts or parts[-1][0] < key - 1:
            parts.append((key - 1, false))
        parts.append((key, true))
    return [*parts, (np.iinfo(keys.dtype).max, false)]


# --- Tables ------------------------------------------------------------------------------------


def forest_of(trees: Trees, *, groups: bool) -> Forest:
    """Return the tables of a forest; raises InvalidModel if its nodes form no trees.

    With `groups`, trees may be reordered and empty trees added.
    """
    nodes, roots = _uniform(trees)
    depth = _depth(nodes, roots)
    count = len(nodes.columns)
    reads_missing = bool(nodes.sends_missing.any())
    columns = nodes.columns * 2 + nodes.sends_missing if reads_missing else nodes.columns
    # Leaves are their own children, so further steps stay there.
    leaves = np.arange(count, count + trees.leaves)
    true, false = (
        np.concatenate([np.where(c < 0, count - 1 - c, c), leaves])
        for c in (nodes.true, nodes.false)
    )
    padding = (0, trees.leaves)
    walk = _Walk(
        np.pad(columns, padding).astype(np.int64),
        np.pad(nodes.thresholds, padding),
        true,
        false,
        np.where(roots < 0, count - 1 - roots, roots),
    )
    forest = Forest(
        depth,
        int(nodes.columns.max(initial=-1)) + 1,
        reads_missing,
        len(roots),
        trees.targets,
        (),
        grouped=False,
        tables={},
    )
    return _with_weights(trees, forest, walk, _trees_of(nodes, roots, trees.leaves), groups=groups)


@dataclass(frozen=True, slots=True)
class _Walk:
    """The nodes and then the leaves, which are their own children."""

    columns: Integers
    thresholds: Integers
    true: Integers
    false: Integers
    roots: Integers

    def with_nothing(self, roots: Integers) -> "_Walk":
        """Return the walk with other roots and an additional leaf, which contributes nothing."""
        place = len(self.columns)
        ways = np.append(self.true, place), np.append(self.false, place)
        return _Walk(np.append(self.columns, 0), np.pad(self.thresholds, (0, 1)), *ways, roots)

    def tables(self, leaves: int) -> dict[str, Tensor]:
        """Return the tables of the walk, whose last `leaves` entries are leaves.

        There is one table if siblings can be adjacent and a node's numbers fit into 64 bits,
        otherwise two or three.
        """
        side_by_side = self._side_by_side(leaves)
        if side_by_side is not None:
            return side_by_side
        if self.thresholds.dtype == np.int32:
            tests = {"tests": _packed(self.columns, self.thresholds)}
        else:
            tests = {"columns": self.columns.astype(np.int32), "thresholds": self.thresholds}
        children = _packed(self.true, self.false)
        return {**tests, "children": children, "roots": self.roots.astype(np.int32)}

    def _side_by_side(self, leaves: int) -> dict[str, Tensor] | None:
        """Return a table of packed nodes with adjacent siblings, and the leaf number of each entry.

        Return None for FP64 thresholds, for nodes with several parents, and if a node does not fit
        into 64 bits.
        """
        order = self._order(leaves)
        if order is None or self.thresholds.dtype != np.int32 or not order.size:
            return None
        nodes = len(self.columns) - leaves
        places = np.zeros(len(self.columns), np.int64)
        places[order] = np.arange(len(order))
        bits = child_bits(len(order))
        if bits + int(self.columns.max()).bit_length() > _HALF:
            return None
        # A leaf's threshold is the largest key, so that the comparison is always true.
        thresholds = np.where(order < nodes, self.thresholds[order], np.iinfo(np.int32).max)
        below = self.columns[order] << bits | places[self.true[order]]
        return {
            "nodes": _packed(thresholds, below),
            "leaves": np.maximum(order - nodes, 0).astype(np.int32),
            "roots": places[self.roots].astype(np.int32),
        }

    def _order(self, leaves: int) -> Integers | None:
        """Return all reachable nodes in an order in which a false child follows its true sibling.

        Return None if a node has several parents, as it cannot be next to two siblings.
        """
        nodes = len(self.columns) - leaves
        level = np.unique(self.roots)
        levels, reached = [level], np.zeros(len(self.columns), np.bool_)
        while level.size:
            # With shared children the number of paths could double at each level.
            if reached[level].any() or len(np.unique(level)) < len(level):
                return None
            reached[level] = True
            above = level[level < nodes]
            level = np.stack([self.true[above], self.false[above]], axis=1).reshape(-1)
            levels.append(level)
        return np.concatenate(levels)


_HALF = 32
"""Number of bits for a node's column and child together."""


def child_bits(nodes: int) -> int:
    """Return the number of low bits of a node that hold its true child."""
    return (nodes - 1).bit_length()


def _packed(high: Integers, low: Integers) -> Integers:
    """Pack two 32-bit integers into one of 64 bits, so that one lookup reads both."""
    found: Integers = (high.astype(np.int64) << 32) | (low.astype(np.int64) & 0xFFFFFFFF)
    return found


def _depth(nodes: _Nodes, roots: Integers) -> int:
    """Return the number of nodes on the longest path; raises InvalidModel for a cycle."""
    level = np.unique(roots[roots >= 0])
    depth = 0
    while level.size:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidModel(
                f"a tree is deeper than {MAX_DEPTH} nodes, or its nodes form a cycle"
            )
        below = np.concatenate([nodes.true[level], nodes.false[level]])
        level = np.unique(below[below >= 0])
    return depth


def _trees_of(nodes: _Nodes, roots: Integers, leaves: int) -> Integers:
    """Return the tree number of each leaf; -1 if unreachable."""
    count = len(nodes.columns)
    found = np.full(count + leaves, -1)
    level = np.where(roots < 0, count - 1 - roots, roots)
    found[level] = np.arange(len(roots))
    level = level[level < count]
    while level.size:
        below = []
        for children in (nodes.true, nodes.false):
            child = np.where(children[level] < 0, count - 1 - children[level], children[level])
            found[child] = found[level]
            below.append(child[child < count])
        level = np.unique(np.concatenate(below))
    return found[count:]


def _with_weights(
    trees: Trees, forest: Forest, walk: _Walk, owners: Integers, *, groups: bool
) -> Forest:
    nothing = len(walk.columns)
    leaf, target, weight = trees.entries
    present = np.zeros((trees.leaves, trees.targets), np.bool_)
    present[leaf, target] = True
    by_tree = _alike(present, owners, forest.trees)
    has_score = np.where(by_tree.all_of.any(axis=0), 1, np.where(by_tree.any_of.any(axis=0), -1, 0))
    if groups and trees.targets > 1 and (has_score == 1).all():
        grouped = _groups(by_tree.any_of, walk.roots, nothing=nothing)
        if grouped is not None:
            values = np.zeros(trees.leaves + 1, weight.dtype)
            np.add.at(values, leaf, weight)
            tables = walk.with_nothing(grouped).tables(len(values)) | {"weights": values}
            return replace(forest, has_score=(1,) * trees.targets, grouped=True, tables=tables)
    values = np.zeros((trees.leaves, trees.targets), weight.dtype)
    np.add.at(values, (leaf, target), weight)
    tables = walk.tables(trees.leaves) | {"weights": values}
    # Sums need this table to tell which targets have a score; minimum and maximum need it to skip
    # the rest.
    if (has_score < 0).any() or not (groups or present.all()):
        tables["present"] = present
    return replace(forest, has_score=tuple(map(int, has_score)), tables=tables)


@dataclass(frozen=True, slots=True)
class _ByTree:
    """Whether any, and whether all, leaves of a tree contribute to a target."""

    any_of: Integers
    all_of: Integers


def _alike(present: Integers, owners: Integers, trees: int) -> _ByTree:
    any_of = np.zeros((trees, present.shape[1]), np.bool_)
    some_not = np.zeros_like(any_of)
    reached = owners >= 0
    np.logical_or.at(any_of, owners[reached], present[reached])
    np.logical_or.at(some_not, owners[reached], ~present[reached])
    return _ByTree(any_of, any_of & ~some_not)


def _groups(adds: Integers, starts: Integers, *, nothing: int) -> Integers | None:
    """Return the roots grouped by target, in groups of equal size.

    Smaller groups are filled with a leaf that adds nothing. Return None if a tree adds to several
    targets, or if filling would more than double the number of trees.
    """
    if (adds.sum(axis=1) != 1).any():
        return None
    counts = adds.sum(axis=0)
    if counts.max() * len(counts) > 2 * len(starts):
        return None
    found = np.full((len(counts), counts.max()), nothing)
    for target, of in enumerate(adds.T):
        found[target, : counts[target]] = starts[of]
    return found.reshape(-1)
