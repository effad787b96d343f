"""Triangular systems, where rows may be columns of the right-hand side."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xlaserve.row_proofs.domain import Along, Value, factor, has_rows
from xlaserve.row_proofs.findings import NoRule
from xlaserve.row_proofs.program import Operation
from xlaserve.row_proofs.rules import linear

_FOREIGN = re.compile(r"lapack_[sdcz]trsm_ffi")
_LEFT = re.compile(r"\bside = 76\b")
"""ASCII code of LAPACK's parameter `L` (left side)."""


def triangular_solve(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Solve one system for many columns, or one system per matrix."""
    is_left = operation.text("left_side") == "true"
    return _columns(operation, operands) if is_left else linear.matrices(operation, operands)


def custom_call(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Apply the rule of a custom call, found by its target name."""
    name = operation.text("call_target_name").strip('"')
    if _FOREIGN.fullmatch(name) and _LEFT.search(operation.text("mhlo.backend_config")):
        return _columns(operation, operands)
    return linear.custom_call(operation, operands)


def _columns(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Keep rows that are columns of the right-hand side, since each column is solved on its own."""
    matrix, right = operands
    if not right.dimensions or not has_rows(right.dimensions[-1]):
        return linear.matrices(operation, operands)
    kinds = operation.operand_types
    if matrix.has_rows or operation.types != (kinds[1],):
        raise NoRule("solves systems that differ between rows")
    if not all(size.is_static for kind in (kinds[0], kinds[1]) for size in kind.shape[:-1]):
        raise NoRule("solves systems whose size is the batch size")
    if not kinds[0].shape[-1].is_static:
        raise NoRule("solves systems whose size is the batch size")
    found = [factor(size, Along.ANY) for size in kinds[1].shape[:-1]]
    return [Value((*found, right.dimensions[-1]), sized=matrix.sized or right.sized)]
