"""Constants, whose elements may depend on the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from xlaserve.row_proofs import ranges
from xlaserve.row_proofs.constants import MAX_ELEMENTS, Constant
from xlaserve.row_proofs.domain import Value, uniform, varying
from xlaserve.row_proofs.findings import Finding, NoRule
from xlaserve.row_proofs.program import Operation, Pair
from xlaserve.row_proofs.rules.elementwise import of_constant

_LIMIT = 1 << 31
_SIZE = "uses the batch size as a value"


def constant(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Return the abstract value of a constant."""
    del operands
    shape = operation.types[0].shape
    found = known(operation)
    if found is not None:
        return [of_constant(found, shape, operation)]
    value = operation.attributes["value"]
    if isinstance(value, Pair):
        if _is_same_splat(value):
            return [Value(uniform(shape))]
        return [
            Value(varying(shape), sized=Finding(True, operation.name, _SIZE, operation.location()))
        ]
    return [Value(uniform(shape) if _is_splat(value) else varying(shape))]


def _is_same_splat(value: Pair) -> bool:
    both = value.first, value.second
    return all(map(_is_splat, both)) and len({str(one.get_splat_value()) for one in both}) == 1


def known(operation: Operation) -> Constant | None:
    """Return a constant's integers; None if there are too many or they are not integers."""
    value = operation.attributes["value"]
    if not isinstance(value, Pair):
        found = literal(value)
        return None if found is None else Constant(found)
    first, second = literal(value.first), literal(value.second)
    if first is None or second is None or first.shape != second.shape:
        return None
    rows = operation.rows
    step = rows[1] - rows[0]
    if ((second - first) % step).any():
        raise NoRule("has a constant that does not scale with the batch size")
    per_row = (second - first) // step
    return Constant(first - per_row * rows[0], per_row)


def _is_splat(value: Any) -> bool:
    return isinstance(value, ir.DenseElementsAttr) and bool(value.is_splat)


def literal(value: Any) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Return the integers of an MLIR constant, a scalar for a splat; None for other constants."""
    if not isinstance(value, ir.DenseIntElementsAttr):
        return None
    whole: Any = value
    shape = tuple(whole.type.shape)
    count = int(np.prod(shape))
    if not count or ranges.of_dtype(str(whole.type.element_type)) is None:
        # The Python bindings cannot read other types.
        return None
    if value.is_splat:
        found: np.ndarray[Any, Any] = np.asarray(_integer(value.get_splat_value()))
    elif count > MAX_ELEMENTS:
        return None
    else:
        found = np.asarray([int(one) for one in whole]).reshape(shape)
    # A larger number is not an index, but perhaps a constant of a hash function.
    if found.dtype != np.int64 or (np.abs(found) >= _LIMIT).any():
        return None
    is_truth = str(whole.type.element_type) == "i1"
    return (found != 0).astype(np.int64) if is_truth else found


def _integer(attribute: Any) -> int:
    if isinstance(attribute, ir.BoolAttr):
        return int(attribute.value)
    return int(ir.IntegerAttr(attribute).value)
