# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support import onnx_networks as networks
from support.onnx_models import artifact_of, exported, graph_of, largest_difference, save, theirs

from xlaserve.importers.onnx import checking
from xlaserve.importers.onnx.importing import Options, import_model
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import LoadedModel, Value
from xlaserve.tensors import Tensor

TOLERANCE = 1e-4

IMAGES = {
    "ResNet-50": lambda: networks.resnet50(32),
    "MobileNetV2": networks.mobilenet_v2,
    "EfficientNet": networks.efficientnet,
    "MobileNetV3": lambda: networks.efficientnet(hard=True),
    "YOLO": networks.yolo,
}


def test_imported_network_has_no_grouped_convolution_on_the_cpu() -> None:
    """XLA would use a naive loop for it there."""
    made = networks.mobilenet_v2()

    artifact, _ = artifact_of(made, "b", {made.graph.input[0].name: "b, 3, 64, 64"})
    groups = re.findall(r"feature_group_count = (\d+)", artifact.mlir_module())

    assert {"1"} == set(groups)


def _ids(batch: int, length: int, words: int = 100) -> dict[str, Tensor]:
    random = np.random.default_rng(batch * 1000 + length)
    mask = np.arange(length)[None, :] < random.integers(1, length + 1, (batch, 1))
    ids = random.integers(0, words, (batch, length))
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


@pytest.mark.parametrize(
    "name",
    [
        "MobileNetV2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("MobileNetV3", "ResNet-50", "EfficientNet", "YOLO")
        ),
    ],
)
def test_network_of_images_gives_what_onnxruntime_gives_with_a_symbolic_batch(name: str) -> None:
    made = IMAGES[name]()
    (image,) = made.graph.input
    size = image.type.tensor_type.shape.dim[2].dim_value
    given = {image.name: np.random.default_rng(0).standard_normal((2, 3, size, size), np.float32)}

    run = exported(made, "b", {image.name: f"b, 3, {size}, {size}"})

    assert largest_difference(theirs(made, given), run(given)) < TOLERANCE


@pytest.mark.parametrize(("decomposed", "opset"), [(True, 13), (False, 17), (False, 20)])
def test_encoder_keeps_batch_and_sequence_symbolic(decomposed: bool, opset: int) -> None:
    """Shape, Gather, Concat, Where, Expand and Reshape compute with symbolic dimensions."""
    made = networks.distilbert(networks.Encoder(), decomposed=decomposed, opset=opset)

    run = exported(made, "b, s", {"input_ids": "b, s", "attention_mask": "b, s"})

    for batch, length in ((1, 7), (3, 32)):
        given = _ids(batch, length)
        assert largest_difference(theirs(made, given), run(given)) < TOLERANCE


@pytest.mark.slow
def test_imported_encoder_is_served_with_token_ids_of_64_bits(
    tmp_path: Path,
    load: Callable[..., LoadedModel],
    run: Callable[[LoadedModel, dict[str, Value]], dict[str, Tensor]],
) -> None:
    made = networks.distilbert(networks.Encoder(layers=1))
    options = Options(dimensions={"sequence": (8,)}, max_batch_size=3)

    imported = import_model(save(made, tmp_path), tmp_path / "models" / "encoder", options)
    given = _ids(2, 8)
    answer = run(load(imported.path, ModelConfig()), dict(given))

    assert imported.checked is not None
    assert imported.checked.worst.relative < TOLERANCE
    assert ["INT64[-1,8]"] * 2 == [str(spec) for spec in imported.manifest.inputs]
    assert largest_difference(theirs(made, given), list(answer.values())) < TOLERANCE


FULL_SIZE = {
    "ResNet-50": (networks.resnet50, {}, 102_228_128),
    "DistilBERT": (lambda: networks.distilbert(networks.DISTILBERT), {"sequence": (128,)}, 264e6),
}


@pytest.mark.large
@pytest.mark.parametrize("name", FULL_SIZE)
def test_network_of_full_size_is_imported_and_served(
    name: str,
    tmp_path: Path,
    load: Callable[..., LoadedModel],
    run: Callable[[LoadedModel, dict[str, Value]], dict[str, Tensor]],
) -> None:
    """Run it with `pytest -m large tests/models/onnx -s`; it prints the differences."""
    make, dimensions, least_bytes = FULL_SIZE[name]
    made = make()
    path = save(made, tmp_path)

    imported = import_model(path, tmp_path / "models" / "m", Options(dimensions=dimensions))
    model = load(imported.path, ModelConfig(max_batch_size=2))
    given = checking.random_inputs(graph_of(made), model.info.inputs, 2)
    answer = run(model, dict(given))
    print(f"{name}: {imported.nodes} operators, {imported.checked}")

    assert imported.checked is not None
    assert imported.checked.worst.relative < TOLERANCE
    assert largest_difference(theirs(made, given), list(answer.values())) < TOLERANCE
    assert imported.manifest.parameters_bytes >= least_bytes
    assert (imported.path / "model.jaxexp").stat().st_size < 200_000
