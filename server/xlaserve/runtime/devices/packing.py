"""How a program receives a model's parameters as arguments.

Each argument of a call costs about half a microsecond, so small parameters (biases, scales) are
packed into one flat buffer per dtype. Embedding them as constants would be free, but then models
with the same computation could not share programs.

On the CPU, convolution kernels [O,I,H,W] are transposed to [H,W,I,O] once, at load. XLA's CPU
backend requires this layout and would otherwise transpose in every call.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.tensors import Shape

PACKED_BYTES = 1024
"""Parameters of at most this size are packed, unless a partition rule shards them."""

MOST_PLACES = 11
"""Maximum height and width of an array that is treated as a convolution kernel."""

KERNEL_ORDER = (2, 3, 1, 0)
"""Permutation from [O,I,H,W] to the layout of XLA's CPU backend, [H,W,I,O]."""

DType: TypeAlias = "np.dtype[Any]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """Dtype and shape of a parameter."""

    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class Place:
    """A packed parameter's buffer and its range in it."""

    buffer: int
    start: int
    stop: int
    shape: Shape


@dataclass(frozen=True)
class Packing:
    """Maps parameters to program arguments: packed buffers first, then the other parameters.

    Depends only on dtypes, shapes and partition rules, so that equal models are packed alike.
    """

    count: int = 0
    """Number of parameters in the artifact."""
    buffers: tuple[tuple[DType, int], ...] = ()
    """Dtype and number of elements of each buffer."""
    places: Mapping[int, Place] = field(default_factory=lambda: MappingProxyType({}))
    """Packed parameters by their index in the artifact."""
    turned: frozenset[int] = frozenset()
    """Indexes of the kernels stored as [H,W,I,O]."""

    @staticmethod
    def of(small: Mapping[int, Parameter], count: int, turned: Collection[int] = ()) -> "Packing":
        """Pack the `small` ones of `count` parameters in order, with one buffer per dtype."""
        dtypes = sorted({parameter.dtype.name for parameter in small.values()})
        sizes = dict.fromkeys(dtypes, 0)
        places: dict[int, Place] = {}
        for index, parameter in sorted(small.items()):
            name = parameter.dtype.name
            start = sizes[name]
            sizes[name] = stop = start + prod(parameter.shape)
            places[index] = Place(dtypes.index(name), start, stop, tuple(parameter.shape))
        of_name = {parameter.dtype.name: parameter.dtype for parameter in small.values()}
        buffers = tuple((of_name[name], sizes[name]) for name in dtypes)
        return Packing(count, buffers, MappingProxyType(places), frozenset(turned))

    @cached_property
    def text(self) -> str:
        """Return the packing for a cache key: equal argument shapes may be packed differently."""
        places = (
            f"{index}@{place.buffer}:{place.start}{list(place.shape)}"
            for index, place in self.places.items()
        )
        turned = (f"{index}/{KERNEL_ORDER}" for index in sorted(self.turned))
        return " ".join((str(self.count), *places, *turned))

    def unpack(self, leaves: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """Yield the parameters in the artifact's order. Called while a program is traced."""
        rest = iter(leaves[len(self.buffers) :])
        for index in range(self.count):
            place = self.places.get(index)
            if index in self.turned:
                # XLA transposes the kernel again for its convolution, and the two transposes cancel
                # out.
                yield jax.lax.transpose(next(rest), _BACK)
            elif place is None:
                yield next(rest)
            else:
                flat = leaves[place.buffer]
                part = jax.lax.slice(flat, (place.start,), (place.stop,))
                yield part.reshape(place.shape)


_BACK = tuple(KERNEL_ORDER.index(axis) for axis in range(len(KERNEL_ORDER)))


def is_kernel(parameter: Parameter) -> bool:
    """Tell whether a parameter looks like the kernel [O,I,H,W] of a convolution.

    A false positive costs a transpose in each call; results are the same.
    """
    shape = parameter.shape
    if len(shape) != len(KERNEL_ORDER) or not jnp.issubdtype(parameter.dtype, jnp.floating):
        return False
    height, width = shape[2:]
    return height * width > 1 and max(height, width) <= MOST_PLACES


UNPACKED = Packing()
"""Packing of a model without parameters."""
