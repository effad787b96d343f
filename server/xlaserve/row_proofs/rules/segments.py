"""Values concatenated from blocks of rows of different sizes, and slices of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from xlaserve.row_proofs import sizes
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import Along, Segments, Value, factor, is_uniform
from xlaserve.row_proofs.findings import Finding, Problem
from xlaserve.row_proofs.program import Operation, Shape
from xlaserve.row_proofs.sizes import ZERO, Size

MAX_SEGMENTS = 16


def put_together(values: Sequence[Value], of: Sequence[Size], axis: int, finding: Finding) -> Value:
    """Return a value that is known only by its blocks; `finding` says why."""
    kept = [(value, size) for value, size in zip(values, of, strict=True) if size != ZERO]
    if len(kept) > MAX_SEGMENTS:
        return Value((), finding)
    return Value(
        (),
        finding,
        fact=Segments(axis, tuple(size for _, size in kept), tuple(value for value, _ in kept)),
    )


def each(
    rule: Callable[[Operation, Sequence[Value]], list[Value]],
    operation: Operation,
    operands: Sequence[Value],
) -> Value | None:
    """Apply an elementwise operation block by block; None if the operands do not allow that."""
    found = [value for value in operands if isinstance(value.fact, Segments)]
    if not found:
        return None
    first = found[0].fact
    assert isinstance(first, Segments)
    axis = first.dimension
    results: list[Value] = []
    for number, size in enumerate(first.sizes):
        pieces = [_piece(value, first, number) for value in operands]
        known = [piece for piece in pieces if piece is not None]
        if len(known) < len(pieces):
            return None
        results.extend(_computed(rule, with_size(operation, axis, size), known))
    assert found[0].blocked is not None
    return put_together(results, first.sizes, axis, found[0].blocked)


def _computed(
    rule: Callable[[Operation, Sequence[Value]], list[Value]],
    operation: Operation,
    operands: Sequence[Value],
) -> list[Value]:
    try:
        return rule(operation, operands)
    except Problem as problem:
        finding = Finding(problem.mixed, operation.name, str(problem), operation.location())
        return [Value((), finding)]


def with_size(operation: Operation, axis: int, size: Size) -> Operation:
    """Return an elementwise operation with another size along a dimension."""
    types, operand_types = (
        tuple(
            kind._replace(shape=(*kind.shape[:axis], size, *kind.shape[axis + 1 :]))
            if kind.shape
            else kind
            for kind in kinds
        )
        for kinds in (operation.types, operation.operand_types)
    )
    return replace(operation, types=types, operand_types=operand_types)


def _piece(value: Value, like: Segments, number: int) -> Value | None:
    """Return the part of an operand that corresponds to a block of another; None if unknown."""
    fact, axis = value.fact, like.dimension
    if isinstance(fact, Segments):
        alike = (fact.dimension, fact.sizes) == (axis, like.sizes)
        return fact.values[number] if alike else None
    if value.blocked is not None:
        return None
    if not value.dimensions:
        return value
    if not is_uniform(value.dimensions[axis]):
        return None
    along = factor(like.sizes[number], Along.UNIFORM)
    dimensions = (*value.dimensions[:axis], along, *value.dimensions[axis + 1 :])
    kept = fact if isinstance(fact, Constant) and fact.is_splat else None
    return Value(dimensions, sized=value.sized, fact=kept)


def cut(
    value: Value,
    start: Size,
    taken: Size,
    sliced: Callable[[Value, Size, Size], Value],
) -> Value | None:
    """Slice a value by its blocks: a part of one, or several whole ones; None for other slices.

    `sliced(block, start, size)` slices one block.
    """
    fact = value.fact
    if not isinstance(fact, Segments):
        return None
    end = sizes.plus(start, taken)
    first, whole = ZERO, []
    for size, block in zip(fact.sizes, fact.values, strict=True):
        last = sizes.plus(first, size)
        if sizes.is_at_most(first, start) and sizes.is_at_most(end, last):
            return block if block.blocked else sliced(block, sizes.minus(start, first), taken)
        if sizes.is_at_most(start, first) and sizes.is_at_most(last, end):
            whole.append((size, block))
        first = last
    of = [size for size, _ in whole]
    if _summed(of) != taken or value.blocked is None:
        return None
    blocks = [block if block.blocked else sliced(block, ZERO, size) for size, block in whole]
    return put_together(blocks, of, fact.dimension, value.blocked)


def _summed(of: Shape | Sequence[Size]) -> Size:
    whole = ZERO
    for size in of:
        whole = sizes.plus(whole, size)
    return whole
