"""Reads parameters from files of other programs, such as checkpoints.

Arrays are matched by the path of their leaf, `layers/0/weight` or `layers.0.weight`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np

from xlaserve.artifact import weights
from xlaserve.artifact.parameters import ROOT_NAME
from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor, datatype_of, describe

_SHOWN_NAMES = 8
_ORBAX_ITEM = "default"
"""Subdirectory of a step in which orbax's CheckpointManager stores a single item."""


def read(source: str) -> Mapping[str, Tensor]:
    """Return the arrays of a source such as `npz:weights.npz`, by path; raises InvalidModel."""
    kind, _, place = source.partition(":")
    if kind not in _READERS or not place:
        known = ", ".join(f"{name}:{what}" for name, (what, _) in _READERS.items())
        raise InvalidModel(f"--params: expected one of {known}, got '{source[:200]}'")
    path = Path(place)
    if not path.exists():
        raise InvalidModel(f"--params: '{place}' is missing")
    arrays: dict[str, Tensor] = {}
    for name, array in _READERS[kind][1](path).items():
        key = _key(name)
        if key in arrays:
            raise InvalidModel(f"--params: {source} has two arrays with the path '{key}'")
        arrays[key] = array
    return MappingProxyType(arrays)


def filled(params: object, source: str) -> object:
    """Replace the arrays of a parameter tree with those of a source.

    The tree's own arrays, which may be `jax.ShapeDtypeStruct`, give the expected shapes and dtypes.
    Raises InvalidModel that names the leaf, and the expected and actual shapes.
    """
    arrays = read(source)
    found, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [_name(path) for path, _ in found]
    taken: dict[int, str] = {}
    leaves: list[object] = []
    for name, (_, leaf) in zip(names, found, strict=True):
        if not _is_array(leaf):
            leaves.append(leaf)
            continue
        # A tied array occurs twice in the tree, but may be stored once.
        key = _key(name)
        key = key if key in arrays else taken.get(id(leaf), key)
        taken.setdefault(id(leaf), key)
        leaves.append(_checked(name, leaf, arrays, key, source))
    unknown = sorted(set(arrays) - set(map(_key, names)))
    if unknown:
        raise InvalidModel(
            f"--params: {source} has {_few(unknown)}, which are not parameters of the model"
        )
    return jax.tree.unflatten(tree, leaves)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or ROOT_NAME


def _key(name: str) -> str:
    return name.replace(".", "/")


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _checked(
    name: str, leaf: Any, arrays: Mapping[str, Tensor], key: str, source: str
) -> "Tensor | jax.Array":
    wanted = describe(leaf.dtype.name, leaf.shape)
    array = arrays.get(key)
    if array is None:
        raise InvalidModel(
            f"parameter '{name}' ({wanted}) is missing from {source}, which has "
            f"{_few(sorted(arrays))}"
        )
    # numpy stores dtypes that it does not know, such as bfloat16, as unnamed bytes (`V2`).
    row = datatype_of(leaf.dtype)
    if row is not None and not row.has_buffer and array.dtype == np.dtype(f"V{row.itemsize}"):
        array = array.view(leaf.dtype)
    if (array.dtype, array.shape) != (leaf.dtype, tuple(leaf.shape)):
        got = describe(array.dtype.name, array.shape)
        raise InvalidModel(f"parameter '{name}': expected {wanted}, got {got} from {source}")
    return array


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(f"'{name[:100]}'" for name in names[:_SHOWN_NAMES]) + more or "no array"


# --- file formats ------------------------------------------------------------------------------


def _of_npz(path: Path) -> dict[str, Tensor]:
    try:
        # Without pickle, an array of objects raises an error.
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, AttributeError, BadZipFile) as error:
        raise InvalidModel(f"--params: '{path}' is not an .npz file of arrays: {error}") from error


def _of_safetensors(path: Path) -> dict[str, Tensor]:
    return dict(weights.read(path.parent, path.name))


def _of_orbax(path: Path) -> dict[str, Tensor]:
    try:
        from orbax import checkpoint as orbax  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise InvalidModel(
            "--params: orbax:DIR requires orbax: pip install 'xlaserve[orbax]'"
        ) from None
    item = path / _ORBAX_ITEM
    place = (item if item.is_dir() else path).absolute()
    try:
        with orbax.PyTreeCheckpointer() as checkpointer:
            stored = checkpointer.metadata(place).item_metadata.tree
            # Restore unsharded arrays on the host, whatever devices they were saved from.
            whole = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), stored)
            restored = checkpointer.restore(place, restore_args=whole)
    # Orbax has no exception class of its own.
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise InvalidModel(
            f"--params: '{path}' is not a checkpoint that orbax can restore (expected the"
            f" directory of one step): {type(error).__name__}: {text}"
        ) from error
    return {
        _name(place): np.asarray(leaf)
        for place, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]
    }


_READERS: Mapping[str, tuple[str, Callable[[Path], dict[str, Tensor]]]] = MappingProxyType(
    {
        "npz": ("FILE", _of_npz),
        "safetensors": ("FILE", _of_safetensors),
        "orbax": ("DIR", _of_orbax),
    }
)
"""The supported formats, each with its argument and its reader."""
