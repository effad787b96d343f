"""Well-known network architectures built with onnx's helpers, with random weights and fixed seed.

Weights are scaled so that activations keep their magnitude through all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from xlaserve.tensors import Tensor


@dataclass(slots=True)
class Builder:
    """A graph under construction: each method adds a node and returns its output's name."""

    opset: int = 17
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node and return its first output."""
        return self.add_all(operator, *inputs, outputs=outputs, **attributes)[0]

    def add_all(
        self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any
    ) -> list[str]:
        """Add a node and return all its outputs."""
        name = f"{operator}_{len(self.nodes)}"
        names = [name if index == 0 else f"{name}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, name=name, **attributes))
        return names

    def constant(self, value: "Tensor | Sequence[int] | int | float") -> str:
        """Add an initializer; integers become INT64, other numbers FP32."""
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        """Add random weights with the variance that keeps a signal's size."""
        drawn = self.random.standard_normal(shape) * np.sqrt(1.0 / fan_in)
        return self.constant(drawn.astype(np.float32))

    def model(
        self,
        inputs: Mapping[str, tuple[int, Sequence[int | str]]],
        outputs: Sequence[str],
    ) -> onnx.ModelProto:
        """Return the model, without types for its outputs."""
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info(name, *said) for name, said in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.initializers,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        model.graph.output[0].name = outputs[0]
        return onnx.shape_inference.infer_shapes(model)

    # --- Image layers ----------------------------------------------------------------------------

    def conv(
        self, x: str, channels: tuple[int, int], kernel: int = 1, stride: int = 1, group: int = 1
    ) -> str:
        """Add a convolution with padding that preserves the size."""
        into, out = channels
        fan_in = into // group * kernel**2
        weight = self.weight(out, into // group, kernel, kernel, fan_in=fan_in)
        return self.add(
            "Conv", x, weight,
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4, group=group,
        )  # fmt: skip

    def batch_norm(self, x: str, channels: int) -> str:
        """Add a batch normalization with random statistics close to a standard normal's."""
        draw = self.random.uniform
        parts = [draw(0.8, 1.2, channels), *(draw(-0.1, 0.1, channels) for _ in range(2))]
        names = [self.constant(part) for part in (*parts, draw(0.8, 1.2, channels))]
        return self.add("BatchNormalization", x, *names, epsilon=1e-5)

    def conv_norm(
        self, x: str, channels: tuple[int, int], kernel: int = 1, stride: int = 1, group: int = 1
    ) -> str:
        """Add a convolution and a batch normalization."""
        return self.batch_norm(self.conv(x, channels, kernel, stride, group), channels[1])

    def classifier(self, x: str, channels: int, classes: int) -> str:
        """Add global pooling, flattening and a matrix multiplication."""
        flat = self.add("Flatten", self.add("GlobalAveragePool", x), axis=1)
        weight = self.weight(classes, channels, fan_in=channels)
        bias = self.weight(classes, fan_in=classes)
        return self.add("Gemm", flat, weight, bias, transB=1)


def resnet50(size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """ResNet-50: a 7x7 convolution, then 3, 4, 6 and 3 bottleneck blocks; 25.6 M parameters."""
    net = Builder()
    x = net.add("Relu", net.conv_norm("image", (3, 64), 7, 2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = net.add("Relu", net.conv_norm(x, (channels, width)))
            y = net.add("Relu", net.conv_norm(y, (width, width), 3, stride))
            y = net.conv_norm(y, (width, 4 * width))
            kept = x if block else net.conv_norm(x, (channels, 4 * width), 1, stride)
            x = net.add("Relu", net.add("Add", y, kept))
            channels = 4 * width
    logits = net.classifier(x, channels, classes)
    return net.model({"image": (TensorProto.FLOAT, ["N", 3, size, size])}, [logits])


def mobilenet_v2(
    size: int = 64, classes: int = 100, stages: Sequence[tuple[int, int, int, int]] = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2), (6, 64, 2, 2),
    ),
) -> onnx.ModelProto:  # fmt: skip
    """MobileNetV2: inverted residuals as (expansion, channels, repeats, stride), ReLU6 as Clip."""
    net = Builder(opset=13)
    low, high = net.constant(0.0), net.constant(6.0)

    def relu6(x: str) -> str:
        return net.add("Clip", x, low, high)

    x, channels = relu6(net.conv_norm("image", (3, 32), 3, 2)), 32
    for expansion, out, repeats, stride in stages:
        for block in range(repeats):
            step = 1 if block else stride
            wide = channels * expansion
            y = relu6(net.conv_norm(x, (channels, wide))) if expansion > 1 else x
            y = relu6(net.conv_norm(y, (wide, wide), 3, step, wide))
            y = net.conv_norm(y, (wide, out))
            x, channels = (net.add("Add", x, y) if block else y), out
    x = relu6(net.conv_norm(x, (channels, 256)))
    logits = net.classifier(x, 256, classes)
    return net.model({"image": (TensorProto.FLOAT, ["N", 3, size, size])}, [logits])


def efficientnet(size: int = 64, *, hard: bool = False) -> onnx.ModelProto:
    """EfficientNet: MBConv blocks with squeeze-and-excitation and Swish (or HardSwish)."""
    net = Builder(opset=14)

    def swish(x: str) -> str:
        return net.add("HardSwish", x) if hard else net.add("Mul", x, net.add("Sigmoid", x))

    def excite(x: str, channels: int) -> str:
        pooled = net.add("ReduceMean", x, axes=[2, 3], keepdims=1)
        small = swish(net.conv(pooled, (channels, channels // 4)))
        scale = net.conv(small, (channels // 4, channels))
        gate = net.add("HardSigmoid", scale, alpha=1 / 6) if hard else net.add("Sigmoid", scale)
        return net.add("Mul", x, gate)

    x, channels = swish(net.conv_norm("image", (3, 16), 3, 2)), 16
    for out, kernel, stride in ((16, 3, 1), (24, 5, 2), (24, 3, 1), (40, 5, 2)):
        wide = 4 * channels
        y = swish(net.conv_norm(x, (channels, wide)))
        y = excite(swish(net.conv_norm(y, (wide, wide), kernel, stride, wide)), wide)
        y = net.conv_norm(y, (wide, out))
        x, channels = (net.add("Add", x, y) if out == channels and stride == 1 else y), out
    scores = net.add("Softmax", net.classifier(x, channels, 50), axis=-1)
    return net.model({"image": (TensorProto.FLOAT, ["N", 3, size, size])}, [scores])


def yolo(size: int = 64, classes: int = 4) -> onnx.ModelProto:
    """A detector: C2f blocks, pyramid pooling, upsampling, and decoding of box distributions."""
    net = Builder(opset=17)
    bins = 8

    def silu(x: str) -> str:
        return net.add("Mul", x, net.add("Sigmoid", x))

    def conv(x: str, into: int, out: int, kernel: int = 3, stride: int = 1) -> str:
        return silu(net.conv_norm(x, (into, out), kernel, stride))

    def c2f(x: str, channels: int) -> str:
        half = channels // 2
        sizes = net.constant([half, half])
        left, right = net.add_all("Split", conv(x, channels, channels, 1), sizes, outputs=2, axis=1)
        inner = net.add("Add", right, conv(conv(right, half, half), half, half))
        joined = net.add("Concat", left, right, inner, axis=1)
        return conv(joined, 3 * half, channels, 1)

    def pyramid(x: str, channels: int) -> str:
        parts = [conv(x, channels, channels // 2, 1)]
        for _ in range(3):
            window: dict[str, Any] = {"kernel_shape": [5, 5], "pads": [2] * 4}
            parts.append(net.add("MaxPool", parts[-1], **window))
        return conv(net.add("Concat", *parts, axis=1), 2 * channels, channels, 1)

    def up(x: str) -> str:
        scales = net.constant(np.asarray([1, 1, 2, 2], np.float32))
        modes: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
        return net.add("Resize", x, "", scales, nearest_mode="floor", **modes)

    fine = c2f(conv(conv("images", 3, 16, 3, 2), 16, 32, 3, 2), 32)
    coarse = pyramid(c2f(conv(fine, 32, 64, 3, 2), 64), 64)
    merged = c2f(conv(net.add("Concat", up(coarse), fine, axis=1), 96, 32, 1), 32)
    heads, cells = [], 0
    for x, channels, stride in ((merged, 32, 4), (coarse, 64, 8)):
        grid = size // stride
        out = 4 * bins + classes
        head = net.conv(conv(x, channels, 32), (32, out))
        # Exporters read the batch size from the shape as well.
        batch = net.add("Gather", net.add("Shape", head), net.constant(0), axis=0)
        first = net.add("Unsqueeze", batch, net.constant([0]))
        shape = net.add("Concat", first, net.constant([out, -1]), axis=0)
        heads.append(net.add("Reshape", head, shape))
        cells += grid * grid
    both = net.add("Concat", *heads, axis=2)
    sizes = net.constant([4 * bins, classes])
    boxes, scores = net.add_all("Split", both, sizes, outputs=2, axis=1)
    spread = net.add("Reshape", boxes, net.constant([0, 4, bins, cells]))
    weights = net.add("Softmax", net.add("Transpose", spread, perm=[0, 2, 1, 3]), axis=1)
    kernel = net.constant(np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
    distance = net.add("Reshape", net.add("Conv", weights, kernel), net.constant([0, 4, -1]))
    near, far = (
        net.add("Slice", distance, *(net.constant([n]) for n in (start, start + 2, 1)))
        for start in (0, 2)
    )
    centre = net.add("Div", net.add("Sub", far, near), net.constant(2.0))
    box = net.add("Concat", centre, net.add("Add", near, far), axis=1)
    found = net.add("Concat", box, net.add("Sigmoid", scores), axis=1)
    return net.model({"images": (TensorProto.FLOAT, ["batch", 3, size, size])}, [found])


# --- Text networks -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoder:
    """Dimensions of a transformer."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    hidden: int = 128
    words: int = 100
    positions: int = 64
    types: int = 0
    """Number of token types, as in BERT; if nonzero, there is a pooled output as well."""


DISTILBERT = Encoder(layers=6, width=768, heads=12, hidden=3072, words=30522, positions=512)
"""66 M parameters."""


def distilbert(
    size: Encoder, *, decomposed: bool = True, opset: int = 14, sequence: int | str = "sequence"
) -> onnx.ModelProto:
    """DistilBERT or BERT, with the shape arithmetic that tracing exporters leave behind.

    `decomposed` expands LayerNormalization and Gelu, as before opsets 17 and 20.
    """
    net = Builder(opset=opset)
    width, ids = size.width, "input_ids"

    def norm(x: str) -> str:
        scale, bias = (net.constant(net.random.uniform(0.9, 1.1, width)) for _ in range(2))
        if not decomposed:
            return net.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)
        axes: dict[str, Any] = {"axes": [-1]}
        centred = net.add("Sub", x, net.add("ReduceMean", x, **axes))
        square = net.add("Pow", centred, net.constant(2.0))
        variance = net.add("ReduceMean", square, **axes)
        deviation = net.add("Sqrt", net.add("Add", variance, net.constant(1e-12)))
        scaled = net.add("Mul", net.add("Div", centred, deviation), scale)
        return net.add("Add", scaled, bias)

    def gelu(x: str) -> str:
        if opset >= 20:
            return net.add("Gelu", x)
        part = net.add("Erf", net.add("Div", x, net.constant(float(np.sqrt(2)))))
        grown = net.add("Mul", x, net.add("Add", part, net.constant(1.0)))
        return net.add("Mul", grown, net.constant(0.5))

    def linear(x: str, into: int, out: int) -> str:
        product = net.add("MatMul", x, net.weight(into, out, fan_in=into))
        return net.add("Add", net.weight(out, fan_in=out), product)

    def dimension(x: str, axis: int) -> str:
        found = net.add("Gather", net.add("Shape", x), net.constant(axis), axis=0)
        return net.add("Unsqueeze", found, net.constant([0]))

    def reshaped(x: str, *sizes: str) -> str:
        return net.add("Reshape", x, net.add("Concat", *sizes, axis=0))

    batch, length = dimension(ids, 0), dimension(ids, 1)
    per_head = net.constant([width // size.heads])
    heads, whole, one = net.constant([size.heads]), net.constant([width]), net.constant([1])

    def split(x: str) -> str:
        parts = reshaped(x, batch, length, heads, per_head)
        return net.add("Transpose", parts, perm=[0, 2, 1, 3])

    positions = net.constant(np.arange(size.positions)[None, :])
    zero, axis = net.constant([0]), net.constant([1])
    places = net.add("Slice", positions, zero, length, axis)
    words = net.add("Gather", net.weight(size.words, width, fan_in=1), ids)
    where = net.add("Gather", net.weight(size.positions, width, fan_in=4), places)
    x = norm(_with_types(net, net.add("Add", words, where), size))

    asked = net.add("Equal", "attention_mask", net.constant(0))
    mask = reshaped(asked, batch, one, one, length)
    target = net.add("Concat", batch, heads, length, length, axis=0)
    # Emitted by torch for expand: -1 keeps a dimension's size.
    filler = net.add("ConstantOfShape", net.add("Shape", target), value=_tensor(1))
    chosen = net.add("Where", net.add("Equal", target, net.constant(-1)), filler, target)
    masked = net.add("Expand", mask, chosen)
    lowest = net.constant(float(np.finfo(np.float32).min))
    for _ in range(size.layers):
        q, k, v = (split(linear(x, width, width)) for _ in range(3))
        q = net.add("Div", q, net.constant(float(np.sqrt(width / size.heads))))
        scores = net.add("MatMul", q, net.add("Transpose", k, perm=[0, 1, 3, 2]))
        weights = net.add("Softmax", net.add("Where", masked, lowest, scores), axis=-1)
        context = net.add("Transpose", net.add("MatMul", weights, v), perm=[0, 2, 1, 3])
        attended = linear(reshaped(context, batch, length, whole), width, width)
        x = norm(net.add("Add", attended, x))
        inner = gelu(linear(x, width, size.hidden))
        x = norm(net.add("Add", linear(inner, size.hidden, width), x))
    shape: list[int | str] = ["batch", sequence]
    names = [ids, "attention_mask", *["token_type_ids"][: size.types]]
    inputs = dict.fromkeys(names, (TensorProto.INT64, shape))
    return net.model(inputs, [x, *_pooled(net, x, size)])


def _with_types(net: Builder, x: str, size: Encoder) -> str:
    if not size.types:
        return x
    kinds = net.weight(size.types, size.width, fan_in=4)
    return net.add("Add", x, net.add("Gather", kinds, "token_type_ids"))


def _pooled(net: Builder, x: str, size: Encoder) -> list[str]:
    if not size.types:
        return []
    first = net.add("Gather", x, net.constant(0), axis=1)
    weight, bias = (
        net.weight(size.width, size.width, fan_in=size.width),
        net.weight(size.width, fan_in=size.width),
    )
    return [net.add("Tanh", net.add("Gemm", first, weight, bias))]


def _tensor(value: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray([value], np.int64))
