"""The rules for all supported operations; other operations block the proof.

`grows` names the attributes that a rule reads as sizes. `ignored` gives the operands on which the
results may turn out not to depend, such as the start of a whole slice or a branch not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import MappingProxyType

from xlaserve.row_proofs.domain import Value
from xlaserve.row_proofs.program import Operation
from xlaserve.row_proofs.rules import (
    constant,
    control,
    elementwise,
    indexing,
    known_slices,
    linear,
    places,
    reduction,
    shape,
    solves,
)
from xlaserve.row_proofs.walk import Rule, Rules, Walker

_Plain = Callable[[Operation, Sequence[Value]], Sequence[Value]]


def _all(count: int) -> range:
    return range(count)


def _rule(
    compute: _Plain,
    *,
    takes_unknown: bool = False,
    grows: Collection[str] = (),
    ignored: Callable[[int], Collection[int]] = lambda count: (),
) -> Rule:
    def without_walker(
        operation: Operation, operands: Sequence[Value], walker: Walker
    ) -> Sequence[Value]:
        del walker
        return compute(operation, operands)

    return Rule(without_walker, takes_unknown, frozenset(grows), ignored)


def _traced(
    compute: _Plain, *, ignored: Callable[[int], Collection[int]] = lambda count: ()
) -> Rule:
    """Return a rule for an operation on integers, with tracing to find out more about them."""
    plain = _rule(compute, takes_unknown=True, ignored=ignored)
    return replace(plain, settle=places.settled)


RULES: Rules = MappingProxyType(
    {
        **dict.fromkeys(sorted(elementwise.NAMES), _traced(elementwise.elementwise)),
        # If the predicate is known, the result depends on one side only.
        "stablehlo.select": _traced(elementwise.elementwise, ignored=_all),
        "stablehlo.constant": _rule(constant.constant, grows={"value"}),
        # Operations that move elements.
        "stablehlo.iota": _rule(shape.iota),
        "stablehlo.broadcast_in_dim": _traced(shape.broadcast_in_dim),
        "stablehlo.transpose": _rule(shape.transpose, takes_unknown=True),
        "stablehlo.reshape": _traced(shape.reshape),
        "stablehlo.slice": _rule(
            shape.slice_, takes_unknown=True, grows={"start_indices", "limit_indices"}
        ),
        "stablehlo.concatenate": _traced(shape.concatenate),
        "stablehlo.pad": _rule(shape.pad, grows={"edge_padding_low", "edge_padding_high"}),
        "stablehlo.reverse": _rule(shape.reverse),
        "stablehlo.bitcast_convert": _rule(shape.bitcast_convert),
        "stablehlo.optimization_barrier": _rule(shape.kept, takes_unknown=True, ignored=_all),
        # Reductions.
        "stablehlo.reduce": Rule(reduction.reduce, settle=places.settled),
        "stablehlo.reduce_window": Rule(reduction.reduce_window),
        "stablehlo.select_and_scatter": Rule(reduction.select_and_scatter),
        # Operands that are not compared follow those that are, and do not affect them.
        "stablehlo.sort": Rule(reduction.sort, takes_unknown=True, ignored=_all),
        "chlo.top_k": _rule(reduction.top_k),
        # Indexing.
        "stablehlo.gather": Rule(
            known_slices.gather,
            takes_unknown=True,
            grows=frozenset({"slice_sizes"}),
            ignored=lambda count: range(1, count),
        ),
        "stablehlo.scatter": Rule(
            indexing.scatter,
            takes_unknown=True,
            ignored=lambda count: (count // 2,),
        ),
        "stablehlo.dynamic_slice": _rule(
            indexing.dynamic_slice,
            takes_unknown=True,
            grows={"slice_sizes"},
            ignored=lambda count: range(1, count),
        ),
        "stablehlo.dynamic_update_slice": _rule(
            indexing.dynamic_update_slice,
            takes_unknown=True,
            ignored=lambda count: range(2, count),
        ),
        # Linear algebra and images.
        "stablehlo.dot_general": _rule(linear.dot_general),
        "stablehlo.convolution": _rule(linear.convolution),
        "stablehlo.fft": _rule(linear.fft),
        "stablehlo.cholesky": _rule(linear.matrices),
        "stablehlo.triangular_solve": _rule(solves.triangular_solve),
        "stablehlo.batch_norm_inference": _rule(linear.batch_norm_inference),
        "stablehlo.batch_norm_training": _rule(linear.batch_norm_training),
        "stablehlo.batch_norm_grad": _rule(linear.batch_norm_training),
        "stablehlo.custom_call": _rule(solves.custom_call),
        # Random bits from a key shared by all rows.
        "stablehlo.rng_bit_generator": _rule(shape.random_bits),
        # Control flow.
        "stablehlo.case": Rule(control.case, takes_unknown=True, ignored=_all),
        "stablehlo.if": Rule(control.case, takes_unknown=True, ignored=_all),
        "stablehlo.while": Rule(control.while_, takes_unknown=True, ignored=_all),
    }
)
