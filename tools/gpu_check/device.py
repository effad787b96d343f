"""The device under test, and the loading and unloading of models on it."""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax
import numpy as np

from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import jax_runtime, sites
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.settings import Settings
from xlaserve.tensors import Tensor, TensorSpec

_LEAST_CALLS = 5


@dataclass(frozen=True, slots=True)
class Options:
    """The models to check, and the duration of each measurement."""

    directories: tuple[Path, ...]
    """Version directories of models."""
    seconds: float
    """Duration of each speed measurement."""
    wide_columns: int
    """Columns of FP32 that take about as long to copy as to process on the device."""


@dataclass(frozen=True, slots=True)
class Device:
    """The first device of a platform."""

    platform: str
    """A JAX platform: cpu, cuda or tpu."""
    kind: str
    count: int
    limit_bytes: int
    """Memory limit; 0 for a device without its own memory."""

    @staticmethod
    def started(platform: str) -> "Device":
        """Start JAX on a platform, with the memory fraction that a server uses.

        The CPU stands in for an accelerator. Raises DeviceUnavailable.
        """
        fraction = Settings(repository=Path()).gpu_memory_fraction
        jax_runtime.start(platform, memory_fraction=fraction if platform == "cuda" else None)
        devices = jax.local_devices(backend=platform)
        if platform == "cpu":
            # Take the code paths of an accelerator, with executions in the device's threads.
            Site.is_accelerator = True  # type: ignore[method-assign, assignment]
        limit = next((limit for _, limit in sites.memory(platform).values()), 0)
        return Device(platform, str(devices[0].device_kind), len(devices), limit)

    def bytes_in_use(self) -> int:
        """Return the bytes in use according to the allocator; 0 if unknown."""
        statistics = jax.local_devices(backend=self.platform)[0].memory_stats() or {}
        return int(statistics.get("bytes_in_use", 0))

    def load(
        self, path: Path, name: str, *, on: str = "", compilation: Compilation | None = None
    ) -> LoadedModel:
        """Load a model on this device, or on another platform given by `on`."""
        context = LoadContext(
            name, "1", ModelConfig(), on or self.platform, compilation=compilation or Compilation()
        )
        return loaders.load(path, context)


def let_go(model: LoadedModel) -> None:
    """Close a model, and return once its memory is free."""
    model.close()
    jax_runtime.release_memory()


def inputs_of(model: LoadedModel, rows: int) -> dict[str, Tensor]:
    """Return random inputs, always the same for the same number of rows."""
    random = np.random.default_rng(rows)

    def tensor(spec: TensorSpec) -> Tensor:
        shape = tuple(rows if size == -1 else size for size in spec.shape)
        return (random.random(shape) * 10).astype(spec.datatype.dtype)

    return {spec.name: tensor(spec) for spec in model.info.inputs}


def calls_per_second(call: Callable[[], object], seconds: float) -> float:
    """Return calls per second, by the median duration of a call."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < _LEAST_CALLS or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1 / median(times)
