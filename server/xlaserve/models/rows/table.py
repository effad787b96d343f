"""The table of rules: what every operation does to rows. What has no row is unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from xlaserve.models.rows.domain import Value
from xlaserve.models.rows.program import Operation
from xlaserve.models.rows.rules import (
    constant,
    control,
    elementwise,
    indexing,
    linear,
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


_ELEMENTWISE = _rule(elementwise.elementwise, takes_unknown=True)

RULES: Rules = MappingProxyType(
    {
        **dict.fromkeys(sorted(elementwise.NAMES), _ELEMENTWISE),
        "stablehlo.constant": _rule(constant.constant),
        # Elements are moved.
        "stablehlo.iota": _rule(shape.iota),
        "stablehlo.broadcast_in_dim": _rule(shape.broadcast_in_dim, takes_unknown=True),
        "stablehlo.transpose": _rule(shape.transpose),
        "stablehlo.reshape": _rule(shape.reshape, takes_unknown=True),
        "stablehlo.slice": _rule(shape.slice_),
        "stablehlo.concatenate": _rule(shape.concatenate, takes_unknown=True),
        "stablehlo.pad": _rule(shape.pad),
        "stablehlo.reverse": _rule(shape.reverse),
        "stablehlo.bitcast_convert": _rule(shape.bitcast_convert),
        "stablehlo.optimization_barrier": _rule(shape.kept, takes_unknown=True),
        # Several elements make one.
        "stablehlo.reduce": Rule(reduction.reduce, takes_unknown=True),
        "stablehlo.reduce_window": Rule(reduction.reduce_window),
        "stablehlo.select_and_scatter": Rule(reduction.select_and_scatter),
        "stablehlo.sort": Rule(reduction.sort),
        "chlo.top_k": _rule(reduction.top_k),
        # Elements are looked up, and put.
        "stablehlo.gather": _rule(indexing.gather, takes_unknown=True),
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
