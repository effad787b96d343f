"""Access to JAX devices; imports JAX on first use."""

from collections.abc import Mapping

from xlaserve.runtime.devices.placement import Devices
from xlaserve.runtime.programs.compilation_cache import CompilationCache


def start(
    device: str, cache: CompilationCache | None = None, *, memory_fraction: float | None = None
) -> str:
    """Start JAX on `auto`, `cpu`, `cuda` or `tpu` and return the platform; see `jax_runtime`.

    Blocks while jax is imported. Raises DeviceUnavailable, or InvalidSettings for an unusable
    cache.
    """
    from xlaserve.runtime.devices import jax_runtime

    return jax_runtime.start(device, cache, memory_fraction=memory_fraction)


def devices(platform: str) -> Devices:
    """Return the devices of a started platform. Blocks."""
    from xlaserve.runtime.devices import sites

    return sites.devices(platform)


def memory(platform: str) -> Mapping[str, tuple[int, int]]:
    """Return bytes in use and limit by device name (`cuda:0`); empty on the CPU. Blocks."""
    from xlaserve.runtime.devices import sites

    return sites.memory(platform)


def release_memory() -> None:
    """Return memory of unloaded models to the operating system. Blocks."""
    from xlaserve.runtime.devices import jax_runtime

    jax_runtime.release_memory()
