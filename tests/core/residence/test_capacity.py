"""Accounting of model memory."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core import AddModel, Core, MakeCore, World

from xlaserve.errors import OutOfMemory
from xlaserve.residence.capacity import Capacity, Reservation
from xlaserve.residence.host import memory_limit_bytes
from xlaserve.residence.registry import Instance
from xlaserve.residence.repository.sources import Location
from xlaserve.runtime.devices.placement import Devices

SIZES = st.fixed_dictionaries({}, optional={name: st.integers(0, 60) for name in "ab"})
TOTALS = {"a": 100, "b": 50}


@given(st.lists(st.tuples(st.integers(0, 5), SIZES | st.none())))
def test_no_device_exceeds_its_total(steps: list[tuple[int, dict[str, int] | None]]) -> None:
    """This holds for any order of reservations, changes and releases; no reservation is partial."""
    capacity = Capacity(TOTALS)
    holders = [Reservation(capacity, "m") for _ in range(6)]
    held: dict[int, dict[str, int]] = {}
    for index, sizes in steps:
        wanted = {**held, index: sizes or {}}
        used = {name: sum(one.get(name, 0) for one in wanted.values()) for name in TOTALS}
        if sizes is None:
            holders[index].release()
            held.pop(index, None)
        elif all(used[name] <= TOTALS[name] for name in sizes):
            holders[index].set(sizes)
            held[index] = sizes
        else:
            with pytest.raises(OutOfMemory):
                holders[index].set(sizes)

        booked = {name: sum(one.get(name, 0) for one in held.values()) for name in TOTALS}
        assert booked == {name: capacity.used_on(name) for name in TOTALS}
        assert sum(booked.values()) == capacity.used_bytes
        assert all(booked[name] <= TOTALS[name] for name in TOTALS)


def test_without_a_total_nothing_is_refused() -> None:
    capacity = Capacity()
    capacity.reserve("a", "m", {"cpu:0": 1 << 60})

    assert (1 << 60, None) == (capacity.used_bytes, capacity.total_bytes)


def test_a_refusal_names_the_device_with_what_is_needed_and_what_is_free() -> None:
    capacity = Capacity({"cuda:0": 100, "cuda:1": 100})
    capacity.reserve("a", "m", {"cuda:1": 70})

    with pytest.raises(
        OutOfMemory, match="'n': .*it needs 40 bytes on cuda:1, where 30 of 100 are free"
    ):
        capacity.reserve("b", "n", {"cuda:0": 40, "cuda:1": 40})


def test_the_memory_of_the_host_is_counted_apart_from_that_of_gpus() -> None:
    """A model placed on the CPU of a server with GPUs takes no GPU memory."""
    capacity = Capacity({"cuda:0": 100}, elsewhere_bytes=50)
    capacity.reserve("a", "m", {"cpu:0": 40})

    assert (0, 100) == (capacity.used_bytes, capacity.total_bytes)
    with pytest.raises(OutOfMemory, match="20 bytes on cpu:0, where 10 of 50 are free"):
        capacity.reserve("b", "n", {"cpu:0": 20})


async def test_a_load_that_does_not_fit_is_refused_before_it_starts(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(capacity_bytes=150)
    add_model("a", {1: 1})
    add_model("b", {1: 1})
    await core.control.load("a")
    with pytest.raises(OutOfMemory):
        await core.control.load("b")

    assert ["a/1"] == world.loads

    await core.control.unload("a")
    await core.control.load("b")

    assert 100 == core.capacity.used_bytes


async def test_a_model_that_took_more_than_there_is_is_let_go_again(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(capacity_bytes=150)
    world.measured_bytes = 200
    add_model("a", {1: 1})
    with pytest.raises(OutOfMemory):
        await core.control.load("a")

    assert ([], 0) == (world.open, core.capacity.used_bytes)


async def test_failed_and_cancelled_loads_give_everything_back(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(capacity_bytes=150)
    directory = add_model("bad", {1: 1})
    (directory / "1/amount.json").write_text("broken")
    with pytest.raises(Exception, match="failed to load"):
        await core.control.load("bad")
    add_model("slow", {1: 1})
    world.may_load.clear()
    world.loading.clear()
    load = asyncio.create_task(core.control.load("slow"))
    while not world.loading.is_set():
        await asyncio.sleep(0)

    assert 100 == core.capacity.used_bytes

    load.cancel()
    await asyncio.sleep(0)
    world.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await load

    assert 0 == core.capacity.used_bytes


async def test_memory_counts_until_it_is_free(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """A reload counts both versions, and a model that outlives its drain still counts."""
    core = make_core(capacity_bytes=250, drain_seconds=0.01)
    add_model("m", {1: 1})
    await core.control.load("m")
    version, instance = core.registry.resolve("m")
    with instance.lease():
        add_model("m", {1: 2})
        await core.control.load("m")

        assert ("1", 200) == (version.number, core.capacity.used_bytes)

    while core.capacity.used_bytes != 100:
        await asyncio.sleep(0)


# --- waiting for memory ---


async def until_loading(core: Core, name: str) -> "asyncio.Task[None]":
    """Start a load, and wait until it waits for memory or has come further."""
    load = asyncio.create_task(core.control.load(name))
    while core.registry.find(name) is None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    return load


async def test_a_load_waits_for_what_an_unload_is_about_to_give_back(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(capacity_bytes=150, drain_seconds=0.01)
    for name in ("a", "b"):
        add_model(name, {1: 1})
    await core.control.load("a")
    _, instance = core.registry.resolve("a")
    with instance.lease():
        await core.control.unload("a")
        load = await until_loading(core, "b")

        assert (["a/1"], 100) == (world.loads, core.capacity.used_bytes)

    await load

    assert (["a/1", "b/1"], 100) == (world.loads, core.capacity.used_bytes)


async def test_a_load_waits_for_what_another_needs_only_to_be_loaded(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(capacity_bytes=250)
    world.predicted_bytes = 150
    for name in ("a", "b"):
        add_model(name, {1: 1})
    world.may_load.clear()
    first = await until_loading(core, "a")
    second = await until_loading(core, "b")

    assert (["a/1"], 150) == (world.loads, core.capacity.used_bytes)

    world.may_load.set()
    await asyncio.gather(first, second)

    assert 200 == core.capacity.used_bytes


async def test_a_mesh_is_waited_for_to_unload_what_is_too_much(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """The mesh evicts only once it learns that another load needed more than predicted."""
    core = make_core(capacity_bytes=150, modelmesh=True, model_control_mode="none")
    for name in ("a", "b"):
        add_model(name, {1: 1})
    load = partial(load_as_a_mesh, core)
    await load("a")
    waiting = asyncio.create_task(load("b"))
    while core.registry.find("b") is None:
        await asyncio.sleep(0.001)
    await core.control.evict("a")
    await waiting

    assert (["a/1", "b/1"], 100) == (world.loads, core.capacity.used_bytes)


@pytest.mark.parametrize(
    ("modelmesh", "predicted", "seconds"), [(0, 100, 60), (1, 151, 60), (1, 100, 0.01)]
)
async def test_a_load_that_waits_in_vain_is_refused(
    make_core: MakeCore,
    add_model: AddModel,
    world: World,
    modelmesh: int,
    predicted: int,
    seconds: float,
) -> None:
    """It is refused immediately if nothing can free the memory, else when the wait times out."""
    core = make_core(
        capacity_bytes=150,
        modelmesh=bool(modelmesh),
        model_control_mode="none",
        memory_wait_seconds=seconds,
    )
    for name in ("a", "b"):
        add_model(name, {1: 1})
    await load_as_a_mesh(core, "a")
    world.predicted_bytes = predicted
    with pytest.raises(OutOfMemory) as raised:
        await asyncio.wait_for(load_as_a_mesh(core, "b"), 30)

    assert (predicted, 100) == (raised.value.needed_bytes, core.capacity.used_bytes)


async def load_as_a_mesh(core: Core, name: str) -> None:
    location = Location(str(core.root / name))
    await core.control.load_from(name, location, partial(core.repository.find_at, name, location))


# --- several devices ---------------------------------------------------------------------------

ON_BOTH = {"parameters": {"devices": {"string_value": "0,1"}}}
ON_SECOND = {"parameters": {"devices": {"string_value": "1"}}}


@pytest.fixture
def two_devices(world: World) -> World:
    world.devices = Devices("cpu", 2)
    return world


async def test_each_device_has_the_capacity(
    make_core: MakeCore, add_model: AddModel, two_devices: World
) -> None:
    core = make_core(capacity_bytes=150)
    add_model("a", {1: 1})
    add_model("b", {1: 1}, ON_SECOND)
    await core.control.load("a")
    await core.control.load("b")

    assert (200, 300) == (core.capacity.used_bytes, core.capacity.total_bytes)
    assert [100, 100] == [core.capacity.used_on(device) for device in ("cpu:0", "cpu:1")]


async def test_a_copy_that_does_not_fit_on_its_device_refuses_the_load(
    make_core: MakeCore, add_model: AddModel, two_devices: World
) -> None:
    core = make_core(capacity_bytes=150)
    add_model("a", {1: 1}, ON_SECOND)
    add_model("b", {1: 1}, ON_BOTH)
    await core.control.load("a")
    with pytest.raises(OutOfMemory, match="100 bytes on cpu:1, where 50 of 150 are free"):
        await core.control.load("b")

    assert (["a/1"], 0) == (two_devices.loads, core.capacity.used_on("cpu:0"))


async def test_what_is_measured_is_booked_on_each_device(
    make_core: MakeCore, add_model: AddModel, two_devices: World
) -> None:
    core = make_core(capacity_bytes=150)
    two_devices.measured_bytes = 120
    add_model("b", {1: 1}, ON_BOTH)
    await core.control.load("b")

    assert [120, 120] == [core.capacity.used_on(device) for device in ("cpu:0", "cpu:1")]

    await core.control.unload("b")

    assert 0 == core.capacity.used_bytes


async def test_a_mesh_is_told_of_the_device_that_is_fullest(
    make_core: MakeCore, add_model: AddModel, two_devices: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mesh knows a single memory size: one replica per device counts as one model."""
    core = make_core(capacity_bytes=150)
    add_model("b", {1: 1}, ON_BOTH)
    await core.control.load("b")

    assert (100, 150) == (core.registry.size_bytes("b"), core.capacity.smallest_bytes)

    monkeypatch.setattr(Instance, "held", {"cpu:0": 70, "cpu:1": 90})

    assert 90 == core.registry.size_bytes("b")


@pytest.mark.parametrize(("text", "limited"), [("1000000\n", True), ("max\n", False)])
def test_the_cgroup_limits_the_memory(tmp_path: Path, text: str, limited: bool) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(text)
    installed = memory_limit_bytes(())

    assert (1_000_000 if limited else installed) == memory_limit_bytes((limit,))
    assert installed > 1_000_000
