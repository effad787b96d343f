"""Device kinds that models can be compiled for without such a device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from xlaserve.errors import DeviceUnavailable

_VERSIONS = ("runtime_version", (12, 8)), ("dnn_version_info", (9, 8))
"""Versions of CUDA and cuDNN. Some compilations fail without the CUDA version; the cuDNN version
decides which cuDNN calls XLA may choose.
"""

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
    """Properties of one kind of GPU, as its driver reports them."""

    description: str
    """JAX's `device_kind`."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cores: int
    """Number of streaming multiprocessors."""
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    """Shared memory per core in bytes, of which one block may use all but 1 KiB."""
    l2_bytes: int
    bandwidth: int
    """Memory bandwidth in bytes per second."""
    clock_ghz: float

    def config(self, memory_bytes: int) -> str:
        """Return XLA's target configuration in protobuf text format."""
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


COUNTS = (1, 2, 4, 8)
"""Possible numbers of devices per host, unless the target has named topologies."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """A device kind that models can be compiled for."""

    name: str
    """Name on the command line."""
    platform: str
    """JAX platform: cpu, cuda or tpu."""
    memory_bytes: int
    """Memory of one device in bytes; 0 for the CPU, which shares the host's memory."""
    verified: str
    """How this target was verified, and with which programs."""
    kind: str = ""
    """Prefix of JAX's `device_kind` for devices of this kind."""
    gpu: Gpu | None = None
    topologies: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Number of devices -> name of the smallest topology with that many devices."""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Further options that the plugin needs to open a topology."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the possible numbers of devices per host."""
        return tuple(self.topologies) or COUNTS

    @property
    def config(self) -> str:
        """Return XLA's target configuration, or an empty string if the topology name suffices."""
        return "" if self.gpu is None else self.gpu.config(self.memory_bytes)

    def topology(self, count: int) -> str:
        """Return the topology for this number of devices, or raise DeviceUnavailable."""
        if count not in self.counts:
            expected = ", ".join(map(str, self.counts))
            raise DeviceUnavailable(self.name, f"expected {expected} devices, got {count}")
        return self.topologies.get(count, f"1x1x{count}")


def _gpu(name: str, memory_bytes: int, gpu: Gpu, verified: str) -> Target:
    return Target(name, "cuda", memory_bytes, verified, gpu.description, gpu)


def _tpu(name: str, kind: str, gib: float, *topologies: str, **options: str) -> Target:
    return Target(
        name,
        "tpu",
        int(gib * _GIB),
        _BY_LIBTPU,
        kind,
        topologies=MappingProxyType(dict(zip(COUNTS, topologies, strict=False))),
        options=MappingProxyType(options),
    )


_BY_XLA = "numbers from XLA's target configurations"
_BY_DATASHEET = "numbers from the data sheet, with memory rounded down; not read from a device"
_BY_LIBTPU = "known to libtpu by name; memory is libtpu's limit for a program"

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        row.name: row
        for row in (
            _gpu(
                "h100",
                84_942_979_072,
                Gpu(
                    "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 233_472, 52_428_800,
                    3_352_320_000_000, 1.98,
                ),
                _BY_XLA,
            ),
            _gpu(
                "h200",
                151_397_597_184,
                Gpu(
                    "NVIDIA H200", (9, 0), 132, 128, 2048, 233_472, 52_428_800,
                    4_800_000_000_000, 1.98,
                ),
                _BY_XLA,
            ),
            _gpu(
                "a100-40",
                42_331_013_120,
                Gpu(
                    "NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 2048, 167_936, 41_943_040,
                    1_555_200_000_000, 1.41,
                ),
                _BY_XLA,
            ),
            _gpu(
                "a100-80",
                85_100_068_864,
                Gpu(
                    "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167_936, 41_943_040,
                    2_039_040_000_000, 1.41,
                ),
                _BY_XLA,
            ),
            _gpu(
                "l4",
                22 * _GIB,
                Gpu(
                    "NVIDIA L4", (8, 9), 58, 128, 1536, 102_400, 50_331_648,
                    300_096_000_000, 2.04,
                ),
                _BY_DATASHEET,
            ),
            _gpu(
                "a10",
                22 * _GIB,
                Gpu(
                    "NVIDIA A10", (8, 6), 72, 128, 1536, 102_400, 6_291_456,
                    600_096_000_000, 1.695,
                ),
                _BY_DATASHEET,
            ),
            _gpu(
                "b200",
                191_514_411_008,
                Gpu(
                    "NVIDIA B200", (10, 0), 148, 128, 2048, 233_472, 132_644_864,
                    7_672_320_000_000, 1.965,
                ),
                _BY_XLA,
            ),
            _tpu(
                "v4", "TPU v4", 30.75, "v4:1x1x1", "v4:1x1x2", "v4:2x2x1",
                chip_config_name="megacore",  # JAX shows the chip's two cores as one device.
            ),
            _tpu("v5e", "TPU v5 lite", 15.75, "v5e:1x1", "v5e:1x2", "v5e:2x2", "v5e:2x4"),
            _tpu("v5p", "TPU v5", 95.73, "v5p:1x1x1", "v5p:1x1x2", "v5p:2x2x1"),
            _tpu("v6e", "TPU v6 lite", 31.24, "v6e:1x1", "v6e:1x2", "v6e:2x2", "v6e:2x4"),
            Target("cpu", "cpu", 0, "the processor of this machine, and its memory"),
        )
    }
)  # fmt: skip
"""All targets by name. To support a new device kind, add a row."""


def named(name: str) -> Target:
    """Return the target with this name; raises DeviceUnavailable if it is unknown."""
    found = TARGETS.get(name.lower())
    if found is None:
        raise DeviceUnavailable(name[:64], f"expected one of {', '.join(TARGETS)}")
    return found


def of_kind(platform: str, device_kind: str) -> Target | None:
    """Return the target that matches JAX's device kind, or None if unknown."""
    rows = [
        row
        for row in TARGETS.values()
        if row.platform == platform and row.kind and device_kind.startswith(row.kind)
    ]
    # Take the longest match: "TPU v5 lite" also starts with "TPU v5".
    return max(rows, key=lambda row: len(row.kind), default=None)
