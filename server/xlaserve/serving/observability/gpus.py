"""GPU metrics from NVML, polled at an interval."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

import structlog

_log = structlog.get_logger("gpus")

VISIBLE = "CUDA_VISIBLE_DEVICES"
OLDEST = 3
"""Number of intervals after which a reading is stale, because the driver does not respond."""


def _utilization(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100


def _memory_total(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetMemoryInfo(device).total)


def _memory_used(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetMemoryInfo(device).used)


def _power(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetPowerUsage(device)) / 1000


def _power_limit(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetEnforcedPowerLimit(device)) / 1000


def _energy(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1000


def _temperature(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))


QUANTITIES: Mapping[str, Callable[[Any, Any], float]] = MappingProxyType(
    {
        "utilization": _utilization,
        "memory_total_bytes": _memory_total,
        "memory_used_bytes": _memory_used,
        "power_watts": _power,
        "power_limit_watts": _power_limit,
        "energy_joules": _energy,
        "temperature_celsius": _temperature,
    }
)
"""NVML queries by metric, in SI units; utilization is between 0 and 1."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading of a GPU or MIG instance, with the metrics that it supports."""

    uuid: str
    values: Mapping[str, float]


@dataclass(slots=True)
class Gpus:
    """Polls NVML on a separate thread, because a faulty driver may respond late or never.

    A reading is reported until it is `OLDEST` intervals old.
    """

    interval_seconds: float
    """Polling interval in seconds; 0 disables polling."""
    is_expected: bool = False
    """Whether a missing NVML is logged at info level, because the settings request a GPU."""
    clock: Callable[[], float] = time.monotonic
    _read: tuple[float, Sequence[GpuReading]] = (0.0, ())
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def readings(self) -> Sequence[GpuReading]:
        """Return the latest readings; none if they are stale."""
        at, found = self._read
        return found if self.clock() - at <= OLDEST * self.interval_seconds else ()

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Poll while the block runs."""
        if not self.interval_seconds:
            yield
            return
        # A daemon thread that is never joined: a driver call may never return.
        threading.Thread(target=self._poll, name="gpus", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _poll(self) -> None:
        try:
            nvml = import_module("pynvml")
            nvml.nvmlInit()
        # NVML's error class cannot be named, because its module may be missing.
        except Exception as error:
            level = _log.info if self.is_expected else _log.debug
            level("GPU metrics disabled, NVML unavailable", reason=str(error))
            return
        problem = ""
        while not self._over.is_set():
            try:
                self._read = (self.clock(), list(_readings(nvml)))
                problem = ""
            # The next poll may succeed.
            except Exception as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("GPU not readable, its metrics disabled", reason=problem)
            self._over.wait(self.interval_seconds)
        with suppress(Exception):
            nvml.nvmlShutdown()


def _readings(nvml: Any) -> Iterator[GpuReading]:
    for device in visible(nvml, os.environ.get(VISIBLE)):
        values = {}
        for name, ask in QUANTITIES.items():
            # MIG instances have no utilization, older GPUs no energy counter.
            with suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                values[name] = ask(nvml, device)
        yield GpuReading(str(nvml.nvmlDeviceGetUUID(device)), values)


def visible(nvml: Any, setting: str | None) -> Iterator[Any]:
    """Yield the devices that CUDA_VISIBLE_DEVICES selects, in its order.

    Like CUDA, accepts indices and (abbreviated) UUIDs up to the first invalid one. Indices are in
    PCI bus order, which differs from CUDA's default on machines with different GPUs unless
    CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    every = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    if setting is None:
        yield from every
        return
    for name in filter(None, map(str.strip, setting.split(","))):
        if name.startswith("MIG-"):
            yield nvml.nvmlDeviceGetHandleByUUID(name)
        elif name.isdecimal() and int(name) < len(every):
            yield every[int(name)]
        else:
            found = [one for one in every if nvml.nvmlDeviceGetUUID(one).startswith(name)]
            if name.isdecimal() or len(found) != 1:
                return
            yield found[0]
