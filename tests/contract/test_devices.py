"""Memory accounting on a server with several devices."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.http import Answer, ask
from support.process import served
from support.server import Serve

import xlaserve

MIB = 1 << 20
ROW_BYTES = 4 * MIB
MODEL_BYTES = 3 * ROW_BYTES
"""One replica: parameters, an input and an output; executables need more."""

CAPACITY_BYTES = 30 * MIB
"""Each device fits two replicas, whatever their executables take, but not three."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four models whose input row and parameters take 4 MiB each."""
    root = tmp_path_factory.mktemp("models")
    columns = ROW_BYTES // 4
    xlaserve.export_model(
        lambda p, x: {"y": x * p["v"]},
        {"v": np.ones((1, columns), np.float32)},
        {"x": ("FP32", [-1, columns])},
        root / "a" / "1",
        max_batch_size=1,
    )
    for name in "bcd":
        shutil.copytree(root / "a", root / name)
    return root


@pytest.fixture(params=[2, 4])
def start(
    request: pytest.FixtureRequest,
    serve: Serve,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., AbstractAsyncContextManager[str]]:
    """A server in this process, or one with four devices in another process."""

    @asynccontextmanager
    async def here(*, evict: bool = False) -> AsyncIterator[str]:
        settings = {"capacity_bytes": CAPACITY_BYTES, "evict": evict}
        async with serve(repository, http_endpoint="port:0", **settings) as running:
            assert running.http is not None
            yield running.http

    @asynccontextmanager
    async def elsewhere(*, evict: bool = False) -> AsyncIterator[str]:
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
        flags = ["--model-control-mode", "explicit", "--capacity-bytes", str(CAPACITY_BYTES)]
        async with served(repository, *flags, "--evict" if evict else "--no-evict") as process:
            yield process.http

    return here if request.param == 2 else elsewhere


@pytest.fixture
async def address(start: Callable[..., AbstractAsyncContextManager[str]]) -> AsyncIterator[str]:
    async with start() as address:
        yield address


async def load(address: str, name: str, devices: str, **parameters: str) -> Answer:
    said = {"devices": devices, **parameters}
    config = {"parameters": {name: {"string_value": value} for name, value in said.items()}}
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    return await ask(address, "POST", f"/v2/repository/models/{name}/load", body=body)


async def used(address: str) -> dict[str, int]:
    """Return how many replicas each device has memory reserved for."""
    text = (await ask(address, "GET", "/metrics")).body.decode()
    return {
        sample.labels["device"]: int(sample.value) // MODEL_BYTES
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "xlaserve_device_capacity_used_bytes"
    }


async def ready(address: str) -> list[str]:
    index = await ask(address, "POST", "/v2/repository/index", body=b'{"ready": true}')
    return sorted(entry["name"] for entry in index.json)


@pytest.mark.slow
async def test_a_copy_that_does_not_fit_on_its_device_is_507_and_leaves_nothing(
    address: str,
) -> None:
    for name in "ab":
        assert 200 == (await load(address, name, "1")).status
    before = await used(address)
    refused = await load(address, "c", "0,1")
    after = await used(address)
    elsewhere = await load(address, "d", "0")

    assert (507, 200) == (refused.status, elsewhere.status)
    assert "model 'c': out of memory, failed to load it: it needs " in refused.error
    assert "bytes on cpu:1, where " in refused.error
    assert f" of {CAPACITY_BYTES} are free" in refused.error
    assert before == after
    assert (0, 2) == (before["cpu:0"], before["cpu:1"])
    assert ["a", "b", "d"] == await ready(address)


@pytest.mark.slow
async def test_what_is_spread_takes_a_part_of_every_device(address: str) -> None:
    rules = json.dumps({"v": [None, "model"]})
    spread = await load(address, "a", "all", placement="shard", partition=rules)
    copies = await load(address, "b", "all")
    room = await load(address, "c", "0")
    devices = await used(address)

    assert [200, 200, 507] == [spread.status, copies.status, room.status]
    assert {2} == set(devices.values())


@pytest.mark.slow
async def test_who_holds_memory_on_the_full_device_goes(
    start: Callable[..., AbstractAsyncContextManager[str]],
) -> None:
    """Of the two models on device 1, the one idle for longer; none on device 0."""
    async with start(evict=True) as address:
        for name, device in (("a", "0"), ("b", "1"), ("c", "1")):
            assert 200 == (await load(address, name, device)).status
        room_made = await load(address, "d", "0,1")

        assert 200 == room_made.status
        assert ["a", "c", "d"] == await ready(address)
        assert {"cpu:0": 2, "cpu:1": 2}.items() <= (await used(address)).items()
