"""The tolerance of a comparison, larger where a model rounds to few bits."""

from dataclasses import dataclass

import numpy as np

from xlaserve.importers.onnx.graph import Graph, Node
from xlaserve.tensors import Tensor, TensorSpec

STEPS = 4
"""Quantisation steps by which an output may differ. The last bit of a number halfway between two
steps decides how it is rounded, and XLA sums products in another order; each layer may add a step.
"""

_LEVELS = 255
"""Steps between the least and the largest number of 8 bits."""

_NARROW = {"FP16": 1e-2, "BF16": 5e-2}
"""Least tolerances of narrow outputs, by datatype."""

_ROUNDING = frozenset(
    {
        "DynamicQuantizeLSTM",
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "QAttention",
        "QGemm",
        "QuantizeLinear",
    }
)
"""Operators that round intermediate results to 8 bits; so do all with the prefix QLinear."""

_OF_SCALE = {"QuantizeLinear": 1, "QLinearConv": 6, "QLinearMatMul": 6}
"""Operators whose output has a step that is known, and the input that is it."""

_KEEPING = frozenset(
    {
        "DequantizeLinear",
        "Flatten",
        "Identity",
        "MaxPool",
        "Relu",
        "Reshape",
        "Slice",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators whose output has the steps of their first input."""


_SIGMOID_STEP = 2.0**-23
"""The step of FP32 at 1. onnxruntime computes a Sigmoid as a fraction plus a half, so its error is
some of these steps, however small the result.
"""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The most that an output may differ by."""

    relative: float
    """Relative to its largest number."""
    absolute: float = 0.0
    """Absolute; either bound suffices."""
    why: str = ""
    """The quantisation steps of the model behind it; empty for a requested tolerance."""

    def covers(self, absolute: float, relative: float) -> bool:
        """Tell whether a difference is allowed."""
        return relative <= self.relative or absolute <= self.absolute

    def __str__(self) -> str:
        if self.why:
            return self.why
        least = f", or {self.absolute:.3g}, as a Sigmoid is" if self.absolute else ""
        return f"{self.relative:.3g} of its largest number (--tolerance){least}"


def allowance(graph: Graph, spec: TensorSpec, tolerance: float) -> Allowance:
    """Return the tolerance of an output, at least `tolerance`."""
    relative = max(tolerance, _NARROW.get(spec.datatype.name, 0.0))
    if not any(map(_rounds, graph.nodes)):
        ends = _maker(graph, spec.name)
        is_sigmoid = ends is not None and ends.operator == "Sigmoid"
        return Allowance(relative, STEPS * _SIGMOID_STEP if is_sigmoid else 0.0)
    step = 1.0 if spec.datatype.itemsize == 1 else _step(graph, spec.name)
    if step is not None:
        said = f"{STEPS} steps of its quantisation, of {step:.3g} each"
        return Allowance(relative, STEPS * step, said)
    return Allowance(
        max(relative, STEPS / _LEVELS),
        why=f"{STEPS} of the {_LEVELS} steps of 8 bits, to which the model rounds what it computes",
    )


def _rounds(node: Node) -> bool:
    return node.operator in _ROUNDING or node.operator.startswith("QLinear")


def _step(graph: Graph, name: str) -> float | None:
    """Return the distance of two neighbouring numbers of an output, None where it is not known."""
    node = _maker(graph, name)
    if node is None or node.operator not in _OF_SCALE:
        return None
    scale: Tensor | None = graph.constants.get(node.inputs[_OF_SCALE[node.operator]])
    return None if scale is None else float(np.max(np.abs(scale.astype(np.float64)), initial=0.0))


def _maker(graph: Graph, name: str) -> Node | None:
    """Return the node that computes an output, skipping nodes that pass values through."""
    makers = {output: node for node in graph.nodes for output in node.outputs}
    node = makers.get(name)
    while node is not None and node.operator in _KEEPING:
        node = makers.get(node.inputs[0])
    return node
