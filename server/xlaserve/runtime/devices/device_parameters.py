"""The parameters of one model on its devices, in the form that its programs take."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlaserve.artifact import manifest, weights
from xlaserve.artifact.manifest import Manifest
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.runtime.devices.packing import (
    KERNEL_ORDER,
    PACKED_BYTES,
    UNPACKED,
    Packing,
    Parameter,
    is_kernel,
)
from xlaserve.runtime.devices.sites import Site
from xlaserve.tensors import Tensor, aligned_bytes


@dataclass(frozen=True, slots=True)
class DeviceParameters:
    """A model's parameters on its devices, as arguments of its programs."""

    leaves: tuple[list[jax.Array], ...] = ()
    """Arrays of each site: the packed buffers of small parameters, then the large parameters in the
    order of the artifact.
    """
    packing: Packing = UNPACKED
    """How small parameters are packed into buffers."""
    elsewhere_bytes: tuple[int, ...] = ()
    """Bytes per site that are mapped from a shared file and accounted for by other processes."""
    host: "tuple[weakref.ref[object], ...]" = field(default=(), compare=False)
    """Weak references to the host memory that the leaves were copied from. On the CPU the leaves
    use this memory itself; for mapped parameters it is the mapping.
    """

    @staticmethod
    def read(
        directory: Path,
        described: Manifest,
        sites: Sequence[Site],
        check_cancelled: Callable[[], None],
        *,
        mapped: bool = False,
        processes: int = 1,
        roots: Roots = ANYWHERE,
    ) -> "DeviceParameters":
        """Read the weights tensor by tensor, or map them; raises InvalidModel.

        If `processes` processes map the same file, each accounts for an equal share of its pages.
        """
        positions = {name: index for index, name in enumerate(described.parameters)}
        large: list[dict[int, jax.Array]] = [{} for _ in sites]
        mapped_bytes = [0] * len(sites)
        small: dict[int, Tensor] = {}
        turned: set[int] = set()
        host: list[weakref.ref[object]] = []
        record = described.files[manifest.WEIGHTS]
        read = weights.read_mapped if mapped else weights.read
        for name, tensor in read(directory, manifest.WEIGHTS, record, roots):
            check_cancelled()
            index = positions[name]
            if _is_small(name, tensor.nbytes, sites):
                small[index] = tensor
                continue
            if _is_turned(name, Parameter(tensor.dtype, tensor.shape), sites):
                turned.add(index)
            held_as = _turned(tensor) if index in turned else tensor
            for number, (site, held) in enumerate(zip(sites, large, strict=True)):
                held[index] = put = _put(held_as, site.parameter(name))
                mapped_bytes[number] += tensor.nbytes if mapped and _is_in_place(put, tensor) else 0
            host.append(weakref.ref[object](held_as.base))
        packing, buffers = _packed(small, len(positions), turned)
        # Drop the host copies of packed parameters, so that they do not keep the file's memory
        # alive.
        small.clear()
        ordered: list[list[jax.Array]] = []
        for site, held in zip(sites, large, strict=True):
            packed = [_put(buffer, site.outputs) for buffer in buffers]
            ordered.append([*packed, *(held[index] for index in sorted(held))])
        host += [weakref.ref[object](buffer.base) for buffer in buffers]
        elsewhere = tuple(size - -(-size // processes) for size in mapped_bytes)
        return DeviceParameters(tuple(ordered), packing, elsewhere, tuple(host))

    @staticmethod
    def described(
        directory: Path, described: Manifest, sites: Sequence[Site], roots: Roots = ANYWHERE
    ) -> "DeviceParameters":
        """Read only the shapes of the parameters, without placing them on devices.

        Shapes suffice to compile, even for devices that this host lacks. Raises InvalidModel.
        """
        positions = {name: index for index, name in enumerate(described.parameters)}
        large: list[dict[int, Any]] = [{} for _ in sites]
        small: dict[int, Parameter] = {}
        turned: set[int] = set()
        for entry in weights.read_entries(directory, manifest.WEIGHTS, roots):
            index = positions[entry.name]
            parameter = Parameter(entry.dtype, entry.shape)
            if _is_small(entry.name, entry.nbytes, sites):
                small[index] = parameter
                continue
            shape = entry.shape
            if _is_turned(entry.name, parameter, sites):
                turned.add(index)
                shape = tuple(shape[axis] for axis in KERNEL_ORDER)
            for site, held in zip(sites, large, strict=True):
                held[index] = jax.ShapeDtypeStruct(
                    shape, entry.dtype, sharding=site.parameter(entry.name)
                )
        packing = Packing.of(small, len(positions), turned)
        ordered: list[list[Any]] = []
        for site, held in zip(sites, large, strict=True):
            packed = [
                jax.ShapeDtypeStruct((count,), dtype, sharding=site.outputs)
                for dtype, count in packing.buffers
            ]
            ordered.append([*packed, *(held[index] for index in sorted(held))])
        return DeviceParameters(tuple(ordered), packing)


def _is_small(name: str, nbytes: int, sites: Sequence[Site]) -> bool:
    return nbytes <= PACKED_BYTES and not any(site.is_split(name) for site in sites)


def _is_turned(name: str, parameter: Parameter, sites: Sequence[Site]) -> bool:
    """Tell whether a parameter is a convolution kernel to be stored as [H,W,I,O] (CPU only)."""
    if not all(site.platform == "cpu" and not site.is_split(name) for site in sites):
        return False
    return is_kernel(parameter)


def _turned(tensor: Tensor) -> Tensor:
    """Return a kernel transposed to [H,W,I,O], aligned so that XLA reads it in place."""
    view = tensor.transpose(KERNEL_ORDER)
    held = aligned_bytes(tensor.nbytes).view(tensor.dtype).reshape(view.shape)
    held[...] = view
    return held


def _put(tensor: Tensor, sharding: jax.sharding.Sharding) -> jax.Array:
    # Wait for the copy, so that at most one tensor exists twice. The CPU uses it in place.
    put: jax.Array = jax.device_put(tensor, sharding).block_until_ready()
    return put


def _is_in_place(put: jax.Array, tensor: Tensor) -> bool:
    """Tell whether the array shares the tensor's memory; XLA copies unaligned tensors."""
    shards = put.addressable_shards
    return len(shards) == 1 and shards[0].data.unsafe_buffer_pointer() == tensor.ctypes.data


def _packed(
    small: Mapping[int, Tensor], count: int, turned: Collection[int]
) -> tuple[Packing, list[Tensor]]:
    """Pack small parameters into buffers; return the packing and the buffers."""
    found = {index: Parameter(tensor.dtype, tensor.shape) for index, tensor in small.items()}
    packing = Packing.of(found, count, turned)
    buffers: list[Tensor] = []
    for dtype, size in packing.buffers:
        memory = aligned_bytes(size * dtype.itemsize)
        buffers.append(memory.view(dtype))
    for index, place in packing.places.items():
        buffers[place.buffer][place.start : place.stop] = np.ravel(small[index])
    return packing, buffers
