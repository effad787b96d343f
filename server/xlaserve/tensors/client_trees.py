"""Trees of arrays as tensors named by their dotted paths: `pair.0`, `scale.by`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xlaserve.errors import InvalidRequest

_DOT = "."


def flattened(model: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten each dict, list or tuple of arrays in the inputs to its leaves.

    Raises InvalidRequest that names the input if a key cannot be part of a path or two leaves have
    the same name.
    """
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        leaves = _leaves(model, name, value) if _is_tree(value) else ((name, value),)
        for path, leaf in leaves:
            if path in found:
                raise InvalidRequest(f"model '{model}': two inputs are named '{path}'")
            found[path] = leaf
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Build a tree from outputs whose names are dotted paths.

    Branches with the keys 0, 1, ... become lists. If one output's name is a prefix of another's
    path, both keep their names.
    """
    whole = {name for name in values if any(other.startswith(name + _DOT) for other in values)}
    tree: dict[str, Any] = {}
    for name, value in values.items():
        path = name.split(_DOT)
        if "" in path or any(_DOT.join(path[:end]) in whole for end in range(1, len(path) + 1)):
            tree[name] = value
            continue
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, _Branch())
        branch[path[-1]] = value
    return {name: _lists(value) for name, value in tree.items()}


class _Branch(dict[str, Any]):
    """A branch of a tree, to distinguish it from values that are dicts."""


def _lists(value: Any) -> Any:
    if not isinstance(value, _Branch):
        return value
    inner = {name: _lists(each) for name, each in value.items()}
    if set(inner) == {str(place) for place in range(len(inner))}:
        return [inner[str(place)] for place in range(len(inner))]
    return inner


def _is_tree(value: object) -> bool:
    """Tell whether a value is a non-empty container whose leaves are all arrays."""
    if not isinstance(value, Mapping | list | tuple) or not value:
        return False
    inner: Sequence[object] = [*(value.values() if isinstance(value, Mapping) else value)]
    return all(_is_array(each) or _is_tree(each) for each in inner)


def _is_array(value: object) -> bool:
    """Tell whether a value is a numpy or JAX array; numpy scalars are not."""
    if isinstance(value, Mapping | list | tuple):
        return False
    return hasattr(value, "__array__") and not np.isscalar(value)


def _leaves(model: str, path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if _is_array(value):
        yield path, np.asarray(value)
        return
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, inner in pairs:
        part = str(key) if isinstance(key, int) else key
        if not isinstance(part, str) or not part or _DOT in part:
            raise InvalidRequest(
                f"model '{model}', input '{path}': expected string keys without dots, got {key!r}"
            )
        yield from _leaves(model, f"{path}{_DOT}{part}", inner)
