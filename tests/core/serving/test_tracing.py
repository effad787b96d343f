"""Spans: sampling is decided when a call begins, and unsampled calls record nothing."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from xlaserve.serving.call import Call
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.observability.opentelemetry import OpenTelemetry
from xlaserve.serving.observability.spans import CallSpan
from xlaserve.serving.observability.tracing import TIMESTAMPS, TraceSetting, Tracing
from xlaserve.serving.statistics import VersionStatistics

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


class Spans:
    """Collects spans in place of the SDK."""

    def __init__(self) -> None:
        self.kept: list[CallSpan] = []
        self.dropped = 0

    def keep(self, spans: Sequence[CallSpan]) -> None:
        self.kept += spans

    def close(self, _: float) -> bool:
        return True


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


class World:
    """The tracer behind a gate, and calls that are answered immediately."""

    def __init__(self, rate: int, count: int = -1, file: Path | None = None) -> None:
        self.spans = Spans()
        self.gates = Gates()
        start = TraceSetting(TIMESTAMPS, rate, count, 0)
        spans = cast(OpenTelemetry, self.spans) if file is None else None
        self.tracing = Tracing(self.gates, file, 1 << 20, at_once, start=start, spans=spans)

    def begin(
        self, model: str, headers: Mapping[str, str], parent: Call | None = None
    ) -> InferCall:
        call = InferCall()
        call.headers, call.parent = headers, parent
        call.found = cast(
            Any, SimpleNamespace(model=model, number="1", statistics=VersionStatistics())
        )
        call.is_found, call.started_ns = True, 1
        self.gates.admit(call)
        return call

    def ask(self, model: str, **headers: str) -> InferCall:
        call = self.begin(model, headers)
        call.end(Executed({}, 1, 2, 1))
        return call

    async def traced(self) -> list[str]:
        await self.tracing.close()
        return [span.name for span in self.spans.kept]


async def test_one_of_so_many_is_traced_and_of_the_others_nothing_is_noted() -> None:
    world = World(3)
    noted = [world.ask(str(number)).record is not None for number in range(9)]

    assert [number % 3 == 2 for number in range(9)] == noted
    assert ["2", "5", "8"] == await world.traced()


async def test_a_client_that_says_so_decides_alone() -> None:
    """Its decision does not use up the sampling (trace_rate applies to other calls)."""
    world = World(2)
    world.ask("first")
    for number in range(4):
        world.ask(f"sampled {number}", traceparent=f"{PARENT}01")
        assert world.ask("not sampled", traceparent=f"{PARENT}00").record is None
    world.ask("second")

    expected = [*(f"sampled {number}" for number in range(4)), "second"]
    assert expected == await world.traced()


async def test_a_malformed_parent_is_none() -> None:
    world = World(2)
    world.ask("first", traceparent="what")
    world.ask("second", traceparent="what")

    assert ["second"] == await world.traced()


async def test_a_setting_of_a_model_is_obeyed() -> None:
    """The model is known only when the call ends: until then each call may be traced."""
    world = World(2)
    world.tracing.update("every", {"trace_rate": ["1"]})
    for _ in range(3):
        world.ask("every")
        world.ask("others")

    assert ["every", "every", "others", "every"] == await world.traced()


async def test_a_count_ends() -> None:
    world = World(1, count=2)
    for number in range(5):
        world.ask(str(number))
    # The gates are notified in the next loop iteration, after the last traced call.
    await asyncio.sleep(0)

    assert not world.gates.are_watched
    assert ["0", "1"] == await world.traced()


@pytest.mark.parametrize("lost", [0, 2])
async def test_traces_that_are_lost_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Logged once: nothing is lost until the queue to be written is full."""
    monkeypatch.setattr("xlaserve.serving.observability.tracing._MOST_PENDING", 3)
    world = World(1, file=tmp_path / "traces")
    for _ in range(3 + lost):
        world.ask("m")
    with capture_logs() as log:
        await world.tracing.close()
        await world.tracing.close()

    assert [lost] * bool(lost) == [one["count"] for one in log if "lost" in one["event"]]
    assert {1, 2, 3} == {one["id"] for one in json.loads((tmp_path / "traces").read_text())}


async def test_a_call_that_was_picked_is_traced_though_the_setting_changes() -> None:
    world = World(1)
    call = world.begin("begun before", {})
    world.tracing.update("", {"trace_level": ["OFF"]})
    assert world.ask("begun after").record is None
    call.end(Executed({}, 1, 2, 1))

    assert ["begun before"] == await world.traced()


@pytest.mark.parametrize("rate", [1, 2])
async def test_parts_are_noted_where_the_whole_is(rate: int) -> None:
    world = World(rate)
    whole = world.begin("whole", {})
    part = world.begin("part", {}, whole)
    part.end(Executed({}, 1, 2, 1))
    whole.end(Executed({}, 1, 2, 1))

    assert (rate == 1) == (part.record is not None)
    assert (["whole"] if rate == 1 else []) == await world.traced()
    assert [["part"]] * (2 - rate) == [
        [inner.name for inner in span.parts] for span in world.spans.kept
    ]


async def test_a_model_of_its_own_count_goes_by_a_new_rate_of_all_at_once() -> None:
    world = World(1000)
    world.tracing.update("own", {"trace_count": ["5"]})
    world.ask("own")
    world.tracing.update("", {"trace_rate": ["1"]})
    world.ask("own")

    assert ["own"] == await world.traced()
