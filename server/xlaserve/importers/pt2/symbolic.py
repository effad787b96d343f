"""Arithmetic on sizes: integers and symbolic dimensions of jax.export."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import core
from jax.export import is_symbolic_dim

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.values import axis_of

_OPEN = "it depends on the size of a dynamic dimension: set it with --dim"


def _true_divide(a: Any, b: Any) -> Any:
    if is_symbolic_dim(a) or is_symbolic_dim(b):
        raise InvalidModel(_OPEN)
    return a / b


def _real(a: Any) -> Any:
    if is_symbolic_dim(a):
        raise InvalidModel(_OPEN)
    return float(a)


def _most(*values: Any) -> Any:
    return _folded(values, core.max_dim)


def _least(*values: Any) -> Any:
    return _folded(values, core.min_dim)


def _folded(values: Sequence[Any], function: Callable[[Any, Any], Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        found = function(found, value)
    return found


def _power(a: Any, b: Any) -> Any:
    if isinstance(b, int) and abs(b) > 64:
        raise InvalidModel(f"a size cannot be raised to the power of {b}")
    return a**b


def _shifted(a: Any, b: Any) -> Any:
    if not isinstance(b, int) or not 0 <= b < 64:
        raise InvalidModel(f"a size cannot be shifted left by {b} bits")
    return a << b if isinstance(a, int) else a * 2**b


ARITHMETIC: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_operator.abs": abs,
        "_operator.add": operator.add,
        "_operator.and_": operator.and_,
        "_operator.eq": operator.eq,
        "_operator.floordiv": operator.floordiv,
        "_operator.ge": operator.ge,
        "_operator.gt": operator.gt,
        "_operator.le": operator.le,
        "_operator.lshift": _shifted,
        "_operator.lt": operator.lt,
        "_operator.mod": operator.mod,
        "_operator.mul": operator.mul,
        "_operator.ne": operator.ne,
        "_operator.neg": operator.neg,
        "_operator.not_": operator.not_,
        "_operator.or_": operator.or_,
        "_operator.pow": _power,
        "_operator.sub": operator.sub,
        "_operator.truediv": _true_divide,
        "math.ceil": math.ceil,
        "math.floor": math.floor,
        "math.trunc": math.trunc,
        "torch.sym_float": _real,
        "torch.sym_int": int,
        "torch.sym_max": _most,
        "torch.sym_min": _least,
        "torch.sym_not": operator.not_,
        "torch.sym_sum": sum,
    }
)
"""Functions on sizes, which are called with positional arguments."""


def size(self: jax.Array, dim: int) -> Any:
    """Return the size of one dimension of a tensor."""
    return self.shape[axis_of(dim, self.ndim)]


def elements(self: jax.Array) -> Any:
    """Return a tensor's number of elements."""
    return self.size
