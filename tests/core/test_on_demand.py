"""Requests that wait for the compilation of their shape, and all that do not."""

import asyncio
import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.core.inference import InferInput, InferRequest
from xlaserve.errors import InvalidModel
from xlaserve.models.loaded import Executable, ModelMemory, Value
from xlaserve.tensors import Tensor


class FakeShapes:
    """Needs a program for every number of rows but 1, and compiles while a gate is open."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._kept: set[Hashable] = set()
        self.compiled: list[Hashable] = []
        self.compiling = threading.Event()
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.problem: Exception | None = None

    def shape_of(self, inputs: Mapping[str, Value]) -> Hashable:
        rows = inputs["x"].shape[0]
        return None if rows == 1 else rows

    def find(self, shape: Hashable) -> Executable | None:
        return self._model if shape in self._kept else None

    def compile(self, shape: Hashable) -> Executable:
        self.compiled.append(shape)
        self.compiling.set()
        assert self.may_compile.wait(10)
        assert not self._model.closed, "closed while compiling"
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
    return made


async def infer(core: Core, rows: int, name: str = "m") -> Tensor:
    data = np.zeros((rows, 2), np.float32)
    request = InferRequest(name, inputs=(InferInput("x", FP32, data),))
    return (await core.engine.infer(request)).outputs[0].data


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
    """The event loop, other models, and what is compiled of the same one."""
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
    """Two threads compile; the third shape waits, until its client has gone."""
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
    """Its client may be gone by then."""
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
    assert 100 == core.capacity.used_bytes
