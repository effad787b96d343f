"""Well-known networks in their original sizes, as ONNX, with random weights and a fixed seed.

Only benchmark tools use them; tests use the smaller ones in `onnx_networks`.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from support.onnx_networks import Builder, Encoder

BERT = Encoder(layers=12, width=768, heads=12, hidden=3072, words=30522, positions=512, types=2)
"""110 M parameters."""

GPT2 = Encoder(layers=12, width=768, heads=12, hidden=3072, words=50257, positions=1024)
"""124 M parameters."""


def resnet18(size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """ResNet-18: four stages of two blocks with two 3x3 convolutions each; 11.7 M parameters."""
    net = Builder()
    x = net.add("Relu", net.conv_norm("image", (3, 64), 7, 2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = 64
    for stage in range(4):
        width = 64 * 2**stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = net.add("Relu", net.conv_norm(x, (channels, width), 3, stride))
            y = net.conv_norm(y, (width, width), 3)
            kept = x if stride == 1 else net.conv_norm(x, (channels, width), 1, stride)
            x = net.add("Relu", net.add("Add", y, kept))
            channels = width
    logits = net.classifier(x, channels, classes)
    return net.model({"image": (TensorProto.FLOAT, ["N", 3, size, size])}, [logits])


# --- MobileNetV3 and EfficientNet ----------------------------------------------------------------


MOBILENET_V3_LARGE: Sequence[tuple[int, int, int, bool, bool, int]] = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
"""Kernel, expanded channels, channels, squeeze-and-excitation, HardSwish, stride (table 1)."""


def mobilenet_v3(size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """MobileNetV3-Large as exported by torchvision: 5.5 M parameters."""
    net = Builder(opset=14)

    def excite(x: str, channels: int) -> str:
        squeezed = -(-channels // 4 // 8) * 8
        pooled = net.add("GlobalAveragePool", x)
        small = net.add("Relu", net.conv(pooled, (channels, squeezed)))
        gate = net.add("HardSigmoid", net.conv(small, (squeezed, channels)), alpha=1 / 6)
        return net.add("Mul", gate, x)

    x, channels = net.add("HardSwish", net.conv_norm("image", (3, 16), 3, 2)), 16
    for kernel, wide, out, has_excitation, is_hard, stride in MOBILENET_V3_LARGE:
        act = "HardSwish" if is_hard else "Relu"
        y = net.add(act, net.conv_norm(x, (channels, wide))) if wide != channels else x
        y = net.add(act, net.conv_norm(y, (wide, wide), kernel, stride, wide))
        y = net.conv_norm(excite(y, wide) if has_excitation else y, (wide, out))
        x, channels = (net.add("Add", y, x) if out == channels and stride == 1 else y), out
    x = net.add("GlobalAveragePool", net.add("HardSwish", net.conv_norm(x, (channels, 960))))
    flat = net.add("Flatten", x, axis=1)
    hidden = net.add("Gemm", flat, net.weight(1280, 960, fan_in=960), transB=1)
    logits = net.add(
        "Gemm", net.add("HardSwish", hidden), net.weight(classes, 1280, fan_in=1280), transB=1
    )
    return net.model({"image": (TensorProto.FLOAT, ["N", 3, size, size])}, [logits])


EFFICIENTNET_B0: Sequence[tuple[int, int, int, int, int]] = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)
"""Expansion, kernel, channels, blocks, stride of the first block (table 1)."""


def efficientnet_b0(size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """EfficientNet-B0: 5.3 M parameters; Swish is a Sigmoid and a Mul."""
    net = Builder(opset=14)

    def swish(x: str) -> str:
        return net.add("Mul", x, net.add("Sigmoid", x))

    def excite(x: str, channels: int, squeezed: int) -> str:
        pooled = net.add("GlobalAveragePool", x)
        small = swish(net.conv(pooled, (channels, squeezed)))
        return net.add("Mul", net.add("Sigmoid", net.conv(small, (squeezed, channels))), x)

    x, channels = swish(net.conv_norm("image", (3, 32), 3, 2)), 32
    for expansion, kernel, out, blocks, first in EFFICIENTNET_B0:
        for block in range(blocks):
            wide, stride = expansion * channels, 1 if block else first
            y = swish(net.conv_norm(x, (channels, wide))) if expansion > 1 else x
            y = swish(net.conv_norm(y, (wide, wide), kernel, stride, wide))
            y = net.conv_norm(excite(y, wide, channels // 4), (wide, out))
            x, channels = (net.add("Add", y, x) if block else y), out
    x = swish(net.conv_norm(x, (channels, 1280)))
    logits = net.classifier(x, 1280, classes)
    return net.model({"image": (TensorProto.FLOAT, ["N", 3, size, size])}, [logits])


# --- YOLOv8 --------------------------------------------------------------------------------------

_BINS = 16
"""Bins in the distribution of each box side."""


def yolo_v8n(size: int = 640, classes: int = 80) -> onnx.ModelProto:
    """YOLOv8n as exported by ultralytics: 3.2 M parameters, [N,84,8400] from 640 x 640 pixels."""
    net = Builder(opset=17)

    def conv(x: str, into: int, out: int, kernel: int = 3, stride: int = 1) -> str:
        y = net.conv_norm(x, (into, out), kernel, stride)
        return net.add("Mul", y, net.add("Sigmoid", y))

    def c2f(x: str, into: int, out: int, blocks: int = 1, *, shortcut: bool = False) -> str:
        half = out // 2
        sizes = net.constant([half, half])
        parts = net.add_all("Split", conv(x, into, out, 1), sizes, outputs=2, axis=1)
        for _ in range(blocks):
            inner = conv(conv(parts[-1], half, half), half, half)
            parts.append(net.add("Add", parts[-1], inner) if shortcut else inner)
        return conv(net.add("Concat", *parts, axis=1), (2 + blocks) * half, out, 1)

    def pyramid(x: str, channels: int) -> str:
        parts = [conv(x, channels, channels // 2, 1)]
        for _ in range(3):
            parts.append(net.add("MaxPool", parts[-1], kernel_shape=[5, 5], pads=[2] * 4))
        return conv(net.add("Concat", *parts, axis=1), 2 * channels, channels, 1)

    def up(x: str) -> str:
        scales = net.constant(np.asarray([1, 1, 2, 2], np.float32))
        modes: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
        return net.add("Resize", x, "", scales, nearest_mode="floor", **modes)

    def joined(*parts: str) -> str:
        return net.add("Concat", *parts, axis=1)

    x = conv(conv("images", 3, 16, 3, 2), 16, 32, 3, 2)
    x = c2f(x, 32, 32, shortcut=True)
    fine = c2f(conv(x, 32, 64, 3, 2), 64, 64, 2, shortcut=True)
    middle = c2f(conv(fine, 64, 128, 3, 2), 128, 128, 2, shortcut=True)
    coarse = pyramid(c2f(conv(middle, 128, 256, 3, 2), 256, 256, shortcut=True), 256)
    down = c2f(joined(up(coarse), middle), 384, 128)
    small = c2f(joined(up(down), fine), 192, 64)
    medium = c2f(joined(conv(small, 64, 64, 3, 2), down), 192, 128)
    large = c2f(joined(conv(medium, 128, 128, 3, 2), coarse), 384, 256)

    heads, centres, steps = [], [], []
    for x, channels, stride in ((small, 64, 8), (medium, 128, 16), (large, 256, 32)):
        sides = conv(conv(x, channels, 64), 64, 64)
        kinds = conv(conv(x, channels, 80), 80, 80)
        head = joined(net.conv(sides, (64, 4 * _BINS)), net.conv(kinds, (80, classes)))
        heads.append(net.add("Reshape", head, net.constant([0, 4 * _BINS + classes, -1])))
        grid = np.arange(size // stride, dtype=np.float32) + 0.5
        centres.append(np.stack(np.meshgrid(grid, grid)).reshape(1, 2, -1))
        steps.append(np.full((1, 1, grid.size**2), stride, np.float32))
    cells = sum(each.shape[2] for each in steps)
    both = net.add("Concat", *heads, axis=2)
    cut = net.constant([4 * _BINS, classes])
    boxes, scores = net.add_all("Split", both, cut, outputs=2, axis=1)
    spread = net.add("Reshape", boxes, net.constant([0, 4, _BINS, cells]))
    weights = net.add("Softmax", net.add("Transpose", spread, perm=[0, 2, 1, 3]), axis=1)
    kernel = net.constant(np.arange(_BINS, dtype=np.float32).reshape(1, _BINS, 1, 1))
    sides = net.add("Reshape", net.add("Conv", weights, kernel), net.constant([0, 4, -1]))
    near, far = net.add_all("Split", sides, net.constant([2, 2]), outputs=2, axis=1)
    where = net.constant(np.concatenate(centres, axis=2))
    first, last = net.add("Sub", where, near), net.add("Add", where, far)
    middle = net.add("Div", net.add("Add", first, last), net.constant(2.0))
    box = joined(middle, net.add("Sub", last, first))
    scaled = net.add("Mul", box, net.constant(np.concatenate(steps, axis=2)))
    found = joined(scaled, net.add("Sigmoid", scores))
    return net.model({"images": (TensorProto.FLOAT, ["batch", 3, size, size])}, [found])


# --- Decoder step --------------------------------------------------------------------------------


def gpt2_step(size: Encoder = GPT2, past: int = 127) -> onnx.ModelProto:
    """One decoding step of GPT-2 after `past` tokens, with key-value cache in and out."""
    net = Builder(opset=17)
    width, heads = size.width, size.heads
    per_head = width // heads
    inputs: dict[str, tuple[int, Sequence[int | str]]] = {
        "input_ids": (TensorProto.INT64, ["batch", 1]),
        "attention_mask": (TensorProto.INT64, ["batch", past + 1]),
    }

    def norm(x: str) -> str:
        scale, bias = (net.constant(net.random.uniform(0.9, 1.1, width)) for _ in range(2))
        return net.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)

    def linear(x: str, into: int, out: int) -> str:
        flat = net.add("Reshape", x, net.constant([-1, into]))
        weight, bias = net.weight(into, out, fan_in=into), net.weight(out, fan_in=out)
        return net.add("Reshape", net.add("Gemm", flat, weight, bias), net.constant([-1, 1, out]))

    def split(x: str) -> str:
        parts = net.add("Reshape", x, net.constant([0, 1, heads, per_head]))
        return net.add("Transpose", parts, perm=[0, 2, 1, 3])

    def gelu(x: str) -> str:
        cubed = net.add("Mul", net.add("Pow", x, net.constant(3.0)), net.constant(0.044715))
        inner = net.add("Mul", net.add("Add", x, cubed), net.constant(sqrt(2 / np.pi)))
        grown = net.add("Add", net.add("Tanh", inner), net.constant(1.0))
        return net.add("Mul", net.add("Mul", x, net.constant(0.5)), grown)

    table = net.weight(size.words, width, fan_in=4)
    place = net.constant(net.random.standard_normal((1, 1, width)).astype(np.float32) * 0.1)
    x = net.add("Add", net.add("Gather", table, "input_ids"), place)
    asked = net.add("Cast", "attention_mask", to=TensorProto.FLOAT)
    hidden = net.add("Sub", net.constant(1.0), net.add("Unsqueeze", asked, net.constant([1, 2])))
    mask = net.add("Mul", hidden, net.constant(float(np.finfo(np.float32).min)))
    kept = []
    for layer in range(size.layers):
        cut = net.constant([width] * 3)
        projected = linear(norm(x), width, 3 * width)
        q, k, v = map(split, net.add_all("Split", projected, cut, outputs=3, axis=2))
        for name, each in (("key", k), ("value", v)):
            inputs[f"past.{layer}.{name}"] = (
                TensorProto.FLOAT,
                ["batch", heads, past, per_head],
            )
            kept.append(net.add("Concat", f"past.{layer}.{name}", each, axis=2))
        keys, values = kept[-2:]
        scores = net.add("MatMul", q, net.add("Transpose", keys, perm=[0, 1, 3, 2]))
        scaled = net.add("Div", scores, net.constant(sqrt(per_head)))
        weights = net.add("Softmax", net.add("Add", scaled, mask), axis=-1)
        context = net.add("Transpose", net.add("MatMul", weights, values), perm=[0, 2, 1, 3])
        merged = net.add("Reshape", context, net.constant([0, 1, width]))
        x = net.add("Add", linear(merged, width, width), x)
        inner = gelu(linear(norm(x), width, size.hidden))
        x = net.add("Add", linear(inner, size.hidden, width), x)
    logits = net.add("MatMul", norm(x), net.add("Transpose", table, perm=[1, 0]))
    return net.model(inputs, [logits, *kept])
