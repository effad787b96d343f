"""Loads and compilations that hang: abandoned, counted, and released once they end."""

import asyncio
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.accelerators import until
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.concurrency.limited import LimitedThreads, Overdue
from xlaserve.errors import (
    CompilationTimedOut,
    LoadFailed,
    LoadTimedOut,
    ShuttingDown,
    TooManyAbandoned,
)
from xlaserve.residence.load_runner import Loading, LoadRunner
from xlaserve.runtime.loaded import Stage
from xlaserve.serving.inference import InferInput, InferRequest

SOON = 0.05


async def infer(core: Core, model: str = "m", rows: int = 1) -> Any:
    data = np.zeros((rows, 2), np.float32)
    request = InferRequest(model, inputs=(InferInput("x", FP32, data),))
    return (await core.engine.infer(request)).outputs[0].data


class Gates:
    """Loads of some models that block until released; other models have a minute."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stuck = {"stuck"}
        self.may_end = threading.Event()
        load = world.load

        def gated(directory: Any, context: Any) -> FakeModel:
            if context.model in self.stuck:
                context.on_stage(Stage("warming", 1, 2))
                self.may_end.wait()
            return load(directory, context)

        monkeypatch.setattr(world, "load", gated)
        run = LoadRunner.run

        def patient(runner: LoadRunner, loading: Loading) -> Any:
            if self.may_end.is_set() or loading.version.model not in self.stuck:
                runner = copy(runner)
                runner._limits = replace(runner._limits, load_seconds=60)
            return run(runner, loading)

        monkeypatch.setattr(LoadRunner, "run", patient)


@pytest.fixture
def gates(world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Gates(world, monkeypatch)
    yield made
    made.may_end.set()


@pytest.fixture
def core(gates: Gates, make_core: MakeCore, add_model: AddModel) -> Core:
    for name in ("stuck", "m"):
        add_model(name, {1: 1})
    return make_core(load_seconds=SOON, drain_seconds=SOON, max_abandoned=3)


async def test_a_load_that_does_not_end_fails_by_its_limit(core: Core, world: World) -> None:
    """The error gives the stage it reached and what stays reserved; its memory stays reserved."""
    with capture_logs() as logs, pytest.raises(LoadTimedOut, match=r"'stuck'.* warming 1 of 2"):
        await core.control.load("stuck")
    await core.control.load("m")
    (line,) = [log for log in logs if log["event"] == "abandoned calls still running"]

    assert core.registry.ready("m")
    assert ("stuck", "warming 1 of 2", 100) == (line["model"], line["doing"], line["holds_bytes"])
    assert "core" in line["consequence"]
    assert 200 == core.capacity.used_bytes
    assert "load_seconds" in core.registry.version("stuck", "1").lifecycle.reason


async def test_what_was_abandoned_is_closed_and_released_once_it_ends(
    core: Core, gates: Gates, world: World
) -> None:
    world.may_load.set()
    with pytest.raises(LoadTimedOut):
        await core.control.load("stuck")
    gates.may_end.set()
    await until(lambda: not core.workers.abandoned and not core.capacity.used_bytes)
    gates.stuck.clear()
    await core.control.load("stuck")

    assert 1 == len(world.open)
    assert core.registry.ready("stuck")


async def test_files_that_are_still_being_loaded_are_not_loaded_again(
    core: Core, add_model: AddModel, gates: Gates
) -> None:
    with pytest.raises(LoadTimedOut):
        await core.control.load("stuck")
    with pytest.raises(LoadFailed, match=r"earlier load of the same files .* is still warming"):
        await core.control.load("stuck")
    await core.control.unload("stuck")
    gates.stuck.clear()
    add_model("stuck", {1: 2})
    await core.control.load("stuck")

    assert core.registry.ready("stuck")
    assert 1 == len(core.workers.abandoned)


async def test_so_many_may_be_abandoned_and_no_more(
    core: Core, add_model: AddModel, gates: Gates
) -> None:
    names = [f"stuck{number}" for number in range(20)]
    for name in names:
        add_model(name, {1: 1})
    gates.stuck = set(names)
    await core.control.load("m")
    found = [
        await asyncio.gather(core.control.load(name), return_exceptions=True) for name in names
    ]
    kinds = [type(error) for (error,) in found]
    answered = await infer(core)
    with pytest.raises(TooManyAbandoned, match="3 abandoned loads and compilations"):
        await core.control.load("stuck")
    gates.may_end.set()
    await until(lambda: not core.workers.abandoned)
    await core.control.load("stuck")

    assert [LoadTimedOut] * 3 + [TooManyAbandoned] * 17 == kinds
    assert [[1, 1]] == answered.tolist()


async def test_a_cancelled_load_that_does_not_end_is_abandoned(core: Core, gates: Gates) -> None:
    """Its own time limit has not passed; another load gets its slot."""
    loading = asyncio.ensure_future(core.control.load("stuck"))
    version = core.registry.version("stuck", "1")
    await until(lambda: version.lifecycle.reason.startswith("warming"))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading

    assert 1 == len(core.workers.abandoned)
    assert 100 == core.capacity.used_bytes


async def test_the_end_does_not_wait_for_what_was_abandoned(core: Core) -> None:
    with pytest.raises(LoadTimedOut):
        await core.control.load("stuck")
    await core.control.close()

    assert not core.workers.close()


async def test_the_end_waits_for_a_load_in_progress_for_so_long(
    make_core: MakeCore, add_model: AddModel, gates: Gates
) -> None:
    core = make_core(drain_seconds=SOON)
    add_model("stuck", {1: 1})
    loading = asyncio.ensure_future(core.control.load("stuck"))
    version = core.registry.version("stuck", "1")
    await until(lambda: version.lifecycle.reason.startswith("warming"))
    core.control.begin_shutdown()
    with pytest.raises(ShuttingDown):
        await loading
    ended = core.workers.close(SOON)
    gates.may_end.set()

    assert not ended


# # --- after the load ----------------------------------------------------------------------------


@pytest.mark.usefixtures("gates")
async def test_a_bucket_that_does_not_end_holds_neither_its_model_nor_another(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model answers and unloads, and its memory is freed once the thread has ended."""
    may_end, finished = threading.Event(), list[float]()

    def compile_rest(
        model: FakeModel, check: Callable[[], None], on_stage: Callable[[Stage], None]
    ) -> None:
        check()
        on_stage(Stage("warming", 2, 3))
        if model.amount == 1:
            may_end.wait()
        finished.append(model.amount)

    monkeypatch.setattr(FakeModel, "compile_rest", compile_rest)
    core = make_core(background_compile=True, load_seconds=SOON, drain_seconds=SOON)
    for number, name in enumerate(("m", "n"), start=1):
        add_model(name, {1: number})
        await core.control.load(name)
    await until(lambda: finished == [2])
    answered = await infer(core)
    await core.control.unload("m")
    held = core.capacity.used_bytes
    closed = [model.closed for model in world.open]
    may_end.set()
    await until(lambda: core.capacity.used_bytes == 100)

    assert [[1, 1]] == answered.tolist()
    assert 200 == held
    assert [False, False] == closed
    assert [2] == [model.amount for model in world.open]


class StuckShapes:
    """Needs a program for more than one row, whose compilation never ends."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.compiled: list[object] = []

    def shape_of(self, inputs: Any) -> Any:
        rows = len(inputs["x"])
        return None if rows == 1 else rows

    def find(self, shape: Any) -> None:
        return None

    def compile(self, shape: Any) -> Any:
        self.compiled.append(shape)
        self.may_end.wait()


async def test_a_shape_that_does_not_end_is_told_to_whoever_asked(
    core: Core, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await core.control.load("m")
    shapes = StuckShapes()
    monkeypatch.setattr(world.open[0], "on_demand", shapes)
    for rows in (2, 2, 3):
        with pytest.raises(CompilationTimedOut, match=rf"'m': compiling shape {rows}"):
            await infer(core, rows=rows)
    answered = await infer(core)
    await core.control.unload("m")
    held = core.capacity.used_bytes
    shapes.may_end.set()
    await until(lambda: not core.capacity.used_bytes)

    assert [2] == shapes.compiled
    assert [[1, 1]] == answered.tolist()
    assert 100 == held
    assert [] == world.open


# # --- threads -----------------------------------------------------------------------------------


async def test_an_abandoned_call_leaves_its_slot_to_another() -> None:
    threads, may_end, begun = LimitedThreads("load", 1), threading.Event(), list[int]()
    stuck = threads.start(may_end.wait)
    waiting = threads.start(lambda: begun.append(1))
    with pytest.raises(Overdue):
        await stuck.within(SOON)
    await waiting.within(60)
    counted = threads.abandoned
    at_first = threads.close(0)
    may_end.set()
    await until(lambda: not threads.abandoned)

    assert ([1], 1, False) == (begun, counted, at_first)
    assert threads.close()


async def test_a_call_that_waits_for_another_lends_its_slot() -> None:
    threads = LimitedThreads("load", 1)
    may_end, order = threading.Event(), list[str]()

    def outer() -> None:
        with threads.lending():
            threads.start(lambda: order.append("inner")).future.result(60)
        order.append("outer")
        may_end.wait(60)

    first = threads.start(outer)
    await until(lambda: len(order) == 2)
    behind = threads.start(lambda: order.append("behind"))
    began_early = behind.future.running() or behind.future.done()
    may_end.set()
    await first.within(60)
    await behind.within(60)

    assert not began_early
    assert ["inner", "outer", "behind"] == order


async def test_a_call_has_its_time_from_when_its_thread_begins() -> None:
    threads, may_end = LimitedThreads("load", 1), threading.Event()
    first = threads.start(may_end.wait)
    second = threads.start(lambda: "second")
    waiting = asyncio.ensure_future(second.within(SOON))
    await asyncio.sleep(2 * SOON)
    is_waiting = not waiting.done()
    may_end.set()

    assert is_waiting
    assert "second" == await waiting
    assert await first.within(1)


async def test_calls_end_as_they_do() -> None:
    threads = LimitedThreads("load", 2)
    with pytest.raises(ZeroDivisionError):
        await threads.start(lambda: 1 // 0).within(60)

    assert 7 == await threads.start(lambda: 7).within(60)
    assert threads.close()
