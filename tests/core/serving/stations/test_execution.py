"""Concurrent requests: batched, executed, and split again."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.calls import begin
from support.core import FP32, AddModel, Core, MakeCore, World

from xlaserve.errors import Overloaded, QueueTimeout
from xlaserve.residence.registry import Instance
from xlaserve.runtime.loaded import Value
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.serving.stations import batching
from xlaserve.serving.stations.batches import Batches
from xlaserve.serving.stations.host import Inline
from xlaserve.serving.stations.replicas import Replicas
from xlaserve.tensors import TensorSpec


def request(value: float, rows: int = 1) -> InferRequest:
    data = np.full((rows, 2), value, np.float32)
    return InferRequest("m", inputs=(InferInput("x", FP32, data),))


async def infer(core: Core, value: float, rows: int = 1) -> Any:
    return (await core.engine.infer(request(value, rows))).outputs[0].data


def executions(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the rows of each execution of the only model."""
    rows: list[int] = []
    (model,) = world.open
    execute = model.execute

    def noting(
        inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        tensor = inputs["x"]
        assert isinstance(tensor, np.ndarray)
        rows.append(len(tensor))
        return execute(inputs, resident=resident, replica=replica)

    monkeypatch.setattr(model, "execute", noting)
    return rows


@pytest.fixture
async def core(make_core: MakeCore, add_model: AddModel, world: World) -> Core:
    world.batch_limit, world.seconds = 4, 1e-3
    made = make_core()
    add_model("m", {1: 1})
    await made.control.load("m")
    return made


async def test_requests_of_one_pass_are_one_execution(
    core: Core, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = executions(world, monkeypatch)
    outputs = await asyncio.gather(infer(core, 1), infer(core, 2, 2), infer(core, 3))

    assert [4] == rows
    assert [[[2, 2]], [[3, 3]] * 2, [[4, 4]]] == [output.tolist() for output in outputs]


async def test_a_batch_counts_once_and_its_requests_each(core: Core) -> None:
    """ModelStatistics: execution_count, inference_count and the batch sizes."""
    await asyncio.gather(*(infer(core, n) for n in range(4)))
    await infer(core, 1)
    (report,) = core.control.catalog.statistics("m")
    totals = report.totals

    assert (5, 5, 2) == (totals.success.count, totals.inference_count, totals.execution_count)
    assert {1: 1, 4: 1} == {b.batch_size: b.compute_infer.count for b in totals.batches}


@pytest.mark.parametrize(
    ("columns", "alone", "together", "gathered"),
    [
        (16, 3e-6, 4e-6, False),
        (16, 50e-6, 100e-6, True),
        (16, 50e-6, 190e-6, False),
        (150_528, 50e-6, 100e-6, False),
        (150_528, 150e-6, 200e-6, True),
        (150_528, 0.6, 2.4, True),
    ],
    ids=["quick", "gains", "gains too little", "large rows", "slow large rows", "in a thread"],
)
async def test_requests_are_gathered_where_that_is_quicker(
    core: Core,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    alone: float,
    together: float,
    *,
    gathered: bool,
) -> None:
    """The comparison includes the cost of queueing and of copying a row into its batch."""
    (model,) = world.open
    spec = TensorSpec("x", FP32, (-1, columns))
    monkeypatch.setattr(model, "info", replace(model.info, inputs=(spec,)))
    monkeypatch.setattr(model, "expected_seconds", {1: alone, 4: together}.__getitem__)
    core.renew()

    assert gathered is isinstance(core.registry.resolve("m")[1].station, Batches)


async def test_a_model_that_is_to_wait_for_others_gathers_however_quick_it_is(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    world.batch_limit, world.seconds = 4, 1e-6
    core = await configured(make_core, add_model, {"preferred_batch_size": [2]})

    assert isinstance(core.registry.resolve("m")[1].station, Batches)


async def test_while_a_thread_computes_the_queue_fills(
    core: Core, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = executions(world, monkeypatch)
    world.seconds = 1.0
    world.may_execute.clear()
    first = asyncio.ensure_future(infer(core, 0))
    while not rows:
        await asyncio.sleep(0.001)
    others = [asyncio.ensure_future(infer(core, n)) for n in range(6)]
    await asyncio.sleep(0.01)
    instance = core.registry.resolve("m")[1]
    waiting, backlog = instance.pending, instance.backlog(time.perf_counter_ns())
    world.may_execute.set()
    await asyncio.gather(first, *others)

    assert 6 == waiting == backlog.pending
    assert backlog.oldest_seconds > 0
    assert [1, 4, 2] == rows


async def test_what_threads_have_waits_on_when_the_station_is_replaced(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """Two threads execute while a third call waits; each is answered exactly once."""
    core = make_core()
    add_model("m", {1: 1})
    await core.control.load("m")
    instance = core.registry.resolve("m")[1]
    world.may_execute.clear()
    asked = [asyncio.ensure_future(infer(core, n)) for n in range(3)]
    while instance.users < 6 or instance.pending > 1:
        await asyncio.sleep(0)
    before = instance.station
    instance.renew()
    pending = instance.pending
    world.may_execute.set()
    answers = await asyncio.gather(*asked)

    assert before is not instance.station
    assert 1 == pending
    assert [1, 2, 3] == [answer[0, 0] for answer in answers]


async def test_a_request_cancelled_in_the_queue_is_never_executed(
    core: Core, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = executions(world, monkeypatch)
    world.seconds = 1.0
    world.may_execute.clear()
    first = asyncio.ensure_future(infer(core, 0))
    while not rows:
        await asyncio.sleep(0.001)
    second = asyncio.ensure_future(infer(core, 1))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    world.may_execute.set()
    await first
    await infer(core, 2)

    assert [1, 1] == rows
    assert 0 == core.registry.requests


async def test_a_request_that_is_alone_is_answered_at_once(
    core: Core, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It skips the queue; two requests of one loop iteration still share an execution."""
    monkeypatch.setattr(batching, "APART_NS", -1)
    world.seconds = 1e-4
    for n in range(batching.ALONE_IN_A_ROW):
        await infer(core, n)
    told: list[Any] = []
    call = begin(core.engine, request(7), told.append)
    (answer,) = told

    assert isinstance(answer, InferResponse)
    assert call.has_ended
    assert [[8, 8]] == answer.outputs[0].data.tolist()

    monkeypatch.setattr(batching, "APART_NS", 10**15)
    rows = executions(world, monkeypatch)
    await asyncio.gather(infer(core, 1), infer(core, 2))

    assert [2] == rows


async def test_a_failure_reaches_every_request_and_the_next_batch_goes_on(
    core: Core, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = world.open
    execute = model.execute

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(model, "execute", fail)
    outcomes = await asyncio.gather(*(infer(core, n) for n in range(3)), return_exceptions=True)
    monkeypatch.setattr(model, "execute", execute)

    assert [ZeroDivisionError] * 3 == [type(outcome) for outcome in outcomes]
    assert [[3, 3]] == (await infer(core, 2)).tolist()


@pytest.mark.parametrize("seconds", [1e-3, 1.0], ids=["quick", "slow"])
@pytest.mark.parametrize("batching_on", [True, False], ids=["in batches", "by itself"])
async def test_the_time_of_a_request_is_looked_up_once(
    make_core: MakeCore,
    add_model: AddModel,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    *,
    batching_on: bool,
    seconds: float,
) -> None:
    """For a request that is expected to be alone, fast enough for the event loop or not."""
    monkeypatch.setattr(batching, "APART_NS", -1)
    world.batch_limit, world.seconds = 4, 1e-3
    core = make_core(dynamic_batching=batching_on)
    add_model("m", {1: 1})
    await core.control.load("m")
    for n in range(batching.ALONE_IN_A_ROW):
        await infer(core, n)
    (model,) = world.open
    asked: list[int] = []

    def expected_seconds(rows: int) -> float:
        asked.append(rows)
        return seconds

    monkeypatch.setattr(model, "expected_seconds", expected_seconds)
    assert [[3, 3]] == (await infer(core, 2)).tolist()

    # A request that waits for a batch is looked up again as part of it.
    assert [1] * (2 if batching_on and seconds == 1.0 else 1) == asked


async def test_batching_can_be_turned_off(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.batch_limit, world.seconds = 4, 1e-3
    core = make_core(dynamic_batching=False)
    add_model("m", {1: 1})
    await core.control.load("m")
    rows = executions(world, monkeypatch)
    await asyncio.gather(*(infer(core, n) for n in range(3)))

    assert [1, 1, 1] == rows


def replicas_of(instance: Instance) -> Replicas:
    assert isinstance(instance.station, Inline)
    return instance.station.work.replicas


async def noted_replicas(
    core: Core, world: World, monkeypatch: pytest.MonkeyPatch, name: str = "m"
) -> list[int]:
    """Load a model of two replicas, and record which of them executes."""
    world.replicas = 2
    await core.control.load(name)
    model = world.open[-1]
    execute = model.execute
    replicas: list[int] = []

    def noting(
        inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        replicas.append(replica)
        return execute(inputs, resident=resident, replica=replica)

    monkeypatch.setattr(model, "execute", noting)
    return replicas


async def test_a_request_by_itself_goes_to_the_replica_with_the_least_to_do(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    add_model("m", {1: 1})
    replicas = await noted_replicas(core, world, monkeypatch)
    world.may_execute.clear()
    asked = [asyncio.ensure_future(infer(core, n)) for n in range(2)]
    while len(replicas) < 2:
        await asyncio.sleep(0.001)
    world.may_execute.set()
    await asyncio.gather(*asked)
    for _ in range(2):
        await infer(core, 1)

    assert [0, 1] == sorted(replicas[:2])
    assert [0, 0] == replicas[2:]


async def test_a_request_that_found_no_thread_counts_no_more(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.seconds = 1.0
    core = make_core()
    add_model("m", {1: 1})
    await core.control.load("m")
    _, instance = core.registry.resolve("m")

    def start(call: object, over: object, model: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(core.workers.host, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        await infer(core, 1)

    assert [0] == replicas_of(instance)._in_flight
    assert (0, 0) == (core.registry.requests, instance.users)


async def test_a_request_that_was_cancelled_counts_no_more(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This applies both to calls that a thread has begun and to those that wait for a thread."""
    core = make_core()
    add_model("m", {1: 1})
    replicas = await noted_replicas(core, world, monkeypatch)
    instance = core.registry.resolve("m")[1]
    world.may_execute.clear()
    asked = [asyncio.ensure_future(infer(core, n)) for n in range(3)]
    while len(replicas) < 2:
        await asyncio.sleep(0.001)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    world.may_execute.set()
    while instance.users:
        await asyncio.sleep(0.001)
    free = replicas_of(instance)

    assert [0, 1] == [free.take(), free.take()]


async def test_batches_go_to_the_replica_that_is_idle(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.batch_limit = 4
    core = make_core()
    add_model("m", {1: 1})
    replicas = await noted_replicas(core, world, monkeypatch)
    world.may_execute.clear()
    asked = []
    for count in (1, 2):
        asked.append(asyncio.ensure_future(infer(core, count)))
        while len(replicas) < count:
            await asyncio.sleep(0.001)
    world.may_execute.set()
    await asyncio.gather(*asked)

    assert [0, 1] == replicas


async def configured(make_core: MakeCore, add_model: AddModel, batching: dict[str, Any]) -> Core:
    core = make_core()
    add_model("m", {1: 1}, {"max_batch_size": 4, "dynamic_batching": batching})
    await core.control.load("m")
    return core


async def test_the_queue_of_a_model_may_be_short(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """max_queue_size of the default queue policy: further requests are refused immediately."""
    world.batch_limit, world.seconds = 4, 1.0
    core = await configured(make_core, add_model, {"default_queue_policy": {"max_queue_size": 2}})
    outcomes = await asyncio.gather(*(infer(core, n) for n in range(4)), return_exceptions=True)

    assert [Overloaded] * 2 == [type(o) for o in outcomes if isinstance(o, Exception)]
    assert "max_queue_size" in str(outcomes[-1])


async def test_a_delay_gathers_what_comes_within_it(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.batch_limit, world.seconds = 4, 1e-3
    core = await configured(make_core, add_model, {"max_queue_delay_microseconds": 200_000})
    rows = executions(world, monkeypatch)
    first = asyncio.ensure_future(infer(core, 1))
    await asyncio.sleep(0.01)
    await asyncio.gather(first, infer(core, 2))

    assert [2] == rows


async def test_whoever_waits_longer_than_the_policy_allows_is_told(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.batch_limit, world.seconds = 4, 1.0
    core = await configured(
        make_core, add_model, {"default_queue_policy": {"default_timeout_microseconds": 1000}}
    )
    rows = executions(world, monkeypatch)
    world.may_execute.clear()
    first = asyncio.ensure_future(infer(core, 0))
    while not rows:
        await asyncio.sleep(0.0001)
    with pytest.raises(QueueTimeout, match="1000 microseconds"):
        await infer(core, 1)
    world.may_execute.set()
    await first
