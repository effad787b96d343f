"""The form in which programs take the parameters of a model.

Small ones are one flat buffer for each of their dtypes: each argument of a call costs about half a
microsecond, and a bias or a scale is not worth it. As constants of the program they would cost
nothing, but then no two models had a program in common.

On the CPU the kernels of convolutions [O,I,H,W] are turned to [H,W,I,O]: so XLA multiplies them
there, and it would turn them in each call.
"""

# Much of jax is typed, but not all that is called here.
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
"""Parameters up to this size are packed, unless a partition rule splits them."""

MOST_PLACES = 11
"""Largest height and width of a presumed convolution kernel."""

KERNEL_ORDER = (2, 3, 1, 0)
"""The dimensions of [O,I,H,W] as XLA's CPU backend wants them."""

DType: TypeAlias = "np.dtype[Any]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """Dtype and shape of a parameter."""

    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter's range in a buffer."""

    buffer: int
    start: int
    stop: int
    shape: Shape


@dataclass(frozen=True)
class Packing:
    """The place of each parameter among the arguments of a program: buffers first, then the rest.

    It follows from dtypes, shapes and partition rules alone: equal models are packed alike.
    """

    count: int = 0
    """Parameters of the artifact."""
    buffers: tuple[tuple[DType, int], ...] = ()
    """Dtype and elements of each buffer."""
    places: Mapping[int, Place] = field(default_factory=lambda: MappingProxyType({}))
    """The packed parameters by position among all."""
    turned: frozenset[int] = frozenset()
    """Positions of the kernels held as [H,W,I,O]."""

    @staticmethod
    def of(small: Mapping[int, Parameter], count: int, turned: Collection[int] = ()) -> "Packing":
        """Pack the small ones of `count` parameters, in order, one buffer per dtype."""
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
        """Return the packing's part of a key: equal arguments may be packed differently."""
        places = (
            f"{index}@{place.buffer}:{place.start}{list(place.shape)}"
            for index, place in self.places.items()
        )
        turned = (f"{index}/{KERNEL_ORDER}" for index in sorted(self.turned))
        return " ".join((str(self.count), *places, *turned))

    def unpack(self, leaves: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """Yield the parameters in the artifact's order; while a program is traced."""
        rest = iter(leaves[len(self.buffers) :])
        for index in range(self.count):
            place = self.places.get(index)
            if index in self.turned:
                # XLA turns it again for its convolution, and the two cancel out.
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

    One that only looks like it costs its turning back in each call, and gives the same answers.
    """
    shape = parameter.shape
    if len(shape) != len(KERNEL_ORDER) or not jnp.issubdtype(parameter.dtype, jnp.floating):
        return False
    height, width = shape[2:]
    return height * width > 1 and max(height, width) <= MOST_PLACES


UNPACKED = Packing()
"""Packing of a model without parameters."""
