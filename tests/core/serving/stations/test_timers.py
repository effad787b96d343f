"""Timers of stations carry no request context, which they would keep alive until they fire."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from xlaserve.serving.call import Call, current_call
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations import deadlock
from xlaserve.serving.stations.batches import LoopClock
from xlaserve.serving.stations.deadlock import Executing, Waits
from xlaserve.serving.stations.health import Health, Watch

Found = Callable[[Call | None], None]


def _by_the_clock(found: Found) -> None:
    clock = LoopClock(asyncio.get_running_loop(), time.perf_counter_ns)
    clock.at(clock.now_ns() + 1000, lambda: found(current_call.get()))


def _by_a_look_for_deadlocks(found: Found) -> None:
    class Station:
        lanes = 1

        @property
        def executing(self) -> dict[InferCall, bool]:
            found(current_call.get())
            return {}

    call = InferCall()
    call.parent = Call()
    Waits().watch(call, cast(Executing, Station()))


def _by_a_look_at_executions(found: Found) -> Watch:
    def begun() -> bool:
        found(current_call.get())
        return True

    watch = Watch(Health(0.001))
    watch.begin(begun, lambda error: None)
    return watch


SCHEDULES = [_by_the_clock, _by_a_look_for_deadlocks, _by_a_look_at_executions]


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_timer_is_not_part_of_the_request_in_which_it_was_made(
    schedule: Callable[[Found], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "FIRST_SECONDS", 0.001)
    due: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def found(call: Call | None) -> None:
        if not due.done():
            due.set_result(call)

    token = current_call.set(Call())
    try:
        kept = schedule(found)  # holds the only reference to the watched object
    finally:
        current_call.reset(token)

    assert await asyncio.wait_for(due, 10) is None
    del kept
