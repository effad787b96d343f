"""The table of rules: what every operation does to rows. What has no row is unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from xlaserve.models.rows.domain import Value
from xlaserve.models.rows.findings import Finding, Problem
from xlaserve.models.rows.program import Operation
from xlaserve.models.rows.rules import (
    constant,
    control,
    elementwise,
    indexing,
    linear,
    places,
    reduction,
    shape,
)
from xlaserve.models.rows.walk import Rule, Rules, Walker

_Plain = Callable[[Operation, Sequence[Value]], Sequence[Value]]


def _rule(compute: _Plain, *, takes_unknown: bool = False) -> Rule:
    def without_walker(
        operation: Operation, operands: Sequence[Value], walker: Walker
    ) -> Sequence[Value]:
        del walker
        return compute(operation, operands)

    return Rule(without_walker, takes_unknown)


def _traced(rule: Rule) -> Rule:
    """Return a rule for integers, of which more is known when they are traced back."""

    def with_places(
        operation: Operation, operands: Sequence[Value], walker: Walker
    ) -> Sequence[Value]:
        try:
            found = rule.compute(operation, operands, walker)
        except Problem as problem:
            stopped = Finding(problem.mixed, operation.name, str(problem), operation.location())
            found = [Value((), stopped)] * len(operation.results)
        return places.settled(operation, found, walker)

    return Rule(with_places, takes_unknown=True)


_ELEMENTWISE = _traced(_rule(elementwise.elementwise))

RULES: Rules = MappingProxyType(
    {
        **dict.fromkeys(sorted(elementwise.NAMES), _ELEMENTWISE),
        "stablehlo.constant": _rule(constant.constant),
        # Elements are moved.
        "stablehlo.iota": _rule(shape.iota),
        "stablehlo.broadcast_in_dim": _traced(_rule(shape.broadcast_in_dim)),
        "stablehlo.transpose": _rule(shape.transpose),
        "stablehlo.reshape": _traced(_rule(shape.reshape)),
        "stablehlo.slice": _rule(shape.slice_),
        "stablehlo.concatenate": _traced(_rule(shape.concatenate)),
        "stablehlo.pad": _rule(shape.pad),
        "stablehlo.reverse": _rule(shape.reverse),
        "stablehlo.bitcast_convert": _rule(shape.bitcast_convert),
        "stablehlo.optimization_barrier": _rule(shape.kept, takes_unknown=True),
        # Several elements make one.
        "stablehlo.reduce": _traced(Rule(reduction.reduce)),
        "stablehlo.reduce_window": Rule(reduction.reduce_window),
        "stablehlo.select_and_scatter": Rule(reduction.select_and_scatter),
        "stablehlo.sort": Rule(reduction.sort),
        "chlo.top_k": _rule(reduction.top_k),
        # Elements are looked up, and put.
        "stablehlo.gather": Rule(indexing.gather, takes_unknown=True),
        "stablehlo.scatter": Rule(indexing.scatter, takes_unknown=True),
        "stablehlo.dynamic_slice": _rule(indexing.dynamic_slice, takes_unknown=True),
        "stablehlo.dynamic_update_slice": _rule(indexing.dynamic_update_slice, takes_unknown=True),
        # Matrices and images.
        "stablehlo.dot_general": _rule(linear.dot_general),
        "stablehlo.convolution": _rule(linear.convolution),
        "stablehlo.fft": _rule(linear.fft),
        "stablehlo.cholesky": _rule(linear.matrices),
        "stablehlo.triangular_solve": _rule(linear.matrices),
        "stablehlo.batch_norm_inference": _rule(linear.batch_norm_inference),
        "stablehlo.batch_norm_training": _rule(linear.batch_norm_training),
        "stablehlo.batch_norm_grad": _rule(linear.batch_norm_training),
        "stablehlo.custom_call": _rule(linear.custom_call),
        # Random bits, of a key that all rows share.
        "stablehlo.rng_bit_generator": _rule(shape.random_bits),
        # Loops and branches.
        "stablehlo.case": Rule(control.case, takes_unknown=True),
        "stablehlo.if": Rule(control.case, takes_unknown=True),
        "stablehlo.while": Rule(control.while_, takes_unknown=True),
    }
)
