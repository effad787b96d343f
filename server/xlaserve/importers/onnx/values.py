"""Values while a graph is traced: known on the host, or arrays that JAX computes.

Shape arithmetic happens on the host, in numpy arrays. One that holds a symbolic dimension has the
dtype object, whose elements are Python integers and dimensions of jax.export. So an operator is
written once, against what numpy and jax.numpy have in common.
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
"""A host value if it is of numpy, else traced."""

Dimensions: TypeAlias = tuple[int, ...]
"""Sizes. JAX calls its symbolic dimensions integers as well, and they calculate like them."""

HOST_ELEMENTS = 65_536
"""More than that is not computed on the host while a graph is traced: a small file could ask for
any amount."""


def is_host(value: Value | None) -> TypeGuard[Tensor]:
    """Tell whether the elements are known while the graph is traced."""
    return isinstance(value, np.ndarray | np.generic)


def is_open(dimension: Any) -> bool:
    """Tell whether a dimension is symbolic, though JAX gives it the type of an integer."""
    return jax.export.is_symbolic_dim(dimension)


def is_concrete(dimensions: Sequence[object]) -> bool:
    """Tell whether no dimension is symbolic."""
    return not any(map(is_open, dimensions))


def host_of(dimensions: Sequence[int]) -> Tensor:
    """Return dimensions as a value of INT64: an array of objects if one is symbolic."""
    array = np.empty(len(dimensions), dtype=np.object_)
    array[:] = dimensions
    return array.astype(np.int64) if is_concrete(dimensions) else array


def settled(value: object) -> Value:
    """Return a result as a value: numpy gives an element instead of an array without dimensions.

    It is INT64 once all of its elements are concrete.
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
        raise InvalidModel("a shape depends on the data, but it must be known before")
    return tuple(_dimension(item) for item in np.ravel(value))


def _dimension(item: Any) -> int:
    return item if is_open(item) else int(item)


def integers_of(value: Value) -> list[int]:
    """Return the elements of a host value as integers, none of which is symbolic."""
    found = dimensions_of(value)
    if not is_concrete(found):
        raise InvalidModel(f"expected integers, got the open dimensions {list(found)}")
    return list(found)


def scalar_of(value: Value) -> int:
    """Return the only element of a host value, possibly symbolic."""
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
    """Return numpy or jax.numpy, and the values as it takes them, for a result of this shape.

    Numpy is for what is known now and small, so that no shape is left to be computed.
    """
    on_host = all(map(is_host, values)) and is_concrete(shape)
    if on_host and math.prod(shape) <= HOST_ELEMENTS:
        return np, list(values)
    return jnp, [on_device(value) for value in values]


def broadcast_shape(*shapes: Sequence[int]) -> Dimensions:
    """Return the broadcast shape of these shapes, by numpy's rule.

    Raises InvalidModel where two sizes differ and none is 1.
    """
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(_broadcast_size(sizes, shapes) for sizes in zip(*aligned, strict=True))


def _broadcast_size(sizes: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> int:
    found = [size for size in sizes if is_open(size) or size != 1]
    if any(size != found[0] for size in found):
        raise InvalidModel(f"the shapes {', '.join(map(str, shapes))} cannot be broadcast")
    return found[0] if found else 1


def aligned(*values: Value) -> tuple[ModuleType, list[Value]]:
    """Return values of one rank, ready for an elementwise operation, and the module to use.

    The ranks are made equal here, because JAX may be configured not to do it.
    """
    shape = broadcast_shape(*(value.shape for value in values))
    module, ready = placed(shape, *values)
    return module, [with_rank(value, len(shape)) for value in ready]


def divided(x: jax.Array, divisor: Value) -> jax.Array:
    """Divide floats, each quotient rounded once as IEEE 754 has it.

    XLA multiplies with the reciprocal of a divisor that it knows, so that a number half-way between
    two levels of a quantisation goes to the other one. What depends on `x` it does not know.
    """
    exact: jax.Array = x / jnp.where(x == x, divisor, jnp.ones((), x.dtype))  # noqa: PLR0124
    return exact


def with_rank(value: Value, rank: int) -> Value:
    """Prepend dimensions of size 1 up to this rank."""
    return value.reshape((1,) * (rank - value.ndim) + value.shape)


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front; raises InvalidModel if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise InvalidModel(f"there is no axis {axis} in {rank} dimensions")
    return axis % rank if rank else 0
