"""Builds small ONNX models, and runs them in our converter and in onnxruntime."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.importers.onnx import planning, reading
from xlaserve.importers.onnx.graph import Graph
from xlaserve.importers.onnx.planning import Plan
from xlaserve.tensors import Tensor

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL

Inputs = Mapping[str, tuple[int, Sequence[int | str]]]
X: Inputs = {"x": (FLOAT, ["N", 4])}


def node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
) -> onnx.NodeProto:
    """Return a node named after its first output."""
    return helper.make_node(operator, inputs, outputs, name=f"the_{outputs[0]}", **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Inputs,
    outputs: Sequence[str],
    constants: Mapping[str, Tensor] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """Return a model whose output types are inferred by onnx."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, *said) for name, said in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [
            numpy_helper.from_array(np.asarray(value), name)
            for name, value in (constants or {}).items()
        ],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    for output in made.graph.output:
        output.ClearField("type")
    return onnx.shape_inference.infer_shapes(made)


def single(
    operator: str,
    given: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] | None = None,
    opset: int = 17,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model with one node that takes the given tensors, then the constants."""
    inputs = {
        name: (int(helper.np_dtype_to_tensor_dtype(value.dtype)), value.shape)
        for name, value in given.items()
    }
    made = node(operator, [*given, *(constants or {})], ["y"], **attributes)
    return model([made], inputs, ["y"], constants, opset)


def save(made: onnx.ModelProto, directory: Path, name: str = "model.onnx") -> Path:
    """Write a model and return its path."""
    path = directory / name
    onnx.save(made, path)
    return path


def graph_of(made: onnx.ModelProto) -> Graph:
    """Parse a model into a graph."""
    return reading.parse(made.SerializeToString()).graph


def planned(made: onnx.ModelProto, given: Mapping[str, Tensor]) -> Plan:
    """Plan a model for inputs of these shapes."""
    arguments = {n: jax.ShapeDtypeStruct(value.shape, value.dtype) for n, value in given.items()}
    return planning.plan(graph_of(made), arguments)


def ours(made: onnx.ModelProto, given: Mapping[str, Tensor]) -> list[Tensor]:
    """Convert, compile and run a model."""
    plan = planned(made, given)
    found = jax.jit(plan)(plan.parameters, dict(given))
    return [np.asarray(found[name]) for name in plan.outputs]


def artifact_of(
    made: onnx.ModelProto, dimensions: str, shapes: Mapping[str, str]
) -> tuple[jax.export.Exported, Plan]:
    """Export a model with symbolic dimensions: `artifact_of(model, "b, s", {"ids": "b, s"})`."""
    graph = graph_of(made)
    scope = jax.export.SymbolicScope()
    jax.export.symbolic_shape(dimensions, scope=scope)
    arguments = {
        item.name: jax.ShapeDtypeStruct(
            jax.export.symbolic_shape(shapes[item.name], scope=scope), item.datatype.dtype
        )
        for item in graph.inputs
    }
    plan = planning.plan(graph, arguments)
    return jax.export.export(jax.jit(optimize(plan.__call__)))(plan.parameters, arguments), plan


def exported(made: onnx.ModelProto, dimensions: str, shapes: Mapping[str, str]) -> Any:
    """Export a model with symbolic dimensions; return a function with the signature of `ours`."""
    artifact, plan = artifact_of(made, dimensions, shapes)

    def run(given: Mapping[str, Tensor]) -> list[Tensor]:
        found = jax.jit(artifact.call)(plan.parameters, dict(given))
        return [np.asarray(found[name]) for name in plan.outputs]

    return run


def theirs(made: onnx.ModelProto, given: Mapping[str, Tensor]) -> list[Tensor]:
    """Run a model in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [np.asarray(value) for value in session.run(None, dict(given))]


def largest_difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the maximum difference, relative to the largest value of each output."""
    assert [(e.shape, e.dtype) for e in expected] == [(a.shape, a.dtype) for a in actual]
    return max(_difference(e, a) for e, a in zip(expected, actual, strict=True))


def _difference(expected: Tensor, actual: Tensor) -> float:
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    scale = np.abs(left).max(initial=0.0)
    return float(np.abs(left - right).max(initial=0.0) / (scale or 1.0))
