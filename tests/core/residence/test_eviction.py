"""Eviction of idle models when a load needs their memory."""

import asyncio

import numpy as np
import pytest
from support.core import FP32, AddModel, Core, MakeCore, World

from xlaserve.errors import OutOfMemory
from xlaserve.runtime.devices.placement import Devices
from xlaserve.serving.inference import InferInput, InferRequest


async def infer(core: Core, name: str) -> None:
    data = np.zeros((1, 2), np.float32)
    await core.engine.infer(InferRequest(name, inputs=(InferInput("x", FP32, data),)))


def ready(core: Core) -> list[str]:
    return [model.name for model in core.registry.models() if core.registry.ready(model.name)]


async def loaded(core: Core, add_model: AddModel, *names: str) -> None:
    for name in names:
        add_model(name, {1: 1})
        await core.control.load(name)


async def test_the_least_recently_used_goes(make_core: MakeCore, add_model: AddModel) -> None:
    core = make_core(capacity_bytes=250, evict=True)
    await loaded(core, add_model, "a", "b")
    await infer(core, "a")
    await loaded(core, add_model, "c")

    assert ["a", "c"] == ready(core)
    assert 200 == core.capacity.used_bytes


async def test_without_the_setting_the_load_is_refused(
    make_core: MakeCore, add_model: AddModel
) -> None:
    core = make_core(capacity_bytes=250)
    await loaded(core, add_model, "a", "b")

    with pytest.raises(OutOfMemory):
        await loaded(core, add_model, "c")
    assert ["a", "b"] == ready(core)


async def test_nobody_goes_for_a_load_that_would_not_fit_anyway(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(capacity_bytes=250, evict=True)
    await loaded(core, add_model, "a", "b")
    world.predicted_bytes = 300

    with pytest.raises(OutOfMemory):
        await loaded(core, add_model, "c")
    assert ["a", "b"] == ready(core)


async def test_a_model_in_use_stays(make_core: MakeCore, add_model: AddModel, world: World) -> None:
    core = make_core(capacity_bytes=250, evict=True)
    await loaded(core, add_model, "a", "b")
    world.may_execute.clear()
    running = asyncio.ensure_future(infer(core, "a"))
    await asyncio.sleep(0)
    await loaded(core, add_model, "c")
    world.may_execute.set()
    await running

    assert ["a", "c"] == ready(core)


async def test_a_model_that_took_more_than_predicted_makes_room_too(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(capacity_bytes=250, evict=True)
    await loaded(core, add_model, "a")
    world.measured_bytes = 200
    await loaded(core, add_model, "b")

    assert ["b"] == ready(core)
    assert 200 == core.capacity.used_bytes


async def test_a_reload_does_not_evict_what_it_reloads(
    make_core: MakeCore, add_model: AddModel
) -> None:
    """The old version serves until the new one does: both must fit."""
    core = make_core(capacity_bytes=150, evict=True)
    await loaded(core, add_model, "a")

    with pytest.raises(OutOfMemory):
        await core.control.load("a", {"config": "{}"})
    assert ["a"] == ready(core)


async def test_only_who_holds_memory_on_the_full_device_goes(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """The model that was idle longest stays: its memory is on another device."""
    world.devices = Devices("cpu", 2)
    core = make_core(capacity_bytes=150, evict=True)
    for name, device in (("a", "0"), ("b", "1"), ("c", "1")):
        add_model(name, {1: 1}, {"parameters": {"devices": {"string_value": device}}})
        await core.control.load(name)

    assert ["a", "c"] == ready(core)


async def test_room_is_made_on_every_device_that_lacks_it(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    world.devices = Devices("cpu", 2)
    core = make_core(capacity_bytes=150, evict=True)
    for name, devices in (("a", "0"), ("b", "1"), ("c", "0,1")):
        add_model(name, {1: 1}, {"parameters": {"devices": {"string_value": devices}}})
        await core.control.load(name)

    assert ["c"] == ready(core)


# # --- models that are never evicted
# ---------------------------------------------------------------

ENSEMBLE = {
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
    "ensemble_scheduling": {
        "step": [{"model_name": "step", "input_map": {"x": "x"}, "output_map": {"y": "y"}}]
    },
}


async def test_a_step_of_an_ensemble_stays(make_core: MakeCore, add_model: AddModel) -> None:
    """It was used least recently by itself, but without it the ensemble could not answer."""
    core = make_core(capacity_bytes=250, evict=True)
    await loaded(core, add_model, "step")
    add_model("ensemble", {}, ENSEMBLE)
    await core.control.load("ensemble")
    await loaded(core, add_model, "other", "newcomer")

    assert ["ensemble", "newcomer", "step"] == sorted(ready(core))
    await infer(core, "ensemble")


async def test_nothing_is_evicted_where_only_steps_could_go(
    make_core: MakeCore, add_model: AddModel
) -> None:
    core = make_core(capacity_bytes=150, evict=True)
    await loaded(core, add_model, "step")
    add_model("ensemble", {}, ENSEMBLE)
    await core.control.load("ensemble")

    with pytest.raises(OutOfMemory):
        await loaded(core, add_model, "newcomer")
    await infer(core, "ensemble")


async def test_another_version_of_the_model_stays(make_core: MakeCore, add_model: AddModel) -> None:
    """Both versions were requested: neither is evicted for the other."""
    core = make_core(capacity_bytes=150, evict=True)
    add_model("a", {1: 1}, {"version_policy": {"all": {}}})
    await core.control.load("a")
    add_model("a", {2: 2})

    with pytest.raises(OutOfMemory):
        await core.control.load("a")
    assert core.registry.ready("a", "1")
    await infer(core, "a")
