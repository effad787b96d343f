"""GPU metrics in /metrics, with a fake driver."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.server import RunningServer, serving

from xlaserve.serving.observability import gpus

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")
INTERVAL_SECONDS = 0.05


class Driver(ModuleType):
    """NVML on a machine with three GPUs, the last of which is old."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """The same class as in pynvml."""

    class NVMLError_NotSupported(NVMLError):
        """The same class as in pynvml."""

    class NVMLError_InvalidArgument(NVMLError):
        """The same class as in pynvml."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = 0
        self.problem = ""

    def nvmlInit(self) -> None:
        """Do nothing."""

    def nvmlShutdown(self) -> None:
        """Do nothing."""

    def nvmlDeviceGetCount(self) -> int:
        self.asked += 1
        self.may_answer.wait(60)
        if self.problem:
            raise self.NVMLError(self.problem)
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return UUIDS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, device: str) -> str:
        return device

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:
        return SimpleNamespace(gpu=25)

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:
        return SimpleNamespace(total=80 << 30, used=3 << 30)

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        return 123_500

    def nvmlDeviceGetEnforcedPowerLimit(self, device: str) -> int:
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:
        if device == UUIDS[2]:
            raise self.NVMLError_NotSupported
        return 5_000

    def nvmlDeviceGetTemperature(self, device: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 41


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    played = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", played)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    return played


@pytest_asyncio.fixture
async def server(
    example_models: Path, tmp_path: Path, driver: Driver
) -> AsyncIterator[RunningServer]:
    settings: dict[str, Any] = {
        "device": "auto",
        "load_model": ("identity",),
        "http_endpoint": "port:0",
        "gpu_metrics_seconds": INTERVAL_SECONDS,
    }
    async with serving(tmp_path, example_models, **settings) as found:
        yield found
        # Release the thread before the driver is gone.
        driver.may_answer.set()


async def metrics(server: RunningServer) -> dict[str, float]:
    """Return the GPU metrics by name and labels."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.http}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in rows if "gpu_uuid" in name}


async def until(server: RunningServer, *, there: bool) -> dict[str, float]:
    while bool(found := await metrics(server)) != there:
        await asyncio.sleep(INTERVAL_SECONDS)
    return found


async def test_every_quantity_of_every_gpu(server: RunningServer) -> None:
    found = await until(server, there=True)

    expected = {
        "nv_gpu_utilization": 0.25,
        "nv_gpu_memory_total_bytes": 80 << 30,
        "nv_gpu_memory_used_bytes": 3 << 30,
        "nv_gpu_power_usage": 123.5,
        "nv_gpu_power_limit": 700,
        "nv_energy_consumption": 5,
        "xlaserve_gpu_temperature_celsius": 41,
    }
    every = {f'{name}{{gpu_uuid="{uuid}"}}': expected[name] for name in expected for uuid in UUIDS}
    del every['nv_energy_consumption{gpu_uuid="GPU-bb33"}']
    assert every == found


async def test_a_driver_that_hangs_is_told_as_absent_and_stops_nobody(
    server: RunningServer, driver: Driver
) -> None:
    await until(server, there=True)
    driver.may_answer.clear()
    await until(server, there=False)
    driver.may_answer.set()
    await until(server, there=True)
    driver.may_answer.clear()
    # The fixture stops the server while the driver hangs.


async def test_a_driver_that_fails_is_asked_again(server: RunningServer, driver: Driver) -> None:
    await until(server, there=True)
    driver.problem = "GPU is lost"
    await until(server, there=False)
    driver.problem = ""

    assert await until(server, there=True)


async def test_the_cpu_asks_no_driver(example_models: Path, tmp_path: Path, driver: Driver) -> None:
    settings: dict[str, Any] = {"load_model": ("identity",), "http_endpoint": "port:0"}
    async with serving(tmp_path, example_models, device="cpu", **settings) as server:
        assert {} == await metrics(server)
    async with serving(
        tmp_path, example_models, device="auto", gpu_metrics_seconds=0.0, **settings
    ) as server:
        assert {} == await metrics(server)

    assert 0 == driver.asked


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, UUIDS),
        ("", ()),
        ("-1", ()),
        ("2,0", (UUIDS[2], UUIDS[0])),
        ("1,7,0", (UUIDS[1],)),
        ("GPU-bb", (UUIDS[2],)),
        ("GPU-aa", ()),
        ("GPU-aa22, 0", (UUIDS[1], UUIDS[0])),
        ("MIG-1,0", ("MIG-1", UUIDS[0])),
        ("none", ()),
    ],
)
def test_devices_are_those_that_cuda_shows(
    driver: Driver, asked: str | None, expected: Sequence[str]
) -> None:
    assert list(expected) == list(gpus.visible(driver, asked))
