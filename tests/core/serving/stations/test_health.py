"""A model whose executions hang or whose device fails becomes not ready, and its requests fail."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.accelerators import until
from support.core import FP32, AddModel, Core, MakeCore, World

from xlaserve.errors import ExecutionStalled, ModelNotReady
from xlaserve.runtime.devices.device_failures import device_failure
from xlaserve.runtime.loaded import Value
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.stations.health import Health, Watch
from xlaserve.serving.stations.table import ExecutionPolicy, Stations

SECONDS = 0.2

Serve = Callable[..., Awaitable[Core]]


@pytest.fixture
def serve(make_core: MakeCore, add_model: AddModel, world: World) -> Serve:
    """Serve `m` and `other`; executions in threads time out after 0.2 seconds."""

    async def made(*, inline: float = 0.0, **settings: Any) -> Core:
        core = make_core(**settings)
        for name in ("m", "other"):
            add_model(name, {1: 1})
            await core.control.load(name)
        policy = ExecutionPolicy(inline, execution_seconds=SECONDS)
        core.renew(Stations(core.workers, policy, core.engine))
        return core

    return made


def asked(core: Core, model: str = "m") -> "asyncio.Future[Any]":
    """Send a request to a model."""
    data = np.ones((1, 2), np.float32)
    request = InferRequest(model, inputs=(InferInput("x", FP32, data),))
    return asyncio.ensure_future(core.engine.infer(request))


# --- executions that do not end ----------------------------------------------------------------


@pytest.mark.parametrize("batch_limit", [0, 4])
async def test_who_waits_for_what_hangs_is_answered(
    serve: Serve, world: World, batch_limit: int
) -> None:
    """Requests in threads, requests that wait for threads, and requests that wait for a batch."""
    world.batch_limit = batch_limit
    core = await serve()
    world.may_execute.clear()
    with capture_logs() as logs:
        found = await asyncio.gather(*(asked(core) for _ in range(40)), return_exceptions=True)

    assert {ExecutionStalled} == {type(error) for error in found}
    assert "has been running for 0.2 seconds (execution_seconds)" in str(found[0])
    line = next(line for line in logs if line["event"] == "execution stalled")
    assert ("m", "error") == (line["model"], line["log_level"])
    world.may_execute.set()


async def test_the_model_is_not_ready_until_it_has_ended(serve: Serve, world: World) -> None:
    core = await serve()
    changes = list[bool]()
    world.may_execute.clear()
    with core.registry.observe(lambda: changes.append(core.registry.ready("m"))):
        with pytest.raises(ExecutionStalled):
            await asked(core)
        with pytest.raises(ModelNotReady, match="has been running for 0.2 seconds"):
            await asked(core)
        version, _ = core.registry.resolve("other")
        shown = core.registry.shown_state(core.registry.version("m", "1"))
        world.may_execute.set()
        await until(lambda: core.registry.ready("m"))

    assert "UNAVAILABLE" == shown[0]
    assert "other" == version.model
    assert [False, True] == changes
    assert np.array_equal([[2, 2]], (await asked(core)).outputs[0].data)


async def test_others_are_served_meanwhile(
    serve: Serve, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = await serve()
    other = core.registry.resolve("other")[1].runner
    monkeypatch.setattr(other, "execute", lambda inputs, **options: {"y": inputs["x"]})
    world.may_execute.clear()
    waiting = asked(core)
    for _ in range(10):
        await asked(core, "other")
    with pytest.raises(ExecutionStalled):
        await waiting
    await asked(core, "other")
    world.may_execute.set()


async def test_what_hangs_can_be_unloaded_and_loaded_again(serve: Serve, world: World) -> None:
    """The unload returns within the drain timeout, and the memory stays reserved."""
    core = await serve(drain_seconds=0.1)
    before = core.capacity.used_bytes
    world.may_execute.clear()
    with pytest.raises(ExecutionStalled):
        await asked(core)
    await core.control.unload("m")
    held = core.capacity.used_bytes
    await core.control.load("m")
    ready = core.registry.ready("m")
    world.may_execute.set()
    await until(lambda: core.capacity.used_bytes == before)

    assert before == held
    assert ready
    assert np.array_equal([[2, 2]], (await asked(core)).outputs[0].data)


async def test_a_call_that_is_cancelled_changes_nothing(serve: Serve, world: World) -> None:
    core = await serve()
    world.may_execute.clear()
    waiting = asked(core)
    instance = core.registry.resolve("m")[1]
    await until(lambda: instance.users > 0 and not instance.pending)
    waiting.cancel()
    await until(lambda: not core.registry.ready("m"))
    world.may_execute.set()
    await until(lambda: core.registry.ready("m"))

    assert waiting.cancelled()


# # --- timing ------------------------------------------------------------------------------------


class Line:
    """A device queue."""


class Looked:
    """A watchdog that the test polls, with a clock that the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.health = Health(10.0, lambda: self.now)
        self.watch = Watch(self.health)
        self.failed = list[BaseException]()
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *_, **_options: None)

    def begin(self, line: object = None) -> Any:
        return self.watch.begin(lambda: True, self.failed.append, line)

    def after(self, seconds: float) -> int:
        """Advance the clock and poll; return how many executions have been given up so far."""
        self.now += seconds
        self.health.check()
        return len(self.failed)


async def test_an_execution_may_take_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Looked(monkeypatch)
    looked.begin()
    looked.after(1)

    assert [0] * 9 == [looked.after(1) for _ in range(9)]
    assert [1, 1] == [looked.after(1) for _ in range(2)]


async def test_time_in_which_nobody_looked_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process was stopped or the machine slept, so that no execution progressed either."""
    looked = Looked(monkeypatch)
    looked.begin()
    looked.after(1)

    assert 0 == looked.after(3600)
    assert [0] * 8 == [looked.after(1) for _ in range(8)]
    assert 1 == looked.after(2)


async def test_what_waits_behind_others_of_a_device_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, line = Looked(monkeypatch), Line()
    first, second = looked.begin(line), looked.begin(line)
    for _ in range(9):
        looked.after(1)
    assert looked.watch.over(first, None)
    for _ in range(9):
        looked.after(1)

    assert [] == looked.failed
    assert 1 == looked.after(1)
    assert not looked.watch.over(second, None)


async def test_nothing_is_given_up_where_any_time_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Looked(monkeypatch)
    looked.health.seconds = 0
    looked.begin()

    assert looked.health._due is None


# --- devices that fail -------------------------------------------------------------------------

FAILURES = {
    "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access": True,
    "UNAVAILABLE: the device is gone": True,
    "INVALID_ARGUMENT: Executable expected parameter 0 of size 4": False,
    "RESOURCE_EXHAUSTED: Out of memory": False,
    "INTERNAL: a call failed: RESOURCE_EXHAUSTED: no room": False,
    "nothing of the kind": False,
}


@pytest.mark.parametrize(("text", "fails"), FAILURES.items())
def test_some_errors_are_of_the_device(text: str, *, fails: bool) -> None:
    error = jax.errors.JaxRuntimeError(text)
    outer = ValueError("around it")
    outer.__cause__ = error

    assert (text if fails else None) == device_failure(error) == device_failure(outer)
    assert device_failure(ValueError(text)) is None


@pytest.mark.parametrize("inline", [0.0, 10.0])
@pytest.mark.parametrize("batch_limit", [0, 4])
async def test_a_model_whose_device_fails_is_not_ready_for_a_while(
    serve: Serve, world: World, inline: float, batch_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pause is longer, wherever the model executes; other models stay ready."""
    world.batch_limit = batch_limit
    core = await serve(inline=inline)
    resumes = Resumes(monkeypatch)
    model = core.registry.resolve("m")[1].runner
    monkeypatch.setattr(model, "execute", fail_on_the_device)
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError):
            await asked(core)
        assert not core.registry.ready("m")
        with pytest.raises(ModelNotReady, match="failed on the device"):
            await asked(core)
        await asked(core, "other")
        resumes.now()
        assert core.registry.ready("m")

    assert [1, 2, 4] == resumes.pauses


async def test_a_device_that_failed_long_ago_is_given_a_short_pause(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = await serve()
    resumes = Resumes(monkeypatch)
    instance = core.registry.resolve("m")[1]
    health, now = Health(SECONDS, lambda: now[0]), [1000.0]
    watch = health.watch(instance)
    for later in (0, 1.5, 2.5, 9, 100):
        now[0] += later
        watch.saw(jax.errors.JaxRuntimeError("INTERNAL: it is broken"))
        watch.saw(jax.errors.JaxRuntimeError("INTERNAL: another that was in flight"))
        resumes.now()

    assert [1, 2, 4, 1, 1] == resumes.pauses


def fail_on_the_device(inputs: Mapping[str, Value], **options: Any) -> Mapping[str, Value]:
    raise jax.errors.JaxRuntimeError("INTERNAL: the device is broken")


class Resumes:
    """Callbacks scheduled to resume models."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses = list[float]()
        self._resume: Callable[[], None] = lambda: None
        loop = asyncio.get_running_loop()
        self._call_later = loop.call_later
        monkeypatch.setattr(loop, "call_later", self._note)

    def now(self) -> None:
        """End the last pause."""
        self._resume()

    def _note(self, delay: float, call: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(call, "__name__", "") != "_resume":
            return self._call_later(delay, call, *arguments, **options)
        self.pauses.append(delay)
        self._resume = call
        return None
