"""Answers by callback: immediate, from a batch, from a thread, from steps, or none."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls import begin
from support.core import FP32, AddModel, Core, MakeCore, World

from xlaserve.errors import InvalidTensor, ModelNotFound, Overloaded, ShuttingDown
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse, RequestedOutput
from xlaserve.serving.statistics import FailureReason, Totals

Answer = InferResponse | BaseException

STEP = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}
ENSEMBLE = {
    "max_batch_size": 4,
    "input": [STEP],
    "output": [STEP | {"name": "y"}],
    "ensemble_scheduling": {
        "step": [
            {"model_name": "m", "input_map": {"x": "x"}, "output_map": {"y": "middle"}},
            {"model_name": "m", "input_map": {"x": "middle"}, "output_map": {"y": "y"}},
        ]
    },
}

WAYS = {"batch": ("m", 4, 1e-3), "thread": ("m", 0, 1.0), "steps": ("e", 0, 1.0)}
"""How a request that is not answered immediately runs: its model, batch limit, and seconds."""


def request(model: str = "m", value: float = 0, rows: int = 1, **more: Any) -> InferRequest:
    data = np.full((rows, 2), value, np.float32)
    return InferRequest(model, inputs=(InferInput("x", FP32, data),), **more)


def values(answer: Answer) -> list[Any]:
    assert isinstance(answer, InferResponse), answer
    found: list[Any] = answer.outputs[0].data.tolist()
    return found


def totals(core: Core, model: str = "m") -> Totals:
    return core.registry.version(model, "1").statistics.totals()


def assert_nothing_is_in_use(core: Core) -> None:
    instances = [v.instance for m in core.registry.models() for v in m.versions.values()]

    assert 0 == core.registry.requests
    assert [0] * len(instances) == [instance.users for instance in instances if instance]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture
async def loaded(core: Core, add_model: AddModel) -> Core:
    add_model("m", {1: 1})
    add_model("e", {}, ENSEMBLE)
    await core.control.load("e")
    return core


def choose(core: Core, world: World, way: str) -> str:
    model, batch_limit, seconds = WAYS[way]
    world.seconds = seconds
    for one in world.open:
        one.batch_limit = batch_limit
    core.renew()
    return model


async def test_a_quick_model_answers_within_the_call(loaded: Core, world: World) -> None:
    world.seconds = 0
    loaded.renew()
    told: list[Answer] = []
    call = begin(loaded.engine, request(value=3, id="7"), told.append)
    (answer,) = told
    counted = totals(loaded).success.count
    await asyncio.sleep(0)

    assert isinstance(answer, InferResponse)
    assert ("m", "1", "7") == (answer.model_name, answer.model_version, answer.id)
    assert [[4, 4]] == values(answer)
    assert call.has_ended
    assert ([answer], 1) == (told, counted)
    assert 1 == totals(loaded).success.count
    assert_nothing_is_in_use(loaded)


@pytest.mark.parametrize("way", WAYS)
async def test_everything_else_answers_later_and_once(loaded: Core, world: World, way: str) -> None:
    model, told = choose(loaded, world, way), list[Answer]()
    pending = begin(loaded.engine, request(model, 3, id="7"), told.append)
    assert not pending.has_ended
    assert [] == told
    assert 1 == loaded.registry.requests
    assert 0 < loaded.registry.resolve(model)[1].users
    await until(lambda: told)
    pending.cancel()

    assert 1 == len(told)
    assert [[5, 5] if way == "steps" else [4, 4]] == values(told[0])
    assert (1, 0) == (totals(loaded, model).success.count, totals(loaded, model).fail.count)
    await until(lambda: not loaded.registry.resolve("m")[1].users)
    assert_nothing_is_in_use(loaded)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("passes", [0, 1, 2, 3])
async def test_nobody_is_told_what_was_cancelled(
    loaded: Core, world: World, way: str, passes: int
) -> None:
    """At any stage it counts as cancelled, and nothing stays in use."""
    model, told = choose(loaded, world, way), list[Answer]()
    world.seconds = 1.0
    world.may_execute.clear()
    pending = begin(loaded.engine, request(model), told.append)
    for _ in range(passes):
        await asyncio.sleep(0)
    pending.cancel()
    pending.cancel()
    world.may_execute.set()
    await until(lambda: not loaded.registry.resolve("m")[1].users)
    await until(lambda: not loaded.registry.requests)

    assert [] == told
    found = totals(loaded, model)
    assert (0, 1) == (found.success.count, found.failures[FailureReason.CANCELLED])
    assert_nothing_is_in_use(loaded)


async def test_a_request_may_be_cancelled_by_one_that_is_answered_with_it(
    loaded: Core, world: World
) -> None:
    """As when a connection is lost while the answers of a batch are written to it."""
    choose(loaded, world, "batch")
    told: list[str] = []

    def first_done(answer: Answer) -> None:
        told.append("first")
        pending.cancel()

    begin(loaded.engine, request(), first_done)
    pending = begin(loaded.engine, request(), lambda answer: told.append("second"))
    begin(loaded.engine, request(), lambda answer: told.append("third"))
    await until(lambda: "third" in told)

    assert ["first", "third"] == told
    assert 3 == totals(loaded).success.count
    assert_nothing_is_in_use(loaded)


async def test_a_callback_that_raises_keeps_no_answer_from_the_others(
    loaded: Core, world: World
) -> None:
    choose(loaded, world, "batch")
    told: list[Answer] = []
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))

    def fail(answer: Answer) -> None:
        raise ZeroDivisionError

    begin(loaded.engine, request(), fail)
    begin(loaded.engine, request(), told.append)
    await until(lambda: told)

    assert [ZeroDivisionError] == [type(what["exception"]) for what in reported]
    assert_nothing_is_in_use(loaded)


@pytest.mark.parametrize("way", WAYS)
async def test_a_model_that_breaks_tells_every_request(
    loaded: Core, world: World, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def break_down(*arguments: object, **more: object) -> None:
        raise RuntimeError("broken")

    model, told = choose(loaded, world, way), list[Answer]()
    monkeypatch.setattr(world.open[0], "execute", break_down)
    for _ in range(2):
        begin(loaded.engine, request(model), told.append)
    await until(lambda: len(told) == 2)
    await until(lambda: not loaded.registry.resolve("m")[1].users)

    assert [RuntimeError] * 2 == [type(answer) for answer in told]
    assert 2 == totals(loaded, model).failures[FailureReason.BACKEND]
    assert_nothing_is_in_use(loaded)


async def test_outputs_that_were_not_promised_leave_nobody_waiting(
    loaded: Core, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(loaded, world, "batch")
    told: list[Answer] = []
    monkeypatch.setattr(world.open[0], "execute", lambda *_, **__: {"other": np.zeros((1, 2))})
    begin(loaded.engine, request(), told.append)
    await until(lambda: told)

    assert [KeyError] == [type(answer) for answer in told]
    assert_nothing_is_in_use(loaded)


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_known_at_once_is_told_at_once(loaded: Core, world: World, way: str) -> None:
    model = choose(loaded, world, way)
    told: list[Answer] = []
    begin(loaded.engine, request("nope"), told.append)
    begin(loaded.engine, request(model, rows=9), told.append)
    loaded.gates.drain()
    begin(loaded.engine, request(model), told.append)
    at_once = list(told)
    await asyncio.sleep(0)

    assert [ModelNotFound, InvalidTensor, ShuttingDown] == [type(answer) for answer in at_once]
    assert at_once == told
    assert 1 == totals(loaded, model).failures[FailureReason.INVALID]
    assert_nothing_is_in_use(loaded)


@pytest.mark.parametrize("way", ["batch", "thread"])
async def test_a_request_over_the_limit_is_refused_at_once(
    make_core: MakeCore, add_model: AddModel, world: World, way: str
) -> None:
    core = make_core(max_requests_per_model=1)
    add_model("m", {1: 1})
    await core.control.load("m")
    choose(core, world, way)
    told: list[Answer] = []
    begin(core.engine, request(), told.append)
    begin(core.engine, request(), told.append)
    assert [Overloaded] == [type(answer) for answer in told]
    await until(lambda: len(told) > 1)
    await until(lambda: not core.registry.resolve("m")[1].users)

    assert [Overloaded, InferResponse] == [type(answer) for answer in told]
    assert 1 == totals(core).failures[FailureReason.REJECTED]
    assert_nothing_is_in_use(core)


async def test_a_full_queue_refuses_without_a_trace(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    world.batch_limit, world.seconds = 4, 1e-3
    core = make_core()
    batching = {"default_queue_policy": {"max_queue_size": 1}}
    add_model("m", {1: 1}, {"max_batch_size": 4, "dynamic_batching": batching})
    await core.control.load("m")
    told: list[Answer] = []
    begin(core.engine, request(), told.append)
    begin(core.engine, request(), told.append)
    assert ["max_queue_size" in str(answer) for answer in told] == [True]
    assert 1 == core.registry.requests
    await until(lambda: len(told) > 1)

    assert [Overloaded, InferResponse] == [type(answer) for answer in told]
    assert_nothing_is_in_use(core)


async def test_requests_of_one_batch_may_ask_for_different_outputs(
    loaded: Core, world: World
) -> None:
    choose(loaded, world, "batch")
    told: list[Answer] = []
    begin(loaded.engine, request(value=1, outputs=(RequestedOutput("y"),)), told.append)
    begin(loaded.engine, request(value=2, rows=2), told.append)
    await until(lambda: len(told) == 2)

    assert [[[2, 2]], [[3, 3], [3, 3]]] == [values(answer) for answer in told]
    assert [3] == [batch.batch_size for batch in totals(loaded).batches]


async def test_steps_run_in_a_batch_with_requests_to_their_model(
    loaded: Core, world: World
) -> None:
    """A step of an ensemble on the host shares a batch with other requests to its model."""
    choose(loaded, world, "batch")
    told: list[Answer] = []
    for _ in range(2):
        begin(loaded.engine, request("e"), told.append)
    await until(lambda: len(told) == 2)

    assert [[[2, 2]]] * 2 == [values(answer) for answer in told]
    assert (4, 2) == (totals(loaded).success.count, totals(loaded).execution_count)
    assert_nothing_is_in_use(loaded)


async def test_a_step_elsewhere_than_on_the_host_runs_by_itself(loaded: Core, world: World) -> None:
    choose(loaded, world, "batch")
    loaded.registry.resolve("m")[1].platform = "cuda"
    told: list[Answer] = []
    for _ in range(2):
        begin(loaded.engine, request("e"), told.append)
    await until(lambda: len(told) == 2)

    assert [[[2, 2]]] * 2 == [values(answer) for answer in told]
    assert 4 == totals(loaded).execution_count
    assert_nothing_is_in_use(loaded)
