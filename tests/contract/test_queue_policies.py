"""Priorities, timeouts and the order of answers, with the stock clients over both transports."""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from structlog.testing import capture_logs
from support.doubling import export_double
from support.http import ask
from support.server import RunningServer, Serve
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that doubles."""
    root = tmp_path_factory.mktemp("models")
    export_double(root)
    return root


@dataclass
class Gate:
    """A model whose executions the test lets begin, one batch at a time."""

    server: RunningServer
    grpc: Any
    http: Any
    executed: list[float] = field(default_factory=list)
    may: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    async def load(self, **batching: Any) -> None:
        config = {"max_batch_size": 1, "dynamic_batching": batching}
        await self.grpc.load_model("double", config=json.dumps(config))
        _, instance = self.server.application.registry.resolve("double")
        runner: Any = instance.runner
        execute = runner.execute

        def gated(inputs: Any, **how: Any) -> Any:
            self.may.acquire(timeout=30)
            self.executed.append(float(inputs["x"][0, 0]))
            return execute(inputs, **how)

        runner.execute = gated
        runner.expected_seconds = lambda rows: 1.0  # nothing of it on the event loop
        instance.renew()

    def ask(self, value: float, *, http: bool = False, **more: Any) -> "asyncio.Task[Any]":
        client, module = (self.http, triton_http) if http else (self.grpc, triton)
        tensor = module.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.full((1, 2), value, np.float32))
        return asyncio.ensure_future(client.infer("double", [tensor], **more))

    async def waiting(self, count: int) -> None:
        """Return once so many requests wait in the queue."""
        _, instance = self.server.application.registry.resolve("double")
        while instance.pending != count:
            await asyncio.sleep(0.001)

    async def busy(self) -> "asyncio.Task[Any]":
        """Have the model compute, so that all that comes later waits."""
        before = self.server.application.registry.requests
        first = self.ask(0)
        while self.server.application.registry.requests == before:
            await asyncio.sleep(0.001)
        await self.waiting(0)
        return first

    def free(self, batches: int) -> None:
        self.may.release(batches)


@pytest.fixture
async def gate(serve: Serve, repository: Path) -> AsyncIterator[Gate]:
    async with (
        serve(repository, http_endpoint="port:0") as server,
        triton.InferenceServerClient(server.url) as grpc,
        triton_http.InferenceServerClient(str(server.http), conn_limit=20) as http,
    ):
        gate = Gate(server, grpc, http)
        yield gate
        gate.free(100)


LEVELS = {"priority_levels": 3, "default_priority_level": 2}


@pytest.mark.parametrize("http", [False, True], ids=["grpc", "http"])
async def test_a_higher_level_is_executed_first(gate: Gate, http: bool) -> None:
    await gate.load(**LEVELS)
    asked = [await gate.busy()]
    for number, level in enumerate((3, 0, 1, 2, 1), 1):
        asked.append(gate.ask(number, http=http, priority=level))
        await gate.waiting(number)
    gate.free(6)
    answers = await asyncio.gather(*asked)

    assert [0, 3, 5, 2, 4, 1] == gate.executed
    assert [2.0 * n for n in range(6)] == [answer.as_numpy("y")[0, 0] for answer in answers]


@pytest.mark.parametrize("http", [False, True], ids=["grpc", "http"])
async def test_a_level_that_there_is_not_is_refused(gate: Gate, http: bool) -> None:
    await gate.load(**LEVELS)
    gate.free(9)
    with pytest.raises(InferenceServerException, match="'priority': expected 0 to 3, got 4") as e:
        await gate.ask(1, http=http, priority=4)

    assert "400" in str(e.value.status()) if http else "INVALID_ARGUMENT" in str(e.value.status())
    assert 1 == gate.server.application.registry.version("double", "1").statistics.fail_count


async def test_what_a_model_obeys_is_not_named_as_without_effect(gate: Gate) -> None:
    with capture_logs() as lines:
        await gate.load(**LEVELS, default_queue_policy={"allow_timeout_override": True})
        gate.free(9)
        await gate.ask(1, priority=1, timeout=9_000_000)
        await gate.load()
        await gate.ask(1, priority=1, timeout=9_000_000)

    named = [sorted(line["parameters"]) for line in lines if "request parameters" in line["event"]]
    assert [["priority", "timeout"]] == named
    assert not [line for line in lines if "configuration fields without effect" in line["event"]]


@pytest.mark.parametrize("http", [False, True], ids=["grpc", "http"])
async def test_a_request_is_refused_at_its_own_timeout(gate: Gate, http: bool) -> None:
    await gate.load(default_queue_policy={"allow_timeout_override": True})
    first = await gate.busy()
    patient, hasty = gate.ask(1, http=http), gate.ask(2, http=http, timeout=1000)
    with pytest.raises(InferenceServerException, match="waited for 1000 microseconds"):
        await hasty
    gate.free(9)
    await asyncio.gather(first, patient)

    assert [0, 1] == gate.executed


async def test_the_age_of_the_oldest_request_is_measured(gate: Gate) -> None:
    def age(text: str) -> float:
        (line,) = re.findall(r'^xlaserve_queue_age_seconds{model="double".*} (.*)$', text, re.M)
        return float(line)

    async def scraped() -> float:
        answer = await ask(str(gate.server.http), "GET", "/metrics")
        return age(answer.body.decode())

    await gate.load(**LEVELS)
    asked, before = [await gate.busy()], time.perf_counter()
    asked.append(gate.ask(1))
    await gate.waiting(1)
    since = time.perf_counter()
    asked.append(gate.ask(2))
    await gate.waiting(2)
    least = time.perf_counter() - since
    found = await scraped()
    most = time.perf_counter() - before
    gate.free(9)
    await asyncio.gather(*asked)

    assert least <= found <= most
    assert 0 == await scraped()


async def test_a_delayed_request_is_executed_last(gate: Gate) -> None:
    policy = {"timeout_action": "DELAY", "allow_timeout_override": True}
    await gate.load(default_queue_policy=policy)
    asked = [await gate.busy(), gate.ask(1, timeout=1)]
    await gate.waiting(1)
    _, instance = gate.server.application.registry.resolve("double")
    station: Any = instance.station
    level = station._batcher._queue._levels[0]
    while not level.delayed:
        await asyncio.sleep(0.001)
    asked.append(gate.ask(2))
    await gate.waiting(2)
    gate.free(9)
    await asyncio.gather(*asked)

    assert [0, 2, 1] == gate.executed


async def test_each_level_has_its_own_limit(gate: Gate) -> None:
    policies = {"1": {"max_queue_size": 1}, "3": {"default_timeout_microseconds": 1000}}
    await gate.load(**LEVELS, priority_queue_policy=policies)
    first = await gate.busy()
    waits = gate.ask(1, priority=1)
    await gate.waiting(1)
    with pytest.raises(InferenceServerException, match="max_queue_size"):
        await gate.ask(2, priority=1)
    with pytest.raises(InferenceServerException, match="waited for 1000 microseconds"):
        await gate.ask(3, priority=3)
    gate.free(9)
    await asyncio.gather(first, waits)

    assert [0, 1] == gate.executed


async def test_answers_of_two_replicas_keep_the_order_of_their_requests(gate: Gate) -> None:
    """The second replica is done at once, and its answer waits for that of the first."""
    await gate.load(preserve_ordering=True)
    _, instance = gate.server.application.registry.resolve("double")
    runner: Any = instance.runner
    execute, held = runner.execute, threading.Event()
    gate.free(9)

    def slowly(inputs: Any, **how: Any) -> Any:
        if inputs["x"][0, 0] == 1:
            held.wait(30)
        return execute(inputs, **how)

    runner.execute = slowly
    ended: list[int] = []
    asked = []

    def noted(number: int, task: Any) -> None:
        ended.append(number)

    for number in (1, 2, 3):
        asked.append(gate.ask(number))
        asked[-1].add_done_callback(partial(noted, number))
        while gate.server.application.registry.requests < number:
            await asyncio.sleep(0.001)
    while len(gate.executed) < 2:
        await asyncio.sleep(0.001)
    before = list(ended)
    held.set()
    await asyncio.gather(*asked)

    assert [] == before
    assert [1, 2, 3] == ended
    assert {1.0, 2.0, 3.0} == set(gate.executed)
