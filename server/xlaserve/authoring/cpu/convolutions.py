"""Convolutions in the forms that XLA's CPU backend runs well, on the CPU alone."""

# Much of jax is typed, but not all that is called here.
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
"""Shifted products that a grouped convolution is written as: 11 x 11 for each of its channels, or
3 x 3 of 14. Each adds an operation to the program and some milliseconds to its compilation."""
MAX_SPLITS = 64
"""Limit of plain convolutions that replace a grouped one."""
MAX_COLUMN_POSITIONS = 64
"""Pixels of a result up to which a convolution is one product of matrices: XLA's own takes 1.8
times as long for 7 x 7 pixels of 512 channels, and no longer for 14 x 14 of 256."""
MIN_COLUMN_FEATURES = 64
"""Fewest channels for which it was measured."""
MIN_WINOGRAD_CHANNELS = 96
"""Channels of an image and of its result from which on Winograd's form is quicker: with fewer, its
transforms of both take longer than the multiplications that it saves."""
MIN_WINOGRAD_MULTIPLICATIONS = 1 << 24
"""Multiplications per image from which Winograd pays off; below, its overhead exceeds its savings.
"""
MAX_WINOGRAD_NUMBERS = 1 << 20
"""Numbers of an image and of its result together up to which it is quicker. Between its products
are four times as many, which for a batch of larger ones are in no cache."""
Form = Callable[["Convolution", jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Convolution:
    """The attributes of `jax.lax.conv_general_dilated`, with one entry for each spatial dimension.

    Convolutions with another `batch_group_count` than 1 are left to XLA.
    """

    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    image_dilation: Sequence[int]
    kernel_dilation: Sequence[int]
    numbers: lax.ConvDimensionNumbers
    groups: int = 1
    precision: Any = None
    dtype: Any = None
    """The dtype of the result, None for the image's."""

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
        """Return one of images [N,C,...] with a kernel [O,I,...]."""
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
        """Convolve as XLA does, of what a negative padding leaves of the image.

        Of padding that adds up to nothing, as -1 and 1, the CPU backend of jaxlib 0.10 reads what
        lies beside the image.
        """
        padding, dilation = self.padding, self.image_dilation
        if any(side < 0 for sides in padding for side in sides):
            # XLA would make one convolution of both.
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
        """Return the spatial sizes of the result; not positive if it is empty."""
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

    It stays one convolution where no form is known to be quicker: spatial dimensions without a
    size, numbers that are neither floats nor integers, too many products and groups. The sums of a
    form have another order: their last bits may differ.
    """
    form = form_of(convolution, image, kernel)
    return (form or Convolution.__call__)(convolution, image, kernel)


def form_of(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> Form | None:
    """Return the CPU form of a convolution; None for XLA's."""
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
    """Return the dtype of sums: halves are added up in FP32, as XLA does within a convolution."""
    dtype = np.dtype(convolution.dtype or image.dtype)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < np.dtype(np.float32).itemsize:
        return np.dtype(np.float32)
    return dtype


# --- products: one shifted image, times one number for each channel, after another ----------------


def _products(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Sum the image shifted to each kernel position, times the kernel there."""
    numbers, groups = convolution.numbers, convolution.groups
    positions = convolution.positions(image, kernel)
    dtype = _sum_dtype(convolution, image)
    feature = numbers.lhs_spec[1]
    # The features become (group, feature within it), beside each other.
    places = [axis + (axis > feature) for axis in numbers.lhs_spec[2:]]
    # What is computed within a pad is computed number by number.
    padded = convolution.padded(lax.optimization_barrier(image))
    shifted = _split_axis(padded, feature, groups).astype(dtype)
    outputs, members, *sides = numbers.rhs_spec
    # What one place has for neighbouring features is read at once where it lies side by side.
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


# --- a product of matrices: the kernel has one place alone -------------------------------------


def _pointwise(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply the features of each position by the kernel, a matrix for each group."""
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
        # A matrix for each row: so XLA reads and writes the images in the order that they have.
        jnp.broadcast_to(matrices, (rows, *matrices.shape)),
        vectors,
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=convolution.precision,
        preferred_element_type=_sum_dtype(convolution, image),
    )
    result = multiplied.reshape((rows, outputs, *positions))
    return _arranged(convolution, result, range(result.ndim), image)


def features_last(rank: int) -> tuple[int, ...]:
    """Return the positions of dimensions [N,C,...] in the layout [N,...,C]."""
    return (0, rank - 1, *range(1, rank - 1))


def _has_features_last(convolution: Convolution) -> bool:
    """Tell whether image and result have features last, in one group."""
    numbers = convolution.numbers
    last = features_last(len(numbers.lhs_spec))
    return convolution.groups == 1 and tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == last


def _multiplied(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply all vectors of features by the kernel at once."""
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


# --- columns: what each pixel of the result is made of, side by side ------------------------------


def _has_columns(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> bool:
    """Tell whether one product of matrices is quicker than a convolution."""
    return (
        _has_features_last(convolution)
        and kernel.shape[convolution.numbers.rhs_spec[1]] >= MIN_COLUMN_FEATURES
        and prod(convolution.positions(image, kernel)) <= MAX_COLUMN_POSITIONS
    )


def _columns(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply the patches at all positions by the kernel."""
    outputs, inputs, *sides = convolution.numbers.rhs_spec
    positions = convolution.positions(image, kernel)
    # What is computed within a pad is computed number by number.
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


# --- Winograd: products of matrices with fewer multiplications ------------------------------------


def _has_winograd(convolution: Convolution, image: jax.Array, kernel: jax.Array) -> bool:
    """Tell whether Winograd's form computes a convolution, and is quicker."""
    outputs, inputs, *sides = convolution.numbers.rhs_spec
    if not (
        _has_features_last(convolution)
        and [kernel.shape[side] for side in sides] == [winograd.KERNEL] * 2
        and {*convolution.strides, *convolution.image_dilation, *convolution.kernel_dilation} == {1}
        and np.dtype(np.float32) == image.dtype == np.dtype(convolution.dtype or image.dtype)
        # Whoever asks for more than is usual gets each product as it is.
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
    # Held before the pad, for the reason that _columns has.
    padded = replace(convolution, padding=padding).padded(lax.optimization_barrier(image))
    outputs, inputs, *sides = convolution.numbers.rhs_spec
    return winograd.convolved(padded, jnp.transpose(kernel, (*sides, inputs, outputs)), positions)


# --- one convolution for each group ---------------------------------------------------------------


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
