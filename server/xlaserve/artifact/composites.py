"""Replaces composites by operations that every supported JAX version can compile.

From 0.12 on JAX lowers cumulative reductions of fixed size on GPUs to a composite with a region,
which needs StableHLO 1.18. For other platforms, and in older versions for GPUs too, it lowers them
to reduce_window. Functions such as erfc also become composites. Older JAX versions cannot refine
their dynamic shapes, so these composites are replaced by calls of their decompositions.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.extend.mlir.passmanager import PassManager

MARK = "chlo."
"""A substring of every module that contains such a composite."""
SCAN = "chlo.scan"
_REDUCERS = frozenset(
    f"stablehlo.{name}" for name in ("add", "multiply", "maximum", "minimum", "and", "or")
)
"""Commutative reducers: the order of their operands does not matter."""


_DEEPEST = 8
"""Maximum nesting depth of composites."""


def without_composites(module: Any) -> None:
    """Replace the composites of a module that older JAX versions cannot compile.

    A scan becomes an equivalent reduce_window, and a composite of dynamic shapes a call of its
    decomposition; other composites are kept.
    """
    scans = _composites(module, _is_cumulative)
    for operation in scans:
        _replace(operation)
    count = 0
    for _ in range(_DEEPEST):
        opened = _composites(module, _is_open)
        for operation in opened:
            count += 1
            _call(module, operation, count)
        if not opened:
            break
    if scans or count:
        # Remove functions that have no callers left.
        PassManager.parse("builtin.module(symbol-dce)", module.context).run(module.operation)


def _composites(module: Any, is_meant: Callable[[Any], bool]) -> list[Any]:
    found: list[Any] = []

    def note(operation: Any) -> Any:
        if operation.name == "stablehlo.composite" and is_meant(operation):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(note)
    return found


def _is_open(operation: Any) -> bool:
    types = [one.type for one in (*operation.operands, *operation.results)]
    has_region = any(len(region.blocks) for region in operation.regions)
    return not has_region and not all(one.has_static_shape for one in types)


def _call(module: Any, operation: Any, number: int) -> None:
    """Replace a composite by a call of its decomposition, cloned for this call."""
    name = ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value
    function = ir.SymbolTable(module.operation)[name]
    with operation.location:
        made = function.operation.clone(ip=ir.InsertionPoint(module.body))
        made.attributes["sym_name"] = ir.StringAttr.get(f"{name}.{number}")
        with ir.InsertionPoint(operation):
            called = ir.Operation.create(
                "func.call",
                results=[result.type for result in operation.results],
                operands=list(operation.operands),
                attributes={"callee": ir.FlatSymbolRefAttr.get(f"{name}.{number}")},
            )
    for before, after in zip(operation.results, called.results, strict=True):
        before.replace_all_uses_with(after)
    operation.erase()


def _is_cumulative(operation: Any) -> bool:
    if ir.StringAttr(operation.attributes["name"]).value != SCAN or len(operation.operands) != 2:
        return False
    x, init = operation.operands
    body = [one.operation for one in operation.regions[0].blocks[0].operations]
    return (
        x.type.has_static_shape
        and not ir.BoolAttr(_said(operation)["is_reverse"]).value
        and not list(operation.results[1].uses)
        and _number(init) is not None
        # The body is one operation on element and carry, and a return.
        and len(body) == 2
        and body[0].name in _REDUCERS
    )


def _said(operation: Any) -> Any:
    return ir.DictAttr(operation.attributes["composite_attributes"])


def _number(init: Any) -> Any:
    """Return the initial value of the carry as a scalar, or None if it is not one."""
    if not init.type.shape:
        return init
    owner = getattr(init.owner, "operation", None)
    if owner is None or owner.name != "stablehlo.broadcast_in_dim":
        return None
    return None if owner.operands[0].type.shape else owner.operands[0]


def _replace(operation: Any) -> None:
    x, init = operation.operands
    axis = ir.IntegerAttr(_said(operation)["dimension"]).value
    window = np.ones(len(x.type.shape), np.int64)
    window[axis] = x.type.shape[axis]
    padding = np.stack([window - 1, np.zeros_like(window)], axis=1)
    reducer = operation.regions[0].blocks[0].operations[0].operation.name
    with ir.InsertionPoint(operation), operation.location:
        made = stablehlo.ReduceWindowOp(
            [x.type],
            [x],
            [_number(init)],
            window_dimensions=ir.DenseI64ArrayAttr.get(window.tolist()),
            # On Python 3.11 the stubs do not accept an array as a buffer.
            padding=ir.DenseElementsAttr.get(padding),  # type: ignore[call-overload, unused-ignore]
        )
        number = ir.RankedTensorType.get([], x.type.element_type)
        block = made.regions[0].blocks.append(number, number)
        with ir.InsertionPoint(block):
            reduced = ir.Operation.create(reducer, results=[number], operands=list(block.arguments))
            stablehlo.ReturnOp([reduced.result])
    operation.results[0].replace_all_uses_with(made.results[0])
    operation.erase()
