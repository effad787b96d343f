"""Sets the precision of FP32 products in lowered modules if the artifact does not."""

from typing import Any

from jax.extend.mlir import ir

_PRODUCTS = frozenset(
    {
        "chlo.ragged_dot",
        "stablehlo.convolution",
        "stablehlo.dot",
        "stablehlo.dot_general",
        "stablehlo.dynamic_conv",
    }
)
"""Operations with a precision for each of their two operands."""
_ALGORITHM = "algorithm"
_PRECISION = "precision_config"
_OPEN = "DEFAULT"
"""JAX writes DEFAULT both for a precision of None and for an explicit DEFAULT."""


def set_precision(lowered: Any, precision: str) -> int:
    """Set unspecified precisions of FP32 products in a `jax.stages.Lowered` to HIGH or HIGHEST.

    A product with an explicit precision or algorithm keeps it, as with
    `jax_default_matmul_precision`. Returns the number of changed products. Idempotent.
    """
    module = lowered.compiler_ir("stablehlo")
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in _PRODUCTS and _is_fp32(operation) and _is_open(operation):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    with module.context:
        each = f"#stablehlo<precision {precision}>"
        for operation in found:
            chlo = operation.name.startswith("chlo.")
            text = each.replace("stablehlo", "chlo") if chlo else each
            operation.attributes[_PRECISION] = ir.Attribute.parse(f"[{text}, {text}]")
    return len(found)


def _is_open(operation: ir.Operation) -> bool:
    attributes = operation.attributes
    if _ALGORITHM in attributes:
        return False
    if _PRECISION not in attributes:
        return True
    return all(_OPEN in str(one) for one in ir.ArrayAttr(attributes[_PRECISION]))


def _is_fp32(operation: ir.Operation) -> bool:
    """Tell whether the operands are FP32, or complex64."""
    types = [str(value.type.element_type) for value in list(operation.operands)[:2]]
    return any(name in ("f32", "complex<f32>") for name in types)
