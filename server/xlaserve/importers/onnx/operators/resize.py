"""Resize: each output is a weighted sum of a few inputs, axis by axis."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.values import (
    Value,
    axis_of,
    dimensions_of,
    is_concrete,
    is_host,
    on_device,
)
from xlaserve.tensors import Tensor

_MAX_SIZE = 2**20
"""Largest size of a resized axis, because its source positions are computed during conversion."""


@dataclass(frozen=True, slots=True)
class _Axis:
    size: int
    output: int
    scale: np.float32
    start: float
    end: float
    """`start` and `end` are the region of interest, as fractions of the axis."""


def _half_pixel(x: Tensor, axis: _Axis) -> Tensor:
    return (x + 0.5) / axis.scale - 0.5


def _half_pixel_symmetric(x: Tensor, axis: _Axis) -> Tensor:
    adjustment = axis.output / (axis.scale * axis.size)
    return axis.size / 2 * (1 - adjustment) + _half_pixel(x, axis)


def _pytorch_half_pixel(x: Tensor, axis: _Axis) -> Tensor:
    return _half_pixel(x, axis) if axis.output > 1 else np.zeros_like(x)


def _align_corners(x: Tensor, axis: _Axis) -> Tensor:
    # Use the integer sizes, like onnxruntime and PyTorch; onnx's test cases use size * scale.
    return x * (axis.size - 1) / (axis.output - 1) if axis.output != 1 else np.zeros_like(x)


def _asymmetric(x: Tensor, axis: _Axis) -> Tensor:
    return x / axis.scale


def _crop_and_resize(x: Tensor, axis: _Axis) -> Tensor:
    first, last = axis.start * (axis.size - 1), axis.end * (axis.size - 1)
    if axis.output > 1:
        return first + x * (last - first) / (axis.output - 1)
    return np.full_like(x, (first + last) / 2)


_COORDINATES: MappingProxyType[str, Callable[[Tensor, _Axis], Tensor]] = MappingProxyType(
    {
        "align_corners": _align_corners,
        "asymmetric": _asymmetric,
        "half_pixel": _half_pixel,
        "half_pixel_symmetric": _half_pixel_symmetric,
        "pytorch_half_pixel": _pytorch_half_pixel,
        "tf_crop_and_resize": _crop_and_resize,
    }
)
"""Functions from output to input positions, by coordinate_transformation_mode."""

_NEAREST: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "ceil": np.ceil,
        "floor": np.floor,
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    }
)
"""Rounding functions by nearest_mode."""


def _linear(distance: Tensor, _: float) -> Tensor:
    weights: Tensor = np.maximum(1 - np.abs(distance), 0)
    return weights


def _cubic(distance: Tensor, a: float) -> Tensor:
    x = np.abs(distance)
    inner: Tensor = ((a + 2) * x - (a + 3)) * x * x + 1
    outer: Tensor = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weights: Tensor = np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))
    return weights


_KERNELS: MappingProxyType[str, tuple[Callable[[Tensor, float], Tensor], int]] = MappingProxyType(
    {"linear": (_linear, 1), "cubic": (_cubic, 2)}
)
"""Kernels by mode: a function from distance to weight, and the kernel's radius."""


@dataclass(frozen=True, slots=True)
class _Method:
    """The attributes of a Resize node."""

    mode: str
    coordinates: Callable[[Tensor, _Axis], Tensor]
    nearest: Callable[[Tensor], Tensor]
    cubic_coefficient: float
    exclude_outside: bool
    antialias: bool
    outside: float | None
    """Value of outputs outside the input; None to clamp."""


def _method(node: Node) -> _Method:
    transform = _choice(node, "coordinate_transformation_mode", "half_pixel", _COORDINATES)
    outside = node.real("extrapolation_value", 0.0)
    nearest = _choice(node, "nearest_mode", "round_prefer_floor", _NEAREST)
    return _Method(
        _choice(node, "mode", "nearest", {"nearest": None, **_KERNELS}),
        _COORDINATES[transform],
        _NEAREST[nearest],
        node.real("cubic_coeff_a", -0.75),
        bool(node.integer("exclude_outside", 0)),
        bool(node.integer("antialias", 0)),
        outside if transform == "tf_crop_and_resize" else None,
    )


def _choice(
    node: Node, name: str, default: str, known: "dict[str, object] | MappingProxyType[str, object]"
) -> str:
    chosen = node.text(name, default)
    if chosen not in known:
        raise InvalidModel(f"{name}: expected {', '.join(known)}, got {chosen}")
    return chosen


def _resize(
    node: Node,
    x: Value,
    region: Value | None = None,
    scales: Value | None = None,
    sizes: Value | None = None,
) -> Value:
    axes = tuple(axis_of(axis, x.ndim) for axis in node.integers("axes", range(x.ndim)))
    method = _method(node)
    array = on_device(x)
    for axis, step in _steps(node, x, axes, scales, sizes, region).items():
        if step.size != step.output or step.scale != 1 or method.outside is not None:
            array = _along(array, axis, step, method)
    return array


def _steps(
    node: Node,
    x: Value,
    axes: tuple[int, ...],
    scales: Value | None,
    sizes: Value | None,
    region: Value | None,
) -> dict[int, _Axis]:
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    before = [x.shape[axis] for axis in axes]
    if sizes is not None and sizes.size:
        outputs, factors = _fitted(before, list(dimensions_of(sizes)), policy)
    elif scales is not None and is_host(scales):
        factors = list(scales.astype(np.float32))
        outputs = [_scaled(*pair) for pair in zip(before, factors, strict=True)]
    else:
        raise InvalidModel("expected constant scales or sizes")
    if any(is_concrete([size]) and size > _MAX_SIZE for size in outputs):
        raise InvalidModel(f"expected sizes up to {_MAX_SIZE}, got {outputs}")
    count = len(axes)
    bounds = [0.0] * count + [1.0] * count
    if region is not None and is_host(region) and region.size == 2 * count:
        bounds = [float(bound) for bound in region]
    found = {}
    for index, axis in enumerate(axes):
        size, output = x.shape[axis], outputs[index]
        if not is_concrete([size, output]):
            if size != output:
                raise InvalidModel(f"axis {axis} is dynamic and cannot be resized")
            continue
        found[axis] = _Axis(size, output, factors[index], bounds[index], bounds[count + index])
    return found


def _scaled(size: int, factor: np.float32) -> int:
    # In FP32 10 * 0.7 is 7, in FP64 it is less; the model's scales are FP32.
    return size if factor == 1 else math.floor(np.float32(size) * factor)


def _fitted(
    sizes: list[int], outputs: list[int], policy: str
) -> tuple[list[int], list[np.float32]]:
    """Apply keep_aspect_ratio_policy to the requested sizes; return sizes and scales."""
    if policy == "stretch":
        return outputs, [
            np.float32(output / size) if is_concrete([size, output]) else np.float32(1)
            for size, output in zip(sizes, outputs, strict=True)
        ]
    if not is_concrete([*sizes, *outputs]):
        raise InvalidModel(f"keep_aspect_ratio_policy {policy} needs constant sizes")
    ratios = [output / size for size, output in zip(sizes, outputs, strict=True)]
    scale = {"not_larger": min, "not_smaller": max}[policy](ratios)
    rounded = [math.floor(size * scale + 0.5) for size in sizes]
    return rounded, [np.float32(scale)] * len(sizes)


def _along(x: jax.Array, axis: int, step: _Axis, method: _Method) -> jax.Array:
    where = method.coordinates(np.arange(step.output, dtype=np.float32), step)
    if method.mode == "nearest":
        picked = np.clip(method.nearest(where), 0, step.size - 1).astype(np.int64)
        resized = _repeated(x, axis, picked)
    else:
        resized = _weighted(x, axis, *_taps(where, step, method))
    if method.outside is None:
        return resized
    inside = (where >= 0) & (where <= step.size - 1)
    shape = [1] * x.ndim
    shape[axis] = step.output
    return jnp.where(inside.reshape(shape), resized, np.asarray(method.outside, x.dtype))


def _repeated(x: jax.Array, axis: int, picked: Tensor) -> jax.Array:
    size, times = x.shape[axis], len(picked) // x.shape[axis]
    if times and np.array_equal(picked, np.repeat(np.arange(size), times)):
        # Broadcasting is cheaper than a gather.
        spread = jnp.expand_dims(x, axis + 1)
        shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
        return jnp.broadcast_to(spread, shape).reshape(
            (*x.shape[:axis], size * times, *x.shape[axis + 1 :])
        )
    return jnp.take(x, picked, axis)


def _taps(where: Tensor, step: _Axis, method: _Method) -> tuple[Tensor, Tensor]:
    """Return the input positions and weights for each output position."""
    kernel, reach = _KERNELS[method.mode]
    shrink = min(float(step.scale), 1.0) if method.antialias else 1.0
    span = math.ceil(reach / shrink)
    first = np.floor(where).astype(np.int64) - span + 1
    indices = first[:, None] + np.arange(2 * span)[None, :]
    weights = kernel((indices - where[:, None]) * shrink, method.cubic_coefficient)
    if method.exclude_outside:
        weights = np.where((indices < 0) | (indices >= step.size), 0, weights)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(indices, 0, step.size - 1), weights


def _weighted(x: jax.Array, axis: int, indices: Tensor, weights: Tensor) -> jax.Array:
    shape = [1] * x.ndim
    shape[axis] = len(indices)
    wide = x.astype(jnp.float32) if x.dtype.kind in "iu" else x
    parts = [
        jnp.take(wide, indices[:, tap], axis)
        * np.asarray(weights[:, tap], wide.dtype).reshape(shape)
        for tap in range(indices.shape[1])
        if np.any(weights[:, tap])
    ]
    total = sum(parts[1:], parts[0])
    return total if x.dtype == wide.dtype else jnp.rint(total).astype(x.dtype)


RESIZE: Family = {"Resize": operator(_resize, 1, 2, 3)}
