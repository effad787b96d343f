"""onnx's test cases for its operators, run through our converter."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import counted, operators, planning, reading, texts
from xlaserve.importers.onnx.control import CONTROL, is_control
from xlaserve.importers.onnx.datatypes import edge_of
from xlaserve.importers.onnx.graph import Graph, Node, reads_of
from xlaserve.tensors import Tensor

PASSED = "passed"
HELD = "passed: held constant"
"""Outcome of a case that needed constant inputs, as with `--const`."""

_KNOWN_OF_LOOPS = 2
"""Inputs of a Loop that must be constant if it stacks outputs: trip count and condition."""

_ASKING = frozenset({"Shape", "Size"})
"""Operators whose result is known without knowing their input."""

_OPEN = "a shape that depends on the data"

REASONS = (
    ("datatype ", "a datatype that the V2 protocol does not have"),
    ("are strings, which JAX", "texts"),
    ("is a string", "texts"),
    ("is not a tensor", "sequences and optionals"),
    ("is a sequence", "sequences and optionals"),
    ("has a kind that is not implemented", "sequences and optionals"),
    ("training_mode is on", "training"),
    ("on data", _OPEN),
    ("data-dependent", _OPEN),
    ("sequence_lens is not implemented", "sequences of different length"),
    ("a Scan of opset 8 is not", "Scan as before opset 9"),
    ("attribute 'ratio' is not implemented", "Dropout as before opset 12"),
)
"""Parts of error messages and the categories they count as; any other error is a failure."""


@dataclass(frozen=True, slots=True)
class Case:
    """A test case of onnx."""

    name: str
    model: onnx.ModelProto
    data_sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]

    @property
    def operators(self) -> set[str]:
        """Return the operators in its graph."""
        return {node.op_type for node in self.model.graph.node}


def cases() -> list[Case]:
    """Return all cases whose operators we convert."""
    known = {name for family in operators.OPERATORS.values() for name in family} | set(CONTROL)
    return [case for case in every_node() if case.operators <= known]


def every_node() -> list[Case]:
    """Return all single-operator cases, including their expansions into functions."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # onnx divides by zero on purpose
        found = collect_testcases(None)
    return [Case(case.name, case.model, case.data_sets or ()) for case in found if case.model]


def with_constant(case: Case, position: int) -> Case:
    """Turn one of a case's inputs into an initializer, which may have any type."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    ((inputs, outputs),) = case.data_sets
    given = inputs[position]
    tensor = TensorProto()
    tensor.CopyFrom(given if isinstance(given, TensorProto) else numpy_helper.from_array(given))
    tensor.name = model.graph.input.pop(position).name
    model.graph.initializer.append(tensor)
    rest = [value for place, value in enumerate(inputs) if place != position]
    return Case(case.name, model, [(rest, outputs)])


def outcome(case: Case) -> str:
    """Run a case; return PASSED, HELD, the category of the error, or `FAILED` and the reason.

    Inputs that decide shapes are made constant, as a user would: first those that operators
    require, then, if a shape is still dynamic, those that these are computed from.
    """
    found = _outcome(case, all_before=False)
    return _outcome(case, all_before=True) if found == _OPEN else found


def _outcome(case: Case, *, all_before: bool) -> str:
    try:
        return _run(case, all_before=all_before)
    except InvalidModel as error:
        text = str(error)
        return next((reason for part, reason in REASONS if part in text), f"FAILED: {text}")


def _run(case: Case, *, all_before: bool) -> str:
    graph = _parsed(case.model)
    texts.refuse(graph)
    names = [item.name for item in case.model.graph.input]
    known = _known_before(graph) if all_before else _known(graph.nodes)
    for inputs, outputs in case.data_sets:
        given = {n: _sent(value) for n, value in zip(names, inputs, strict=False) if n}
        fixed = {name: value for name, value in given.items() if name in known}
        traced = {name: value for name, value in given.items() if name not in known}
        got = compute(replace(graph, constants={**graph.constants, **fixed}), traced)
        for name, want in zip(graph.outputs, outputs, strict=True):
            problem = _problem(_sent(want), got[name])
            if problem:
                return f"FAILED: {name}: {problem}"
    return HELD if known.intersection(names) else PASSED


def _parsed(model: onnx.ModelProto) -> Graph:
    try:
        return reading.parse(model.SerializeToString()).graph
    except InvalidModel as error:
        if ", which onnx cannot convert to" not in str(error):
            raise
    return reading.parse(_within_opsets(model)).graph


def _within_opsets(model: onnx.ModelProto) -> bytes:
    """Raise an unsupported old opset to the oldest supported one; the operators did not change."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for opset in changed.opset_import:
        if not opset.domain and opset.version < reading.OLDEST_OPSET:
            opset.version = reading.OLDEST_OPSET
    return changed.SerializeToString()


def _known(nodes: Iterable[Node]) -> set[str]:
    """Return the values that must be constant during conversion."""
    found: set[str] = set()
    for node in nodes:
        if is_control(node):
            found.update(node.inputs[:_KNOWN_OF_LOOPS] if node.operator == "Loop" else ())
            continue
        row = operators.OPERATORS.get(node.domain, {}).get(node.operator)
        static = frozenset() if row is None else row.static
        found |= {node.inputs[place] for place in static if place < len(node.inputs)}
    return found


def _known_before(graph: Graph) -> set[str]:
    """Return the values of `_known` and everything they are computed from."""
    found = _known(graph.nodes)
    for node in reversed(graph.nodes):
        if node.operator not in _ASKING and found.intersection(node.outputs):
            found.update(reads_of(node))
    return found


def compute(graph: Graph, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compile and run a graph with these inputs; padding rows are removed from the outputs."""
    arguments = {n: jax.ShapeDtypeStruct(value.shape, value.dtype) for n, value in given.items()}
    plan = planning.plan(graph, arguments)
    found = jax.jit(plan)(plan.parameters, given)
    return counted.cut({name: np.asarray(value) for name, value in found.items()}, plan.counted)


def _array(value: Any) -> Tensor:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _sent(value: Any) -> Tensor:
    """Convert a tensor to the datatype that clients use for it."""
    found = _array(value)
    return found.astype(edge_of(found.dtype))


def _problem(expected: Tensor, actual: Tensor) -> str:
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"expected {expected.dtype}{expected.shape}, got {actual.dtype}{actual.shape}"
    # onnx's own tolerance; larger for bfloat16, which has 8 bits.
    tolerance = 2e-2 if expected.dtype.name == "bfloat16" else 1e-3
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    if np.allclose(left, right, rtol=tolerance, atol=1e-5, equal_nan=True):
        return ""
    return f"differs by {np.abs(left - right).max()}"
