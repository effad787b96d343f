"""Models that run slower than their warm-up leave the event loop."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.accelerators import until
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.residence.registry import Instance
from xlaserve.runtime.loaded import Value
from xlaserve.serving.answers import Counting
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.stations.batches import Batches
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.table import Candidate, ExecutionPolicy, Stations

LIMIT = 1e-3


@dataclass
class Timed:
    """Executions that advance a fake clock by the milliseconds given in their input."""

    now_ns: int = 1_000_000_000
    inline: list[bool] = field(default_factory=list)
    """For each execution, whether it ran on the event loop."""
    disturbances: list[float] = field(default_factory=list)
    """Extra milliseconds that the next executions take, regardless of their input."""

    def __call__(self) -> int:
        return self.now_ns

    def model(self, amount: float, world: World, devices: Any) -> FakeModel:
        model = FakeModel(amount, world, devices)
        execute = model.execute

        def timed(
            inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
        ) -> Mapping[str, Value]:
            tensor = inputs["x"]
            assert isinstance(tensor, np.ndarray)
            self.inline.append(threading.current_thread() is threading.main_thread())
            disturbance = self.disturbances.pop(0) if self.disturbances else 0.0
            self.now_ns += int((float(tensor.max()) + disturbance) * 1e6)
            return execute(inputs, resident=resident, replica=replica)

        model.execute = timed  # type: ignore[method-assign]
        return model


@dataclass(frozen=True)
class Served:
    """A model, and an engine with its own clock."""

    core: Core
    engine: Engine
    stations: Stations
    timed: Timed

    @property
    def instance(self) -> Instance:
        return self.core.registry.resolve("m")[1]

    @property
    def is_inline(self) -> bool:
        return not self.stations.overruns.is_away(self.instance)

    async def infer(self, milliseconds: float, rows: int = 1) -> Any:
        data = np.full((rows, 2), milliseconds, np.float32)
        request = InferRequest("m", inputs=(InferInput("x", FP32, data),))
        return (await self.engine.infer(request)).outputs[0].data

    async def judged(self) -> None:
        """Wait until the repetition of the slow execution has completed."""
        await until(lambda: self.instance.users == 0)


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
def serve(make_core: MakeCore, add_model: AddModel, world: World) -> Serve:
    async def made(*, batch_limit: int = 0, loops_follow_inputs: bool = False) -> Served:
        timed = Timed()
        world.seconds, world.batch_limit = 1e-6, batch_limit

        def model(amount: float, world: World, devices: Any) -> FakeModel:
            made = timed.model(amount, world, devices)
            made.info = replace(made.info, loops_follow_inputs=loops_follow_inputs)
            return made

        world.model_type = model
        core = make_core()
        add_model("m", {1: 1})
        await core.control.load("m")
        gates = Gates(observers=[Counting(timed)])
        engine = Engine(core.registry, gates, core.workers.host, clock=timed)
        stations = Stations(core.workers, ExecutionPolicy(LIMIT), engine, timed)
        core.renew(stations)
        return Served(core, engine, stations, timed)

    return made


async def test_a_slow_execution_moves_its_model_off_the_event_loop_for_good(serve: Serve) -> None:
    """However many fast executions came before and come after."""
    served = await serve()
    with capture_logs() as logs:
        for milliseconds in (*[0.1] * 1000, 500, 0.1, 500, 0.1):
            await served.infer(milliseconds)
            await served.judged()

    assert [True] * 1001 + [False] * 4 == served.timed.inline
    (line,) = [log for log in logs if "too slow for the event loop" in log["event"]]
    assert ("m", 0.5, 0.5, "never") == (
        line["model"],
        line["seconds"],
        line["repeated_seconds"],
        line["returns"],
    )


async def test_requests_do_not_wait_for_the_verdict(serve: Serve) -> None:
    served = await serve()
    await served.infer(500)
    await served.infer(0.1)

    assert True is served.timed.inline[0]
    assert served.timed.inline.count(True) == 1


async def test_a_model_that_was_only_disturbed_comes_back(serve: Serve) -> None:
    """Another process, or a compiling thread, may delay an execution that is fast by itself."""
    served = await serve()
    served.timed.disturbances = [500, 20]
    await served.infer(0.1)
    await served.judged()
    await served.infer(0.1)

    # The first, its repetition (disturbed too), a second repetition, and the next request.
    assert [True, False, False, True] == served.timed.inline


async def test_a_model_that_takes_a_little_more_comes_back_after_a_pause(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, pauses, loop = await serve(), list[float](), asyncio.get_running_loop()
    call_later = loop.call_later

    def later(
        delay: float, call: Callable[..., object], *args: Any, **options: Any
    ) -> asyncio.TimerHandle:
        if getattr(call, "__name__", "") != "_come_back":  # a timer of some other component
            return call_later(delay, call, *args, **options)
        pauses.append(delay)
        return call_later(0, call, *args, **options)

    monkeypatch.setattr(loop, "call_later", later)
    with capture_logs() as logs:
        for _ in range(8):
            await until(lambda: served.is_inline)
            await served.infer(2)
            await served.judged()

    assert [1, 2, 4, 8, 16, 32, 60, 60] == pauses
    assert 1 == sum("too slow" in log["event"] for log in logs)


async def test_a_repetition_has_the_inputs_as_they_were(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's buffers may be reused once it is answered."""
    served, calls = await serve(), list[Callable[[int], object]]()
    monkeypatch.setattr(HostWork, "in_thread", lambda work, call, over: calls.append(call))
    data = np.full((1, 2), 500, np.float32)
    await served.engine.infer(InferRequest("m", inputs=(InferInput("x", FP32, data),)))
    data[:] = 0
    (repeat,) = calls

    assert 0.5 == repeat(0)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch the calls of a fast model, even if that gains nothing."""
    monkeypatch.setattr(Candidate, "gains", True)


@pytest.mark.usefixtures("gathers")
async def test_a_batch_that_overran_moves_its_model_too(serve: Serve) -> None:
    """Its limit is that of four requests in sequence."""
    served = await serve(batch_limit=4)
    await asyncio.gather(served.infer(3, 2), served.infer(3, 2))
    stays = served.is_inline  # two requests may take two milliseconds
    await served.judged()
    await asyncio.gather(served.infer(30, 2), served.infer(30, 2))
    await served.judged()
    await asyncio.gather(served.infer(0.1), served.infer(0.1))

    assert stays is False
    assert not served.is_inline
    assert isinstance(served.instance.station, Batches)
    assert False is served.timed.inline[-1]


@pytest.mark.usefixtures("gathers")
async def test_a_batch_may_take_as_long_as_its_requests(serve: Serve) -> None:
    served = await serve(batch_limit=4)
    await asyncio.gather(served.infer(1.5, 2), served.infer(1.5, 2))

    assert served.is_inline
    assert [True] == served.timed.inline


@pytest.mark.usefixtures("gathers")
async def test_calls_that_wait_move_to_the_next_station(serve: Serve) -> None:
    """They keep their order, and none of them runs on the event loop."""
    served = await serve(batch_limit=4)
    answers = await asyncio.gather(*(served.infer(500 + n, 4) for n in range(4)))
    await served.judged()

    assert [501.0, 502.0, 503.0, 504.0] == [float(answer.max()) for answer in answers]
    assert 1 == served.timed.inline.count(True)
    assert 4 == served.core.registry.version("m", "1").statistics.totals().success.count
    assert 0 == served.core.registry.requests


async def test_a_model_whose_loops_follow_its_inputs_is_never_on_the_event_loop(
    serve: Serve,
) -> None:
    """Not even once: the duration of one request says nothing about the next."""
    served = await serve(loops_follow_inputs=True)
    for _ in range(3):
        await served.infer(0.1)
    await asyncio.gather(served.infer(0.1), served.infer(0.1))

    assert True not in served.timed.inline


async def test_an_unloaded_model_does_not_come_back(serve: Serve) -> None:
    """A timer that referenced the model would keep its memory."""
    served = await serve()
    await served.infer(2)
    await served.judged()
    instance, overruns = served.instance, served.stations.overruns
    assert overruns.is_away(instance)
    await served.core.control.unload("m")
    users, instance = instance.users, None  # type: ignore[assignment]
    gc.collect()
    overruns._come_back(lambda: None)  # type: ignore[arg-type]

    assert 0 == users
    assert not overruns._away
    assert not overruns._pauses


async def test_a_model_that_was_unloaded_does_not_come_back(serve: Serve) -> None:
    """The programs by which its station would be chosen are gone."""
    served = await serve()
    await served.infer(2)
    await served.judged()
    instance, overruns = served.instance, served.stations.overruns
    station = instance.station
    await served.core.control.unload("m")
    overruns._come_back(weakref.ref(instance))

    assert overruns.is_away(instance)
    assert station is instance.station
