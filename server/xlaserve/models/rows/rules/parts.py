"""Values that are put together from parts of size 1, as index vectors are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from xlaserve.models.rows.constants import Constant
from xlaserve.models.rows.domain import (
    Along,
    Parts,
    RowNumber,
    Value,
    blocked,
    factor,
    is_uniform,
    joined,
)
from xlaserve.models.rows.findings import Finding, Problem
from xlaserve.models.rows.program import Operation
from xlaserve.models.rows.sizes import ONE, Size

MAX_PARTS = 16


def each_part(
    rule: Callable[[Operation, Sequence[Value]], list[Value]],
    operation: Operation,
    operands: Sequence[Value],
) -> Value | None:
    """Compute an elementwise operation part by part; None where no operand is made of parts."""
    found = [value.fact for value in operands if isinstance(value.fact, Parts)]
    if not found:
        return None
    axis, count = found[0].dimension, len(found[0].values)
    if any(fact.dimension != axis or len(fact.values) != count for fact in found):
        return None
    types = tuple(
        kind._replace(shape=(*kind.shape[:axis], ONE, *kind.shape[axis + 1 :]))
        for kind in operation.types
    )
    one = replace(operation, types=types)
    results = []
    for number in range(count):
        try:
            results.extend(rule(one, [part_of(value, axis, number) for value in operands]))
        except Problem as problem:
            finding = Finding(problem.mixed, operation.name, str(problem), operation.location())
            results.append(Value((), finding))
    return put_together(results, axis, operation)


def part_of(value: Value, axis: int, number: int) -> Value:
    """Return what is known of one part along a dimension."""
    fact = value.fact
    if isinstance(fact, Parts) and fact.dimension == axis:
        return fact.values[number]
    if value.blocked is not None or not value.dimensions:
        return value
    dimensions = (*value.dimensions[:axis], (), *value.dimensions[axis + 1 :])
    if isinstance(fact, Constant):
        cut = fact if fact.is_splat else fact.map(lambda a: a.take([number], axis))
        return Value(dimensions, sized=None if cut.is_static else value.sized, fact=cut)
    kept = isinstance(fact, RowNumber) and is_uniform(value.dimensions[axis])
    return Value(dimensions, sized=value.sized, fact=fact if kept else None)


def put_together(values: Sequence[Value], axis: int, operation: Operation) -> Value:
    """Return what is known of values of size 1 that are put together along a dimension."""
    fact = Parts(axis, tuple(values)) if len(values) <= MAX_PARTS else None
    if any(value.blocked is not None for value in values):
        return Value((), blocked(values).blocked, fact=fact)
    try:
        whole = joined(values)
    except Problem as problem:
        finding = Finding(problem.mixed, operation.name, str(problem), operation.location())
        return Value((), finding, fact=fact)
    along = factor(Size(0, len(values)), Along.ANY)
    dimensions = (*whole.dimensions[:axis], along, *whole.dimensions[axis + 1 :])
    known = [value.fact for value in values if isinstance(value.fact, Constant)]
    if len(known) == len(values) and all(size.is_static for size in operation.types[0].shape):
        shape = tuple(size.fixed for size in operation.types[0].shape)
        thin = (*shape[:axis], 1, *shape[axis + 1 :])
        per_row, fixed = (
            np.concatenate([np.broadcast_to(one, thin) for one in each], axis)
            for each in ([one.per_row for one in known], [one.fixed for one in known])
        )
        return Value(dimensions, sized=whole.sized, fact=Constant(fixed, per_row))
    return Value(dimensions, sized=whole.sized, fact=fact)
