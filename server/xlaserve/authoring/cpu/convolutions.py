"""Computes convolutions in forms that are faster on XLA's CPU backend."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlaserve.authoring.cpu import winograd

MAX_PRODUCTS = 128
"""Maximum number of shifted products that replace a grouped convolution: 11 x 11 kernels with one
channel per group, or 3 x 3 with 14. Each adds an operation to the program and some milliseconds to
its compilation."""
MAX_SPLITS = 64
"""Maximum number of plain convolutions that replace a grouped one."""
MAX_COLUMN_POSITIONS = 64
"""Maximum number of result pixels for computing a convolution as one matrix product. XLA's own
convolution takes 1.8 times as long for 7 x 7 pixels of 512 channels, but no longer for 14 x 14 of
256."""
MIN_COLUMN_FEATURES = 64
"""Minimum number of channels for computing a convolution as one matrix product; fewer were not
measured."""
MIN_WINOGRAD_CHANNELS = 96
"""Minimum number of channels in image and result for Winograd's algorithm: with fewer, transforming
both takes longer than the saved multiplications."""
MIN_WINOGRAD_MULTIPLICATIONS = 1 << 24
"""Minimum number of multiplications per image for Winograd's algorithm, to outweigh its overhead.
"""
MAX_WINOGRAD_NUMBERS = 1 << 20
"""Maximum number of elements in image and result together for Winograd's algorithm. Its
intermediate tiles have four times as many, which for a batch of larger images do not fit in any
cache."""
Form = Callable[["Convolution", jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Convolution:
    """The attributes of `jax.lax.conv_general_dilated`, with one entry per spatial dimension.

    Only convolutions with a `batch_group_count` of 1 are represented.
    """

    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    image_dilation: Sequence[int]
    kernel_dilation: Sequence[int]
    numbers: lax.ConvDimensionNumbers
    groups: int = 1
    precision: Any = None
    dtype: Any = None
    """Dtype of the result; None for that of the image."""

    @classmethod
    def plain(
        cls,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        *,
        image_dilation: Sequence[int] = (),
        kernel_dilation: Sequence[int] = (),
        groups: int = 1,
        precision: Any = None,
        dtype: Any = None,
    ) -> "Convolution":
        """Return a convolution of images [N,C,...] with a kernel [O,I,...]."""
        order = tuple(range(len(strides) + 2))
        ones = (1,) * len(strides)
        numbers = lax.ConvDimensionNumbers(order, order, order)
        return cls(
            tuple(strides),
            tuple(padding),
            tuple(image_dilation) or ones,
            tuple(kernel_dilation) or ones,
            numbers,
            groups,
            precision,
            dtype,
        )

    def __call__(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        """Convolve with XLA's operation, after applying negative padding separately.

        For paddings that sum to 0, such as -1 and 1, the CPU backend of jaxlib 0.10 reads outside
        the image.
        """
        padding, dilation = self.padding, self.image_dilation
        if any(side < 0 for sides in padding for side in sides):
            # Without the barrier XLA would merge the pad into the convolution again.
            image = lax.optimization_barrier(self.padded(image))
            padding, dilation = [(0, 0)] * len(padding), [1] * len(padding)
        convolved: jax.Array = lax.conv_general_dilated(
            image,
            kernel,
            self.strides,
            padding,
            lhs_dilation=dilation,
            rhs_dilation=self.kernel_dilation,
            dimension_numbers=self.numbers,
            feature_group_count=self.groups,
            precision=self.precision,
            preferred_element_type=self.dtype,
        )
        return convolved

    def positions(self, image: jax.Array, kernel: jax.Array) -> tuple[int, ...]:
        """Return the spatial sizes of the result; a size of 0 or less means an empty result."""
        sizes = [image.shape[axis] for axis in self.numbers.lhs_spec[2:]]
        extents = [
            (kernel.shape[axis] - 1) * dilation + 1
            for axis, dilation in zip(self.numbers.rhs_spec[2:], self.kernel_dilation, strict=True)
        ]
        return tuple(
            ((size - 1) * dilation + 1 + low + high - extent) // stride + 1
            for size, dilation, (low, high), extent, stride in zip(
                sizes, self.image_dilation, self.padding, extents, self.strides, strict=True
            )
        )

    def padded(self, image: jax.Array) -> jax.Array:
        """Return the image with padding and dilation applied."""
        config = [(0, 0, 0)] * image.ndim
        for axis, (low, high), dilation in zip(
            self.numbers.lhs_spec[2:], self.padding, self.image_dilation, strict=True
        ):
            config[axis] = (low, high, dilation - 1)
        if not any(any(each) for each in config):
            return image
        return lax.pad(image, np.zeros((), image.dtype)[()], config)


def convolve(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute a convolution in the form that is fastest on the CPU.

    Uses XLA's convolution if none is known to be faster: for unknown spatial sizes, for complex
    numbers, and for too many products or groups. Other forms add in another order, so the last bits
    of the result may differ.
    """
    form = form_of(convolution, image, kernel)
    return (form or Convolution.__call__)(convolution, image, kernel)


def form_of(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> Form | None:
    """Return the fastest form of a convolution, or None for XLA's operation."""
    if not _has_forms(convolution, image, kernel):
        return None
    places = prod(kernel.shape[axis] for axis in convolution.numbers.rhs_spec[2:])
    is_float = jnp.issubdtype(image.dtype, jnp.floating)
    if is_float and places == 1 and set(convolution.image_dilation) == {1}:
        return _multiplied if _has_features_last(convolution) else _pointwise
    if convolution.groups == 1:
        if is_float and places <= MAX_PRODUCTS and _has_columns(convolution, image, kernel):
            return _columns
        return _winograd if _has_winograd(convolution, image, kernel) else None
    if kernel.shape[convolution.numbers.rhs_spec[1]] * places <= MAX_PRODUCTS:
        return _products
    return _split if convolution.groups <= MAX_SPLITS else None


def _has_forms(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> bool:
    """Tell whether sizes are known, numbers are real, and nothing is empty."""
    spatial = [image.shape[axis] for axis in convolution.numbers.lhs_spec[2:]]
    if not spatial or not all(isinstance(size, int) for size in (*spatial, *kernel.shape)):
        return False
    is_real = any(jnp.issubdtype(image.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return is_real and min(kernel.shape) > 0 and min(convolution.positions(image, kernel)) > 0


def _sum_dtype(convolution: Convolution, image: jax.Array) -> Any:
    """Return the dtype for sums: FP32 for 16-bit floats, as in XLA's convolution."""
    dtype = np.dtype(convolution.dtype or image.dtype)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < np.dtype(np.float32).itemsize:
        return np.dtype(np.float32)
    return dtype


# --- shifted products, for grouped convolutions ---------------------------------------------------


def _products(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Sum the products of the shifted image and the kernel, over all kernel positions."""
    numbers, groups = convolution.numbers, convolution.groups
    positions = convolution.positions(image, kernel)
    dtype = _sum_dtype(convolution, image)
    feature = numbers.lhs_spec[1]
    # The feature axis is split in two: (group, feature in the group).
    places = [axis + (axis > feature) for axis in numbers.lhs_spec[2:]]
    # The barrier keeps XLA from fusing the producer into the pad, where it is not vectorized.
    padded = convolution.padded(lax.optimization_barrier(image))
    shifted = _split_axis(padded, feature, groups).astype(dtype)
    outputs, members, *sides = numbers.rhs_spec
    # Features become the last axes, so that the factors of one position are contiguous in memory.
    factors = jnp.transpose(kernel, (*sides, members, outputs)).astype(dtype)
    factors = _split_axis(lax.optimization_barrier(factors), len(sides) + 1, groups)
    total = None
    for member in range(kernel.shape[members]):
        for place in product(*(range(kernel.shape[side]) for side in sides)):
            starts, limits, steps = [0] * shifted.ndim, list(shifted.shape), [1] * shifted.ndim
            starts[feature + 1], limits[feature + 1] = member, member + 1
            for axis, index, dilation, size, stride in zip(
                places,
                place,
                convolution.kernel_dilation,
                positions,
                convolution.strides,
                strict=True,
            ):
                starts[axis] = index * dilation
                limits[axis] = starts[axis] + (size - 1) * stride + 1
                steps[axis] = stride
            part = lax.slice(shifted, starts, limits, steps)
            shape = [1] * shifted.ndim
            shape[feature : feature + 2] = factors.shape[-2:]
            term = part * factors[(*place, member)].reshape(shape)
            total = term if total is None else total + term
    assert total is not None
    merged = [
        *total.shape[:feature],
        kernel.shape[outputs],
        *total.shape[feature + 2 :],
    ]
    return _arranged(convolution, total.reshape(merged), numbers.lhs_spec, image)


def _split_axis(array: jax.Array, axis: int, parts: int) -> jax.Array:
    sizes = parts, array.shape[axis] // parts
    return array.reshape((*array.shape[:axis], *sizes, *array.shape[axis + 1 :]))


def _arranged(
    convolution: Convolution, result: jax.Array, has: Sequence[int], image: jax.Array
) -> jax.Array:
    """Return a result with dimensions in the requested order."""
    wanted = convolution.numbers.out_spec
    if tuple(has) != tuple(wanted):
        order = [0] * result.ndim
        for ours, theirs in zip(has, wanted, strict=True):
            order[theirs] = ours
        result = jnp.transpose(result, order)
    return result.astype(convolution.dtype or image.dtype)


# --- matrix product, for kernels of size 1 -----------------------------------------------------


def _pointwise(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply the features of each pixel by the kernel, one matrix per group."""
    numbers, groups = convolution.numbers, convolution.groups
    positions = convolution.positions(image, kernel)
    ordered = jnp.transpose(convolution.padded(image), numbers.lhs_spec)
    rows, features = ordered.shape[:2]
    limits = [
        (size - 1) * step + 1 for size, step in zip(positions, convolution.strides, strict=True)
    ]
    met = lax.slice(
        ordered, (0,) * ordered.ndim, (rows, features, *limits), (1, 1, *convolution.strides)
    )
    matrices = jnp.transpose(kernel, numbers.rhs_spec)
    outputs = matrices.shape[0]
    matrices = matrices.reshape((groups, outputs // groups, features // groups))
    vectors = met.reshape((rows, groups, features // groups, prod(positions)))
    multiplied = lax.dot_general(
        # With one matrix per image of the batch, XLA keeps the layout of the images.
        jnp.broadcast_to(matrices, (rows, *matrices.shape)),
        vectors,
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=convolution.precision,
        preferred_element_type=_sum_dtype(convolution, image),
    )
    result = multiplied.reshape((rows, outputs, *positions))
    return _arranged(convolution, result, range(result.ndim), image)


def features_last(rank: int) -> tuple[int, ...]:
    """Return the positions of the dimensions [N,C,...] in the layout [N,...,C]."""
    return (0, rank - 1, *range(1, rank - 1))


def _has_features_last(convolution: Convolution) -> bool:
    """Tell whether image and result have features last, in a single group."""
    numbers = convolution.numbers
    last = features_last(len(numbers.lhs_spec))
    return convolution.groups == 1 and tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == last


def _multiplied(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply the features of all pixels by the kernel in one matrix product."""
    positions = convolution.positions(image, kernel)
    padded = convolution.padded(image)
    limits = [
        (size - 1) * step + 1 for size, step in zip(positions, convolution.strides, strict=True)
    ]
    rows, *_, features = padded.shape
    met = lax.slice(
        padded, (0,) * padded.ndim, (rows, *limits, features), (1, *convolution.strides, 1)
    )
    matrix = jnp.transpose(kernel, convolution.numbers.rhs_spec).reshape((-1, features))
    result: jax.Array = lax.dot_general(
        met,
        matrix,
        (((met.ndim - 1,), (1,)), ((), ())),
        precision=convolution.precision,
        preferred_element_type=_sum_dtype(convolution, image),
    )
    return result.astype(convolution.dtype or image.dtype)


# --- matrix product of patches (im2col) -----------------------------------------------------------


def _has_columns(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> bool:
    """Tell whether one matrix product is faster than XLA's convolution."""
    return (
        _has_features_last(convolution)
        and kernel.shape[convolution.numbers.rhs_spec[1]] >= MIN_COLUMN_FEATURES
        and prod(convolution.positions(image, kernel)) <= MAX_COLUMN_POSITIONS
    )


def _columns(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply the patches of all pixels by the kernel."""
    outputs, inputs, *sides = convolution.numbers.rhs_spec
    positions = convolution.positions(image, kernel)
    # The barrier keeps XLA from fusing the producer into the pad, where it is not vectorized.
    padded = convolution.padded(lax.optimization_barrier(image))
    rows, *_, features = padded.shape
    parts = []
    for place in product(*(range(kernel.shape[side]) for side in sides)):
        starts = [i * step for i, step in zip(place, convolution.kernel_dilation, strict=True)]
        limits = [
            start + (size - 1) * stride + 1
            for start, size, stride in zip(starts, positions, convolution.strides, strict=True)
        ]
        part = lax.slice(
            padded, (0, *starts, 0), (rows, *limits, features), (1, *convolution.strides, 1)
        )
        parts.append(part)
    columns = jnp.concatenate(parts, axis=-1)
    matrix = jnp.transpose(kernel, (*sides, inputs, outputs)).reshape(columns.shape[-1], -1)
    result: jax.Array = lax.dot_general(
        columns,
        matrix,
        (((columns.ndim - 1,), (0,)), ((), ())),
        precision=convolution.precision,
        preferred_element_type=_sum_dtype(convolution, image),
    )
    return result.astype(convolution.dtype or image.dtype)


# --- Winograd: matrix products with fewer multiplications -----------------------------------------


def _has_winograd(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> bool:
    """Tell whether Winograd's algorithm applies to a convolution, and is faster."""
    outputs, inputs, *sides = convolution.numbers.rhs_spec
    if not (
        _has_features_last(convolution)
        and [kernel.shape[side] for side in sides] == [winograd.KERNEL] * 2
        and {*convolution.strides, *convolution.image_dilation, *convolution.kernel_dilation} == {1}
        and np.dtype(np.float32) == image.dtype == np.dtype(convolution.dtype or image.dtype)
        # Winograd loses some precision, so it is not used if a higher one is requested.
        and convolution.precision in _USUAL
    ):
        return False
    features, channels = kernel.shape[outputs], kernel.shape[inputs]
    positions = prod(convolution.positions(image, kernel))
    return (
        min(features, channels) >= MIN_WINOGRAD_CHANNELS
        and positions * prod(kernel.shape) >= MIN_WINOGRAD_MULTIPLICATIONS
        and positions * (features + channels) <= MAX_WINOGRAD_NUMBERS
    )


_USUAL = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT, lax.Precision.DEFAULT))


def _winograd(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply transformed tiles of the image by the transformed kernel."""
    positions = convolution.positions(image, kernel)
    padding = [
        (low, high + more)
        for (low, high), more in zip(
            convolution.padding, winograd.padding_of(positions), strict=True
        )
    ]
    # The barrier keeps XLA from fusing the producer into the pad, where it is not vectorized.
    padded = replace(convolution, padding=padding).padded(lax.optimization_barrier(image))
    outputs, inputs, *sides = convolution.numbers.rhs_spec
    return winograd.convolved(padded, jnp.transpose(kernel, (*sides, inputs, outputs)), positions)


# --- one convolution per group --------------------------------------------------------------------


def _split(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve each group separately."""
    numbers, groups = convolution.numbers, convolution.groups
    images = jnp.split(image, groups, numbers.lhs_spec[1])
    kernels = jnp.split(kernel, groups, numbers.rhs_spec[0])
    alone = Convolution(
        convolution.strides,
        convolution.padding,
        convolution.image_dilation,
        convolution.kernel_dilation,
        numbers,
        precision=convolution.precision,
        dtype=convolution.dtype,
    )
    results = [alone(*each) for each in zip(images, kernels, strict=True)]
    return jnp.concatenate(results, numbers.out_spec[1])
