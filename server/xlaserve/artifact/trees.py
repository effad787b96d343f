"""Names of the arrays in nested inputs and outputs: `a.b.0` for `{"a": {"b": [array]}}`."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
)

from xlaserve.artifact.manifest import MAX_NAME_LENGTH
from xlaserve.errors import InvalidModel

SEPARATOR = "."


@dataclass(frozen=True, slots=True)
class Nesting:
    """The tree structures of a function's arguments; their leaves are the inputs, in order."""

    trees: tuple[Any, ...]

    def arguments(self, leaves: Sequence[object]) -> list[object]:
        """Return the arguments with these arrays as leaves."""
        rest = iter(leaves)
        return [tree.unflatten([next(rest) for _ in range(tree.num_leaves)]) for tree in self.trees]


def flatten_inputs(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Nesting]:
    """Flatten described inputs to leaves by name, and return the arguments' structures.

    A leaf starts with a datatype, as in `("FP32", [-1, 4])`. Raises InvalidModel.
    """
    flat: list[tuple[str, Any]] = []
    trees = []
    for name, described in inputs.items():
        found, tree = _flattened("input", name, described, is_described)
        if not found:
            raise InvalidModel(f"input '{name}' has no array")
        flat += [(_joined("input", (name, *_texts(path))), leaf) for path, leaf in found]
        trees.append(tree)
    if flat:
        check_names("input", [name for name, _ in flat])
    _check_dots("input", inputs, flat)
    return dict(flat), Nesting(tuple(trees))


def flatten_outputs(outputs: Mapping[str, object]) -> dict[str, object]:
    """Flatten a function's results to leaves by name; raises InvalidModel."""
    flat: list[tuple[str, object]] = []
    for name, value in outputs.items():
        found, _ = _flattened("output", name, value)
        # None flattens to no leaves, but an output must not be None.
        leaves = found or [((), value)]
        flat += [(_joined("output", (name, *_texts(path))), leaf) for path, leaf in leaves]
    check_names("output", [name for name, _ in flat])
    _check_dots("output", outputs, flat)
    return dict(flat)


def names_of_arguments(in_tree: Any) -> list[str]:
    """Return the names of the leaves of `(args, kwargs)`, in JAX's order.

    A single dict argument names them by its keys, keyword arguments by their names; all others are
    `input_0` and so on. Raises InvalidModel.
    """
    args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    is_one_dict = len(args) == 1 and not kwargs and isinstance(args[0], Mapping)
    return _names("input", [args[0]] if is_one_dict else [args, kwargs])


def names_of_results(out_tree: Any) -> list[str]:
    """Return the names of a result's leaves: the keys of a dict, or `output_0` and so on.

    Raises InvalidModel.
    """
    return _names("output", [jax.tree.unflatten(out_tree, range(out_tree.num_leaves))])


def check_names(kind: str, names: Sequence[str]) -> None:
    """Raise InvalidModel for missing, overlong or duplicate names."""
    if not names:
        raise InvalidModel(f"expected at least one {kind}, got a tree without arrays")
    for name in names:
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise InvalidModel(
                f"one {kind}: expected a name of 1 to {MAX_NAME_LENGTH} characters, got {len(name)}"
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidModel(f"two {kind}s have the name '{twice}'; rename a key of their tree")


def _flattened(
    kind: str, name: str, tree: object, is_leaf: Callable[[object], bool] | None = None
) -> tuple[Any, Any]:
    try:
        return tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError as error:
        # JAX sorts the keys of a dict, which fails for keys of mixed types.
        raise InvalidModel(
            f"{kind} '{name}' is not a pytree that JAX can flatten: {error}"
        ) from error


def _names(kind: str, trees: Sequence[object]) -> list[str]:
    paths = [path for tree in trees for path, _ in tree_flatten_with_path(tree)[0]]
    texts = [list(_path_texts(kind, path)) for path in paths]
    is_nested = any(len(path) > 1 for path in texts)
    for path in texts:
        for key in path if is_nested else ():
            _check_key(kind, key)
    names = [SEPARATOR.join(path) for path in texts]
    check_names(kind, names)
    return names


def _path_texts(kind: str, path: Sequence[Any]) -> Iterator[str]:
    """Yield the parts of a name; an index in first position gets a prefix, as in `input_0`."""
    if not path:
        yield f"{kind}_0"
    for depth, (key, text) in enumerate(zip(path, _texts(path), strict=True)):
        is_position = isinstance(key, SequenceKey | FlattenedIndexKey)
        yield f"{kind}_{text}" if is_position and not depth else text


def _texts(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(_text(key) for key in path)


def _text(key: Any) -> str:
    match key:
        case SequenceKey():
            return str(key.idx)
        case GetAttrKey():
            return str(key.name)
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case _:
            return str(key)


def is_described(value: object) -> bool:
    """Tell whether a value is the description of one input, valid or not, rather than a tree."""
    if isinstance(value, Mapping) or value is None:
        return False
    begin = value[0] if isinstance(value, tuple | list) and value else ""
    return isinstance(begin, str | type | np.dtype)


def _joined(kind: str, path: tuple[str, ...]) -> str:
    for key in path if len(path) > 1 else ():
        _check_key(kind, key)
    return SEPARATOR.join(path)


def _check_dots(kind: str, given: Mapping[str, object], flat: Sequence[tuple[str, Any]]) -> None:
    """Raise InvalidModel if a name with a dot may be confused with a nested name."""
    if [name for name, _ in flat] != list(given):
        for name in given:
            _check_key(kind, name)


def _check_key(kind: str, key: str) -> None:
    if not key or SEPARATOR in key:
        raise InvalidModel(
            f"{kind} '{key}': expected a non-empty key without '{SEPARATOR}', which joins nested"
            " keys; rename it"
        )
