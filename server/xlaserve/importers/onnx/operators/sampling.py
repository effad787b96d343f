"""Sampling between pixels: grids, deformable convolutions, regions of interest."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.convolution import with_bias
from xlaserve.importers.onnx.operators.table import Family, operator
from xlaserve.importers.onnx.operators.windows import window_of
from xlaserve.importers.onnx.values import Value, integers_of, on_device

Taps: TypeAlias = list[tuple[jax.Array, jax.Array | None]]
"""Positions along one axis with their weights; None is a weight of 1."""

_A = -0.75
"""Coefficient of the cubic kernel."""


def _linear_taps(x: jax.Array) -> Taps:
    low = jnp.floor(x)
    return [(low, low + 1 - x), (low + 1, x - low)]


def _cubic_taps(x: jax.Array) -> Taps:
    low = jnp.floor(x)
    taps: Taps = []
    for offset in (-1, 0, 1, 2):
        far = jnp.abs(x - low - offset)
        inner = ((_A + 2) * far - (_A + 3)) * far * far + 1
        outer = ((_A * far - 5 * _A) * far + 8 * _A) * far - 4 * _A
        taps.append((low + offset, inner if offset in (0, 1) else outer))
    return taps


def _nearest_taps(x: jax.Array) -> Taps:
    return [(jnp.rint(x), None)]


_TAPS: dict[str, Callable[[jax.Array], Taps]] = {
    "bicubic": _cubic_taps,
    "bilinear": _linear_taps,
    "cubic": _cubic_taps,
    "linear": _linear_taps,
    "nearest": _nearest_taps,
}
_PADDINGS = ("zeros", "border", "reflection")


def _reflected(x: jax.Array, low: float, high: float) -> jax.Array:
    """Mirror positions at both bounds until they lie between them."""
    extent = high - low
    if extent <= 0:
        return jnp.full_like(x, low)
    far = jnp.abs(x - low)
    turns = jnp.floor(far / extent)
    rest = far - turns * extent
    return jnp.where(turns % 2 == 0, low + rest, high - rest)


def _pixels(image: jax.Array, positions: Sequence[jax.Array]) -> jax.Array:
    """Read pixels of an image [C, ...] at integer positions [Q] per axis; 0 outside the image."""
    sizes = image.shape[1:]
    inside = jnp.ones(positions[0].shape, jnp.bool_)
    flat = jnp.zeros(positions[0].shape, jnp.int64)
    for position, size in zip(positions, sizes, strict=True):
        inside = inside & (position >= 0) & (position < size)
        flat = flat * size + jnp.clip(position, 0, size - 1).astype(jnp.int64)
    found = jnp.take(image.reshape((image.shape[0], -1)), flat, axis=1, mode="clip")
    return jnp.where(inside[None, :], found, jnp.zeros((), image.dtype))


def _blended(image: jax.Array, along: Sequence[Taps]) -> jax.Array:
    """Interpolate: sum the pixels at all combinations of the axes' taps, weighted."""
    total = None
    for taps in itertools.product(*along):
        part = _pixels(image, [position for position, _ in taps])
        for _, weight in taps:
            part = part if weight is None else part * weight[None, :]
        total = part if total is None else total + part
    assert total is not None
    return total


def _grid_sample(node: Node, x: Value, grid: Value) -> Value:
    mode, padding = node.text("mode", "linear"), node.text("padding_mode", "zeros")
    aligned = bool(node.integer("align_corners", 0))
    if mode not in _TAPS or padding not in _PADDINGS:
        raise InvalidModel(
            f"expected a mode of {', '.join(_TAPS)} and a padding_mode of {', '.join(_PADDINGS)}, "
            f"got {mode} and {padding}"
        )
    array, points = on_device(x), on_device(grid)
    sizes = array.shape[2:]
    if points.shape[-1] != len(sizes):
        raise InvalidModel(
            f"grid: expected {len(sizes)} coordinates per point, one per spatial dimension, "
            f"got {points.shape[-1]}"
        )
    wide = array.astype(jnp.promote_types(points.dtype, array.dtype))
    if not jnp.issubdtype(wide.dtype, jnp.floating):
        wide = wide.astype(points.dtype)

    def sample(image: jax.Array, where: jax.Array) -> jax.Array:
        along = [
            _taps_of(where[..., -1 - axis].reshape(-1), size, mode, padding, aligned=aligned)
            for axis, size in enumerate(sizes)
        ]
        return _blended(image, along).reshape((image.shape[0], *where.shape[:-1]))

    return jax.vmap(sample)(wide, points).astype(array.dtype)


def _taps_of(x: jax.Array, size: int, mode: str, padding: str, *, aligned: bool) -> Taps:
    """Return the taps along one axis for normalised coordinates."""
    place = (x + 1) / 2 * (size - 1) if aligned else ((x + 1) * size - 1) / 2
    low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
    taps = _TAPS[mode](place)

    def kept(position: jax.Array) -> jax.Array:
        if padding == "reflection":
            position = _reflected(position, low, high)
        return position if padding == "zeros" else jnp.clip(position, 0, size - 1)

    if mode in ("linear", "bilinear") and padding != "zeros":
        taps = _TAPS[mode](kept(place))
    return [(kept(position), weight) for position, weight in taps]


def _affine_grid(node: Node, theta: Value, size: Value) -> Value:
    matrices = on_device(theta)
    sizes = integers_of(size)[2:]
    if matrices.shape[1:] != (len(sizes), len(sizes) + 1):
        raise InvalidModel(
            f"theta: expected [batch, {len(sizes)}, {len(sizes) + 1}], got {list(matrices.shape)}"
        )
    corners = bool(node.integer("align_corners", 0))
    lines = [_line(count, matrices.dtype, corners=corners) for count in sizes]
    # Coordinates are ordered from the innermost dimension outwards.
    places = jnp.stack([*jnp.meshgrid(*lines, indexing="ij")[::-1]], axis=-1)
    turned = jnp.einsum("...c,nrc->n...r", places, matrices[:, :, :-1])
    shift = matrices[:, :, -1].reshape((-1,) + (1,) * len(sizes) + (len(sizes),))
    return (turned + shift).astype(matrices.dtype)


def _line(count: int, dtype: jnp.dtype, *, corners: bool) -> jax.Array:
    if corners:
        return jnp.linspace(-1, 1, count, dtype=dtype)
    return ((2 * jnp.arange(count) + 1) / count - 1).astype(dtype)


def _deformed_convolution(
    node: Node,
    x: Value,
    weight: Value,
    offset: Value,
    bias: Value | None = None,
    mask: Value | None = None,
) -> Value:
    image, filters, moved = on_device(x), on_device(weight), on_device(offset)
    sizes = image.shape[2:]
    rank, count = len(sizes), math.prod(filters.shape[2:])
    window = window_of(node, sizes, node.integers("kernel_shape", filters.shape[2:]))
    groups, shares = node.integer("group", 1), node.integer("offset_group", 1)
    batch, channels = image.shape[:2]
    outputs = moved.shape[2:]
    moved = moved.reshape((batch, shares, count, rank, *outputs))
    taps = np.stack(np.meshgrid(*map(np.arange, window.kernel), indexing="ij"), 0)
    starts = np.stack(np.meshgrid(*map(np.arange, outputs), indexing="ij"), 0)
    origin = [
        jnp.asarray(
            starts[axis].reshape((1, *outputs)) * window.strides[axis]
            - window.pads[axis][0]
            + taps[axis].reshape((-1,) + (1,) * rank) * window.dilations[axis],
            moved.dtype,
        )
        for axis in range(rank)
    ]
    scales = jnp.ones((batch, shares, count, *outputs), image.dtype)
    if mask is not None:
        scales = on_device(mask).reshape(scales.shape)

    def sample(part: jax.Array, shifts: jax.Array, scale: jax.Array) -> jax.Array:
        places = [(shifts[:, axis] + begin).reshape(-1) for axis, begin in enumerate(origin)]
        found = _blended(part, [_linear_taps(place) for place in places])
        return found.reshape((part.shape[0], count, *outputs)) * scale[None]

    split = image.reshape((batch, shares, channels // shares, *sizes))
    columns = jax.vmap(jax.vmap(sample))(split, moved, scales)
    columns = columns.reshape((batch, groups, channels // groups * count, -1))
    matrix = filters.reshape((groups, filters.shape[0] // groups, -1))
    product = jnp.einsum("gok,bgkq->bgoq", matrix, columns)
    return with_bias(product.reshape((batch, filters.shape[0], *outputs)), bias)


# --- Regions of interest -----------------------------------------------------------------------


def _roi_align(node: Node, x: Value, rois: Value, batch_indices: Value) -> Value:
    mode = node.text("mode", "avg")
    shift = node.text("coordinate_transformation_mode", "half_pixel")
    points = node.integer("sampling_ratio", 0)
    if mode not in ("avg", "max") or shift not in ("half_pixel", "output_half_pixel"):
        raise InvalidModel(
            "expected a mode of avg or max and a coordinate_transformation_mode of half_pixel or "
            f"output_half_pixel, got {mode} and {shift}"
        )
    if points < 1:
        raise InvalidModel("with sampling_ratio 0 its number of samples depends on data")
    scale = node.real("spatial_scale", 1.0)
    counts = node.integer("output_height", 1), node.integer("output_width", 1)
    image = on_device(x)
    half = 0.5 if shift == "half_pixel" else 0.0

    def region(box: jax.Array, index: jax.Array) -> jax.Array:
        part = jnp.take(image, index, axis=0, mode="fill")
        columns, rows = (
            _samples(box[axis] * scale - half, box[axis + 2] * scale - half, count, points)
            if half
            else _samples(
                box[axis] * scale,
                jnp.maximum(box[axis + 2] * scale, box[axis] * scale + 1),
                count,
                points,
            )
            for axis, count in ((0, counts[1]), (1, counts[0]))
        )
        y = jnp.broadcast_to(rows[:, None], (rows.size, columns.size)).reshape(-1)
        x = jnp.broadcast_to(columns[None, :], (rows.size, columns.size)).reshape(-1)
        return _pooled_samples(part, (y, x), counts, points, mode)

    return jax.vmap(region)(on_device(rois), on_device(batch_indices).astype(jnp.int64))


def _samples(low: jax.Array, high: jax.Array, count: int, points: int) -> jax.Array:
    """Return the positions of `points` samples in each of `count` equal bins."""
    steps = np.arange(count * points) + 0.5
    return (low + jnp.asarray(steps, low.dtype) * ((high - low) / (count * points))).reshape(-1)


def _pooled_samples(
    image: jax.Array,
    places: tuple[jax.Array, jax.Array],
    counts: tuple[int, int],
    points: int,
    mode: str,
) -> jax.Array:
    """Sample an image bilinearly and reduce the samples of each bin; 0 outside the image."""
    inside = jnp.ones(places[0].shape, jnp.bool_)
    along = []
    for place, size in zip(places, image.shape[1:], strict=True):
        inside = inside & (place >= -1) & (place <= size)
        kept = jnp.clip(place, 0, size - 1)
        along.append(
            [(jnp.minimum(position, size - 1), weight) for position, weight in _linear_taps(kept)]
        )
    parts = [_blended(image, [[one], [two]]) for one in along[0] for two in along[1]]
    shape = (image.shape[0], counts[0], points, counts[1], points)
    if mode == "avg":
        found = jnp.where(inside[None, :], parts[0] + parts[1] + parts[2] + parts[3], 0)
        return jnp.mean(found.reshape(shape), axis=(2, 4)).astype(image.dtype)
    # Like the specification's code, take the largest weighted pixel, not the largest sample.
    largest = jnp.maximum(jnp.maximum(parts[0], parts[1]), jnp.maximum(parts[2], parts[3]))
    found = jnp.where(inside[None, :], largest, 0)
    return jnp.max(found.reshape(shape), axis=(2, 4)).astype(image.dtype)


def _max_roi_pool(node: Node, x: Value, rois: Value) -> Value:
    counts = node.integers("pooled_shape")
    scale = node.real("spatial_scale", 1.0)
    image = on_device(x)

    def region(box: jax.Array) -> jax.Array:
        part = jnp.take(image, box[0].astype(jnp.int64), axis=0, mode="fill")
        for axis, count in enumerate(counts):
            low, high = (
                jnp.floor(box[place - axis] * scale + 0.5).astype(jnp.int64) for place in (2, 4)
            )
            part = _pooled_bins(part, axis + 1, (low, high), count)
        return part

    return jax.vmap(region)(on_device(rois))


def _pooled_bins(
    x: jax.Array, axis: int, bounds: tuple[jax.Array, jax.Array], count: int
) -> jax.Array:
    """Max-pool an axis into `count` bins between two positions; an empty bin is 0."""
    low, high = bounds
    size = x.shape[axis]
    # Compute in integers: rounded floats would move the end of a bin by a pixel.
    extent = jnp.maximum(high - low + 1, 1)
    bins = jnp.arange(count)
    begin = jnp.clip(bins * extent // count + low, 0, size)[:, None]
    end = jnp.clip(-(-(bins + 1) * extent // count) + low, 0, size)[:, None]
    line = jnp.arange(size)[None, :]
    chosen = (line >= begin) & (line < end)
    rows = jnp.moveaxis(x, axis, -1)[..., None, :]
    kept = jnp.where(chosen.reshape((1,) * (x.ndim - 1) + chosen.shape), rows, -jnp.inf)
    most = jnp.max(kept, axis=-1)
    return jnp.moveaxis(jnp.where(jnp.isneginf(most), 0, most), -1, axis).astype(x.dtype)


SAMPLING: Family = {
    "AffineGrid": operator(_affine_grid, 1),
    "DeformConv": operator(_deformed_convolution),
    "GridSample": operator(_grid_sample),
    "MaxRoiPool": operator(_max_roi_pool),
    "RoiAlign": operator(_roi_align),
}
