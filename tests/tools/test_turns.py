"""The event loop measurement runs, times callbacks, and leaves the loop unchanged."""

import asyncio
import time
from collections import Counter

import pytest

import turns


@pytest.mark.parametrize("name", turns.SCENARIOS)
def test_each_scenario_sends_requests(name: str) -> None:
    rounds = turns.SCENARIOS[name]()
    first, second = next(rounds), next(rounds)

    start = b"PRI * HTTP/2.0" if name.startswith("gRPC") else b"POST /v2/models/m/infer"
    assert first.startswith(start)
    assert len(second) > 1000


async def test_a_callback_is_timed_by_what_it_computes() -> None:
    """Waiting time does not count."""
    run, found = asyncio.Handle._run, list[float]()
    loop = asyncio.get_running_loop()
    with turns.timed(found):
        loop.call_soon(time.sleep, 0.05)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert found
    assert max(found) < 40
    assert asyncio.Handle._run is run


async def test_long_callbacks_are_counted_by_name() -> None:
    """Callbacks of tasks count under the name of their coroutine."""

    def computes() -> None:
        until = time.thread_time() + 0.006
        while time.thread_time() < until:
            pass

    async def steps() -> None:
        computes()

    loop, long = asyncio.get_running_loop(), Counter[str]()
    with turns.timed([], long):
        loop.call_soon(computes)
        loop.call_soon(len, "")
        await asyncio.create_task(steps())

    assert {"computes": 1, "steps": 1} == {
        name.rpartition(".")[2]: count for name, count in long.items()
    }
