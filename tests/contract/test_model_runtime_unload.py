"""Unloads requested by a mesh: acceptance cases 14 to 16."""

import asyncio
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from support import mesh
from support.conditions import until
from support.held import held
from support.runtime import Runtime, StartRuntime
from support.shelf import LARGE_BYTES, MIB, Shelf, addition, spinning, sums

from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import ModelSource

PROMPT_SECONDS = 2
"""Maximum time of an unload with nothing to unload."""
TRIES = 9

LONG_SECONDS = 60
"""Longer than any drain in these tests, even on a busy machine."""

SLOWLY = {"inline_execution_seconds": 0, "default_model_size_bytes": MIB}
"""Settings that keep requests off the event loop, however fast the model was."""


# --- 14: Nothing to unload -----------------------------------------------------------------------


async def unload_seconds(runtime: Runtime, model: str) -> float:
    """Unload successfully, and return the duration."""
    started = time.perf_counter()
    await runtime.mesh.unload(model)
    return time.perf_counter() - started


@pytest.mark.parametrize("model", ["unknown", "failed", "unloaded", "", "é / .. \U0001f600" * 50])
async def test_unloading_what_is_not_loaded_is_ok_at_once(
    runtime: Runtime, models: Shelf, model: str
) -> None:
    """Case 14: unknown, failed, or unloaded models, and repeatedly."""
    if model == "failed":
        await mesh.code(runtime.mesh.load(model, models.path("corrupt")))
    if model == "unloaded":
        await runtime.mesh.load(model, models.path("plus-1"))
        await runtime.mesh.unload(model)
    times = [await unload_seconds(runtime, model) for _ in range(TRIES)]

    assert median(times) < PROMPT_SECONDS
    assert [] == runtime.application.registry.models()


async def test_unloading_a_model_without_a_path_is_ok(runtime: Runtime) -> None:
    """Case 14: a load without a path fails, and can be unloaded like any other."""
    answer = await mesh.outcome(runtime.mesh.load("m", ""))
    times = [await unload_seconds(runtime, "m") for _ in range(TRIES)]

    assert "FAILED_PRECONDITION" == answer[0]
    assert "path" in answer[1]
    assert median(times) < PROMPT_SECONDS


@pytest.mark.usefixtures("compilations")
async def test_unknown_ids_are_ok_at_once_while_models_load(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 14: after READY the puller unloads everything it finds in its folder."""
    async with start(load_threads=2) as runtime:
        names = ["slow-0", "slow-1"]
        calls = [runtime.mesh.load(name, models.path("slow")) for name in names]
        waiting = [asyncio.ensure_future(mesh.code(call)) for call in calls]
        await runtime.until_compiling(*names)
        times = [await unload_seconds(runtime, f"unknown-{i}") for i in range(5 * TRIES)]
        for call in calls:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    assert median(times) < PROMPT_SECONDS


async def test_unloads_of_one_id_that_come_together_are_ok(runtime: Runtime, models: Shelf) -> None:
    """Case 14: each returns OK once the model is gone."""
    before = runtime.held()
    await runtime.mesh.load("m", models.path("plus-1"))
    await asyncio.gather(*(mesh.code(runtime.mesh.unload("m")) for _ in range(5)))

    await until(lambda: before == runtime.held())
    assert "NOT_FOUND" == await mesh.code(runtime.mesh.infer("m", addition()))


# --- 15: Memory ----------------------------------------------------------------------------------


async def test_memory_is_free_when_an_unload_answers(
    start: StartRuntime, models: Shelf, compilations: list[str]
) -> None:
    """Case 15: buffers and executables are freed; a model of the same size fits."""
    capacity = LARGE_BYTES + LARGE_BYTES // 2
    async with start(capacity_bytes=capacity, default_model_size_bytes=MIB) as runtime:
        before = runtime.held()
        for _ in range(5):
            size = (await runtime.mesh.load("m", models.path("large"))).sizeInBytes
            loaded = runtime.held()
            await runtime.mesh.unload("m")
            # Without garbage collection: the memory must be free already.
            after = held(runtime.application, collect=False)

            assert before == after
            assert LARGE_BYTES <= loaded.buffers_bytes - before.buffers_bytes <= size
    assert 5 == len(compilations)


async def test_an_id_loads_right_after_its_unload(runtime: Runtime, models: Shelf) -> None:
    """Case 15: even if the load was sent before the unload's answer."""
    await runtime.mesh.load("m", models.path("plus-1"))
    unloading = asyncio.ensure_future(mesh.code(runtime.mesh.unload("m")))
    await asyncio.sleep(0)
    loading = asyncio.ensure_future(mesh.code(runtime.mesh.load("m", models.path("plus-2"))))

    assert ("OK", "OK") == (await unloading, await loading)
    assert [2, 2] == sums(await runtime.mesh.infer("m", addition()))


# --- 16: Requests in flight ----------------------------------------------------------------------


async def requests_in_flight(runtime: Runtime, seconds: float, count: int) -> list[Any]:
    """Start `count` sequential requests of about this duration; wait until all have arrived."""
    waiting = [
        asyncio.ensure_future(mesh.code(runtime.mesh.infer("m", spinning(seconds))))
        for _ in range(count)
    ]
    await runtime.until_in_use(count)
    return waiting


async def test_requests_in_flight_end_before_an_unload_answers(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 16: within the drain; later requests get the status of an unloaded model."""
    async with start(**SLOWLY, drain_seconds=LONG_SECONDS) as runtime:
        before = runtime.held()
        await runtime.mesh.load("m", models.path("spin"))
        waiting = await requests_in_flight(runtime, 0.5, 3)
        unloading = asyncio.ensure_future(mesh.code(runtime.mesh.unload("m")))
        await runtime.until_unloading("m")
        late = {await mesh.code(runtime.mesh.infer("m", spinning(0)))}
        while not unloading.done():
            late.add(await mesh.code(runtime.mesh.infer("m", spinning(0))))
        answers = [(request.done(), await request) for request in waiting]

        assert "OK" == unloading.result()
        assert [(True, "OK")] * 3 == answers
        assert {"UNAVAILABLE"} <= late <= {"UNAVAILABLE", "NOT_FOUND"}
        await until(lambda: before == runtime.held())


@pytest.mark.slow
async def test_an_unload_ends_in_bounded_time(start: StartRuntime, models: Shelf) -> None:
    """Case 16: requests that outlive the drain are not cut off; their memory is freed later."""
    async with start(**SLOWLY, drain_seconds=0.2) as runtime:
        before = runtime.held()
        await runtime.mesh.load("m", models.path("spin"))
        waiting = await requests_in_flight(runtime, 1, 2)
        unloaded = await mesh.code(runtime.mesh.unload("m"))
        in_flight = [request.done() for request in waiting]
        booked = runtime.application.capacity.used_bytes
        answers = await asyncio.gather(*waiting)
        await mesh.code(runtime.mesh.load("m", models.path("spin")))
        again = await mesh.code(runtime.mesh.infer("m", spinning(0)))
        await runtime.mesh.status()

        assert "OK" == unloaded
        assert [False, False] == in_flight
        assert booked > 0
        assert ["OK", "OK"] == answers
        assert "OK" == again
        await until(lambda: before == runtime.held())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_requests_that_are_given_up_hold_no_unload_up(
    start: StartRuntime, models: Shelf, way: str
) -> None:
    """Case 16: only the executing request does, until it completes."""
    async with start(**SLOWLY) as runtime:
        before = runtime.held()
        await runtime.mesh.load("m", models.path("spin"))
        first = runtime.mesh.infer("m", spinning(0.5))
        computing = asyncio.ensure_future(mesh.code(first))
        await runtime.until_in_use(1)
        timeout = 0.2 if way == "deadline" else None
        calls = [runtime.mesh.infer("m", spinning(0.5), timeout=timeout) for _ in range(4)]
        waiting = [asyncio.ensure_future(mesh.code(call)) for call in calls]
        if way == "cancel":
            await runtime.until_in_use(5, unless=computing)
            for call in (first, *calls):
                call.cancel()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        await runtime.mesh.unload("m")
        (end,) = await asyncio.gather(computing, return_exceptions=True)

        await until(lambda: before == runtime.held())
        if way == "deadline":
            assert ["DEADLINE_EXCEEDED"] * 4 == ends
            assert "OK" == end


@pytest.mark.slow
async def test_no_request_ends_as_an_accident_whenever_the_unload_comes(
    runtime: Runtime, models: Shelf
) -> None:
    """Case 16: concurrent requests, loads and unloads of one id give no internal errors."""

    async def ask(answers: set[str]) -> None:
        while True:
            answers.add(await mesh.code(runtime.mesh.infer("m", addition())))

    before = runtime.held()
    answers: set[str] = set()
    asking = [asyncio.ensure_future(ask(answers)) for _ in range(4)]
    for _ in range(10):
        await runtime.mesh.load("m", models.path("plus-1"))
        await asyncio.sleep(0.005)
        await runtime.mesh.unload("m")
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await runtime.mesh.unload("m")

    assert {"OK", "NOT_FOUND"} <= answers <= {"OK", "NOT_FOUND", "UNAVAILABLE"}
    await until(lambda: before == runtime.held())


# --- Unload during a load ------------------------------------------------------------------------


class Gate:
    """Blocks callers that look for a model's files, starting with a given look."""

    def __init__(self, held_from: int) -> None:
        self._held_from = held_from
        self._looks = 0
        self.is_reached = threading.Event()
        self.is_open = threading.Event()

    def __call__(self, find: Callable[..., ModelSource], *where: object) -> ModelSource:
        self._looks += 1
        if self._looks >= self._held_from:
            self.is_reached.set()
            self.is_open.wait(LONG_SECONDS)
        return find(*where)


@pytest.mark.parametrize("look", [1, 2])
async def test_an_unload_ends_a_load_that_has_not_found_its_files(
    runtime: Runtime, models: Shelf, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """The model is not registered yet; the first look is for its size, the second to load it."""
    gate, find_at = Gate(look), Repository.find_at
    monkeypatch.setattr(Repository, "find_at", lambda *where: gate(find_at, *where))
    loading = asyncio.ensure_future(mesh.code(runtime.mesh.load("m", models.path("plus-1"))))
    await until(gate.is_reached.is_set)
    unloaded = await mesh.code(runtime.mesh.unload("m"))
    gate.is_open.set()

    assert ("OK", "CANCELLED") == (unloaded, await loading)
    assert [] == runtime.application.registry.models()
    assert "NOT_FOUND" == await mesh.code(runtime.mesh.infer("m", addition()))
    assert "OK" == await mesh.code(runtime.mesh.load("m", models.path("plus-1")))


async def test_a_purge_ends_a_load_that_has_not_found_its_files(
    runtime: Runtime, models: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh that asks for the status learns that nothing is loaded."""
    gate, find_at = Gate(1), Repository.find_at
    monkeypatch.setattr(Repository, "find_at", lambda *where: gate(find_at, *where))
    loading = asyncio.ensure_future(mesh.code(runtime.mesh.load("m", models.path("plus-1"))))
    await until(gate.is_reached.is_set)
    await runtime.mesh.status()
    gate.is_open.set()

    assert "CANCELLED" == await loading
    assert [] == runtime.application.registry.models()
