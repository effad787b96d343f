"""Rewrites a function to keep images channels-last, for faster convolutions.

On the CPU, convolutions of images [N,C,...] are faster with channels last: XLA transposes the image
before each one, and the result after it. Here an image is transposed once before the first
convolution, keeps that layout through all operations in `RULES`, and is transposed back for others.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from xlaserve.authoring.cpu.convolutions import Convolution, convolve, features_last
from xlaserve.authoring.cpu.swish import swish


@dataclass(frozen=True, slots=True, eq=False)
class Last:
    """An image [N,C,...], stored as [N,...,C]."""

    held: jax.Array
    logistic_of: jax.Array | None = None
    """The array x if this image is logistic(x), which makes their product a swish."""

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return self.held.ndim

    def back(self) -> jax.Array:
        """Return the image as [N,C,...]."""
        return jnp.transpose(self.held, features_last(self.held.ndim))


Given: TypeAlias = "jax.Array | Last"
Rule: TypeAlias = Callable[[core.JaxprEqn, Sequence[Any]], "list[Given] | None"]
"""Evaluates an equation on channels-last operands; returns None if it cannot."""


def plain(value: Any) -> Any:
    """Return a value in its original dimension order."""
    return value.back() if isinstance(value, Last) else value


def rank(value: Any) -> int:
    """Return the number of dimensions of an array or a number."""
    return value.ndim if isinstance(value, Last) else int(jnp.ndim(value))


def order(rank: int) -> tuple[int, ...]:
    """Return the permutation from [N,C,...] to [N,...,C]."""
    return (0, *range(2, rank), 1)


def held(value: Given) -> jax.Array:
    """Return an image with its channels last."""
    return value.held if isinstance(value, Last) else jnp.transpose(value, order(value.ndim))


def _moved(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Reorder per-dimension values of an image to channels-last order."""
    return tuple(sizes[axis] for axis in order(len(sizes)))


def convolved(convolution: Convolution, image: Given, kernel: jax.Array) -> "Last | None":
    """Convolve an image [N,C,...], or return None if the dimensions are in another order."""
    rank = image.ndim
    first = tuple(range(rank))
    numbers = convolution.numbers
    if rank < 3 or tuple(numbers.lhs_spec) != first or tuple(numbers.out_spec) != first:
        return None
    places = features_last(rank)
    turned = replace(
        convolution, numbers=lax.ConvDimensionNumbers(places, numbers.rhs_spec, places)
    )
    return Last(convolve(turned, held(image), kernel))


# --- rules that keep channels last ----------------------------------------------------------------


def _element_by_element(equation: core.JaxprEqn, given: Sequence[Given]) -> list[Given]:
    operands = [held(each) if rank(each) else each for each in given]
    return _bound(equation, operands)


def _bound(equation: core.JaxprEqn, operands: Sequence[Any], **changed: Any) -> list[Given]:
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    with equation.ctx.manager:
        return [Last(equation.primitive.bind(*operands, **parameters))]


def _logistic(equation: core.JaxprEqn, given: Sequence[Given]) -> list[Given]:
    [image] = given
    [found] = _element_by_element(equation, given)
    assert isinstance(image, Last)
    assert isinstance(found, Last)
    return [replace(found, logistic_of=image.held)]


def _multiplied(equation: core.JaxprEqn, given: Sequence[Given]) -> list[Given]:
    """Multiply two images; the product of an image and its logistic function is its swish."""
    for image, gate in (given, reversed(given)):
        if (
            isinstance(image, Last)
            and isinstance(gate, Last)
            and gate.logistic_of is image.held
            and np.dtype(np.float32) == image.held.dtype
        ):
            return [Last(swish(image.held))]
    return _element_by_element(equation, given)


def _over_windows(
    combine: Callable[[jax.Array, jax.Array], jax.Array], neutral: Callable[[Any], Any]
) -> Rule:
    """Return the rule for a window reduction, which combines shifted images axis by axis."""

    def compute(equation: core.JaxprEqn, given: Sequence[Given]) -> "list[Given] | None":
        window = {name: _moved(equation.params[name]) for name in _WINDOW}
        if set(window["base_dilation"]) != {1} or max(window["window_dimensions"]) > MOST_SHIFTS:
            return None
        image = held(given[0])
        for axis, (size, stride, dilation, padding) in enumerate(
            zip(*(window[name] for name in _WINDOW[:-1]), strict=True)
        ):
            if size == stride == 1 and tuple(padding) == (0, 0):
                continue
            config = [(0, 0, 0)] * image.ndim
            config[axis] = (*padding, 0)
            # The barrier keeps XLA from fusing the producer into the pad, where it is not
            # vectorized.
            image = lax.pad(lax.optimization_barrier(image), neutral(image.dtype), config)
            positions = (image.shape[axis] - (size - 1) * dilation - 1) // stride + 1
            parts = (
                lax.slice_in_dim(
                    image,
                    place * dilation,
                    place * dilation + (positions - 1) * stride + 1,
                    stride,
                    axis,
                )
                for place in range(size)
            )
            image = reduce(combine, parts)
        return [Last(image)]

    return compute


_WINDOW = ("window_dimensions", "window_strides", "window_dilation", "padding", "base_dilation")
MOST_SHIFTS = 16
"""Maximum side of a window that is reduced by shifting the image."""


def _least(dtype: Any) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.asarray(-np.inf if floating else jnp.iinfo(dtype).min, dtype)[()]


def _greatest(dtype: Any) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.asarray(np.inf if floating else jnp.iinfo(dtype).max, dtype)[()]


def _zero(dtype: Any) -> Any:
    return np.zeros((), dtype)[()]


def _concatenated(equation: core.JaxprEqn, given: Sequence[Given]) -> list[Given]:
    axis = order(given[0].ndim).index(equation.params["dimension"])
    return _bound(equation, [held(each) for each in given], dimension=axis)


def _padded(equation: core.JaxprEqn, given: Sequence[Given]) -> list[Given]:
    image, value = given
    config = _moved(equation.params["padding_config"])
    return _bound(equation, [held(image), plain(value)], padding_config=config)


def _sliced(equation: core.JaxprEqn, given: Sequence[Given]) -> list[Given]:
    strides = equation.params["strides"]
    changed = {
        "start_indices": _moved(equation.params["start_indices"]),
        "limit_indices": _moved(equation.params["limit_indices"]),
        "strides": None if strides is None else _moved(strides),
    }
    return _bound(equation, [held(given[0])], **changed)


def _reduced(equation: core.JaxprEqn, given: Sequence[Given]) -> "list[Given] | None":
    """Reduce an image to one value per channel; returns None for other axes."""
    rank = given[0].ndim
    if set(equation.params["axes"]) != set(range(2, rank)):
        return None
    [found] = _bound(equation, [held(given[0])], axes=tuple(range(1, rank - 1)))
    assert isinstance(found, Last)
    return [found.held]


def _broadcast(equation: core.JaxprEqn, given: Sequence[Given]) -> "list[Given] | None":
    """Repeat an image along its dimensions of size 1."""
    shape, axes = equation.params["shape"], equation.params["broadcast_dimensions"]
    if len(given) != 1 or tuple(axes) != tuple(range(len(shape))):
        return None
    return _bound(equation, [held(given[0])], shape=_moved(shape))


_ELEMENT_BY_ELEMENT = (
    primitives.abs_p,
    primitives.add_p,
    primitives.and_p,
    primitives.cbrt_p,
    primitives.ceil_p,
    primitives.clamp_p,
    primitives.convert_element_type_p,
    primitives.cos_p,
    primitives.div_p,
    primitives.eq_p,
    primitives.erf_p,
    primitives.exp_p,
    primitives.expm1_p,
    primitives.floor_p,
    primitives.ge_p,
    primitives.gt_p,
    primitives.integer_pow_p,
    primitives.is_finite_p,
    primitives.le_p,
    primitives.log1p_p,
    primitives.log_p,
    primitives.lt_p,
    primitives.max_p,
    primitives.min_p,
    primitives.ne_p,
    primitives.neg_p,
    primitives.not_p,
    primitives.or_p,
    primitives.pow_p,
    primitives.rem_p,
    primitives.round_p,
    primitives.rsqrt_p,
    primitives.select_n_p,
    primitives.sign_p,
    primitives.sin_p,
    primitives.sqrt_p,
    primitives.sub_p,
    primitives.tanh_p,
)

RULES: Mapping[core.Primitive, Rule] = {
    **dict.fromkeys(_ELEMENT_BY_ELEMENT, _element_by_element),
    primitives.broadcast_in_dim_p: _broadcast,
    primitives.concatenate_p: _concatenated,
    primitives.logistic_p: _logistic,
    primitives.mul_p: _multiplied,
    primitives.pad_p: _padded,
    primitives.reduce_max_p: _reduced,
    primitives.reduce_min_p: _reduced,
    primitives.reduce_sum_p: _reduced,
    primitives.reduce_window_max_p: _over_windows(lax.max, _least),
    primitives.reduce_window_min_p: _over_windows(lax.min, _greatest),
    primitives.reduce_window_sum_p: _over_windows(lax.add, _zero),
    primitives.slice_p: _sliced,
}
"""Rules for operations on channels-last images. All others get the original layout."""


def ruled(equation: core.JaxprEqn, given: Sequence[Given]) -> "list[Given] | None":
    """Evaluate an equation on channels-last images, or return None if there is no rule."""
    if not any(isinstance(each, Last) for each in given):
        return None
    rule = RULES.get(equation.primitive)
    return None if rule is None else rule(equation, given)
