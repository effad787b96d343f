"""Matrix products, convolutions, and linear algebra."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jax.extend.mlir.dialects import stablehlo

from xlaserve.row_proofs.domain import (
    Along,
    Dimension,
    Value,
    check_one_row,
    factor,
    has_rows,
    joined,
    joined_dimension,
    uniform,
)
from xlaserve.row_proofs.findings import Mixes, NoRule
from xlaserve.row_proofs.program import Operation
from xlaserve.row_proofs.rules.shape import depends_on_size
from xlaserve.row_proofs.sizes import Size


def dot_general(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Join the batching dimensions, keep the free ones, and contract the others."""
    left, right = operands
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    batching = tuple(numbers.lhs_batching_dimensions), tuple(numbers.rhs_batching_dimensions)
    contracted = (
        tuple(numbers.lhs_contracting_dimensions),
        tuple(numbers.rhs_contracting_dimensions),
    )
    sized = left.sized or right.sized
    for value, axes, shape in (
        (left, contracted[0], operation.operand_types[0].shape),
        (right, contracted[1], operation.operand_types[1].shape),
    ):
        for axis in axes:
            if has_rows(value.dimensions[axis]):
                raise Mixes("contracts over the rows")
            if not shape[axis].is_static:
                sized = sized or depends_on_size(operation, "sums as many products as rows")
    dimensions = [
        joined_dimension(left.dimensions[one], right.dimensions[other])
        for one, other in zip(*batching, strict=True)
    ]
    for value, ours, gone in zip((left, right), batching, contracted, strict=True):
        dimensions.extend(
            dimension
            for axis, dimension in enumerate(value.dimensions)
            if axis not in ours and axis not in gone
        )
    check_one_row(tuple(dimensions))
    return [Value(tuple(dimensions), sized=sized)]


# --- Convolution -------------------------------------------------------------------------------

_NUMBERS = re.compile(r"\[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]")


def convolution(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Convolve images with a kernel, keeping the batch dimension of the images."""
    image, kernel = operands
    found = _NUMBERS.search(operation.text("dimension_numbers"))
    if found is None or operation.integers("batch_group_count") not in ((), (1,)):
        raise NoRule("is an unsupported convolution")
    places, kernel_places, result_places = (
        {name.strip(): axis for axis, name in enumerate(text.split(","))} for text in found.groups()
    )
    sized = image.sized or kernel.sized
    shape = operation.types[0].shape
    for name, axis in places.items():
        if name in {"b", "f"}:
            continue
        if has_rows(image.dimensions[axis]) or has_rows(kernel.dimensions[kernel_places[name]]):
            raise Mixes("moves a kernel over the rows")
        if not operation.operand_types[0].shape[axis].is_static:
            raise NoRule("moves a kernel over a dimension whose size is the batch size")
        if not operation.operand_types[1].shape[kernel_places[name]].is_static:
            raise NoRule("has a kernel whose size is the batch size")
    features = _features(operation, image, kernel, places["f"], kernel_places)
    dimensions: list[Dimension] = [factor(size, Along.ANY) for size in shape]
    dimensions[result_places["b"]] = image.dimensions[places["b"]]
    dimensions[result_places["f"]] = features
    check_one_row(tuple(dimensions))
    return [Value(tuple(dimensions), sized=sized)]


def _features(
    operation: Operation, image: Value, kernel: Value, place: int, places: dict[str, int]
) -> Dimension:
    """Return the dimension of the output features."""
    taken, given = image.dimensions[place], kernel.dimensions[places["o"]]
    if has_rows(kernel.dimensions[places["i"]]):
        raise Mixes("contracts over the rows")
    (groups,) = operation.integers("feature_group_count") or (1,)
    if has_rows(taken):
        problem = Mixes if groups == 1 else NoRule
        raise problem("contracts over the rows")
    if not operation.operand_types[0].shape[place].is_static:
        raise NoRule("sums over a feature dimension whose size is the batch size")
    if groups == 1:
        return given
    if has_rows(given):
        raise NoRule("is a grouped convolution with a kernel for each row")
    if not operation.operand_types[1].shape[places["o"]].is_static:
        raise NoRule("is a grouped convolution whose number of kernels is the batch size")
    return factor(operation.operand_types[1].shape[places["o"]], Along.ANY)


# --- Linear algebra ----------------------------------------------------------------------------


def _over_matrices(operation: Operation, operands: Sequence[Value], core: int) -> list[Value]:
    """Apply a function to every matrix or vector in the last `core` dimensions of the operands."""
    batch = len(operands[0].dimensions) - core
    if batch < 0:
        raise NoRule("has operands of unexpected ranks")
    leading = []
    for value in operands:
        if not value.dimensions:
            leading.append(Value(uniform(_leading(operation, batch)), sized=value.sized))
            continue
        if len(value.dimensions) < batch:
            raise NoRule("has operands of unexpected ranks")
        if any(has_rows(dimension) for dimension in value.dimensions[batch:]):
            raise Mixes("multiplies by a matrix that contains rows of the batch")
        leading.append(Value(value.dimensions[:batch], sized=value.sized))
    together = joined(leading)
    sized = together.sized
    if any(not size.is_static for kind in operation.operand_types for size in kind.shape[batch:]):
        sized = sized or depends_on_size(
            operation, "multiplies by a matrix whose size is the batch size"
        )
    results = []
    for kind in operation.types:
        if len(kind.shape) < batch or kind.shape[:batch] != _leading(operation, batch):
            raise NoRule("has results of unexpected ranks")
        own = tuple(factor(size, Along.ANY) for size in kind.shape[batch:])
        results.append(Value((*together.dimensions, *own), sized=sized))
    return results


def _leading(operation: Operation, batch: int) -> tuple[Size, ...]:
    return operation.operand_types[0].shape[:batch]


def matrices(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Apply a function to every matrix in the last two dimensions."""
    return _over_matrices(operation, operands, 2)


def vectors(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Apply a function to every vector in the last dimension."""
    return _over_matrices(operation, operands, 1)


def scalars(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Apply a function to every element."""
    shapes = {kind.shape for kind in (*operation.operand_types, *operation.types)}
    if len(shapes) > 1:
        raise NoRule("has operands of unexpected shapes")
    return [joined(operands)] * len(operation.results)


def fft(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Transform along the last dimensions."""
    (value,) = operands
    count = len(operation.integers("fft_length"))
    found = list(value.dimensions)
    for axis in range(len(found) - count, len(found)):
        # A transform along the batch would have a symbolic `fft_length`, which is rejected.
        found[axis] = factor(operation.types[0].shape[axis], Along.ANY)
    return [Value(tuple(found), sized=value.sized)]


def batch_norm_inference(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Normalize every feature with given statistics."""
    value, *statistics = operands
    axis = operation.integer("feature_index")
    spread = []
    for one in statistics:
        dimensions = list(uniform(operation.types[0].shape))
        dimensions[axis] = one.dimensions[0]
        spread.append(Value(tuple(dimensions), sized=one.sized))
    return [joined([Value(value.dimensions, sized=value.sized), *spread])]


def batch_norm_training(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Reject the operation: it computes statistics over all rows."""
    axis = operation.integer("feature_index")
    for value in operands[:1]:
        for number, dimension in enumerate(value.dimensions):
            if number != axis and has_rows(dimension):
                raise Mixes("normalizes by statistics of all rows")
    raise NoRule("computes statistics")


# --- Custom calls ------------------------------------------------------------------------------

_Rule = Callable[[Operation, Sequence[Value]], list[Value]]


def _identity(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    if len(operands) != 1 or operation.types != operation.operand_types:
        raise NoRule("has operands and results of different types")
    return [operands[0]]


FUNCTIONS: tuple[tuple[str, _Rule], ...] = (
    (r"lapack_[sdcz](potrf|geqrf|orgqr|ungqr|getrf|gees|sytrd|hetrd|gehrd|trsm)_ffi", matrices),
    (r"lapack_[sdcz](gesdd|gesvd|gesvdq|syevd|heevd|geev|geev2|geqp3)_ffi", matrices),
    (
        r"(cu|hip)solver_(geqrf|orgqr|getrf|syevd|syrk|gesvd|gesvdj|gesvdp|potrf|sytrd)_ffi",
        matrices,
    ),
    (r"(cu|hip)blas_(geqrf|getrf)_batched_ffi", matrices),
    # On TPUs.
    (r"Qr|Eigh|LuDecomposition|ProductOfElementaryHouseholderReflectors", matrices),
    (r"lapack_[sdcz]gtsv_ffi|(cu|hip)sparse_gtsv2_ffi", vectors),
    (r"(cu|hip)_lu_pivots_to_permutation", vectors),
    (r"(cu|hip)_threefry2x32_ffi", scalars),
    (r"Sharding|annotate_device_placement", _identity),
)
"""Patterns of custom call targets with their rules; the first match applies."""


def custom_call(operation: Operation, operands: Sequence[Value]) -> list[Value]:
    """Apply the rule of a custom call, found by its target name."""
    name = operation.text("call_target_name").strip('"')
    for pattern, rule in FUNCTIONS:
        if re.fullmatch(pattern, name):
            return rule(operation, operands)
    raise NoRule(f"calls '{name[:64]}', which has no rule")
