"""Names a program's outputs after the structure of the module's result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from xlaserve.errors import InvalidModel

_VERSION = 1
_MAX_DEPTH = 32
_LONE = "output"


class _Tree(msgspec.Struct):
    type: str | None
    context: str | None
    children_spec: list["_Tree"]


def result_names(spec: str, fields: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a name for each leaf of a result: keys and indices, `output` for a lone tensor.

    `spec` is PyTorch's JSON of the result's structure, `fields` has the fields of named tuples.
    Raises InvalidModel for an invalid or unsupported spec.
    """
    try:
        version, tree = msgspec.json.decode(spec, type=tuple[int, _Tree])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidModel(f"its out_spec cannot be read: {error}") from None
    if version != _VERSION:
        raise InvalidModel(f"its out_spec has version {version}, expected {_VERSION}")
    leaves = list(_leaves(tree, fields, (), 0))
    if leaves == [()]:
        return [_LONE]
    names = ["_".join(path) if path and _is_key(path[0]) else _numbered(path) for path in leaves]
    for name in names:
        if names.count(name) > 1:
            raise InvalidModel(f"two of its outputs would have the name '{name}'")
    return names


def _numbered(path: Sequence[str]) -> str:
    return "_".join((_LONE, *path))


def _is_key(text: str) -> bool:
    return not text.isdecimal()


def _leaves(
    tree: _Tree, fields: Mapping[str, Sequence[str]], path: tuple[str, ...], depth: int
) -> Iterator[tuple[str, ...]]:
    if depth > _MAX_DEPTH:
        raise InvalidModel(f"its result is nested more than {_MAX_DEPTH} deep")
    if tree.type is None:
        yield path
        return
    count = len(tree.children_spec)
    keys = _keys(tree, fields)
    if keys is None or len(keys) != count:
        keys = [str(place) for place in range(count)]
    for key, child in zip(keys, tree.children_spec, strict=True):
        yield from _leaves(child, fields, (*path, key), depth + 1)


def _keys(tree: _Tree, fields: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Return the keys of a dict or the fields of a named tuple, or None for other types."""
    if not tree.context:
        return None
    try:
        context: Any = msgspec.json.decode(tree.context)
    except (msgspec.MsgspecError, RecursionError):
        return list(fields.get(tree.context, ())) or None
    if isinstance(context, str):
        return list(fields.get(context, ())) or None
    if isinstance(context, list) and context and isinstance(context[0], list):
        context = context[0]  # in transformers' ModelOutput the keys come first
    if not isinstance(context, list) or not all(isinstance(key, str | int) for key in context):
        return None
    return [str(key) for key in context]
