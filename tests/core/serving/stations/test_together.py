"""Continuous batching: one execution computes the next answers to several requests."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.concurrency.host import HostThreads
from xlaserve.runtime.loaded import Answer, Value
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.tensors import Parameter


class Counting:
    """The answers to one request: the numbers up to its input."""

    def __init__(self, last: int, replica: int) -> None:
        self.last = last
        self.replica = replica
        self.number = 0
        self.closed = 0

    def __next__(self) -> Answer:
        raise AssertionError("it is never asked by itself")

    def close(self) -> None:
        self.closed += 1


class SteppingModel(FakeModel):
    """Counts for several requests together; fails a negative one alone, and all at 99."""

    most_together = 3

    def __init__(self, amount: float, world: World, devices: Sequence[str]) -> None:
        super().__init__(amount, world, devices)
        self.groups: list[list[tuple[int, int]]] = []
        """Per execution: last number and next number of each request."""
        self.opened: list[Counting] = []
        self.gate = threading.Semaphore(0)
        """Released once for each execution that may run."""

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Counting:
        wanted: Any = inputs["x"]
        self.opened.append(Counting(int(wanted[0, 0]), replica))
        return self.opened[-1]

    def advance(self, rows: Sequence[Counting]) -> Sequence[Answer | Exception]:
        assert self.gate.acquire(timeout=10)
        self.groups.append([(row.last, row.number) for row in rows])
        if any(row.last == 99 for row in rows):
            raise ArithmeticError("of all")
        assert 1 == len({row.replica for row in rows}) == len({not row.number for row in rows})
        return [self.step(row) for row in rows]

    def step(self, row: Counting) -> Answer | Exception:
        row.number += 1
        if row.last < 0:
            return ValueError("of one")
        outputs = {"y": np.full((1, 2), row.number, np.float32)}
        return Answer(outputs, row.number == row.last)


class Client(InferCall):
    """Reads immediately, unless told otherwise."""

    takes_many = True
    deadline = None
    reads = True

    def __init__(self) -> None:
        self.told: list[Any] = []

    def write(self, response: InferResponse, *, last: bool) -> None:
        (output,) = response.outputs
        self.told.append(float(output.data[0, 0]))

    def refuse(self, error: BaseException) -> None:
        self.told.append(error)

    @property
    def is_writable(self) -> bool:
        return self.reads


def asking(core: Core, *counts: float, of_bad: int = 0) -> list[Client]:
    """Send one request per count; `of_bad` is the client class of the negative ones."""
    clients = []
    for count in counts:
        inputs = (InferInput("x", FP32, np.full((1, 2), count, np.float32)),)
        clients.append(Client())
        clients[-1].client = of_bad if count == 99 else 0
        core.engine.begin(clients[-1], InferRequest("m", inputs=inputs))
    return clients


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
async def core(make_core: MakeCore, add_model: AddModel, world: World) -> AsyncIterator[Core]:
    world.model_type = SteppingModel
    made = make_core()
    add_model("m", {1: 1})
    await made.control.load("m")
    yield made
    instance = made.registry.resolve("m")[1]
    await until(lambda: not instance.users and not made.registry.requests)


@pytest.fixture
def model(core: Core, world: World) -> SteppingModel:
    (found,) = world.open
    assert isinstance(found, SteppingModel)
    return found


def free(model: SteppingModel) -> None:
    model.gate.release(10_000)


def sizes(model: SteppingModel) -> list[int]:
    return [len(group) for group in model.groups]


async def test_requests_that_come_together_are_stepped_together(
    core: Core, model: SteppingModel
) -> None:
    """Up to the batch limit; the others run in the next execution."""
    clients = asking(core, 4, 4, 4, 4, 4)
    free(model)
    await until(lambda: all(client.has_ended for client in clients))

    assert [[1, 2, 3, 4]] * 5 == [client.told for client in clients]
    assert [3, 2] == sizes(model)[:2]
    assert all(row.closed == 1 for row in model.opened)


async def test_a_request_joins_those_that_go_on_behind_its_first_step(
    core: Core, model: SteppingModel
) -> None:
    """Whatever step they are at. First steps and later steps never share an execution."""
    (first,) = asking(core, 500)
    model.gate.release(100)
    await until(lambda: len(model.groups) >= 50)
    (second,) = asking(core, 450)
    free(model)
    await until(lambda: first.has_ended and second.has_ended)

    assert [list(range(1, 501)), list(range(1, 451))] == [first.told, second.told]
    assert [(450, 0)] in model.groups
    joined = [group for group in model.groups if len(group) == 2]
    assert joined
    assert {500, 450} == {last for last, _ in joined[0]}


async def test_an_error_of_one_is_of_nobody_else(core: Core, model: SteppingModel) -> None:
    clients = asking(core, 3, -1, 3)
    free(model)
    await until(lambda: all(client.has_ended for client in clients))

    assert [[1, 2, 3], [1, 2, 3]] == [clients[0].told, clients[2].told]
    assert [ValueError] == [type(error) for error in clients[1].told]
    assert [1, 1, 1] == [row.closed for row in model.opened]


async def test_of_an_execution_that_fails_those_alone_fail_that_do_by_themselves(
    core: Core, model: SteppingModel
) -> None:
    """The next execution begins as usual."""
    clients = asking(core, 5, 99, 6, 2)
    free(model)
    await until(lambda: all(client.has_ended for client in clients))

    assert [ArithmeticError] == [type(error) for error in clients[1].told]
    assert [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]] == [clients[0].told, clients[2].told]
    assert [1, 2] == clients[3].told
    assert [1, 1, 1, 1] == [row.closed for row in model.opened]


async def test_an_answer_that_cannot_be_written_is_of_nobody_else(
    core: Core, model: SteppingModel
) -> None:
    """Its call fails with that error, and the others continue."""

    def write(response: InferResponse, *, last: bool) -> None:
        raise Panic

    clients = asking(core, 3, 3, 3)
    clients[0].write = write  # type: ignore[method-assign]
    free(model)
    await until(lambda: all(client.has_ended for client in clients))
    (later,) = asking(core, 2)
    await until(lambda: later.has_ended)

    assert [Panic] == [type(error) for error in clients[0].told]
    assert [[1, 2, 3], [1, 2, 3], [1, 2]] == [one.told for one in (*clients[1:], later)]


class Panic(BaseException):
    """An exception such as a Rust library raises on a panic."""


async def test_what_waits_of_a_client_that_is_found_out_is_executed_by_itself(
    core: Core, model: SteppingModel
) -> None:
    """Although it arrived before its client was detected."""
    first = asking(core, 2, 99, of_bad=7)
    await until(lambda: model.opened)
    waiting = asking(core, 99, 2, of_bad=7)
    free(model)
    await until(lambda: all(client.has_ended for client in (*first, *waiting)))

    assert [[1, 2], [1, 2]] == [first[0].told, waiting[1].told]
    mixed = [group for group in model.groups if len(group) > 1 and any(of == 99 for of, _ in group)]
    assert 1 == len(mixed)


async def test_who_does_not_read_is_in_no_execution(core: Core, model: SteppingModel) -> None:
    """The others continue, and so does this request once its client reads again."""
    slow, quick = asking(core, 60, 60)
    slow.reads = False
    free(model)
    await until(lambda: quick.has_ended)
    paused = len(slow.told), model.opened[0].number
    slow.reads = True
    slow.resume()
    await until(lambda: slow.has_ended)

    assert list(range(1, 61)) == slow.told
    assert paused[0] <= paused[1] <= 2


async def test_who_leaves_while_it_waits_is_not_stepped(core: Core, model: SteppingModel) -> None:
    clients = asking(core, 5, 5, 5, 7)
    station = core.registry.resolve("m")[1].station
    assert station is not None
    waiting = len(list(station.pending_since()))
    clients[3].cancel()
    free(model)
    await until(lambda: all(client.has_ended for client in clients))
    left = [client.told for client in clients]

    assert (4, 0) == (waiting, len(list(station.pending_since())))
    assert [[1, 2, 3, 4, 5]] * 3 == left[:3]
    assert 7 not in {last for group in model.groups for last, _ in group}


async def test_who_leaves_within_a_step_is_closed_behind_it(
    core: Core, model: SteppingModel
) -> None:
    clients = asking(core, 5, 500)
    model.gate.release(1)
    await until(lambda: model.groups)
    clients[1].cancel()
    free(model)
    await until(lambda: clients[0].has_ended and model.opened[1].closed)

    assert [1, 2, 3, 4, 5] == clients[0].told
    assert [1, 1] == [row.closed for row in model.opened]


async def test_without_a_thread_all_are_told_and_later_ones_are_served(
    core: Core, model: SteppingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: HostThreads, *arguments: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(HostThreads, "start", none)
        refused = asking(core, 5, 5, 5, 5)
        await until(lambda: all(client.has_ended for client in refused))
    (served,) = asking(core, 2)
    free(model)
    await until(lambda: served.has_ended)

    assert [[RuntimeError]] * 4 == [[type(error) for error in one.told] for one in refused]
    assert [1, 2] == served.told


async def test_batches_may_be_forbidden(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """Each request is then executed alone, as for any other generator."""
    world.model_type = SteppingModel
    core = make_core(dynamic_batching=False)
    add_model("m", {1: 1})
    await core.control.load("m")
    (client,) = asking(core, 1)
    await until(lambda: client.has_ended)

    assert [AssertionError] == [type(error) for error in client.told]
