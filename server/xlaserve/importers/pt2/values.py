"""Values during tracing: JAX arrays, and numbers that may be symbolic.

Dtypes are promoted by PyTorch's rules: tensors with dimensions take precedence over 0-d tensors,
and those over Python numbers, unless the lower one is of a higher kind (bool < integer < float).
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel

Number: TypeAlias = bool | int | float
"""A Python number, or a symbolic dimension."""

Operand: TypeAlias = jax.Array | Number
Dtype: TypeAlias = np.dtype[Any]

_KINDS = "bif"
"""Kinds of dtypes in ascending order; unsigned integers are integers, and bfloat16 is a float."""

FLOAT = np.dtype(np.float32)
_INTEGER = np.dtype(np.int64)


class NotComputed:
    """A placeholder for a result that only a backward pass needs; reading it is an error."""


NOT_COMPUTED = NotComputed()


def is_open(value: Any) -> bool:
    """Tell whether a number is a symbolic dimension."""
    return jax.export.is_symbolic_dim(value)


def is_floating(dtype: Dtype) -> bool:
    """Tell whether a dtype is a floating-point type."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _rank(dtype: Dtype) -> int:
    if is_floating(dtype):
        return _KINDS.index("f")
    return _KINDS.index("b" if dtype == np.bool_ else "i")


def number_dtype(value: Number) -> Dtype:
    """Return the dtype of the tensor that PyTorch makes of this number."""
    if isinstance(value, bool | np.bool_):
        return np.dtype(np.bool_)
    if isinstance(value, float):
        return FLOAT
    return _INTEGER


def common_dtype(*operands: Operand) -> Dtype:
    """Return the dtype to which an operator promotes its operands."""
    with_dimensions, without, numbers = None, None, None
    for operand in operands:
        if not isinstance(operand, jax.Array):
            numbers = _joined(numbers, number_dtype(operand))
        elif operand.ndim:
            with_dimensions = _joined(with_dimensions, operand.dtype)
        else:
            without = _joined(without, operand.dtype)
    found = _over(_over(with_dimensions, without), numbers)
    assert found is not None
    return found


def _joined(one: Dtype | None, other: Dtype) -> Dtype:
    # JAX may be configured to reject promotions that PyTorch makes.
    with jax.numpy_dtype_promotion("standard"):
        return other if one is None else np.dtype(jnp.promote_types(one, other))


def _over(higher: Dtype | None, lower: Dtype | None) -> Dtype | None:
    """Return the dtype with precedence, unless the other one is of a higher kind."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    return _joined(higher, lower) if _rank(lower) > _rank(higher) else higher


def as_array(value: Operand, dtype: Dtype | None = None) -> jax.Array:
    """Return an array of a dtype, by default the value's own."""
    if isinstance(value, jax.Array):
        return value if dtype in (None, value.dtype) else value.astype(dtype)
    return jnp.asarray(value, dtype=dtype or number_dtype(value))


def aligned(*arrays: jax.Array) -> list[jax.Array]:
    """Return arrays of equal rank; JAX may be configured to reject rank promotion."""
    rank = max(array.ndim for array in arrays)
    return [
        array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)
        for array in arrays
    ]


def promoted(*operands: Operand, dtype: Dtype | None = None) -> list[jax.Array]:
    """Return operands as arrays of equal rank and dtype; by default the common dtype."""
    common = dtype or common_dtype(*operands)
    return aligned(*(as_array(operand, common) for operand in operands))


def fractional(*operands: Operand) -> list[jax.Array]:
    """Return operands as arrays of equal rank and a common floating-point dtype."""
    dtype = common_dtype(*operands)
    return promoted(*operands, dtype=dtype if is_floating(dtype) else FLOAT)


def axis_of(dim: int, rank: int) -> int:
    """Return an axis counted from the front; raises InvalidModel if it is out of range."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise InvalidModel(f"dimension {dim} is out of range for a tensor of rank {rank}")
    return dim % max(rank, 1)


def axes_of(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return axes counted from the front; all axes if `dims` is None or empty."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return tuple(range(rank))
    listed = (dims,) if isinstance(dims, int) else dims
    return tuple(axis_of(dim, rank) for dim in listed)


def spread(values: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return one number per dimension; a single number is repeated."""
    listed = (values,) if isinstance(values, int) else tuple(values)
    if len(listed) == 1:
        return listed * count
    if len(listed) != count:
        raise InvalidModel(f"expected {count} numbers, got {len(listed)}")
    return listed
