"""Asynchronous execution on devices: order, number in flight, and completion."""

import asyncio
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.accelerators import AcceleratedModel, Accelerators, until
from support.core import FP32, AddModel, Core, MakeCore, World

from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.concurrency.device import DeviceThreads
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import ExecutionStalled, OutOfMemory, Overloaded
from xlaserve.residence.registry import Instance
from xlaserve.runtime.devices.placement import Devices
from xlaserve.runtime.loaded import Executable, InFlight, Value
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.stations.dispatch import Dispatcher
from xlaserve.serving.stations.table import ExecutionPolicy, Stations

TENSOR = {"data_type": "TYPE_FP32", "dims": [2]}
OF_STEP_M = {
    "max_batch_size": 4,
    "input": [TENSOR | {"name": "x"}],
    "output": [TENSOR | {"name": "y"}],
    "ensemble_scheduling": {
        "step": [{"model_name": "m", "input_map": {"x": "x"}, "output_map": {"y": "y"}}]
    },
}


@pytest.fixture
def devices() -> Iterator[Accelerators]:
    made = Accelerators()
    made.may_dispatch.set()
    yield made
    made.open()


Start = Callable[..., Any]
"""Makes a core with models of these names, on devices with these queues."""


@pytest.fixture
def start(
    make_core: MakeCore, add_model: AddModel, world: World, devices: Accelerators
) -> Iterator[Start]:
    async def make(names: str = "m", queues: Sequence[str] = ("cuda:0",), **settings: Any) -> Core:
        world.batch_limit = 4
        world.model_type = devices.models_on(*queues)
        core = make_core(**settings)
        for name in names:
            add_model(name, {1: ord(name)})
            await core.control.load(name)
        return core

    yield make
    devices.open()


def asking(core: Core, name: str = "m", rows: int = 1) -> "asyncio.Task[Any]":
    data = np.zeros((rows, 2), np.float32)
    request = InferRequest(name, inputs=(InferInput("x", FP32, data),))
    return asyncio.ensure_future(core.engine.infer(request))


def instance_of(core: Core, name: str = "m") -> Instance:
    return core.registry.resolve(name)[1]


async def passes(count: int = 20) -> None:
    """Run this many loop iterations, so that all ready callbacks run."""
    for _ in range(count):
        await asyncio.sleep(0.0005)


# --- order -------------------------------------------------------------------------------------


async def test_all_models_of_a_device_are_dispatched_by_one_thread_in_order(
    start: Start, devices: Accelerators
) -> None:
    core = await start("mn")
    devices.may_dispatch.clear()
    asked = []
    for name in "mnnm":
        asked.append(asking(core, name))
        await passes(3)
    devices.may_dispatch.set()
    given = await devices.has(4)
    devices.open()
    await asyncio.gather(*asked)

    # The second of each joined the queue of its model until the first was dispatched.
    assert [ord(name) for name in "mn"] == [one.model.amount for one in given[:2]]
    assert {"dispatch cuda:0_0"} == {one.thread for one in given}
    assert {"fetch cuda:0_0"} == {one.fetched_by for one in given}


async def test_devices_are_dispatched_to_side_by_side(start: Start, devices: Accelerators) -> None:
    core = await start("m", ["cuda:0", "cuda:1"])
    asked = [asking(core, rows=4) for _ in range(2)]
    given = await devices.has(2)
    devices.open()
    await asyncio.gather(*asked)

    assert {"cuda:0", "cuda:1"} == {one.queue for one in given}
    assert {"dispatch cuda:0_0", "dispatch cuda:1_0"} == {one.thread for one in given}


async def test_a_quick_model_is_not_run_on_the_event_loop(
    start: Start, devices: Accelerators, world: World
) -> None:
    """Its device may be busy with the work of other models."""
    core = await start()
    world.seconds = 0.0
    asked = asking(core)
    (given,) = await devices.has(1)
    given.end()

    assert [[ord("m")] * 2] == (await asked).outputs[0].data.tolist()
    assert "dispatch cuda:0_0" == given.thread


# # --- number in flight --------------------------------------------------------------------------


async def test_the_next_batch_leaves_when_the_one_before_it_is_dispatched(
    start: Start, devices: Accelerators
) -> None:
    """Until then it collects requests; then the device has both, and computes the first."""
    core = await start()
    devices.may_dispatch.clear()
    asked = [asking(core)]
    await passes()
    asked += [asking(core), asking(core, rows=2)]
    await passes()
    pending = instance_of(core).pending
    devices.may_dispatch.set()
    given = await devices.has(2)
    unanswered = [task.done() for task in asked]
    devices.open()
    await asyncio.gather(*asked)

    assert 2 == pending
    assert [1, 3] == [one.rows for one in given]
    assert [False] * 3 == unanswered


async def test_a_replica_has_no_more_in_flight_than_it_may(
    start: Start, devices: Accelerators
) -> None:
    core = await start()
    asked = []
    for _ in range(IN_FLIGHT + 3):
        asked.append(asking(core, rows=2))
        await passes(3)
    await passes()
    counts = [len(devices.given)]
    devices.given[0].end()
    given = await devices.has(IN_FLIGHT + 1)
    await passes()
    counts.append(len(given))
    devices.open()
    await asyncio.gather(*asked)

    assert [IN_FLIGHT, IN_FLIGHT + 1] == counts
    # The requests that waited meanwhile form one batch, as large as allowed.
    assert [2] * IN_FLIGHT + [4, 2] == [one.rows for one in devices.given]


async def test_models_that_are_not_gathered_wait_as_well(
    start: Start, devices: Accelerators
) -> None:
    core = await start(dynamic_batching=False)
    asked = [asking(core) for _ in range(IN_FLIGHT + 2)]
    await devices.has(IN_FLIGHT)
    await passes()
    counts = [len(devices.given)]
    devices.open()
    await asyncio.gather(*asked)

    assert [IN_FLIGHT] == counts
    assert [1] * (IN_FLIGHT + 2) == [one.rows for one in devices.given]


async def test_the_replica_with_the_least_to_do_is_next(
    start: Start, devices: Accelerators
) -> None:
    core = await start("m", ["cuda:0", "cuda:1"])
    asked = []
    for count in range(2 * IN_FLIGHT):
        asked.append(asking(core, rows=4))
        await devices.has(count + 1)
    first = [one.queue for one in devices.given]
    for one in devices.given:
        if one.queue == "cuda:1":
            one.end()
    await until(lambda: sum(task.done() for task in asked) == IN_FLIGHT)
    asked.append(asking(core))
    given = await devices.has(2 * IN_FLIGHT + 1)
    devices.open()
    await asyncio.gather(*asked)

    assert ["cuda:0", "cuda:1"] * IN_FLIGHT == first
    assert "cuda:1" == given[-1].queue


async def test_what_other_models_do_on_a_device_counts(
    start: Start, devices: Accelerators, world: World, add_model: AddModel
) -> None:
    core = await start("m", ["cuda:0"])
    world.model_type = devices.models_on("cuda:0", "cuda:1")
    add_model("n", {1: 1})
    await core.control.load("n")
    asked = [asking(core)]
    await devices.has(1)
    asked.append(asking(core, "n"))
    given = await devices.has(2)
    devices.open()
    await asyncio.gather(*asked)

    assert ["cuda:0", "cuda:1"] == [one.queue for one in given]


async def test_what_is_learnt_changes_nothing_on_a_device(start: Start) -> None:
    """A rebuilt station would put more batches in flight than a replica may have."""
    core = await start()
    before = instance_of(core).station
    instance_of(core).renew()

    assert before is instance_of(core).station


async def test_the_queue_of_a_model_has_its_bound(start: Start, devices: Accelerators) -> None:
    core = await start(max_requests_per_model=IN_FLIGHT + 1)
    asked = []
    for _ in range(IN_FLIGHT + 1):
        asked.append(asking(core))
        await passes(3)
    with pytest.raises(Overloaded):
        await asking(core)
    devices.open()
    await asyncio.gather(*asked)


# # --- completion --------------------------------------------------------------------------------

NO_ROOM = OutOfMemory("m", "RESOURCE_EXHAUSTED")


async def test_an_error_of_the_device_is_told_to_those_of_the_batch_that_have_it_alone(
    start: Start, devices: Accelerators
) -> None:
    """XLA reports errors late, when the outputs are fetched."""
    core = await start()
    asked = [asking(core) for _ in range(3)]
    (given,) = await devices.has(1)
    given.end(NO_ROOM)
    for count in (2, 3, 4):
        found = await devices.has(count)
        found[count - 1].end(NO_ROOM)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    devices.open()
    again = await asking(core)

    assert [NO_ROOM] * 3 == outcomes
    assert (1, 2) == again.outputs[0].data.shape


async def test_an_error_of_the_dispatch_is_told_to_all_of_the_batch(
    start: Start, devices: Accelerators
) -> None:
    core = await start()
    devices.problem = NO_ROOM
    outcomes = await asyncio.gather(*[asking(core) for _ in range(3)], return_exceptions=True)
    devices.problem = None
    devices.open()
    await asyncio.gather(*[asking(core) for _ in range(3)])

    assert [NO_ROOM] * 3 == outcomes
    assert [3] == [one.rows for one in devices.given]


@pytest.mark.parametrize("dispatches", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
async def test_what_a_device_does_not_end_is_answered_and_all_behind_it(
    start: Start, devices: Accelerators, rows: int, *, dispatches: bool
) -> None:
    """In flight, waiting for a slot, and queued; afterwards the model serves again."""
    core = await start("mn")
    core.renew(Stations(core.workers, ExecutionPolicy(0.5, execution_seconds=0.2), core.engine))
    if not dispatches:
        devices.may_dispatch.clear()
    asked = [asking(core, rows=rows) for _ in range(5 * IN_FLIGHT)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    ready = core.registry.ready("m"), core.registry.ready("n")
    devices.may_dispatch.set()
    devices.open()
    await until(lambda: core.registry.ready("m"))
    again = await asyncio.gather(*(asking(core, rows=rows) for _ in range(5 * IN_FLIGHT)))

    assert {ExecutionStalled} == {type(error) for error in found}
    assert (False, True) == ready
    assert [[[ord("m")] * 2] * rows] * len(again) == [
        answer.outputs[0].data.tolist() for answer in again
    ]
    assert 0 == instance_of(core).pending == instance_of(core).users


async def test_who_leaves_while_the_device_computes_is_not_waited_for(
    start: Start, devices: Accelerators
) -> None:
    """The rest of the batch is answered; the instance stays in use until the device is done."""
    core = await start()
    leaving, staying = asking(core), asking(core)
    (given,) = await devices.has(1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    given.end()

    assert (1, 2) == (await staying).outputs[0].data.shape
    assert 0 == instance_of(core).users


async def test_an_unload_waits_for_what_is_in_flight(start: Start, devices: Accelerators) -> None:
    """This includes executions of cancelled requests: the device still accesses their buffers."""
    core = await start()
    asked = asking(core)
    (given,) = await devices.has(1)
    asked.cancel()
    unloading = asyncio.ensure_future(core.control.unload("m"))
    await passes()
    before = (unloading.done(), given.model.closed)
    given.end()
    await unloading

    assert (False, False) == before
    assert given.model.closed


async def test_who_leaves_the_queue_is_never_dispatched(
    start: Start, devices: Accelerators
) -> None:
    core = await start()
    asked = [asking(core, rows=4) for _ in range(IN_FLIGHT)]
    await devices.has(IN_FLIGHT)
    leaving = asking(core)
    await passes()
    leaving.cancel()
    await asyncio.wait([leaving])
    devices.open()
    await asyncio.gather(*asked)
    await unused(core)

    assert [4] * IN_FLIGHT == [one.rows for one in devices.given]


async def unused(core: Core, name: str = "m") -> None:
    await until(lambda: not core.registry.requests and not instance_of(core, name).users)


# # --- single requests: shapes on demand, and steps of ensembles ---------------------------------


class Shapes:
    """Has a program for every number of rows, in addition to those of the load."""

    def __init__(self, model: AcceleratedModel) -> None:
        self._model = model

    def shape_of(self, inputs: Mapping[str, Value]) -> Hashable:
        return inputs["x"].shape[0]

    def find(self, shape: Hashable) -> Executable | None:
        return self._model

    def compile(self, shape: Hashable) -> Executable:
        raise AssertionError("compiled what there is")


@pytest.fixture
async def alone(start: Start, world: World, monkeypatch: pytest.MonkeyPatch) -> Core:
    """Make a core whose model executes each request alone."""
    core: Core = await start()
    (model,) = world.open
    assert isinstance(model, AcceleratedModel)
    monkeypatch.setattr(model, "on_demand", Shapes(model))
    core.renew()
    return core


async def test_shapes_on_demand_wait_for_room(alone: Core, devices: Accelerators) -> None:
    before = time.perf_counter_ns()
    asked = [asking(alone) for _ in range(IN_FLIGHT + 2)]
    await devices.has(IN_FLIGHT)
    await passes()
    counts = [len(devices.given), instance_of(alone).pending]
    since, now = list(instance_of(alone).station.pending_since()), time.perf_counter_ns()
    devices.open()
    await asyncio.gather(*asked)
    await unused(alone)

    assert [IN_FLIGHT, 2] == counts
    assert IN_FLIGHT + 2 == len(devices.given)
    assert [True] * 2 == [before <= one <= now for one in since]


async def test_who_waits_for_room_is_answered_where_a_device_does_not_end(
    alone: Core, devices: Accelerators
) -> None:
    policy = ExecutionPolicy(0.5, execution_seconds=0.2)
    alone.renew(Stations(alone.workers, policy, alone.engine))
    asked = [asking(alone) for _ in range(IN_FLIGHT + 2)]
    async with asyncio.timeout(30):
        found = await asyncio.gather(*asked, return_exceptions=True)
    devices.open()
    await until(lambda: alone.registry.ready("m"))

    assert {ExecutionStalled} == {type(error) for error in found}
    assert IN_FLIGHT == len(devices.given)


async def test_who_leaves_before_there_is_room_is_never_dispatched(
    alone: Core, devices: Accelerators
) -> None:
    asked = [asking(alone) for _ in range(IN_FLIGHT)]
    await devices.has(IN_FLIGHT)
    leaving = asking(alone)
    await passes()
    leaving.cancel()
    await asyncio.wait([leaving])
    pending = instance_of(alone).pending
    devices.open()
    await asyncio.gather(*asked)
    await unused(alone)

    assert 0 == pending
    assert IN_FLIGHT == len(devices.given)


async def with_steps(start: Start, add_model: AddModel, world: World) -> Core:
    """Load a model on one device, and an ensemble with that model as its step."""
    world.devices = Devices("cuda", 1)
    core: Core = await start()
    add_model("e", {}, OF_STEP_M)
    await core.control.load("e")
    return core


async def test_steps_and_requests_share_the_room(
    start: Start, add_model: AddModel, world: World, devices: Accelerators
) -> None:
    """Their sum stays within the in-flight limit, and both make progress."""
    core = await with_steps(start, add_model, world)
    asked = []
    for _ in range(IN_FLIGHT + 2):
        asked += [asking(core, "e"), asking(core, "m", rows=2)]
        await passes(3)
    await passes()
    most = len(devices.given)
    for done in range(2):
        devices.given[done].end()
        await devices.has(IN_FLIGHT + done + 1)
    rows = {one.rows for one in devices.given}
    devices.open()
    await asyncio.gather(*asked)
    await unused(core)

    assert IN_FLIGHT == most
    assert len(rows) > 1


async def test_a_batch_has_its_turn_among_steps(
    start: Start, add_model: AddModel, world: World, devices: Accelerators
) -> None:
    """A step that arrives after the batch runs after it, however many steps wait."""
    core = await with_steps(start, add_model, world)
    asked = []
    for count in range(IN_FLIGHT):
        asked.append(asking(core, rows=4))
        await devices.has(count + 1)
    for name, rows in (("e", 1), ("m", 2), ("e", 1), ("e", 1)):
        asked.append(asking(core, name, rows))
        await passes(3)
    for done in range(4):
        devices.given[done].end()
        await devices.has(IN_FLIGHT + done + 1)
    devices.open()
    await asyncio.gather(*asked)
    await unused(core)

    assert [4] * IN_FLIGHT + [1, 2, 1, 1] == [one.rows for one in devices.given]


async def test_a_step_that_nobody_waits_for_is_called_off(
    start: Start, add_model: AddModel, world: World, devices: Accelerators
) -> None:
    core = await with_steps(start, add_model, world)
    asked = [asking(core, "e") for _ in range(IN_FLIGHT + 1)]
    await devices.has(IN_FLIGHT)
    await passes()
    asked[-1].cancel()
    await asyncio.wait([asked[-1]])
    devices.open()
    await asyncio.gather(*asked[:-1])
    await unused(core)

    assert IN_FLIGHT == len(devices.given)


# # --- threads -----------------------------------------------------------------------------------


async def test_closed_threads_end_what_the_device_has_and_call_off_the_rest(
    start: Start, devices: Accelerators
) -> None:
    """Requests that were not dispatched are cancelled, so that no client waits forever."""
    core = await start("mn")
    devices.may_dispatch.clear()
    asked = [asking(core, "m"), asking(core, "n")]
    await until(lambda: core.workers.device("cuda:0").in_flight == len(asked))
    threads = core.workers.device("cuda:0")
    closing = asyncio.get_running_loop().run_in_executor(None, threads.close)
    await passes()
    devices.open()
    await closing
    outcomes = await asyncio.gather(*asked, return_exceptions=True)

    assert 1 == len(devices.given)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert not isinstance(outcomes[0], BaseException)
    with pytest.raises(RuntimeError, match="shutdown"):
        await asking(core)


class Flight:
    """A flight that completes immediately."""

    def fetch(self) -> Mapping[str, Value]:
        return {}


class Nobody:
    """A User without a reference count."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...


@pytest.mark.usefixtures("no_collection")
async def test_what_is_over_leaves_no_garbage() -> None:
    """A reference cycle would hold device memory until the next garbage collection."""
    threads = DeviceThreads("cuda:0")
    watched: list[weakref.ref[Flight]] = []

    def dispatch(replica: int) -> InFlight:
        flight = Flight()
        watched.append(weakref.ref(flight))
        return flight

    heard: list[object] = []
    job = Dispatcher(Nobody(), [threads], lambda: 0).submit(dispatch, heard.append)
    await until(lambda: len(heard) == 1)
    threads.close()
    left = watched[0]()

    assert left is None
    assert not job.cancel()


async def test_the_threads_of_devices_end_with_the_others() -> None:
    workers = Workers(load_threads=1, execute_threads=1)
    threads = workers.device("cuda:0")
    again = workers.device("cuda:0")
    workers.close()

    assert threads is again
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.start(lambda: lambda: None, lambda: None, lambda result: None)


async def test_a_thread_goes_on_behind_an_error() -> None:
    threads = DeviceThreads("cuda:0")
    heard: list[object] = []

    def failing() -> Callable[[], int]:
        raise ZeroDivisionError

    threads.start(failing, lambda: heard.append("dispatched"), heard.append)
    threads.start(lambda: lambda: 1 // 0, lambda: heard.append("dispatched"), heard.append)
    threads.start(lambda: lambda: 7, lambda: heard.append("dispatched"), heard.append)
    await until(lambda: len(heard) == 5)
    threads.close()

    assert ["dispatched", "dispatched"] == [one for one in heard if isinstance(one, str)]
    assert [ZeroDivisionError] * 2 == [type(one) for one in heard if isinstance(one, Exception)]
    assert 7 == heard[-1]


async def test_whoever_cannot_be_fetched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetching thread cannot be started, as when the system is out of threads."""
    threads = DeviceThreads("cuda:0")
    heard: list[object] = []

    def submit(fetch: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads._fetch, "submit", submit)
    threads.start(lambda: lambda: 7, lambda: heard.append("dispatched"), heard.append)
    await until(lambda: len(heard) == 2)
    threads.close()

    assert ["dispatched", "can't start new thread"] == [str(one) for one in heard]
