"""Values during tracing: known on the host, or arrays that JAX computes.

Shape arithmetic runs on the host, in numpy. Arrays with symbolic dimensions have dtype object;
their elements are Python integers and dimensions of jax.export. Most operators are written once,
for the API that numpy and jax.numpy share.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.tensors import Tensor

Value: TypeAlias = jax.Array | np.ndarray[Any, Any]
"""A numpy array if the elements are known, otherwise traced."""

Dimensions: TypeAlias = tuple[int, ...]
"""Sizes, which may be symbolic: JAX types symbolic dimensions as int."""

HOST_ELEMENTS = 65_536
"""Limit for computing a value on the host during tracing, because a small file could ask for any
amount."""


def is_host(value: Value | None) -> TypeGuard[Tensor]:
    """Tell whether the elements are known during tracing."""
    return isinstance(value, np.ndarray | np.generic)


def is_open(dimension: Any) -> bool:
    """Tell whether a dimension is symbolic, which its type does not show."""
    return jax.export.is_symbolic_dim(dimension)


def is_concrete(dimensions: Sequence[object]) -> bool:
    """Tell whether no dimension is symbolic."""
    return not any(map(is_open, dimensions))


def host_of(dimensions: Sequence[int]) -> Tensor:
    """Return dimensions as an INT64 array, or an object array if one is symbolic."""
    array = np.empty(len(dimensions), dtype=np.object_)
    array[:] = dimensions
    return array.astype(np.int64) if is_concrete(dimensions) else array


def settled(value: object) -> Value:
    """Normalise a result to an array: numpy returns scalars in place of 0-d arrays.

    An object array becomes INT64 if no element is symbolic.
    """
    if isinstance(value, jax.Array):
        return value
    array = value if isinstance(value, np.ndarray) else _element(value)
    if array.dtype == np.object_ and is_concrete(list(array.flat)):
        return array.astype(np.int64)
    return array


def _element(value: object) -> Tensor:
    if isinstance(value, np.generic):
        return np.asarray(value)
    array = np.empty((), dtype=np.object_)
    array[()] = value
    return array


def dimensions_of(value: Value) -> Dimensions:
    """Return the elements of a host value as dimensions."""
    if not is_host(value):
        raise InvalidModel("a shape depends on data, but XLA needs fixed shapes")
    return tuple(_dimension(item) for item in np.ravel(value))


def _dimension(item: Any) -> int:
    return item if is_open(item) else int(item)


def integers_of(value: Value) -> list[int]:
    """Return the elements of a host value as integers; raises InvalidModel if one is symbolic."""
    found = dimensions_of(value)
    if not is_concrete(found):
        raise InvalidModel(f"expected integers, got the dynamic dimensions {list(found)}")
    return list(found)


def scalar_of(value: Value) -> int:
    """Return the only element of a host value; it may be symbolic."""
    found = dimensions_of(value)
    if len(found) != 1:
        raise InvalidModel(f"expected one element, got {len(found)}")
    return found[0]


def on_device(value: Value) -> jax.Array:
    """Return a value as a JAX array; dimensions become INT64."""
    if is_host(value) and value.dtype == np.object_:
        elements = [jnp.asarray(item, dtype=jnp.int64) for item in value.flat]
        return jnp.stack(elements).reshape(value.shape)
    return jnp.asarray(value)


def placed(shape: Sequence[int], *values: Value) -> tuple[ModuleType, list[Value]]:
    """Choose numpy or jax.numpy for a result of this shape, and return it with converted values.

    numpy is used for small results with known inputs, so that shapes are computed during tracing.
    """
    on_host = all(map(is_host, values)) and is_concrete(shape)
    if on_host and math.prod(shape) <= HOST_ELEMENTS:
        return np, list(values)
    return jnp, [on_device(value) for value in values]


def broadcast_shape(*shapes: Sequence[int]) -> Dimensions:
    """Return the broadcast shape by numpy's rules; raises InvalidModel if there is none."""
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(_broadcast_size(sizes, shapes) for sizes in zip(*aligned, strict=True))


def _broadcast_size(sizes: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> int:
    found = [size for size in sizes if is_open(size) or size != 1]
    if any(size != found[0] for size in found):
        raise InvalidModel(f"the shapes {', '.join(map(str, shapes))} cannot be broadcast")
    return found[0] if found else 1


def aligned(*values: Value) -> tuple[ModuleType, list[Value]]:
    """Return the module to use, and the values with equal ranks, for an elementwise operation.

    Ranks are made equal explicitly because JAX may be configured to reject rank promotion.
    """
    shape = broadcast_shape(*(value.shape for value in values))
    module, ready = placed(shape, *values)
    return module, [with_rank(value, len(shape)) for value in ready]


def divided(x: jax.Array, divisor: Value) -> jax.Array:
    """Divide floats with correct IEEE 754 rounding.

    XLA replaces division by a constant with multiplication by its reciprocal, which can round a
    number halfway between two quantisation levels the wrong way. A divisor that depends on `x` is
    not constant.
    """
    exact: jax.Array = x / jnp.where(x == x, divisor, jnp.ones((), x.dtype))  # noqa: PLR0124
    return exact


def with_rank(value: Value, rank: int) -> Value:
    """Prepend dimensions of size 1 up to this rank."""
    return value.reshape((1,) * (rank - value.ndim) + value.shape)


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front; raises InvalidModel if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise InvalidModel(f"axis {axis} is out of range for a tensor of rank {rank}")
    return axis % rank if rank else 0
