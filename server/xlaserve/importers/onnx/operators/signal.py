"""Signal processing: Fourier transforms, windows, and the mel scale."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.datatypes import dtype_of
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, Operation, operator
from xlaserve.importers.onnx.values import HOST_ELEMENTS, Value, axis_of, on_device, scalar_of
from xlaserve.tensors import Tensor

_FLOAT = 1
_AXIS_IS_INPUT = 20
"""Opset since which the axis of a DFT is an input."""


def _complex(x: jax.Array) -> jax.Array:
    """Convert a last dimension of size 1 (real) or 2 (real, imaginary) to complex numbers."""
    if x.shape[-1] not in (1, 2):
        raise InvalidModel(f"its last dimension: expected 1 or 2, got {x.shape[-1]}")
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    imaginary = wide[..., 1] if x.shape[-1] == 2 else jnp.zeros_like(wide[..., 0])
    return jax.lax.complex(wide[..., 0], imaginary)


def _pairs(x: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1).astype(like.dtype)


def _transform(
    node: Node, x: Value, length: Value | None = None, axis: Value | None = None
) -> Value:
    array = on_device(x)
    if node.opset < _AXIS_IS_INPUT:
        along = node.integer("axis", 1)
    else:
        along = -2 if axis is None else scalar_of(axis)
    place = axis_of(along, array.ndim)
    if place == array.ndim - 1:
        raise InvalidModel(
            f"axis: expected a signal axis, got {along}, the axis of real and imaginary parts"
        )
    one_sided = bool(node.integer("onesided", 0))
    size = None if length is None else scalar_of(length)
    numbers = _complex(array)
    if not node.integer("inverse", 0):
        if one_sided and array.shape[-1] == 2:
            raise InvalidModel("onesided needs real input, got complex")
        whole = jnp.fft.rfft(numbers.real, size, place) if one_sided else None
        return _pairs(jnp.fft.fft(numbers, size, place) if whole is None else whole, array)
    if one_sided:
        return jnp.fft.irfft(numbers, size, place)[..., None].astype(array.dtype)
    return _pairs(jnp.fft.ifft(numbers, size, place), array)


def _short_time(
    node: Node, x: Value, step: Value, window: Value | None = None, length: Value | None = None
) -> Value:
    array = on_device(x)
    one_sided = bool(node.integer("onesided", 1))
    if array.ndim != 3 or (one_sided and array.shape[-1] != 1):
        raise InvalidModel(
            "expected a signal of [batch, length, 1], or with onesided 0 of "
            f"[batch, length, 2], got {list(array.shape)}"
        )
    stride, total = scalar_of(step), array.shape[1]
    extent = _extent(total, window, length)
    if stride < 1 or not 1 <= extent <= total:
        raise InvalidModel(
            f"expected a frame_step of at least 1 and frames of 1 to {total} samples, the signal's"
            f" length, got a frame_step of {stride} and frames of {extent}"
        )
    begins = np.arange((total - extent) // stride + 1)[:, None] * stride
    frames = jnp.take(_complex(array), begins + np.arange(extent)[None, :], axis=1)
    if window is not None:
        frames = frames * on_device(window).astype(frames.dtype)[None, None, :]
    found = jnp.fft.rfft(frames.real) if one_sided else jnp.fft.fft(frames)
    return _pairs(found, array)


def _extent(total: int, window: Value | None, length: Value | None) -> int:
    if length is None:
        return total if window is None else window.shape[0]
    extent = scalar_of(length)
    if window is not None and window.shape[0] != extent:
        raise InvalidModel(
            f"window: expected {extent} samples, the frame_length, got {window.shape[0]}"
        )
    return extent


def _window(*weights: float) -> Operation:
    """Return the operation that makes a cosine-sum window with these weights."""

    def compute(node: Node, size: Value) -> Value:
        count = scalar_of(size)
        dtype = dtype_of(node.integer("output_datatype", _FLOAT))
        last = count if node.integer("periodic", 1) else count - 1
        if not 0 <= count <= HOST_ELEMENTS:
            raise InvalidModel(f"its size: expected 0 to {HOST_ELEMENTS}, got {count}")
        angle = 2 * math.pi * np.arange(count) / max(last, 1)
        terms = [weight * np.cos(order * angle) for order, weight in enumerate(weights)]
        # A window of one sample is 1.
        samples = np.sum(terms, axis=0) if last > 0 else np.ones(count)
        return np.asarray(samples, dtype)

    return compute


def _mel(hertz: Tensor | float) -> Tensor:
    return np.asarray(2595 * np.log10(1 + np.asarray(hertz, np.float64) / 700))


def _mel_weights(node: Node, *inputs: Value) -> Value:
    bands, length, rate = (scalar_of(value) for value in inputs[:3])
    low, high = (float(np.asarray(value).item()) for value in inputs[3:])
    dtype = dtype_of(node.integer("output_datatype", _FLOAT))
    rows = length // 2 + 1
    if bands < 1 or length < 1 or rate < 1 or rows * bands > 64 * HOST_ELEMENTS:
        raise InvalidModel(
            f"expected num_mel_bins, dft_length and sample_rate above 0, and a matrix of at most"
            f" {64 * HOST_ELEMENTS} elements, got {bands}, {length} and {rate}"
        )
    edges = _edges(bands, length, rate, (float(_mel(low)), float(_mel(high))))
    begin, peak, end = edges[:-2][None, :], edges[1:-1][None, :], edges[2:][None, :]
    line = np.arange(rows)[:, None]
    up = np.where(peak == begin, line == peak, (line - begin) / np.maximum(peak - begin, 1))
    down = (end - line) / np.maximum(end - peak, 1)
    rising = (line >= begin) & (line <= peak)
    falling = (line >= peak) & (line < end) & (end > peak)
    return np.where(falling, down, np.where(rising, up, 0)).astype(dtype)


def _edges(bands: int, length: int, rate: int, ends: Sequence[float]) -> Tensor:
    """Return the frequency bins where the mel bands begin, peak and end."""
    steps = np.arange(bands + 2) * ((ends[1] - ends[0]) / (bands + 2)) + ends[0]
    hertz = 700 * (np.power(10.0, steps / 2595) - 1)
    return np.asarray((length + 1) * hertz // rate, np.int64)


SIGNAL: Family = {
    "BlackmanWindow": operator(_window(0.42, -0.5, 0.08), 0),
    "DFT": operator(_transform, 1, 2),
    "HammingWindow": operator(_window(25 / 46, -21 / 46), 0),
    "HannWindow": operator(_window(0.5, -0.5), 0),
    "MelWeightMatrix": operator(_mel_weights, 0, 1, 2, 3, 4),
    "STFT": operator(_short_time, 1, 3),
}
