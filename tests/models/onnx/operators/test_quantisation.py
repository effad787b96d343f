"""Quantization cases that onnx's suite lacks: ties with a constant scale, and all zeros."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from support.onnx_cases import compute

from xlaserve.importers.onnx import reading
from xlaserve.tensors import Tensor

HALVES = np.arange(-40.5, 41.0, 0.5, dtype=np.float32)


def model(node: onnx.NodeProto, inputs: dict[str, int], constants: dict[str, Tensor]) -> bytes:
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info(name, kind, [None]) for name, kind in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in node.output],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    return made.SerializeToString()


@pytest.mark.parametrize("scale", [0.1, 255.0, 3.0, 1 / 3, 0.0157])
@pytest.mark.parametrize("operator", ["QuantizeLinear", "Div"])
def test_a_scale_that_is_known_divides_as_one_that_is_not(operator: str, scale: float) -> None:
    """Multiples of half the scale show errors of a reciprocal in the last bit."""
    constants = {"scale": np.asarray(scale, np.float32)}
    node = helper.make_node(operator, ["x", "scale"], ["y"])
    data = model(node, {"x": TensorProto.FLOAT}, constants)
    x = HALVES * np.float32(scale)
    (expected,) = ReferenceEvaluator(data).run(None, {"x": x})
    assert isinstance(expected, np.ndarray)

    assert expected.tolist() == compute(reading.parse(data).graph, {"x": x})["y"].tolist()


def test_zeros_alone_are_quantised_to_zeros() -> None:
    """Their scale is that of onnxruntime, without a division by zero."""
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])
    data = model(node, {"x": TensorProto.FLOAT}, {})
    found = compute(reading.parse(data).graph, {"x": np.zeros(3, np.float32)})

    assert {"y": [0, 0, 0], "scale": 1.0, "zero": 0} == {n: v.tolist() for n, v in found.items()}
