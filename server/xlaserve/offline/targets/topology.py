"""Opens the devices of a target in a compiler process."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax.experimental import topologies

from xlaserve.errors import DeviceUnavailable
from xlaserve.offline.targets import wheels
from xlaserve.runtime.devices.target_kinds import Target

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm], as jax declares it


def open_devices(target: Target, count: int = 1) -> Sequence[Device]:
    """Return `count` devices of a target, which exist only for the compiler, except CPUs.

    The process must have the environment of `environment.of`. Raises DeviceUnavailable.
    """
    name = target.topology(count)
    wheels.check(target)
    try:
        if target.platform == "cpu":
            found = jax.local_devices(backend="cpu")
        elif target.gpu is not None:
            found = topologies.get_topology_desc(
                platform=target.platform, target_config=target.config, topology=name
            ).devices
        else:
            found = topologies.get_topology_desc(
                platform=target.platform, topology_name=name, **target.options
            ).devices
    # Plugins raise various exceptions, including JaxRuntimeError and NotImplementedError.
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeviceUnavailable(
            target.name, f"its topology {name} cannot be opened: {line}"
        ) from error
    if len(found) < count:
        raise DeviceUnavailable(
            target.name, f"topology {name} has {len(found)} devices, expected {count}"
        )
    return tuple(found)[:count]
