"""Decoupled models, which send many answers to a request as fast as the client reads."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import structlog.testing
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.errors import DeadlineExceeded, Decoupled, Overloaded
from xlaserve.runtime.loaded import Answer, Value
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.serving.stations.generator import Generator
from xlaserve.serving.statistics import FailureReason
from xlaserve.tensors import Parameter


class CountingModel(FakeModel):
    """Counts up to the absolute value of its input; a negative input then raises an error."""

    def __init__(self, amount: float, world: World, devices: Sequence[str]) -> None:
        super().__init__(amount, world, devices)
        self.computed = 0
        self.threads: set[str] = set()
        """Names of the threads that computed or closed answers."""
        self.parameters: Mapping[str, Parameter] = {}
        """Parameters of the last request."""
        self.requests_of: list[int] = []
        """The replica of each request."""
        self.fails_to_close = False
        self.finished = 0
        """Number of requests whose generator has finished."""

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        wanted: Any = inputs["x"]
        last = int(wanted[0, 0])
        self.parameters = parameters
        self.requests_of.append(replica)
        try:
            for number in range(abs(last)):
                self._world.may_execute.wait(10)
                assert not self.closed, "closed while it computed"
                self.threads.add(threading.current_thread().name)
                self.computed += 1
                is_last = number + 1 == parameters.get("last")
                size = int(parameters.get("size", 2))
                yield Answer({"y": np.full((1, size), number, np.float32)}, is_last)
            if last < 0:
                raise ArithmeticError("below zero")
        finally:
            self.threads.add(threading.current_thread().name)
            self.finished += 1
            if self.fails_to_close:
                raise OSError("it cannot be closed")


@dataclass(eq=False)
class Client(InferCall):
    """Reads a limited number of answers; backpressure holds back the others."""

    window: int = 1000
    told: list[Any] = field(default_factory=list)
    lasts: list[bool] = field(default_factory=list)
    takes_many: bool = True
    deadline: float | None = None

    def write(self, response: InferResponse, *, last: bool) -> None:
        self.told.append([output.data[0, 0] for output in response.outputs])
        self.lasts.append(last)

    def refuse(self, error: BaseException) -> None:
        self.told.append(error)
        self.lasts.append(True)

    @property
    def is_writable(self) -> bool:
        return len(self.told) < self.window

    def read(self, count: int) -> None:
        """Read this many more answers."""
        self.window += count
        self.resume()


def asking(
    core: Core, count: float, parameters: Mapping[str, Parameter] | None = None, **attributes: Any
) -> Client:
    data = np.full((1, 2), count, np.float32)
    client = Client(**attributes)
    inputs = (InferInput("x", FP32, data),)
    core.engine.begin(client, InferRequest("m", id="7", inputs=inputs, parameters=parameters or {}))
    return client


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def nothing_is_in_use(core: Core) -> None:
    instance = core.registry.resolve("m")[1]
    await until(lambda: not instance.users and not core.registry.requests)


async def settled() -> None:
    """Wait until all ready callbacks have run."""
    for _ in range(20):
        await asyncio.sleep(0.0005)


@pytest.fixture
async def core(make_core: MakeCore, add_model: AddModel, world: World) -> Core:
    world.model_type = CountingModel
    made = make_core()
    add_model("m", {1: 1})
    await made.control.load("m")
    return made


@pytest.fixture
def model(core: Core, world: World) -> CountingModel:
    (found,) = world.open
    assert isinstance(found, CountingModel)
    return found


async def test_a_request_has_many_answers_and_a_last_one(core: Core, model: CountingModel) -> None:
    """The final answer is empty: when the third was sent, nobody knew that no more would follow."""
    client = asking(core, 3)
    in_use = core.registry.requests, isinstance(core.registry.resolve("m")[1].station, Generator)
    await until(lambda: client.has_ended)
    await nothing_is_in_use(core)
    totals = core.registry.version("m", "1").statistics.totals()

    assert (1, True) == in_use
    assert [[0], [1], [2], []] == client.told
    assert [False, False, False, True] == client.lasts
    assert (1, 1, 1) == (totals.success.count, totals.inference_count, totals.execution_count)
    assert all(name.startswith("execute") for name in model.threads)


async def test_a_model_may_know_which_answer_is_the_last(core: Core, model: CountingModel) -> None:
    """The final answer has outputs, and the generator is not advanced again."""
    client = asking(core, 5, {"last": 2})
    await until(lambda: client.has_ended)
    await nothing_is_in_use(core)

    assert [[0], [1]] == client.told
    assert [False, True] == client.lasts
    assert (2, 1) == (model.computed, model.finished)
    assert {"last": 2} == model.parameters


async def test_all_answers_to_a_request_are_computed_by_one_replica(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """The least busy replica is chosen; finished requests do not count."""
    world.model_type, world.replicas = CountingModel, 2
    core = make_core()
    add_model("m", {1: 1})
    await core.control.load("m")
    (model,) = world.open
    assert isinstance(model, CountingModel)
    first, second = (asking(core, 1e6, window=1) for _ in range(2))
    await until(lambda: first.told and second.told)
    first.cancel()
    await until(lambda: model.finished == 1)
    await settled()
    third = asking(core, 1)
    await until(lambda: third.has_ended)
    second.cancel()
    await nothing_is_in_use(core)

    assert {0, 1} == set(model.requests_of[:2])
    assert 0 == model.requests_of[2]


async def test_answers_that_cannot_be_closed_are_logged(core: Core, model: CountingModel) -> None:
    """The model and the request are released nevertheless."""
    model.fails_to_close = True
    client = asking(core, 1e6, window=1)
    await until(lambda: client.told)
    with structlog.testing.capture_logs() as logged:
        client.cancel()
        await nothing_is_in_use(core)

    assert [("m", "OSError('it cannot be closed')")] == [
        (entry["model"], entry["error"]) for entry in logged
    ]


async def test_what_closing_raises_behind_the_last_answer_is_logged(
    core: Core, model: CountingModel
) -> None:
    model.fails_to_close = True
    with structlog.testing.capture_logs() as logged:
        client = asking(core, 5, {"last": 1})
        await until(lambda: client.has_ended)
        await nothing_is_in_use(core)

    assert [[0]] == client.told
    assert ["OSError('it cannot be closed')"] == [e["error"] for e in logged if "error" in e]


async def test_answers_are_closed_of_a_call_that_is_cancelled_while_they_wait_for_a_thread(
    core: Core, model: CountingModel, world: World
) -> None:
    client = asking(core, 1e6, window=1)
    await until(lambda: client.told)
    instance = core.registry.resolve("m")[1]
    world.may_execute.clear()
    others = []
    while not instance.pending:  # until all threads compute for others
        others.append(asking(core, 3))
        await settled()
    client.read(1)
    await until(lambda: client.on_writable is None)
    client.cancel()
    world.may_execute.set()
    await until(lambda: all(other.has_ended for other in others))
    await nothing_is_in_use(core)

    assert len(others) + 1 == model.finished
    assert all(name.startswith("execute") for name in model.threads)


async def test_a_request_may_have_no_answer_but_the_last(core: Core) -> None:
    client = asking(core, 0)
    await until(lambda: client.has_ended)

    assert [[]] == client.told


@pytest.mark.parametrize(("size", "ahead"), [(2, 2), (1 << 12, 1)])
async def test_little_is_computed_that_the_client_does_not_read(
    core: Core, model: CountingModel, size: int, ahead: int
) -> None:
    """Per stream, the model computes ahead as many answers as were read, at most 16 KiB."""
    slow, quick = asking(core, 1e6, {"size": size}, window=2), asking(core, 5)
    await until(lambda: quick.has_ended)
    await until(lambda: len(slow.told) == 2)
    await settled()
    first, computed = list(slow.told), [model.computed]
    for _ in range(17):
        slow.read(1)
        await until(lambda: len(slow.told) == slow.window)
    await settled()
    computed.append(model.computed)
    slow.cancel()
    await nothing_is_in_use(core)

    assert [[0], [1]] == first
    assert [[number] for number in range(19)] == slow.told
    assert 5 + 2 <= computed[0] <= 5 + 1 + ahead
    assert 5 + 19 <= computed[1] <= 5 + 18 + ahead
    assert [[0], [1], [2], [3], [4], []] == quick.told


@pytest.mark.parametrize("window", [0, 2, 1000], ids=["unread", "held back", "read"])
@pytest.mark.parametrize("passes", [0, 1, 2, 3, 20])
async def test_nobody_is_told_behind_a_cancellation(
    core: Core, model: CountingModel, window: int, passes: int
) -> None:
    """At any stage computing stops, and nothing stays in use."""
    client = asking(core, 1e6, window=window)
    for _ in range(passes):
        await asyncio.sleep(0)
    client.cancel("gone")
    told = list(client.told)
    await nothing_is_in_use(core)
    computed = model.computed
    await settled()
    totals = core.registry.version("m", "1").statistics.totals()

    assert told == client.told
    assert computed == model.computed
    assert (0, 1) == (totals.success.count, totals.failures[FailureReason.CANCELLED])
    await core.control.unload("m")
    assert model.closed
    assert model.finished == len(model.requests_of)
    assert all(name.startswith("execute") for name in model.threads)


async def test_a_failure_comes_behind_the_answers_before_it(core: Core) -> None:
    client = asking(core, -2)
    await until(lambda: client.has_ended)
    await nothing_is_in_use(core)

    assert [[0], [1]] == client.told[:2]
    assert [ArithmeticError] == [type(error) for error in client.told[2:]]
    assert [False, False, True] == client.lasts


async def test_a_deadline_ends_a_stream_that_is_not_read(core: Core) -> None:
    deadline = asyncio.get_running_loop().time() + 0.05
    client = asking(core, 1e6, window=2, deadline=deadline)
    await until(lambda: client.has_ended)
    await nothing_is_in_use(core)

    assert DeadlineExceeded is type(client.told[-1])
    assert len(client.told) <= 3


async def test_an_unload_waits_for_the_answer_that_is_computed(
    core: Core, model: CountingModel, world: World
) -> None:
    world.may_execute.clear()
    client = asking(core, 3)
    instance = core.registry.resolve("m")[1]
    # The call, its answers, and a thread that has begun.
    await until(lambda: instance.users == 3 and not instance.pending)
    client.cancel()
    unloading = asyncio.ensure_future(core.control.unload("m"))
    await settled()
    early = unloading.done() or model.closed
    world.may_execute.set()
    await unloading

    assert not early
    assert model.closed


async def test_a_stream_counts_towards_the_limit_until_it_ends(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    world.model_type = CountingModel
    core = make_core(max_requests_per_model=1)
    add_model("m", {1: 1})
    await core.control.load("m")
    first = asking(core, 3, window=1)
    await until(lambda: first.told)
    second = asking(core, 3)
    first.read(10)
    await until(lambda: first.has_ended)
    third = asking(core, 1)
    await until(lambda: third.has_ended)

    assert [Overloaded] == [type(error) for error in second.told]
    assert [[0], []] == third.told


async def test_quick_answers_are_computed_together_for_a_client_that_reads(
    core: Core, world: World
) -> None:
    """The first answer is sent alone, to arrive early. An error comes after all answers."""
    groups: list[int] = []

    class Reading(Client):
        def write(self, response: InferResponse, *, last: bool) -> None:
            if not self.told or self.told[-1] is None:
                groups.append(0)
                asyncio.get_running_loop().call_soon(self.told.append, None)
            groups[-1] += 1
            super().write(response, last=last)

    data = np.full((1, 2), -300, np.float32)
    client = Reading()
    core.engine.begin(client, InferRequest("m", inputs=(InferInput("x", FP32, data),)))
    await until(lambda: client.has_ended)
    await nothing_is_in_use(core)
    told = [one for one in client.told if one is not None]

    assert [[float(number)] for number in range(300)] == told[:300]
    assert [ArithmeticError] == [type(error) for error in told[300:]]
    assert 1 == groups[0]
    assert 1 < max(groups) <= 16


async def test_who_can_have_one_answer_is_refused(core: Core) -> None:
    client = asking(core, 3, takes_many=False)
    with pytest.raises(Decoupled, match=r"'m' .* decoupled .* ModelStreamInfer"):
        await core.engine.infer(
            InferRequest("m", inputs=(InferInput("x", FP32, np.zeros((1, 2), np.float32)),))
        )

    assert [Decoupled] == [type(error) for error in client.told]
    assert (0, 0) == (core.registry.requests, core.registry.resolve("m")[1].users)
