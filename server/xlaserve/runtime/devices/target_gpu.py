"""XLA's description of a GPU, as the text of its GpuTargetConfigProto."""

from collections.abc import Iterator
from dataclasses import dataclass

_VERSIONS = ("runtime_version", (12, 8)), ("dnn_version_info", (9, 8))
"""Versions of CUDA and of cuDNN. Without the first some compilations fail; the second decides which
calls of cuDNN XLA may choose."""

_SAME_FOR_ALL = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, as its driver reports it."""

    description: str
    """Its `device_kind` in JAX."""
    capability: tuple[int, int]
    """The CUDA compute capability."""
    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    """Bytes. A block may use all but one KiB of it."""
    l2_bytes: int
    bandwidth: int
    """Bytes per second."""
    clock_ghz: float

    def config(self, memory_bytes: int) -> str:
        """Return the configuration in text format."""
        return "\n".join(self._lines(memory_bytes))

    def _lines(self, memory_bytes: int) -> Iterator[str]:
        info = _SAME_FOR_ALL | {
            "shared_memory_per_core": self.shared_memory_per_core,
            "shared_memory_per_block_optin": self.shared_memory_per_core - 1024,
            "threads_per_core_limit": self.threads_per_core,
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": memory_bytes,
        }
        major, minor = self.capability
        yield "gpu_device_info {"
        yield from (f"  {name}: {value}" for name, value in info.items())
        yield f"  cuda_compute_capability {{ major: {major} minor: {minor} }}"
        yield "}"
        yield 'platform_name: "CUDA"'
        for name, (version, part) in _VERSIONS:
            yield f"{name} {{ major: {version} minor: {part} }}"
        yield f'device_description_str: "{self.description}"'
