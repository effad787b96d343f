"""Convolutions, forward and transposed."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2.operators.table import Family
from xlaserve.importers.pt2.values import spread

Sizes = int | Sequence[int]
_LETTERS = "DHW"


def _dimensions(count: int) -> tuple[str, str, str]:
    spatial = _LETTERS[-count:]
    return f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"


def _convolve(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
) -> jax.Array:
    count = weight.ndim - 2
    is_one = x.ndim == count + 1
    x = x[None] if is_one else x
    steps = spread(dilation, count)
    made = jax.lax.conv_general_dilated(
        x,
        weight,
        window_strides=spread(stride, count),
        padding=_padding(padding, weight.shape[2:], steps),
        rhs_dilation=steps,
        dimension_numbers=_dimensions(count),
        feature_group_count=groups,
    )
    made = _with_bias(made, bias)
    return made[0] if is_one else made


def _padding(
    padding: Sizes | str, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        raise InvalidModel(f"padding: expected same, valid or numbers, got '{padding}'")
    return [(size, size) for size in spread(padding, len(kernel))]


def _with_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.reshape((1, -1) + (1,) * (x.ndim - 2))


def _forward(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> jax.Array:
    return _convolve(
        input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


def _transposed(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> jax.Array:
    """Convolve the input with gaps between its elements, like the gradient of a convolution."""
    count = weight.ndim - 2
    is_one = input.ndim == count + 1
    x = input[None] if is_one else input
    steps, kernel = spread(dilation, count), weight.shape[2:]
    pads = []
    for size, step, pad, extra in zip(
        kernel, steps, spread(padding, count), spread(output_padding, count), strict=True
    ):
        reach = step * (size - 1)
        pads.append((reach - pad, reach - pad + extra))
    made = jax.lax.conv_general_dilated(
        x,
        _turned(weight, groups),
        window_strides=(1,) * count,
        padding=pads,
        lhs_dilation=spread(stride, count),
        rhs_dilation=steps,
        dimension_numbers=_dimensions(count),
        feature_group_count=groups,
    )
    made = _with_bias(made, bias)
    return made[0] if is_one else made


def _turned(weight: jax.Array, groups: int) -> jax.Array:
    """Flip a kernel [in,out/groups,...] and return it as [out,in/groups,...]."""
    inputs, outputs, *kernel = weight.shape
    weight = jnp.flip(weight, tuple(range(2, weight.ndim)))
    weight = weight.reshape(groups, inputs // groups, outputs, *kernel)
    return jnp.swapaxes(weight, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)


def _either(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> jax.Array:
    if transposed:
        return _transposed(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return _forward(input, weight, bias, stride, padding, dilation, groups)


CONVOLUTION: Family = {
    "conv1d": _forward,
    "conv2d": _forward,
    "conv3d": _forward,
    "conv_transpose1d": _transposed,
    "conv_transpose2d": _transposed,
    "conv_transpose3d": _transposed,
    "convolution": _either,
}
