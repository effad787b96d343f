"""Sites of a model: single devices, or meshes over which it is sharded."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from xlaserve.errors import InvalidModel
from xlaserve.runtime.devices.placement import (
    DATA_AXIS,
    Axes,
    Devices,
    Placement,
    Sharding,
    axis_names,
    device_name,
    mesh_of,
)
from xlaserve.tensors import Shape

_MESHES = "meshes"
"""Queue for all sharded executions. Two executions that share devices must start in the same order
on each device; otherwise they deadlock.
"""

_launching = threading.Lock()
"""Held while a program is dispatched to several devices. Concurrent dispatches could reach the
devices in different orders and deadlock.
"""

_NO_RULES: Mapping[str, tuple[Axes, ...]] = {}


class Site:
    """The device or mesh that holds one copy of a model's parameters, inputs and outputs."""

    def __init__(
        self,
        devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm], as jax declares it
        sharding: Sharding | None = None,
        *,
        platform: str = "cpu",
    ) -> None:
        self.devices = tuple(devices)
        self.platform = platform
        self._sharding = sharding
        self.launching = _launching if len(self.devices) > 1 else None
        """Lock to hold while dispatching to several devices; None for a single device."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return the devices' names in the memory ledger: `cpu:0`."""
        return tuple(device_name(self.platform, device.id) for device in self.devices)

    @property
    def is_accelerator(self) -> bool:
        """Tell whether the site is an accelerator, so that the host is free while it computes."""
        return str(self.devices[0].platform) != "cpu"

    @property
    def queue(self) -> str:
        """Return the name of the site's queue (Dispatching.queues)."""
        names = self.device_names
        return names[0] if len(names) == 1 else f"{self.platform}:{_MESHES}"

    @property
    def rules(self) -> Mapping[str, tuple[Axes, ...]]:
        """Return the partition rules by glob; empty if the model is not sharded."""
        return _NO_RULES if self._sharding is None else self._sharding.partition

    @cached_property
    def outputs(self) -> jax.sharding.Sharding:
        """Return the sharding of outputs and of parameters without a rule: replicated."""
        return self._split(())

    def inputs(self, rows: int) -> jax.sharding.Sharding:
        """Return the sharding of inputs: split over the mesh's `data` axis, if it has one."""
        parts = 1 if self._mesh is None else self._mesh.shape.get(DATA_AXIS, 1)
        return (
            self._split((DATA_AXIS,)) if parts > 1 and rows and not rows % parts else self.outputs
        )

    def is_split(self, name: str) -> bool:
        """Tell whether a partition rule matches a parameter."""
        return self._rule(name) is not None

    def parameter(self, name: str) -> jax.sharding.Sharding:
        """Return the sharding of a parameter."""
        return self._split(self._rule(name) or ())

    def check(self, parameters: Mapping[str, Shape]) -> None:
        """Raise InvalidModel unless every rule splits its parameters evenly, over existing axes."""
        for glob, spec in self.rules.items():
            names = [name for name in parameters if fnmatchcase(name, glob)]
            if not names:
                known = ", ".join(list(parameters)[:8]) or "none"
                raise InvalidModel(f"partition rule '{glob}' matches no parameter of: {known}")
            self._check_axes(glob, spec)
            for name in names:
                self._check_shape(name, parameters[name])

    def _rule(self, name: str) -> tuple[Axes, ...] | None:
        return None if self._sharding is None else self._sharding.rule(name)

    def _split(self, spec: tuple[Axes, ...]) -> jax.sharding.Sharding:
        if self._mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec(*spec))

    @cached_property
    def _mesh(self) -> Mesh | None:
        if self._sharding is None:
            return None
        axes = mesh_of(self._sharding, len(self.devices))
        return Mesh(np.array(self.devices).reshape(tuple(axes.values())), tuple(axes))

    def _check_axes(self, glob: str, spec: tuple[Axes, ...]) -> None:
        assert self._mesh is not None
        used = [axis for axes in spec for axis in axis_names(axes)]
        for axis in used:
            if axis not in self._mesh.shape:
                known = ", ".join(map(repr, self._mesh.shape))
                raise InvalidModel(
                    f"partition rule '{glob}': no axis '{axis}', the mesh has {known}"
                )
            if used.count(axis) > 1:
                raise InvalidModel(f"partition rule '{glob}' has axis '{axis}' twice")

    def _check_shape(self, name: str, shape: Shape) -> None:
        assert self._mesh is not None
        spec = self._rule(name) or ()
        if len(spec) > len(shape):
            raise InvalidModel(
                f"parameter '{name}' has {len(shape)} dimensions, its partition rule has"
                f" {len(spec)}"
            )
        for dimension, axes in enumerate(spec):
            parts = prod(self._mesh.shape.get(axis, 1) for axis in axis_names(axes))
            if shape[dimension] % parts:
                raise InvalidModel(
                    f"parameter '{name}': dimension {dimension} of {list(shape)} cannot be split "
                    f"into {parts} equal parts"
                )


@dataclass(frozen=True, slots=True)
class Layout:
    """The sites of a model, and the site of each replica."""

    sites: tuple[Site, ...]
    replicas: tuple[int, ...]
    """Site index of each replica. Several replicas may share a site."""


def layout(
    placement: Placement,
    present: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Layout:
    """Find the devices of a placement; raises InvalidModel for missing ones.

    Chooses from this process's devices, or from `present`, which may be compile-only devices.
    """
    if present is None:
        present = jax.local_devices(backend=placement.platform)
    if placement.sharding is not None:
        (group,) = placement.groups
        devices = [present[index] for index in group.indexes(placement.platform, len(present))]
        site = Site(devices, placement.sharding, platform=placement.platform)
        _ = site.outputs  # Raises InvalidModel unless the mesh fits the devices.
        return Layout((site,), (0,) * group.count)
    seats = list(placement.seats(len(present)))
    used = list(dict.fromkeys(seats))
    return Layout(
        tuple(Site([present[index]], platform=placement.platform) for index in used),
        tuple(used.index(seat) for seat in seats),
    )


def devices(platform: str) -> Devices:
    """Return the devices of a platform."""
    found = jax.local_devices(backend=platform)
    reported = [getattr(device, "compute_capability", None) for device in found]
    capabilities = tuple(str(one) for one in reported if one is not None)
    return Devices(platform, len(found), str(found[0].device_kind), capabilities)


def memory(platform: str) -> dict[str, tuple[int, int]]:
    """Return bytes in use and limit by device; empty for host memory."""
    found: dict[str, tuple[int, int]] = {}
    for device in jax.local_devices(backend=platform):
        statistics = device.memory_stats()
        if statistics is not None:
            in_use, limit = statistics.get("bytes_in_use", 0), statistics.get("bytes_limit", 0)
            found[device_name(platform, device.id)] = (in_use, limit)
    return found
