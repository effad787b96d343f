"""Compilation that continues after a load, with a model that needs no JAX."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import structlog
from support.core import AddModel, Core, FakeModel, MakeCore, World

from xlaserve.errors import InvalidModel
from xlaserve.runtime.loaded import ModelMemory, Stage


class Rest:
    """Stands for the rest of a compilation: two steps, controlled by the test."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.size_bytes = 170

    def compile(
        self,
        model: FakeModel,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        check_cancelled()
        self.begun.set()
        try:
            while not self.may_end.is_set() and not model.stopped:
                time.sleep(0.001)
            check_cancelled()
            if self.error:
                raise self.error
            model.info = replace(model.info, memory=ModelMemory(self.size_bytes))
        finally:
            self.ended.set()


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> Rest:
    made = Rest()

    def compile_rest(model: FakeModel, *arguments: Callable[..., None]) -> None:
        made.compile(model, *arguments)

    monkeypatch.setattr(FakeModel, "compile_rest", compile_rest)
    return made


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 10)


async def loaded(make_core: MakeCore, add_model: AddModel) -> Core:
    core = make_core(background_compile=True)
    add_model("m", {1: 1})
    await core.control.load("m")
    return core


async def test_a_model_answers_before_the_rest_is_compiled(
    make_core: MakeCore, add_model: AddModel, rest: Rest
) -> None:
    core = await loaded(make_core, add_model)
    await until(rest.begun)

    assert core.registry.ready("m")
    assert not rest.ended.is_set()


async def test_what_the_rest_took_is_reserved_behind_it(
    make_core: MakeCore, add_model: AddModel, rest: Rest, world: World
) -> None:
    """The prediction is reserved during the load only, and each bucket while it compiles."""
    world.predicted_bytes = 150
    world.next_bucket_bytes = {"cpu:0": 30}
    core = await loaded(make_core, add_model)
    before = core.capacity.used_bytes
    await until(rest.begun)
    during = core.capacity.used_bytes
    rest.may_end.set()
    await until(rest.ended)
    while core.capacity.used_bytes == during:
        await asyncio.sleep(0.001)

    assert (100, 130, 170) == (before, during, core.capacity.used_bytes)


async def test_a_bucket_waits_for_memory_that_others_hold(
    make_core: MakeCore, add_model: AddModel, rest: Rest, world: World
) -> None:
    """The model keeps serving; a bucket that does not fit is not compiled and evicts nothing."""
    # Too large to fit even beside one model, so that compiling starts only after both are loaded.
    world.next_bucket_bytes = {"cpu:0": 126}
    rest.size_bytes = 130
    rest.may_end.set()
    core = make_core(background_compile=True, capacity_bytes=225, evict=True)
    with structlog.testing.capture_logs() as logs:
        for name in ("a", "b"):
            add_model(name, {1: 1})
            await core.control.load(name)
        while len([log for log in logs if log["event"] == "background compilation pending"]) < 2:
            await asyncio.sleep(0.001)
    world.next_bucket_bytes = {"cpu:0": 30}

    assert (200, False) == (core.capacity.used_bytes, rest.begun.is_set())

    await core.control.unload("b")
    await until(rest.ended)
    while core.capacity.used_bytes != rest.size_bytes:
        await asyncio.sleep(0.001)

    assert core.registry.ready("a")


async def test_the_end_of_the_server_ends_a_wait_for_memory(
    make_core: MakeCore, add_model: AddModel, rest: Rest, world: World
) -> None:
    world.next_bucket_bytes = {"cpu:0": 30}
    core = make_core(background_compile=True, capacity_bytes=120)
    add_model("m", {1: 1})
    with structlog.testing.capture_logs() as logs:
        await core.control.load("m")
        while not any(log["event"] == "background compilation pending" for log in logs):
            await asyncio.sleep(0.001)
    await asyncio.wait_for(core.control.close(), 10)

    assert (0, False) == (core.capacity.used_bytes, rest.begun.is_set())


async def test_a_rest_that_fails_leaves_the_model_as_it_is(
    make_core: MakeCore, add_model: AddModel, rest: Rest
) -> None:
    rest.error = InvalidModel("bucket 3 cannot be compiled")
    core = await loaded(make_core, add_model)
    rest.may_end.set()
    await until(rest.ended)

    assert core.registry.ready("m")


async def test_an_unload_gives_back_everything_in_the_middle_of_it(
    make_core: MakeCore, add_model: AddModel, rest: Rest
) -> None:
    core = await loaded(make_core, add_model)
    await until(rest.begun)
    await core.control.unload("m")
    rest.may_end.set()
    await until(rest.ended)
    await asyncio.sleep(0.01)

    assert 0 == core.capacity.used_bytes


async def test_an_unload_does_not_wait_for_what_is_compiled_for_others(
    make_core: MakeCore, add_model: AddModel, rest: Rest
) -> None:
    """The compiling thread may wait for the load that wants this memory: a deadlock."""
    core = await loaded(make_core, add_model)
    await until(rest.begun)
    add_model("queued", {1: 1})
    await core.control.load("queued")
    both = core.capacity.used_bytes
    await core.control.unload("queued")
    left = core.capacity.used_bytes
    rest.may_end.set()
    await until(rest.ended)

    assert (200, 100) == (both, left)


async def test_the_end_of_the_server_ends_it(
    make_core: MakeCore, add_model: AddModel, rest: Rest
) -> None:
    core = await loaded(make_core, add_model)
    await until(rest.begun)
    await core.control.close()

    assert rest.ended.is_set()


async def test_loads_go_before_it(
    make_core: MakeCore, add_model: AddModel, rest: Rest, world: World
) -> None:
    core = await loaded(make_core, add_model)
    await until(rest.begun)
    world.may_load.clear()
    world.loading.clear()
    add_model("other", {1: 1})
    loading = asyncio.ensure_future(core.control.load("other"))
    await until(world.loading)
    rest.may_end.set()
    held = not await asyncio.to_thread(rest.ended.wait, 0.2)
    world.may_load.set()
    await loading
    await until(rest.ended)

    assert held
