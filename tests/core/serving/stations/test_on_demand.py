"""Shapes compiled on demand: requests wait for them, and all others continue."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.calls import begin
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.errors import InvalidModel, InvalidTensor, Overloaded
from xlaserve.runtime.loaded import Executable, ModelMemory, Value
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.serving.stations.by_itself import ByItself
from xlaserve.serving.statistics import FailureReason, Totals
from xlaserve.tensors import Tensor

STEP = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}
ENSEMBLE = {
    "max_batch_size": 4,
    "input": [STEP],
    "output": [STEP | {"name": "y"}],
    "ensemble_scheduling": {
        "step": [{"model_name": "m", "input_map": {"x": "x"}, "output_map": {"y": "y"}}]
    },
}


class FakeShapes:
    """Needs a program for every number of rows except 1; compiles while the gate is open."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._kept: set[Hashable] = set()
        self.compiled: list[Hashable] = []
        self.compiling = threading.Event()
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.problem: Exception | None = None
        self.outlived = False
        """Whether the model was closed before a compilation completed."""

    def shape_of(self, inputs: Mapping[str, Value]) -> Hashable:
        rows = inputs["x"].shape[0]
        return None if rows == 1 else rows

    def find(self, shape: Hashable) -> Executable | None:
        return self._model if shape in self._kept else None

    def compile(self, shape: Hashable) -> Executable:
        self.compiled.append(shape)
        self.outlived |= self._model.closed
        self.compiling.set()
        assert self.may_compile.wait(10)
        self.outlived |= self._model.closed
        if self.problem is not None:
            raise self.problem
        self._kept.add(shape)
        self._model.info = replace(self._model.info, memory=ModelMemory(123))
        return self._model


@pytest.fixture
async def core(make_core: MakeCore, add_model: AddModel) -> Core:
    core = make_core()
    for name in "mn":
        add_model(name, {1: 1})
        await core.control.load(name)
    return core


@pytest.fixture
def shapes(core: Core, world: World, monkeypatch: pytest.MonkeyPatch) -> FakeShapes:
    model = world.open[0]
    made = FakeShapes(model)
    monkeypatch.setattr(model, "on_demand", made)
    core.renew()
    return made


def request(rows: int, name: str = "m") -> InferRequest:
    data = np.zeros((rows, 2), np.float32)
    return InferRequest(name, inputs=(InferInput("x", FP32, data),))


async def infer(core: Core, rows: int, name: str = "m") -> Tensor:
    return (await core.engine.infer(request(rows, name))).outputs[0].data


def totals(core: Core, model: str = "m") -> Totals:
    return core.registry.version(model, "1").statistics.totals()


async def nothing_is_in_use(core: Core, model: str = "m") -> None:
    while core.registry.requests or core.registry.resolve(model)[1].users:
        await asyncio.sleep(0)


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0)


async def test_who_asks_for_the_same_shape_waits_for_one_compilation(
    core: Core, shapes: FakeShapes
) -> None:
    outputs = await asyncio.gather(infer(core, 2), infer(core, 2), infer(core, 3), infer(core, 2))
    await infer(core, 2)

    assert Counter((2, 3)) == Counter(shapes.compiled)
    assert [2, 2, 3, 2] == [len(output) for output in outputs]


async def test_everything_else_goes_on(core: Core, shapes: FakeShapes) -> None:
    """The event loop, other models, and shapes of this model that are already compiled."""
    shapes.may_compile.clear()
    waiting = [asyncio.ensure_future(infer(core, 2)) for _ in range(2)]
    await until(shapes.compiling)
    others = [await infer(core, 1), await infer(core, 2, "n")]
    pending = [task.done() for task in waiting]
    shapes.may_compile.set()

    assert [False, False] == pending
    assert [1, 2] == [len(output) for output in others]
    assert [2, 2] == [len(output) for output in await asyncio.gather(*waiting)]
    assert [2] == shapes.compiled


async def test_one_that_leaves_does_not_end_the_compilation(core: Core, shapes: FakeShapes) -> None:
    shapes.may_compile.clear()
    leaving, staying = (asyncio.ensure_future(infer(core, 2)) for _ in range(2))
    await until(shapes.compiling)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    shapes.may_compile.set()

    assert 2 == len(await staying)
    assert [2] == shapes.compiled


async def test_what_nobody_waits_for_any_more_is_not_begun(core: Core, shapes: FakeShapes) -> None:
    """Two threads compile while a third shape waits; then its client leaves."""
    shapes.may_compile.clear()
    busy = [asyncio.ensure_future(infer(core, rows)) for rows in (2, 3)]
    while len(shapes.compiled) < 2:
        await asyncio.sleep(0)
    instance = core.registry.resolve("m")[1]
    users = instance.users
    gone = asyncio.ensure_future(infer(core, 4))
    while instance.users == users:
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    while instance.users > users:
        await asyncio.sleep(0)
    shapes.may_compile.set()
    await asyncio.gather(*busy)

    assert 4 not in shapes.compiled


async def test_a_failure_is_told_to_all_who_wait_and_tried_again_later(
    core: Core, shapes: FakeShapes
) -> None:
    shapes.problem = InvalidModel("no such shape")
    found = await asyncio.gather(infer(core, 2), infer(core, 2), return_exceptions=True)
    shapes.problem = None

    assert ["no such shape"] * 2 == [str(error) for error in found]
    assert 2 == len(await infer(core, 2))
    assert [2, 2] == shapes.compiled


async def test_the_books_have_what_was_compiled(core: Core, shapes: FakeShapes) -> None:
    assert 200 == core.capacity.used_bytes

    await infer(core, 2)
    while core.capacity.used_bytes == 200:
        await asyncio.sleep(0)

    assert 223 == core.capacity.used_bytes


async def test_an_unload_waits_for_the_thread_that_compiles(core: Core, shapes: FakeShapes) -> None:
    """The client that requested the shape may already be gone."""
    shapes.may_compile.clear()
    gone = asyncio.ensure_future(infer(core, 2))
    await until(shapes.compiling)
    gone.cancel()
    unloading = asyncio.ensure_future(core.control.unload("m"))
    for _ in range(20):
        await asyncio.sleep(0)
    early = unloading.done()
    shapes.may_compile.set()
    await unloading

    assert not early
    assert not shapes.outlived
    assert 100 == core.capacity.used_bytes


# --- answers by callback -----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2], ids=["there", "missing"])
@pytest.mark.parametrize("seconds", [0, 1])
async def test_every_request_to_a_model_with_shapes_on_demand_has_a_thread_of_its_own(
    core: Core, shapes: FakeShapes, world: World, rows: int, seconds: float
) -> None:
    """Regardless of how fast the model is and what batching would gain."""
    world.seconds = seconds
    world.open[0].batch_limit = 4
    core.renew()
    told: list[InferResponse | BaseException] = []
    pending = [begin(core.engine, request(rows), told.append) for _ in range(2)]
    instance = core.registry.resolve("m")[1]

    assert not any(one.has_ended for one in pending)
    assert 2 == core.registry.requests
    assert instance.users > 2

    await nothing_is_in_use(core)

    assert [InferResponse] * 2 == [type(answer) for answer in told]
    assert (2, 2) == (totals(core).success.count, totals(core).execution_count)
    assert isinstance(instance.station, ByItself)


async def test_the_wait_for_a_compilation_counts_as_time_in_the_queue(
    core: Core, shapes: FakeShapes
) -> None:
    shapes.may_compile.clear()
    waiting = asyncio.ensure_future(infer(core, 2))
    await until(shapes.compiling)
    began_ns = time.perf_counter_ns()
    await asyncio.sleep(0)
    ended_ns = time.perf_counter_ns()
    shapes.may_compile.set()
    await waiting

    assert totals(core).queue.ns >= ended_ns - began_ns


@pytest.mark.parametrize("passes", range(8))
async def test_nobody_is_told_of_a_shape_that_is_not_wanted_any_more(
    core: Core, shapes: FakeShapes, passes: int
) -> None:
    """At any stage, a compilation keeps the model in use until it ends."""
    told: list[InferResponse | BaseException] = []
    shapes.may_compile.clear()
    pending = begin(core.engine, request(2), told.append)
    for _ in range(passes):
        await asyncio.sleep(0)
    pending.cancel()
    counted, in_use = core.registry.requests, core.registry.resolve("m")[1].users > 0
    unloading = asyncio.ensure_future(core.control.unload("m"))
    await asyncio.sleep(0)
    shapes.may_compile.set()
    await unloading

    assert 0 == counted
    assert in_use or not shapes.compiled
    assert [] == told
    assert not shapes.outlived
    assert (0, 1) == (totals(core).success.count, totals(core).failures[FailureReason.CANCELLED])


async def test_who_waits_for_a_compilation_counts_towards_the_limit(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(max_requests_per_model=1)
    add_model("m", {1: 1})
    await core.control.load("m")
    world.open[0].on_demand = shapes = FakeShapes(world.open[0])
    core.renew()
    shapes.may_compile.clear()
    waiting = asyncio.ensure_future(infer(core, 2))
    await until(shapes.compiling)
    with pytest.raises(Overloaded):
        await infer(core, 1)
    shapes.may_compile.set()

    assert 2 == len(await waiting)
    assert 1 == totals(core).failures[FailureReason.REJECTED]


async def test_sizes_that_contradict_one_another_are_refused_at_once(
    core: Core, shapes: FakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(inputs: Mapping[str, Value]) -> Hashable:
        raise InvalidTensor("m", "input", "x", "3 rows", "2 rows")

    monkeypatch.setattr(shapes, "shape_of", refuse)
    told: list[InferResponse | BaseException] = []
    begin(core.engine, request(2), told.append)
    at_once = list(told)
    await nothing_is_in_use(core)

    assert [InvalidTensor] == [type(answer) for answer in at_once]
    assert at_once == told
    assert 1 == totals(core).failures[FailureReason.INVALID]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
async def test_the_steps_of_an_ensemble_ask_for_shapes_too(
    core: Core, shapes: FakeShapes, world: World, add_model: AddModel, platform: str
) -> None:
    """Both when they pass tensors through the host and when they keep them on a device."""
    world.seconds = 0
    add_model("e", {}, ENSEMBLE)
    await core.control.load("e")
    core.registry.resolve("m")[1].platform = platform
    outputs = await asyncio.gather(infer(core, 2, "e"), infer(core, 2, "e"))
    await nothing_is_in_use(core)

    assert [2, 2] == [len(output) for output in outputs]
    assert [2] == shapes.compiled
    assert (2, 2) == (totals(core).success.count, totals(core, "e").success.count)
