"""The measurement of turns runs, times what it says, and leaves the event loop as it was."""

import asyncio
import time

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
    """And not by what it waits for."""
    run, found = asyncio.Handle._run, list[float]()
    loop = asyncio.get_running_loop()
    with turns.timed(found):
        loop.call_soon(time.sleep, 0.05)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert found
    assert max(found) < 40
    assert asyncio.Handle._run is run
