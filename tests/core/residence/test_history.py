"""The history of the last hour: its contents, and its bounded size."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.calls import NotedCall
from support.executions import succeed
from support.others import PlayedOthers

from xlaserve.concurrency.in_turns import AT_A_TIME
from xlaserve.concurrency.others import NOBODY, Others, Question
from xlaserve.errors import ModelNotFound
from xlaserve.http.dashboard.history_page import HistoryRoutes, quantile
from xlaserve.http.messages import HttpRequest
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.registry import Registry
from xlaserve.residence.reports.history import (
    HOUR_SAMPLES,
    MAX_MODELS,
    RECENT_SAMPLES,
    History,
    history_in_sight,
)
from xlaserve.serving.observability.failures import Failures
from xlaserve.serving.observability.loop_lag import LoopLag
from xlaserve.serving.stations.backlog import Backlog

MS = 1_000_000
LOOKS = 99


class World:
    """A history over a registry, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.registry = Registry(10)
        self.failures = Failures()
        capacity = Capacity({"cpu:0": 100})
        self.lag = LoopLag()
        self.history = History(
            self.registry, capacity, self.failures, self.lag, clock=lambda: self.now
        )

    def ask(self, model: str, count: int, ended: int = MS) -> None:
        statistics = self.registry.version(model, "1").statistics
        for _ in range(count):
            succeed(statistics, 1, (0, 0, 0, 0, ended))

    def take(self, at: float) -> None:
        self.now = at
        self.history.take()

    async def shown(self, others: Others = NOBODY) -> Any:
        answer = await HistoryRoutes(self.history, others).show(HttpRequest())
        return json.loads(b"".join(answer.parts))


async def test_intervals_have_rates_latencies_and_failures() -> None:
    world = World()
    world.ask("m", 5)
    world.take(0)
    world.ask("m", 99)
    world.ask("m", 1, 2000 * MS)
    for _ in range(3):
        world.failures.note(NotedCall(model="n"), ModelNotFound("n"), 7)
    world.take(10)
    world.take(20)
    shown = await world.shown()
    first, second = shown["hour"]

    assert (10, 10.0, {"ModelNotFound": 3}) == (
        first["at_seconds"],
        first["requests_per_second"],
        first["failures"],
    )
    assert 0.5 * MS < first["p50_ns"] <= MS
    assert first["p99_ns"] <= MS
    (model,) = first["models"]
    assert ("m", "1", 10.0) == (model["name"], model["version"], model["requests_per_second"])
    assert {"cpu:0": 0} == first["devices"]
    assert (0.0, {}, None) == (
        second["requests_per_second"],
        second["failures"],
        second["p50_ns"],
    )
    assert 3 == len(shown["errors"])
    assert ("ModelNotFound", "n", str(ModelNotFound("n")), 7) == tuple(
        shown["errors"][0][name] for name in ("reason", "model", "text", "at_ns")
    )
    assert [5, 105, 105] == [moment["success"] for moment in shown["recent"]]


async def test_a_history_has_two_minutes_by_the_second_and_an_hour() -> None:
    world = World()
    for second in range(2 * 3600):
        world.take(second)

    assert RECENT_SAMPLES == len(world.history.recent)
    assert HOUR_SAMPLES == len(world.history.hour)
    assert 3590 == world.history.hour[-1].at - world.history.hour[0].at
    assert 119 == world.history.recent[-1].at - world.history.recent[0].at


async def test_a_sample_has_the_most_active_models_only() -> None:
    world = World()
    for number in range(3 * MAX_MODELS):
        world.ask(f"m{number:02}", 1)
    world.take(0)
    world.ask("m40", 5)
    world.take(1)
    latest = world.history.recent[-1]

    assert MAX_MODELS == len(latest.models)
    assert "m40" == latest.models[0].name
    assert 3 * MAX_MODELS + 5 == latest.success == sum(latest.buckets)


async def test_sums_of_some_models_do_not_jump_as_busier_ones_take_their_place() -> None:
    world = World()
    world.ask("own", 7)
    world.take(0)
    for at in range(1, 4):
        for number in range(2 * MAX_MODELS):
            world.ask(f"m{number:02}", 1)
        world.take(at)
    world.ask("own", 2)
    world.take(4)
    seen = history_in_sight(world.history.snapshot(), lambda model: model == "own").recent

    assert [7, 7, 7, 7, 9] == [sample.success for sample in seen]
    assert [7, 7, 7, 7, 9] == [sum(sample.buckets) for sample in seen]


async def test_requests_before_the_first_look_at_a_model_count() -> None:
    """The model gets no later request, and still has a rate per second and in the hour."""
    world = World()
    world.take(0)
    world.ask("new", 20)
    world.take(1)
    world.take(10)
    shown = await world.shown()
    (interval,) = shown["hour"]
    (model,) = interval["models"]

    assert ("new", 2.0) == (model["name"], model["requests_per_second"])
    counts = [[one.get("success", 0) for one in each["models"]] for each in shown["recent"]]
    assert [[0], [20], [20]] == counts


async def test_who_asks_for_the_history_has_it_to_that_moment() -> None:
    """With very many models samples are rare, yet a page sees requests since the last one."""
    world = World()
    world.take(0)
    world.ask("m", 5)
    world.now = 3
    first = await world.shown()
    world.now = 3.2
    second = await world.shown()

    assert [0, 5] == [moment["success"] for moment in first["recent"]]
    assert first["recent"] == second["recent"]


async def test_a_sample_has_the_counts_that_the_next_one_is_compared_with() -> None:
    """A model absent from the previous sample's busiest models may be in this one."""
    world = World()
    for number in range(3 * MAX_MODELS):
        world.ask(f"m{number:02}", 7)
    world.take(0)
    world.ask("m40", 5)
    world.take(10)
    first, second = world.history.recent

    assert MAX_MODELS == len(second.models)
    assert {one.name: 7 for one in second.models} == {
        name: count
        for name, count in ((one.name, one.success) for one in first.models)
        if name in {one.name for one in second.models}
    }
    assert len(first.models) <= 2 * MAX_MODELS
    interval = (await world.shown())["hour"][0]["models"][0]
    assert ("m40", 0.5) == (interval["name"], interval["requests_per_second"])


def test_what_did_not_change_is_kept_once() -> None:
    world = World()
    world.ask("m", 1)
    world.take(0)
    world.take(1)
    first, second = world.history.recent

    assert first.models[0] is second.models[0]


async def test_counts_that_begin_anew_make_no_negative_rate() -> None:
    world = World()
    world.ask("m", 50)
    world.take(0)
    world.registry = Registry(10)
    world.history._registry = world.registry
    world.ask("m", 1)
    world.take(10)
    (interval,) = (await world.shown())["hour"]

    assert 0 == interval["requests_per_second"] == interval["models"][0]["requests_per_second"]


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([0] * 17, 0.5, None),
        ([2, *[0] * 16], 0.5, 25_000),
        ([0, 4, *[0] * 15], 0.5, 75_000),
        ([*[0] * 16, 3], 0.99, 10_000 * MS),
    ],
)
def test_quantiles_lie_within_their_bucket(
    buckets: list[int], share: float, expected: float | None
) -> None:
    assert expected == quantile(buckets, share)


async def test_the_hour_is_that_of_all_workers_and_names_who_is_missing() -> None:
    worlds = [World(), World()]
    for world in worlds:
        for second in range(0, 30, 10):
            world.ask("m", 5)
            world.take(second)
        world.now = 20.4
    asked = PlayedOthers({})
    await worlds[1].shown(asked)
    theirs = await asked.answering[Question.HISTORY]({})
    shown = await worlds[0].shown(PlayedOthers({"1": theirs}, {"2": "no answer"}))

    assert [1.0, 1.0] == [interval["requests_per_second"] for interval in shown["hour"]]
    assert [10, 20, 30] == [moment["success"] for moment in shown["recent"]]
    assert {"2": "no answer"} == shown["missing"]
    assert {} == (await worlds[0].shown())["missing"]


async def test_intervals_have_the_lag_of_the_event_loop_between_their_ends() -> None:
    world = World()
    world.lag.note(2.0)
    world.take(0)
    for _ in range(LOOKS):
        world.lag.note(0.0005)
    world.lag.note(0.2)
    world.take(10)
    world.take(20)
    first, second = (await world.shown())["hour"]

    assert (LOOKS * 0.0005 + 0.2) / (LOOKS + 1) == pytest.approx(first["lag_mean_seconds"])
    assert 0.001 == pytest.approx(first["lag_p99_seconds"])
    assert (None, None) == (second["lag_mean_seconds"], second["lag_p99_seconds"])


async def test_executions_that_wait_are_added_up_with_the_longest_wait() -> None:
    """The sums cover all versions at the time of the sample."""
    world = World()
    now = 5_000 * MS
    world.history = History(
        world.registry, Capacity({"cpu:0": 100}), world.failures, now_ns=lambda: now
    )
    for model, since in (("m", [now - 40 * MS, now - 10 * MS]), ("n", [now - 70 * MS]), ("o", [])):
        instance: Any = SimpleNamespace(
            memory=SimpleNamespace(total_bytes=1, per_device={}),
            backlog=partial(Backlog.of, since),
        )
        world.registry.version(model, "1").instance = instance
    world.history.take()
    (sample,) = world.history.recent

    assert 3 == sample.pending
    assert 0.07 == pytest.approx(sample.oldest_seconds)


async def test_samples_of_many_models_are_taken_in_turns_with_requests() -> None:
    world = World()
    for number in range(10 * AT_A_TIME):
        world.registry.version(f"m{number}", "1")
    watching = asyncio.create_task(world.history.watch())
    turns = 0
    while not world.history.recent:
        await asyncio.sleep(0)
        turns += 1
    watching.cancel()

    assert 10 <= turns
