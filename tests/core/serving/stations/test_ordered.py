"""Stations that send answers in the order of the requests."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.core import FP32, AddModel, Core, MakeCore, World

from xlaserve.errors import DeadlineExceeded, Overloaded
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferInput, InferOutput, InferRequest, InferResponse
from xlaserve.serving.stations.ordered import Ordered


@dataclass
class Held:
    """A station whose executions complete when the test says so (a Station)."""

    calls: list[InferCall] = field(default_factory=list)
    left: list[InferCall] = field(default_factory=list)

    def pending_since(self) -> Iterator[int]:
        return (call.submitted_ns for call in self.calls)

    def begin(self, call: InferCall) -> None:
        if len(self.calls) > 6:
            raise Overloaded("m", 7, "max_queue_size")
        self.calls.append(call)
        call.wait_at(self)

    def leave(self, call: InferCall) -> None:
        self.left.append(call)

    def retire(self) -> list[InferCall]:
        calls, self.calls = self.calls, []
        return calls


class Client(InferCall):
    """Appends its number to a list that all clients of a test share."""

    def __init__(self, number: int, told: list[Any], deadline: float | None = None) -> None:
        self.number, self.all_told, self.deadline = number, told, deadline
        self.then: Callable[[], None] = lambda: None

    def write(self, response: InferResponse, *, last: bool) -> None:
        self.then()  # while it is being written
        self.all_told.append((self.number, float(response.outputs[0].data[0, 0])))

    def refuse(self, error: BaseException) -> None:
        self.all_told.append((self.number, type(error)))


@dataclass
class Asked:
    """A model with ordered answers, and the answers that its clients got."""

    core: Core
    held: Held
    told: list[Any] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def ask(self, deadline: float | None = None) -> Client:
        client = Client(len(self.clients), self.told, deadline)
        self.clients.append(client)
        data = np.full((1, 2), client.number, np.float32)
        request = InferRequest("m", inputs=(InferInput("x", FP32, data),))
        self.core.engine.begin(client, request)
        return client

    def end(self, number: int, error: Exception | None = None) -> None:
        (call,) = [c for c in self.held.calls if c.inputs["x"][0, 0] == number]
        if error is not None:
            call.fail(error)
        else:
            output = InferOutput("y", FP32, call.inputs["x"] * 2)
            call.answer(InferResponse("m", "1", "", (output,)))


@pytest.fixture
async def asked(make_core: MakeCore, add_model: AddModel) -> Asked:
    add_model("m", {1: 100}, {"dynamic_batching": {"preserve_ordering": True}})
    core = make_core()
    await core.control.load("m")
    station: Any = core.registry.resolve("m")[1].station
    assert isinstance(station, Ordered)
    held = Held()
    station.within = held
    return Asked(core, held)


async def test_answers_wait_for_those_before_them(asked: Asked) -> None:
    for _ in range(4):
        asked.ask()
    for number in (2, 1):
        asked.end(number)
    assert [] == asked.told
    asked.end(0)
    assert [(0, 0.0), (1, 2.0), (2, 4.0)] == asked.told
    asked.end(3)
    assert (3, 6.0) == asked.told[-1]
    assert 0 == asked.core.registry.requests


async def test_an_error_keeps_its_place(asked: Asked) -> None:
    for _ in range(3):
        asked.ask()
    asked.end(1, ArithmeticError("one"))
    asked.end(2)
    asked.end(0, ArithmeticError("none"))

    assert [(0, ArithmeticError), (1, ArithmeticError), (2, 4.0)] == asked.told


async def test_heads_that_went_away_hold_up_nobody(asked: Asked) -> None:
    """They are cancelled at any time, or pass their deadline."""
    now = asyncio.get_running_loop().time()
    for _ in range(3):
        asked.ask()
    hasty = asked.ask(now + 0.001)
    asked.ask()
    for number in (1, 2, 4):
        asked.end(number)
    asked.clients[1].cancel()
    assert [] == asked.told
    asked.clients[0].cancel()
    assert [(2, 4.0)] == asked.told
    while not hasty.has_ended:
        await asyncio.sleep(0)

    assert [(2, 4.0), (4, 8.0)] == [one for one in asked.told if one[0] != 3]
    assert (3, DeadlineExceeded) in asked.told
    assert {0, 3} <= {int(call.inputs["x"][0, 0]) for call in asked.held.left}
    assert 0 == asked.core.registry.requests


async def test_an_answer_that_has_others_cancelled_is_written_first(asked: Asked) -> None:
    """Requests sent meanwhile wait."""
    first, second, third = asked.ask(), asked.ask(), asked.ask()

    def then() -> None:
        second.cancel()
        asked.ask()
        asked.end(3)

    first.then = then
    for number in (1, 2, 0):
        asked.end(number)

    assert [(0, 0.0), (2, 4.0), (3, 6.0)] == asked.told
    assert third.has_ended


async def test_a_request_that_is_not_admitted_is_told_at_once(asked: Asked) -> None:
    for _ in range(8):
        asked.ask()
    assert [(7, Overloaded)] == asked.told
    for number in reversed(range(7)):
        asked.end(number)

    assert list(range(7)) == [number for number, _ in asked.told[1:]]
    asked.held.calls.clear()
    asked.ask()
    asked.end(8)
    assert (8, 16.0) == asked.told[-1]


async def test_what_waits_moves_to_the_station_that_comes_next(asked: Asked) -> None:
    asked.ask()
    asked.ask()
    station: Any = asked.core.registry.resolve("m")[1].station
    after = Held()
    station.renew(after)
    asked.held = after
    asked.end(1)
    asked.end(0)

    assert [(0, 0.0), (1, 2.0)] == asked.told


async def test_batches_of_a_model_are_counted_as_batches(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    world.batch_limit, world.replicas = 2, 2
    add_model("m", {1: 100}, {"dynamic_batching": {"preserve_ordering": True}})
    core = make_core()
    await core.control.load("m")
    asked = Asked(core, Held())
    for _ in range(4):
        asked.ask()
    gone = asked.ask()
    gone.cancel()
    while len(asked.told) < 4:
        await asyncio.sleep(0)
    totals = core.registry.version("m", "1").statistics.totals()

    assert [(n, 100.0 + n) for n in range(4)] == asked.told
    assert (4, 4, 2, 1) == (
        totals.success.count,
        totals.inference_count,
        totals.execution_count,
        totals.fail.count,
    )
