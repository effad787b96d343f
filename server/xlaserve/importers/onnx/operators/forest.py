"""Decision forests as tables: each node compares one column with a threshold.

A node compares a column with a threshold, `column <= threshold`, as integers. The integers are in
the order of the floats that they stand for, so that each comparison of floats is exact, denormals
included, and any other test is one or several of these: `x < t` is `x <= t - 1`, `x == t` is two. A
missing value has two columns: one in which it is the largest integer, one in which it is the
smallest, and the node that sends it to its true branch reads the second one.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

Integers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(7)
"""Modes of nodes, by the numbers that TreeEnsemble gives them."""

MAX_DEPTH = 1000
"""Most nodes on the way to a leaf."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Nodes and leaves as a model has them, those of all trees one after another.

    A child from the number of nodes on is a leaf, counted from there.
    """

    columns: Integers
    thresholds: Tensor
    """Values of the dtype in which they are compared."""
    modes: Integers
    sends_missing: Integers
    """Whether a missing value goes to the true branch, by node."""
    true: Integers
    false: Integers
    sets: tuple[Tensor, ...]
    """Values of the nodes whose mode is MEMBER, in their order."""
    roots: Integers
    leaves: int
    targets: int
    entries: tuple[Integers, Integers, Tensor]
    """Leaf, target and weight of each contribution to a target."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Tables of a forest, walked from the roots for a number of steps."""

    depth: int
    columns: int
    """Columns that are read, at least."""
    reads_missing: bool
    """Whether a node sends missing values to its true branch, so that columns are there twice."""
    trees: int
    targets: int
    has_score: tuple[int, ...]
    """Per target 1 if every row has a score, 0 if none has, -1 if it depends on the leaf."""
    grouped: bool
    """Whether each tree adds to one target alone, and the trees lie in groups of one size, a group
    for each target."""
    tables: dict[str, Tensor]


def keys_of(values: Tensor) -> Integers:
    """Return integers in the order of floats; NaN is above all others, and -0.0 equals 0.0."""
    signed = np.dtype(f"int{8 * values.dtype.itemsize}")
    bits = np.ascontiguousarray(values).view(signed)
    largest = np.iinfo(signed).max
    bits = np.where(bits == np.iinfo(signed).min, signed.type(0), bits)
    ordered = bits ^ ((bits >> (8 * values.dtype.itemsize - 1)) & largest)
    return np.where(np.isnan(values), largest, ordered).astype(signed)


# --- tests -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Nodes:
    """Nodes whose only test is `<=`."""

    columns: Integers
    thresholds: Integers
    sends_missing: Integers
    true: Integers
    false: Integers


def _uniform(trees: Trees) -> tuple[_Nodes, Integers]:
    """Return nodes with one test, and the roots. Children below 0 are leaves: -1 is the first."""
    nodes = len(trees.columns)
    true, false = (np.where(c >= nodes, nodes - 1 - c, c) for c in (trees.true, trees.false))
    roots = np.where(trees.roots >= nodes, nodes - 1 - trees.roots, trees.roots)
    keys = keys_of(trees.thresholds)
    lowest = _below_all(trees.thresholds.dtype)
    # Nothing is less than, greater than or equal to NaN; everything differs from it.
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
    """Return an integer below that of every number, and above the one for a missing value."""
    return keys_of(np.asarray([-np.inf], dtype))[0] - 1


def _with_sets(nodes: _Nodes, several: list[tuple[int, Integers]], lowest: Any) -> _Nodes:
    """Give nodes that ask for a set of keys a search tree instead."""
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
            """Return the node of the parts from low to high."""
            if low == high:
                return parts[low][1]
            middle = (low + high) // 2
            at = first + len(added)
            added.append((0, 0, False, 0, 0))
            children = build(low, middle), build(middle + 1, high)
            added[at - first] = (column, parts[middle][0], missing, *children)
            return at

        top = build(0, len(parts) - 1)
        # The node itself becomes the first one of its tree.
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
    """Return the parts of all integers by their last one, with the child that each leads to.

    A missing value that goes to the true branch is below `lowest`, any other above all keys.
    """
    parts = [] if lowest is None else [(lowest, true)]
    for key in map(int, np.unique(keys[keys != np.iinfo(keys.dtype).max])):
        if not parts or parts[-1][0] < key - 1:
            parts.append((key - 1, false))
        parts.append((key, true))
    return [*parts, (np.iinfo(keys.dtype).max, false)]


# --- tables ------------------------------------------------------------------------------------


def forest_of(trees: Trees, *, groups: bool) -> Forest:
    """Return the tables of a forest; raises InvalidModel where its nodes make no trees.

    With `groups` trees may be put into another order, and more of them that add nothing.
    """
    nodes, roots = _uniform(trees)
    depth = _depth(nodes, roots)
    count = len(nodes.columns)
    reads_missing = bool(nodes.sends_missing.any())
    columns = nodes.columns * 2 + nodes.sends_missing if reads_missing else nodes.columns
    # A leaf leads to itself, whatever it reads.
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
    """Table of nodes followed by leaves, which lead to themselves; a walk reads it."""

    columns: Integers
    thresholds: Integers
    true: Integers
    false: Integers
    roots: Integers

    def with_nothing(self, roots: Integers) -> "_Walk":
        """Return it from other roots, and with one more leaf."""
        place = len(self.columns)
        ways = np.append(self.true, place), np.append(self.false, place)
        return _Walk(np.append(self.columns, 0), np.pad(self.thresholds, (0, 1)), *ways, roots)

    def tables(self, leaves: int) -> dict[str, Tensor]:
        """Return the tables of a walk, the last places of which are so many leaves.

        One table where the children of each node lie side by side and its numbers fit into 64 bits,
        else two or three of them.
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
        """Return one table of thresholds, columns and true children, and which leaf a place is.

        None for other thresholds than FP32's, and for nodes that several lead to.
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
        # No key is above the threshold of a leaf.
        thresholds = np.where(order < nodes, self.thresholds[order], np.iinfo(np.int32).max)
        below = self.columns[order] << bits | places[self.true[order]]
        return {
            "nodes": _packed(thresholds, below),
            "leaves": np.maximum(order - nodes, 0).astype(np.int32),
            "roots": places[self.roots].astype(np.int32),
        }

    def _order(self, leaves: int) -> Integers | None:
        """Return all that a walk can reach with the false child of each node behind the true one.

        None where several nodes lead to one: it cannot lie beside two others.
        """
        nodes = len(self.columns) - leaves
        level = np.unique(self.roots)
        levels, reached = [level], np.zeros(len(self.columns), np.bool_)
        while level.size:
            # Where nodes share what is below them, ways double from level to level.
            if reached[level].any() or len(np.unique(level)) < len(level):
                return None
            reached[level] = True
            above = level[level < nodes]
            level = np.stack([self.true[above], self.false[above]], axis=1).reshape(-1)
            levels.append(level)
        return np.concatenate(levels)


_HALF = 32
"""The bits of the column and the child of a node."""


def child_bits(nodes: int) -> int:
    """Return how many of the lowest bits of a node are its true child."""
    return (nodes - 1).bit_length()


def _packed(high: Integers, low: Integers) -> Integers:
    """Return two integers of 32 bits as one of 64: a walk looks up both at once."""
    found: Integers = (high.astype(np.int64) << 32) | (low.astype(np.int64) & 0xFFFFFFFF)
    return found


def _depth(nodes: _Nodes, roots: Integers) -> int:
    """Return the most nodes on the way to a leaf; raises InvalidModel for a way without an end."""
    level = np.unique(roots[roots >= 0])
    depth = 0
    while level.size:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidModel(
                f"a tree is deeper than {MAX_DEPTH} nodes, or its nodes lead in a circle"
            )
        below = np.concatenate([nodes.true[level], nodes.false[level]])
        level = np.unique(below[below >= 0])
    return depth


def _trees_of(nodes: _Nodes, roots: Integers, leaves: int) -> Integers:
    """Return the number of the tree of each leaf; -1 for none."""
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
    # A sum needs it to know who has a score, an extreme to know what is there.
    if (has_score < 0).any() or not (groups or present.all()):
        tables["present"] = present
    return replace(forest, has_score=tuple(map(int, has_score)), tables=tables)


@dataclass(frozen=True, slots=True)
class _ByTree:
    """Whether leaves of a tree add to a target."""

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
    """Return the roots by target, each of which has as many; None unless that is worth it.

    Groups are filled up with a leaf that adds nothing.
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
