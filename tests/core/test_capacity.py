"""The books of model memory."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core import AddModel, MakeCore, World

from xlaserve.core.capacity import Capacity, MeasuredSizes, Reservation
from xlaserve.core.host import memory_limit_bytes
from xlaserve.errors import OutOfMemory


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60) | st.none())))
def test_the_sum_never_exceeds_the_total(steps: list[tuple[int, int | None]]) -> None:
    """Whatever is reserved, changed and released, in any order."""
    capacity = Capacity(100)
    holders = [Reservation(capacity, "m") for _ in range(6)]
    held: dict[int, int] = {}
    for index, size in steps:
        if size is None:
            holders[index].release()
            held.pop(index, None)
        elif sum(held.values()) - held.get(index, 0) + size <= 100:
            holders[index].set(size)
            held[index] = size
        else:
            with pytest.raises(OutOfMemory):
                holders[index].set(size)

        assert sum(held.values()) == capacity.used_bytes <= 100


def test_without_a_total_nothing_is_refused() -> None:
    capacity = Capacity()
    capacity.reserve("a", "m", 1 << 60)

    assert 1 << 60 == capacity.used_bytes


def test_a_refusal_says_what_is_needed_and_what_is_used() -> None:
    capacity = Capacity(100)
    capacity.reserve("a", "m", 70)

    with pytest.raises(
        OutOfMemory, match="'n': .*failed to load it: it needs 40 bytes, 70 of 100 are in use"
    ):
        capacity.reserve("b", "n", 40)


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
    """A reload holds both; an unload that outlives its drain holds on."""
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


def test_measured_sizes_are_bounded() -> None:
    sizes = MeasuredSizes(limit=2)
    for key, size in (("a", 1), ("b", 2)):
        sizes.remember(key, size)

    assert 1 == sizes.recall("nothing", "a")

    sizes.remember("c", 3)

    assert [1, None, 3] == [sizes.recall(key) for key in "abc"]


@pytest.mark.parametrize(("text", "limited"), [("1000000\n", True), ("max\n", False)])
def test_the_cgroup_limits_the_memory(tmp_path: Path, text: str, limited: bool) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(text)
    installed = memory_limit_bytes(())

    assert (1_000_000 if limited else installed) == memory_limit_bytes((limit,))
    assert installed > 1_000_000
