"""Flattens a pytree of parameters into named arrays, and restores the tree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

_NARROW = {np.dtype(wide): narrow for wide, narrow in (("i8", "i4"), ("u8", "u4"), ("f8", "f4"))}

ROOT_NAME = "params"
"""Name of the parameter if the tree is a single array."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """How one leaf of the tree is restored."""

    index: int | None
    """Index of the leaf's array; None if the leaf is not an array."""
    key_impl: str | None = None
    """PRNG implementation if the leaf is a random key, whose words are stored in the array;
    otherwise None."""
    constant: object = None


@dataclass(frozen=True, slots=True)
class Parameters:
    """The arrays of a pytree by name, in order, with the structure of the tree."""

    arrays: Mapping[str, Tensor]
    """Arrays by path, such as `layers/0/weight`. A tied array is stored once."""
    weak_types: tuple[bool, ...]
    """Whether each array has a weak type, as Python numbers have."""
    _slots: tuple[_Slot, ...]
    _assemble: Callable[[Sequence[object]], object]

    def unflatten(self, arrays: Sequence["jax.Array | Tensor"]) -> object:
        """Return the tree with its arrays replaced by these, which may be tracers."""
        return self._assemble([_leaf(slot, arrays) for slot in self._slots])


def flatten(params: object, *, x64: bool) -> Parameters:
    """Name every array of a pytree; other leaves are kept as constants.

    Without `x64`, 64-bit arrays are narrowed to 32 bits, as jit does. A random key is stored as its
    words. Raises InvalidModel if two paths have the same name, if a dtype is not numeric, or if an
    array has no values (`jax.ShapeDtypeStruct`).
    """
    arrays: dict[str, Tensor] = {}
    weak_types: list[bool] = []
    seen: dict[int, int] = {}
    slots: list[_Slot] = []
    found, tree = jax.tree_util.tree_flatten_with_path(params)
    for path, leaf in found:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or ROOT_NAME
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise InvalidModel(
                f"parameter '{name}' has a shape but no values: read them from a file with"
                " `xlaserve export --params`"
            )
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            slots.append(_Slot(None, constant=leaf))
            continue
        if id(leaf) not in seen:
            if name in arrays:
                raise InvalidModel(f"two parameters have the path '{name}'")
            seen[id(leaf)] = len(arrays)
            arrays[name] = _words(name, leaf, x64=x64)
            weak_types.append(bool(getattr(leaf, "weak_type", False)))
        slots.append(_Slot(seen[id(leaf)], _key_impl(leaf)))
    return Parameters(
        MappingProxyType(arrays), tuple(weak_types), tuple(slots), partial(jax.tree.unflatten, tree)
    )


def has_64_bit(params: object) -> bool:
    """Tell whether any array of a pytree has a 64-bit dtype."""
    return any(
        leaf.dtype.itemsize == 8 and leaf.dtype.kind in "iuf"
        for leaf in jax.tree.leaves(params)
        if isinstance(leaf, np.ndarray | np.generic)
        or (isinstance(leaf, jax.Array) and not _is_key(leaf))
    )


def _is_key(leaf: object) -> TypeGuard[jax.Array]:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: "jax.Array | Tensor | np.generic") -> str | None:
    return str(jax.random.key_impl(leaf)) if _is_key(leaf) else None


def _words(name: str, leaf: "jax.Array | Tensor | np.generic", *, x64: bool) -> Tensor:
    if _is_key(leaf):
        return np.asarray(jax.random.key_data(leaf))
    array: np.ndarray[Any, Any] = np.asarray(leaf)
    if array.dtype.kind in "OSUMmc":
        raise InvalidModel(f"parameter '{name}' has dtype {array.dtype}, expected numbers")
    return array if x64 else array.astype(_NARROW.get(array.dtype, array.dtype), copy=False)


def _leaf(slot: _Slot, arrays: Sequence["jax.Array | Tensor"]) -> object:
    if slot.index is None:
        return slot.constant
    array = arrays[slot.index]
    if slot.key_impl is None:
        return array
    return jax.random.wrap_key_data(jnp.asarray(array), impl=slot.key_impl)
