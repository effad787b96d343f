"""The models for the comparison with onnxruntime, and how each is made or found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import onnx
from support import onnx_networks, onnx_real_networks

import zoo
import zoo_trained
from zoo_rows import ROWS

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the inputs of an execution."""

    title: str
    """Title in the table."""
    make: Callable[[], onnx.ModelProto]
    name: str = ""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Shapes of inputs that the file leaves open; -1 is the batch."""
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """Sizes of dynamic dimensions by name."""
    below: Mapping[str, int] = field(default_factory=dict)
    """Exclusive upper bounds of random integer inputs."""
    tolerance: float = TOLERANCE


def _packaged(row: str) -> Callable[[], onnx.ModelProto]:
    """Return a function that loads the model of a row of the zoo from its package."""

    def make() -> onnx.ModelProto:
        [found] = (each for each in ROWS if each.name == row)
        return onnx.load(zoo.find(found, zoo.CACHE).file)

    return make


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "resnet18": Model("ResNet-18, 224 x 224", onnx_real_networks.resnet18),
        "resnet50": Model("ResNet-50, 224 x 224", onnx_networks.resnet50),
        "mobilenet_v3": Model("MobileNetV3-Large, 224 x 224", onnx_real_networks.mobilenet_v3),
        "efficientnet_b0": Model("EfficientNet-B0, 224 x 224", onnx_real_networks.efficientnet_b0),
        "yolo_v8n": Model("YOLOv8n, 640 x 640", onnx_real_networks.yolo_v8n),
        "pp_ocr_det": Model(
            "PP-OCRv4 det, 320 x 320",
            _packaged("pp-ocr-v4-det"),
            dimensions={f"p2o.DynamicDimension.{axis}": 320 for axis in (1, 2)},
        ),
        "pp_ocr_rec": Model(
            "PP-OCRv4 rec, 48 x 320", _packaged("pp-ocr-v4-rec"), shapes={"x": (-1, 3, 48, 320)}
        ),
        "pp_ocr_cls": Model(
            "PP-OCRv2 cls, 48 x 192", _packaged("pp-ocr-v2-cls"), shapes={"x": (-1, 3, 48, 192)}
        ),
        "bert": Model(
            "BERT-base, 128 tokens", lambda: onnx_networks.distilbert(onnx_real_networks.BERT)
        ),
        "distilbert": Model(
            "DistilBERT, 128 tokens", lambda: onnx_networks.distilbert(onnx_networks.DISTILBERT)
        ),
        "gpt2_step": Model("GPT-2, one token behind 127", onnx_real_networks.gpt2_step),
        "boosted_forest": Model(
            "gradient-boosted forest, 100 trees of 31 leaves",
            lambda: onnx.load_from_string(zoo_trained.boosted_numbers()),
        ),
        # These are smaller than their namesakes.
        "mobilenet_v2_like": Model("MobileNetV2-like, 64 x 64", onnx_networks.mobilenet_v2),
        "mobilenet_v3_like": Model(
            "MobileNetV3-like, 224 x 224", lambda: onnx_networks.efficientnet(224, hard=True)
        ),
        "efficientnet_like": Model(
            "EfficientNet-like, 224 x 224", lambda: onnx_networks.efficientnet(224)
        ),
        "yolo_like": Model("YOLO-like, 320 x 320", lambda: onnx_networks.yolo(320)),
    }
)
DEFAULT = tuple(name for name in MODELS if not name.endswith("_like"))


def model_of(said: str) -> Model:
    """Return a model by name, or from a file with the shapes of its inputs: m.onnx:x=3,48,192."""
    if said in MODELS:
        found = MODELS[said]
        return Model(
            found.title, found.make, said, found.shapes, found.dimensions, found.below,
            found.tolerance,
        )  # fmt: skip
    name, _, rest = said.partition(":")
    shapes = {}
    for each in filter(None, rest.split(":")):
        key, _, sizes = each.partition("=")
        shapes[key] = (-1, *(int(size) for size in sizes.split(",")))
    stem = Path(name).stem
    return Model(stem, lambda: onnx.load(name), stem, shapes)
