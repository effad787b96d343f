"""ONNX models whose rows affect one another."""

import numpy as np
import onnx

from support.onnx_models import FLOAT, X, model, node

_HIDDEN = 2


def quantised() -> onnx.ModelProto:
    """Return an 8-bit matrix multiplication, as written by onnxruntime's quantize_dynamic."""
    weights = np.arange(-6, 6, dtype=np.int8).reshape(4, 3)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("MatMulInteger", ["q", "w", "zero"], ["product"]),
        node("Cast", ["product"], ["float"], to=FLOAT),
        node("Mul", ["float", "scale"], ["y"]),
    ]
    return model(nodes, X, ["y"], {"w": weights})


def time_first() -> onnx.ModelProto:
    """Return an LSTM without a batch dimension; its first dimension is time, of any length."""
    random = np.random.default_rng(0)
    constants = {
        "w": random.standard_normal((1, 4 * _HIDDEN, 4)).astype(np.float32),
        "r": random.standard_normal((1, 4 * _HIDDEN, _HIDDEN)).astype(np.float32),
    }
    lstm = node("LSTM", ["x", "w", "r"], ["y"], hidden_size=_HIDDEN)
    return model([lstm], {"x": (FLOAT, ["seq", 1, 4])}, ["y"], constants)
