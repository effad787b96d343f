"""JAX on demand: it is imported when a device is first needed, seconds after the port opened."""

from collections.abc import Mapping

from xlaserve.models.compilation_cache import CompilationCache


def start(device: str, cache: CompilationCache | None = None) -> str:
    """Start JAX on `auto`, `cpu`, `cuda` or `tpu` and return the platform; see `jax_runtime`.

    Blocks for the import of jax. Raises DeviceUnavailable, or InvalidSettings for the cache.
    """
    from xlaserve.models import jax_runtime

    return jax_runtime.start(device, cache)


def memory_limit_bytes() -> int | None:
    """Return what the device has for us, None where that is the host's memory. Blocks."""
    from xlaserve.models import jax_runtime

    return jax_runtime.memory_limit_bytes()


def memory(platform: str) -> Mapping[str, tuple[int, int]]:
    """Return bytes in use and the limit of each device, `cuda:0`; none for the CPU. Blocks."""
    from xlaserve.models import sites

    return sites.memory(platform)


def release_memory() -> None:
    """Give memory of dropped models back to the operating system. Blocks."""
    from xlaserve.models import jax_runtime

    jax_runtime.release_memory()
