"""Image resizing: nearest, bilinear, bicubic."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family, Operation
from xlaserve.importers.pt2.values import FLOAT, is_open
from xlaserve.tensors import Tensor

_CUBIC = -0.75
"""Coefficient of PyTorch's bicubic kernel."""


_MOST_WEIGHTS = 2**26
"""Limit on the elements of the matrix that resizes one dimension."""


def _sizes(
    x: jax.Array,
    count: int,
    output_size: Sequence[int] | None,
    scale_factors: Sequence[float] | None,
) -> list[int]:
    extents = x.shape[-count:]
    if any(map(is_open, extents)):
        raise InvalidModel("it resizes a dynamic dimension: give this dimension a size with --dim")
    if output_size is not None:
        return _bounded(extents, output_size)
    if scale_factors is None:
        raise InvalidModel("it has neither a size nor scale factors")
    sizes = [int(extent * by) for extent, by in zip(extents, scale_factors, strict=True)]
    return _bounded(extents, sizes)


def _bounded(extents: Sequence[int], sizes: Sequence[int]) -> list[int]:
    for extent, wanted in zip(extents, sizes, strict=True):
        if wanted < 1 or extent * wanted > _MOST_WEIGHTS:
            raise InvalidModel(f"resizing {extent} to {wanted} exceeds the limit")
    return list(sizes)


def _scale(extent: int, wanted: int, factor: float | None, align_corners: bool) -> float:
    """Return the distance in the input between the sources of adjacent outputs."""
    if align_corners:
        return (extent - 1) / (wanted - 1) if wanted > 1 else 0.0
    return 1 / factor if factor else extent / wanted


def _factors(
    count: int, scales: Sequence[float | None], listed: Sequence[float] | None
) -> list[float | None]:
    return list(listed) if listed is not None else list(scales)[:count]


def _nearest(count: int, *, is_exact: bool = False) -> Operation:
    def compute(x: jax.Array, sizes: Sequence[int], factors: Sequence[float | None]) -> jax.Array:
        for place, (wanted, factor) in enumerate(zip(sizes, factors, strict=True)):
            axis = x.ndim - count + place
            extent = x.shape[axis]
            step = np.float32(_scale(extent, wanted, factor, False))
            at = np.arange(wanted, dtype=np.float32) + np.float32(0.5 if is_exact else 0)
            places = np.minimum(np.floor(at * step).astype(np.int64), extent - 1)
            x = jnp.take(x, places, axis=axis)
        return x

    return _with_factors(count, compute)


def _with_factors(count: int, resize: Callable[..., jax.Array]) -> Operation:
    """Wrap a resize function for both overloads: a scale per dimension, or a list of factors."""

    def compute(
        input: jax.Array | None = None,
        output_size: Sequence[int] | None = None,
        scale_factors: Sequence[float] | None = None,
        scales: float | None = None,
        scales_d: float | None = None,
        scales_h: float | None = None,
        scales_w: float | None = None,
        self: jax.Array | None = None,
    ) -> jax.Array:
        x = _one_of(input, self)
        single = {1: (scales,), 2: (scales_h, scales_w), 3: (scales_d, scales_h, scales_w)}[count]
        factors = _factors(count, single, scale_factors)
        return resize(x, _sizes(x, count, output_size, scale_factors), factors)

    return compute


def _one_of(input: jax.Array | None, self: jax.Array | None) -> jax.Array:
    x = self if input is None else input
    assert x is not None
    return x


def _interpolated(matrix: Callable[[int, int, float, bool], Tensor], count: int) -> Operation:
    def compute(
        input: jax.Array | None = None,
        output_size: Sequence[int] | None = None,
        align_corners: bool = False,
        scale_factors: Sequence[float] | None = None,
        scales: float | None = None,
        scales_h: float | None = None,
        scales_w: float | None = None,
        self: jax.Array | None = None,
    ) -> jax.Array:
        x = _one_of(input, self)
        single = (scales,) if count == 1 else (scales_h, scales_w)
        factors = _factors(count, single, scale_factors)
        sizes = _sizes(x, count, output_size, scale_factors)
        found = x.astype(FLOAT) if x.dtype.itemsize < FLOAT.itemsize else x
        for place, (wanted, factor) in enumerate(zip(sizes, factors, strict=True)):
            axis = x.ndim - count + place
            extent = found.shape[axis]
            step = _scale(extent, wanted, factor, align_corners)
            weights = matrix(extent, wanted, step, align_corners).astype(found.dtype)
            moved = jnp.moveaxis(found, axis, -1)
            found = jnp.moveaxis(jnp.matmul(moved, weights, precision="highest"), -1, axis)
        return found.astype(x.dtype)

    return compute


def _sources(wanted: int, step: float, align_corners: bool) -> Tensor:
    at = np.arange(wanted, dtype=np.float64)
    found: Tensor = at * step if align_corners else (at + 0.5) * step - 0.5
    return found


def _linear_matrix(extent: int, wanted: int, step: float, align_corners: bool) -> Tensor:
    """Return the weights [extent,wanted] of the two inputs next to each output's source."""
    at = np.maximum(_sources(wanted, step, align_corners), 0)
    low = np.minimum(np.floor(at).astype(np.int64), extent - 1)
    part = at - low
    weights = np.zeros((extent, wanted))
    columns = np.arange(wanted)
    np.add.at(weights, (low, columns), 1 - part)
    np.add.at(weights, (np.minimum(low + 1, extent - 1), columns), part)
    return weights


def _cubic_matrix(extent: int, wanted: int, step: float, align_corners: bool) -> Tensor:
    """Return the weights [extent,wanted] of the four inputs nearest to each output's source."""
    at = _sources(wanted, step, align_corners)
    low = np.floor(at).astype(np.int64)
    weights = np.zeros((extent, wanted))
    columns = np.arange(wanted)
    for neighbour in range(-1, 3):
        distance = np.abs(at - (low + neighbour))
        near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
        far = ((distance - 5) * distance + 8) * distance * _CUBIC - 4 * _CUBIC
        places = np.clip(low + neighbour, 0, extent - 1)
        np.add.at(weights, (places, columns), np.where(distance <= 1, near, far))
    return weights


RESIZING: Family = {
    "_upsample_nearest_exact1d": _nearest(1, is_exact=True),
    "_upsample_nearest_exact2d": _nearest(2, is_exact=True),
    "upsample_bicubic2d": _interpolated(_cubic_matrix, 2),
    "upsample_bilinear2d": _interpolated(_linear_matrix, 2),
    "upsample_linear1d": _interpolated(_linear_matrix, 1),
    "upsample_nearest1d": _nearest(1),
    "upsample_nearest2d": _nearest(2),
    "upsample_nearest3d": _nearest(3),
}
