"""The test cases that onnx has for its operators, run through our converter."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases

from xlaserve.errors import InvalidModel
from xlaserve.models.onnx import operators, planning, reading
from xlaserve.models.onnx.graph import Graph
from xlaserve.tensors import Tensor

_BRANCHES = "If"

REASONS = (
    ("datatype ", "a datatype that the V2 protocol does not have"),
    ("are texts, which JAX", "texts"),
    ("is no tensor", "sequences and optionals"),
    ("no sequences", "sequences and optionals"),
    ("of a kind that is not implemented", "sequences and optionals"),
    ("training_mode is on", "training"),
    ("depends on the data", "a shape that depends on the data"),
    ("quantisation to", "a datatype that the V2 protocol does not have"),
    ("its second output, the indices", "MaxPool with indices"),
    ("sequence_lens is not implemented", "sequences of different length"),
    ("zero-size array", "the extreme of nothing"),
    ("attribute 'mode' is not implemented", "SpaceToDepth with a mode"),
    ("attribute 'ratio' is not implemented", "Dropout as before opset 12"),
)
"""What a refusal says, and what it is counted as. A refusal that is not here is a failure."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test case of onnx."""

    name: str
    model: onnx.ModelProto
    data_sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]

    @property
    def operators(self) -> set[str]:
        """Return the operators of its graph."""
        return {node.op_type for node in self.model.graph.node}


def cases() -> list[Case]:
    """Return all cases whose operators are converted."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # onnx divides by zero on purpose
        found = collect_testcases(None)
    known = {name for family in operators.OPERATORS.values() for name in family} | {_BRANCHES}
    made = [Case(case.name, case.model, case.data_sets or ()) for case in found if case.model]
    return [case for case in made if case.operators <= known]


def few(found: Sequence[Case], each: int) -> Iterator[Case]:
    """Yield so many cases of each operator, but none that spells an operator out."""
    counts: dict[str, int] = {}
    for case in found:
        if len(case.operators) > 1 or case.name.endswith("_expanded"):
            continue
        (operator,) = case.operators
        counts[operator] = counts.get(operator, 0) + 1
        if counts[operator] <= each:
            yield case


def with_constant(case: Case, position: int) -> Case:
    """Give a case one of its inputs as an initializer, which may be of any type."""
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
    """Run a case and return `passed`, the reason of a refusal, or how it failed."""
    try:
        return _run(case)
    except InvalidModel as error:
        text = str(error)
        return next((reason for part, reason in REASONS if part in text), f"FAILED: {text}")


def _run(case: Case) -> str:
    graph = reading.parse(_within_opsets(case.model)).graph
    names = [item.name for item in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        given = {n: _array(value) for n, value in zip(names, inputs, strict=False) if n}
        known = _known(case.model)
        fixed = {name: value for name, value in given.items() if name in known}
        traced = {name: value for name, value in given.items() if name not in known}
        got = compute(replace(graph, constants={**graph.constants, **fixed}), traced)
        for name, want in zip(graph.outputs, outputs, strict=True):
            problem = _problem(_array(want), got[name])
            if problem:
                return f"FAILED: {name}: {problem}"
    return "passed"


def _within_opsets(model: onnx.ModelProto) -> bytes:
    """Give an operator that did not change since an old opset the oldest that is read."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for opset in changed.opset_import:
        if not opset.domain and opset.version < reading.OLDEST_OPSET:
            opset.version = reading.OLDEST_OPSET
    return changed.SerializeToString()


def _known(model: onnx.ModelProto) -> set[str]:
    """Return the inputs that must be known while a graph is converted."""
    found = set()
    for node in model.graph.node:
        if node.op_type == _BRANCHES:
            found.add(node.input[0])
            continue
        row = operators.OPERATORS["" if node.domain == "ai.onnx" else node.domain][node.op_type]
        found |= {node.input[p] for p in row.static if p < len(node.input)}
    return found


def compute(graph: Graph, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a graph, compiled, on inputs by name."""
    arguments = {n: jax.ShapeDtypeStruct(value.shape, value.dtype) for n, value in given.items()}
    plan = planning.plan(graph, arguments)
    found = jax.jit(plan)(plan.parameters, given)
    return {name: np.asarray(value) for name, value in found.items()}


def _array(value: Any) -> Tensor:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _problem(expected: Tensor, actual: Tensor) -> str:
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"expected {expected.dtype}{expected.shape}, got {actual.dtype}{actual.shape}"
    # As onnx compares, but bfloat16 has 8 bits.
    tolerance = 2e-2 if expected.dtype.name == "bfloat16" else 1e-3
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    if np.allclose(left, right, rtol=tolerance, atol=1e-5, equal_nan=True):
        return ""
    return f"differs by {np.abs(left - right).max()}"
