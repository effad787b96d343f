"""Verdicts on served models: the examples, and imports from ONNX."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from xlaserve.artifact import artifact, manifest
from xlaserve.row_proofs import Independence, Verdict, loops_follow_inputs, prove

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from support import onnx_networks as networks
from support.onnx_models import FLOAT, artifact_of, model, node

NETWORKS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "MobileNetV2": networks.mobilenet_v2,
    "EfficientNet": networks.efficientnet,
    "MobileNetV3": lambda: networks.efficientnet(hard=True),
    "YOLO": networks.yolo,
}
ENCODER = {"input_ids": "b, s", "attention_mask": "b, s"}


def verdict_of(
    made: onnx.ModelProto, shapes: Mapping[str, str], sizes: Mapping[str, int] | None = None
) -> Verdict:
    """Return the verdict on an ONNX model whose batch is `b`."""
    with jax.enable_x64(True):
        exported, plan = artifact_of(made, ", ".join(["b", *(sizes or {})]), shapes)
    parameters = len(jax.tree.leaves(plan.parameters))
    return prove(exported, parameters, list(plan.outputs), sizes)


@pytest.mark.parametrize("name", ["digits", "identity", "mlp", "simple"])
def test_an_example_is_proved_from_its_files(example_models: Path, name: str) -> None:
    directory = example_models / name / "1"
    described = manifest.read(directory)
    exported = artifact.read(directory, described)

    verdict = prove(exported, len(described.parameters), [spec.name for spec in described.outputs])

    assert str(verdict) == "proved"
    assert not loops_follow_inputs(exported)


@pytest.mark.parametrize("name", NETWORKS)
def test_an_imported_network_of_images_is_proved(name: str) -> None:
    made = NETWORKS[name]()
    (image,) = made.graph.input
    size = image.type.tensor_type.shape.dim[2].dim_value

    verdict = verdict_of(made, {image.name: f"b, 3, {size}, {size}"})

    assert str(verdict) == "proved"


@pytest.mark.parametrize(("decomposed", "opset"), [(True, 13), (False, 20)])
def test_an_imported_encoder_is_proved_for_a_length(decomposed: bool, opset: int) -> None:
    made = networks.distilbert(networks.Encoder(), decomposed=decomposed, opset=opset)

    verdict = verdict_of(made, ENCODER, {"s": 16})

    assert str(verdict) == "proved"


def test_an_open_dimension_needs_a_size() -> None:
    made = networks.distilbert(networks.Encoder())
    with jax.enable_x64(True):
        exported, plan = artifact_of(made, "b, s", ENCODER)

    verdict = prove(exported, len(jax.tree.leaves(plan.parameters)), ["y"])

    assert verdict.independence == Independence.UNKNOWN
    assert "'s'" in verdict.reason


def _recurrent(operator: str, gates: int) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((1, gates * 3, 4)).astype(np.float32),
        "r": random.standard_normal((1, gates * 3, 3)).astype(np.float32),
    }
    recurrent = node(operator, ["x", "w", "r"], ["y"], hidden_size=3)
    return model([recurrent], {"x": (FLOAT, ["seq", 1, 4])}, ["y"], weights)


@pytest.mark.parametrize(("operator", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_time_axis_that_is_first_is_no_batch(operator: str, gates: int) -> None:
    verdict = verdict_of(_recurrent(operator, gates), {"x": "b, 1, 4"})

    assert verdict.independence == Independence.UNKNOWN


def test_quantisation_by_the_range_of_all_rows_mixes_them() -> None:
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("MatMulInteger", ["q", "w", "zero"], ["product"]),
        node("Cast", ["product"], ["number"], to=FLOAT),
        node("Mul", ["number", "scale"], ["y"]),
    ]
    weights = {"w": np.arange(-6, 6, dtype=np.int8).reshape(4, 3)}
    made = model(nodes, {"x": (FLOAT, ["N", 4])}, ["y"], weights)

    verdict = verdict_of(made, {"x": "b, 4"})

    assert (verdict.independence, verdict.operation) == (
        Independence.UNKNOWN,
        "stablehlo.reduce",
    )
