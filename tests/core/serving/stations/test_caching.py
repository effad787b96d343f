"""Stations that answer repeated requests from a cache."""

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.errors import DeadlineExceeded, Overloaded
from xlaserve.net.ledger import Ledger
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.serving.response_cache import ResponseCache, key_of
from xlaserve.serving.stations.caching import Caching
from xlaserve.serving.stations.table import ExecutionPolicy, Stations
from xlaserve.serving.uses import note, use_of

CONFIG = {"response_cache": {"enable": True}}
MEGABYTE = 1 << 20


@dataclass(eq=False)
class Client(InferCall):
    """A client that records its answers."""

    told: list[Any] = field(default_factory=list)
    deadline: float | None = None

    def write(self, response: InferResponse, *, last: bool) -> None:
        assert last
        self.told.append([response.id, *(o.data[0, 0] for o in response.outputs)])

    def refuse(self, error: BaseException) -> None:
        self.told.append(error)


class Executions(FakeModel):
    """A model that counts its executions, and fails for a negative number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.executed: list[float] = []

    def execute(self, inputs: Any, *, resident: bool = False, replica: int = 0) -> Any:
        outputs = super().execute(inputs, resident=resident, replica=replica)
        value = float(inputs["x"][0, 0])
        self.executed.append(value)
        if value < 0:
            raise ArithmeticError("below zero")
        return outputs


@dataclass
class Cached:
    """A core with a cache, and a model that uses it."""

    core: Core
    cache: ResponseCache
    world: World

    @property
    def model(self) -> Any:
        (model,) = self.world.open
        return model

    @property
    def totals(self) -> Any:
        version, _ = self.core.registry.resolve("m")
        return version.statistics.totals()

    @property
    def station(self) -> Any:
        return self.core.registry.resolve("m")[1].station

    def ask(self, value: float, columns: int = 2, **more: Any) -> Client:
        client = Client(deadline=more.pop("deadline", None))
        client.principal, client.parent = more.pop("principal", None), more.pop("parent", None)
        data = np.full((more.pop("rows", 1), columns), value, np.float32)
        request = InferRequest("m", id="7", inputs=(InferInput("x", FP32, data),), **more)
        self.core.engine.begin(client, request)
        return client


@pytest.fixture
def start(make_core: MakeCore, add_model: AddModel, world: World) -> Callable[..., Any]:
    async def run(limit: int = MEGABYTE, **settings: Any) -> Cached:
        world.model_type = Executions
        queue = {"default_queue_policy": {"max_queue_size": settings.pop("queue", 9)}}
        add_model("m", {1: 100}, CONFIG | {"dynamic_batching": queue})
        core = make_core(**settings)
        await core.control.load("m")
        cache = ResponseCache(limit, Ledger(64 * MEGABYTE))
        core.renew(Stations(core.workers, ExecutionPolicy(0.5), core.engine, cache=cache))
        return Cached(core, cache, world)

    return run


async def answered(*clients: Client) -> list[Any]:
    while not all(client.told for client in clients):
        await asyncio.sleep(0)
    return [client.told[0] for client in clients]


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["inline", "in a thread"])
async def test_an_equal_request_is_answered_without_an_execution(
    start: Any, world: World, seconds: float
) -> None:
    world.seconds = seconds
    cached = await start()
    first = await answered(cached.ask(1))
    took = cached.totals.success.ns
    again = cached.ask(1)  # in the same iteration of the event loop

    assert cached.totals.success.ns > took
    assert [["7", 101.0]] == first == again.told
    assert [1.0] == cached.model.executed
    assert [["7", 102.0]] == await answered(cached.ask(2))
    totals = cached.totals
    assert (3, 2, 2) == (totals.success.count, totals.inference_count, totals.execution_count)
    assert (1, 2) == (totals.cache_hit.count, totals.cache_miss.count)
    assert (2, 3) == (totals.compute_infer.count, sum(totals.request_buckets))
    assert totals.cache_hit.ns > 0
    assert totals.cache_miss.ns > 0


async def test_equal_requests_in_flight_share_one_execution(start: Any, world: World) -> None:
    cached = await start()
    world.may_execute.clear()
    equal = [cached.ask(1) for _ in range(5)]
    other = cached.ask(2)
    world.may_execute.set()

    assert [["7", 101.0]] * 5 == await answered(*equal)
    assert [["7", 102.0]] == await answered(other)
    assert [1.0, 2.0] == sorted(cached.model.executed)
    totals = cached.totals
    assert (4, 2, 6) == (totals.cache_hit.count, totals.cache_miss.count, totals.success.count)
    assert 2 == totals.execution_count


async def test_equal_requests_of_two_callers_share_no_execution(start: Any, world: World) -> None:
    """Part of a call belongs to its client; all anonymous clients count as one caller."""
    cached = await start()
    world.may_execute.clear()
    whole = InferCall()
    whole.principal = Principal("a")
    callers = [Principal("a"), Principal("b"), None, Principal("a"), None]
    clients = [cached.ask(1, principal=caller) for caller in callers]
    part = cached.ask(1, parent=whole)
    world.may_execute.set()

    assert [["7", 101.0]] * 6 == await answered(*clients, part)
    assert [1.0, 1.0, 1.0] == cached.model.executed
    assert (3, 3) == (cached.totals.cache_hit.count, cached.totals.cache_miss.count)


async def test_a_leader_that_goes_away_leaves_the_execution_to_the_others(
    start: Any, world: World
) -> None:
    cached = await start()
    world.may_execute.clear()
    leader, middle, last = (cached.ask(1) for _ in range(3))
    leader.cancel()
    middle.cancel()
    world.may_execute.set()

    assert [["7", 101.0]] == await answered(last)
    assert [[], []] == [leader.told, middle.told]
    assert [1.0] == cached.model.executed
    totals = cached.totals
    assert (0, 1) == (totals.cache_hit.count, totals.cache_miss.count)
    assert (1, 2) == (totals.success.count, totals.fail.count)


async def test_a_deadline_that_passes_is_that_of_one_request_alone(
    start: Any, world: World
) -> None:
    cached = await start()
    world.may_execute.clear()
    now = asyncio.get_running_loop().time()
    hasty, patient = cached.ask(1, deadline=now + 0.001), cached.ask(1)
    (told,) = await answered(hasty)
    world.may_execute.set()

    assert isinstance(told, DeadlineExceeded)
    assert [["7", 101.0]] == await answered(patient)


async def test_the_last_one_takes_the_execution_back(start: Any, world: World) -> None:
    """The execution is removed from the queue, and the next equal request is executed anew."""
    cached = await start()
    world.may_execute.clear()
    busy = cached.ask(5)
    blocked = [cached.ask(6), cached.ask(7)]
    gone = [cached.ask(1) for _ in range(3)]
    for client in gone:
        client.cancel()
    flights = len(cached.station._flights)
    world.may_execute.set()
    await answered(busy, *blocked)

    assert 3 == flights
    assert 1.0 not in cached.model.executed
    assert [["7", 101.0]] == await answered(cached.ask(1))
    assert not cached.station._flights
    assert 0 == cached.core.registry.requests


async def test_a_failure_is_told_to_all_and_not_kept(start: Any, world: World) -> None:
    cached = await start()
    world.may_execute.clear()
    equal = [cached.ask(-1) for _ in range(3)]
    world.may_execute.set()
    told = await answered(*equal)

    assert ["below zero"] * 3 == [str(error) for error in told]
    assert 3 == cached.totals.fail.count
    assert 0 == len(cached.cache)
    await answered(cached.ask(-1))
    assert [-1.0, -1.0] == cached.model.executed


async def test_other_parameters_are_another_request(start: Any) -> None:
    cached = await start()
    for parameters in ({}, {"mine": 1}, {"mine": True}, {"mine": 1}, {"priority": 1}):
        await answered(cached.ask(1, parameters=parameters))

    assert [1.0] * 3 == cached.model.executed


async def test_a_batch_is_kept_row_by_row(start: Any, world: World) -> None:
    """Each answer is a copy of its own rows."""
    world.batch_limit = 4
    cached = await start()
    gathered = await answered(*(cached.ask(value) for value in (1, 2, 3)))
    again = await answered(*(cached.ask(value) for value in (3, 1, 2)))

    assert [["7", 101.0], ["7", 102.0], ["7", 103.0]] == gathered
    assert [["7", 103.0], ["7", 101.0], ["7", 102.0]] == again
    assert 1 == len(cached.model.executed) == cached.totals.execution_count
    assert 3 == cached.totals.cache_hit.count


async def test_long_inputs_are_hashed_in_a_thread(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlaserve.serving.stations.caching._INLINE_BYTES", 4)
    cached = await start()
    first, again = cached.ask(1), cached.ask(1)

    assert ([], []) == (first.told, again.told)
    assert [["7", 101.0]] * 2 == await answered(first, again)
    assert [1.0] == cached.model.executed
    hashing, go_on = threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        hashing.set()
        go_on.wait(10)
        return key_of(*args)

    monkeypatch.setattr("xlaserve.serving.stations.caching.key_of", slowly)
    gone = cached.ask(2)
    while not hashing.is_set():
        await asyncio.sleep(0)
    gone.cancel()
    go_on.set()
    assert [["7", 103.0]] == await answered(cached.ask(3))
    assert 2.0 not in cached.model.executed


async def test_inputs_that_a_client_may_change_meanwhile_are_not_cached(start: Any) -> None:
    """The execution may read other bytes than the key was computed from: a wrong cached answer."""
    cached = await start()
    for _ in range(2):
        client = Client()
        client.is_volatile = True
        data = np.ones((1, 2), np.float32)
        request = InferRequest("m", id="7", inputs=(InferInput("x", FP32, data),))
        cached.core.engine.begin(client, request)
        await answered(client)

    assert [1.0, 1.0] == cached.model.executed
    assert 0 == len(cached.cache)


async def test_an_overload_refuses_the_request_and_leaves_no_flight(
    start: Any, world: World
) -> None:
    world.batch_limit = 4
    cached = await start(queue=1)
    first, equal = cached.ask(1), cached.ask(1)
    refused = cached.ask(2)

    assert isinstance(refused.told[0], Overloaded)
    assert 1 == len(cached.station._flights)
    assert [["7", 101.0]] * 2 == await answered(first, equal)
    assert [["7", 102.0]] == await answered(cached.ask(2))


async def test_a_reload_answers_anew_and_an_unload_leaves_nothing(
    start: Any, world: World, add_model: AddModel
) -> None:
    cached = await start()
    stations = cached.core.registry.resolve("m")[1]._make_station
    await answered(cached.ask(1))
    add_model("m", {1: 200})
    # The next instance has the same cache.
    cached.core.control._loader._make_station = stations
    await cached.core.control.load("m")

    assert 0 == len(cached.cache)
    assert [["7", 201.0]] == await answered(cached.ask(1))
    assert 1 == len(cached.cache)
    await cached.core.control.unload("m")
    assert (0, 0) == (len(cached.cache), cached.cache.held)


async def test_what_waits_moves_to_the_station_that_comes_next(start: Any, world: World) -> None:
    """The caching station stays; the station inside it is replaced."""
    world.batch_limit = 4
    cached = await start()
    before = cached.station
    within = before.within
    waiting = [cached.ask(1), cached.ask(1), cached.ask(2)]
    cached.core.registry.resolve("m")[1].renew()

    assert before is cached.station
    assert within is not before.within
    assert [["7", 101.0], ["7", 101.0], ["7", 102.0]] == await answered(*waiting)
    assert 0 == len(list(within.pending_since()))


async def test_an_instance_with_a_cache_is_free_when_it_is_unloaded(
    start: Any, no_collection: None
) -> None:
    cached = await start()
    await answered(*(cached.ask(1) for _ in range(2)))
    await cached.core.control.unload("m")
    gc.collect()

    assert [] == cached.world.open
    assert not any(isinstance(found, Caching) for found in gc.get_objects())


async def test_a_model_that_asks_for_none_has_the_station_that_it_had(
    make_core: MakeCore, add_model: AddModel
) -> None:
    add_model("m", {1: 100})
    core = make_core()
    await core.control.load("m")
    cache = ResponseCache(MEGABYTE, Ledger(MEGABYTE))
    core.renew(Stations(core.workers, ExecutionPolicy(0.5), core.engine, cache=cache))

    assert not isinstance(core.registry.resolve("m")[1].station, Caching)


async def test_an_answer_made_with_a_model_that_has_changed_meanwhile_is_not_kept(
    start: Any,
) -> None:
    """The old execution may complete after the reload has replaced the model."""
    cached = await start()
    client = cached.ask(1)
    (flight,) = cached.station._flights.values()
    note(flight.relay, [use_of("unloaded", "", cached.model)])
    await answered(client)

    assert 0 == len(cached.cache)
