"""The tolerance of the onnxruntime comparison, which is wider for quantised models."""

from dataclasses import dataclass

import numpy as np

from xlaserve.importers.onnx.graph import Graph, Node
from xlaserve.tensors import Tensor, TensorSpec

STEPS = 4
"""Number of quantisation steps by which an output may differ. XLA sums products in another order
than onnxruntime, which can flip the rounding of numbers halfway between two steps, in each layer.
"""

_LEVELS = 255
"""Steps between the smallest and the largest 8-bit number."""

_NARROW = {"FP16": 1e-2, "BF16": 5e-2}
"""Minimum tolerances of FP16 and BF16 outputs."""

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
"""Operators that round intermediate results to 8 bits, besides those named QLinear*."""

_OF_SCALE = {"QuantizeLinear": 1, "QLinearConv": 6, "QLinearMatMul": 6}
"""Operators whose output has a known quantisation step, with the position of its scale input."""

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
"""Operators that keep the quantisation step of their first input."""


_SIGMOID_STEP = 2.0**-23
"""Spacing of FP32 numbers near 1. onnxruntime computes Sigmoid as 0.5 plus a fraction, so its
absolute error is a few times this spacing, even if the result is tiny."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The largest accepted difference of an output."""

    relative: float
    """Difference divided by the output's largest absolute value."""
    absolute: float = 0.0
    """Absolute difference; an output passes if it meets either limit."""
    why: str = ""
    """Explains a limit that comes from quantisation; empty if it is the requested tolerance."""

    def covers(self, absolute: float, relative: float) -> bool:
        """Tell whether a difference is within the limits."""
        return relative <= self.relative or absolute <= self.absolute

    def __str__(self) -> str:
        if self.why:
            return self.why
        least = f", or {self.absolute:.3g}, as a Sigmoid is" if self.absolute else ""
        return f"{self.relative:.3g} of its largest value (--tolerance){least}"


def allowance(graph: Graph, spec: TensorSpec, tolerance: float) -> Allowance:
    """Return the accepted difference of an output, whose relative limit is at least `tolerance`."""
    relative = max(tolerance, _NARROW.get(spec.datatype.name, 0.0))
    if not any(map(_rounds, graph.nodes)):
        ends = _maker(graph, spec.name)
        is_sigmoid = ends is not None and ends.operator == "Sigmoid"
        return Allowance(relative, STEPS * _SIGMOID_STEP if is_sigmoid else 0.0)
    step = 1.0 if spec.datatype.itemsize == 1 else _step(graph, spec.name)
    if step is not None:
        description = f"{STEPS} steps of its quantization, of {step:.3g} each"
        return Allowance(relative, STEPS * step, description)
    return Allowance(
        max(relative, STEPS / _LEVELS),
        why=f"{STEPS} of the {_LEVELS} levels of the model's 8-bit quantization",
    )


def _rounds(node: Node) -> bool:
    return node.operator in _ROUNDING or node.operator.startswith("QLinear")


def _step(graph: Graph, name: str) -> float | None:
    """Return the quantisation step of an output, or None if it is unknown."""
    node = _maker(graph, name)
    if node is None or node.operator not in _OF_SCALE:
        return None
    scale: Tensor | None = graph.constants.get(node.inputs[_OF_SCALE[node.operator]])
    return None if scale is None else float(np.max(np.abs(scale.astype(np.float64)), initial=0.0))


def _maker(graph: Graph, name: str) -> Node | None:
    """Return the node that computes an output; operators that keep the step are skipped."""
    makers = {output: node for node in graph.nodes for output in node.outputs}
    node = makers.get(name)
    while node is not None and node.operator in _KEEPING:
        node = makers.get(node.inputs[0])
    return node
