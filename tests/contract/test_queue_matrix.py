"""Every policy of a queue holds on every station that queues: a matrix of both tables."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import tritonclient.grpc.aio as triton
from support.gated import ENSEMBLES, ROWS, SHORT_CUTS, Row, Station, gate
from support.server import Serve
from tritonclient.utils import InferenceServerException

from xlaserve.model_config.config import DynamicBatching, QueuePolicy
from xlaserve.residence.lifecycle import State
from xlaserve.serving.stations.table import KINDS, WRAPPINGS

LEVELS: dict[str, Any] = {
    "priority_levels": 4,
    "default_priority_level": 2,
    "default_queue_policy": {"max_queue_size": 3},
    "priority_queue_policy": {
        "1": {"max_queue_size": 9, "allow_timeout_override": True},
        "3": {"default_timeout_microseconds": 1000},
        "4": {"timeout_action": "DELAY", "allow_timeout_override": True},
    },
}
"""All that a queue can be told of requests by themselves: of each level something else."""

NOT_HERE = {
    "in another process": "the engine has the queue: tests/processes/fronts",
    "ensemble": "its steps have the queues: ENSEMBLES",
    "sequences": "sequence_batching stands in the place of dynamic_batching",
    "inline": "never with a policy: such a model is batched on the host",
}
"""Stations without a queue of policies, and why."""

NAME = attrgetter("name")


async def _refused(asked: "asyncio.Task[float]") -> str:
    try:
        await asked
    except InferenceServerException as error:
        # Within a stream there is no status.
        return f"{error.status() or ''} {error.message()}".removeprefix("StatusCode.")
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    raise AssertionError("it was answered")


async def a_higher_level_goes_first(station: Station) -> None:
    asked = await station.busy()
    for number, level in enumerate((4, 0, 1, 2, 1), 1):
        asked.append(station.ask(number, priority=level))
        await station.pending(number)
    station.gate.free(99)
    answers = await asyncio.gather(*asked)

    assert [3, 5, 2, 4, 1] == [value for value in station.gate.values if value]
    assert [station.of.factor * number for number in (1, 2, 3, 4, 5)] == answers[-5:]


async def a_level_has_so_many_at_most(station: Station) -> None:
    asked = await station.busy()
    failed = station.statistics.fail_count
    for number in (1, 2, 3):
        asked.append(station.ask(number))
        await station.pending(number)
    text = await _refused(station.ask(4))
    asked.append(station.ask(5, priority=1))  # the room of a level is its own
    await station.pending(4)
    station.gate.free(99)
    await asyncio.gather(*asked)

    assert text.startswith("RESOURCE_EXHAUSTED" if not station.row.many else " "), text
    assert "(max_queue_size)" in text, text
    assert [5, 1, 2, 3] == [value for value in station.gate.values if value]
    assert failed + 1 == station.statistics.fail_count


async def a_queue_has_so_many_at_most(station: Station) -> None:
    asked = await station.busy()
    for number in (1, 2, 3):
        asked.append(station.ask(number))
        await station.pending(number)
    text = await _refused(station.ask(4))
    station.gate.free(99)
    answers = await asyncio.gather(*asked)

    assert text.startswith("RESOURCE_EXHAUSTED"), text
    assert "(max_queue_size)" in text, text
    assert [station.of.factor * number for number in (1, 2, 3)] == answers[-3:]


async def a_request_expires_in_the_queue(station: Station) -> None:
    asked = await station.busy()
    failed = station.statistics.fail_count
    late = station.ask(1, priority=3)
    await station.refused(late)
    asked.append(station.ask(2))
    station.gate.free(99)
    text = await _refused(late)
    await asyncio.gather(*asked)

    assert text.startswith("UNAVAILABLE" if not station.row.many else " "), text
    assert "waited for 1000 microseconds" in text, text
    assert [2] == [value for value in station.gate.values if value]
    assert failed + 1 == station.statistics.fail_count


async def a_request_may_say_its_own_timeout(station: Station) -> None:
    asked = await station.busy()
    late = station.ask(1, priority=1, timeout=2000)
    await station.refused(late)
    asked.append(station.ask(2, priority=1))
    station.gate.free(99)
    text = await _refused(late)
    await asyncio.gather(*asked)

    if station.row.many and "DEADLINE_EXCEEDED" in text:  # of a generator it is that of its answers
        assert station.of.kind == "generator"
    else:
        assert "waited for 2000 microseconds" in text, text
    assert [2] == [value for value in station.gate.values if value]


async def a_delayed_request_goes_last(station: Station) -> None:
    if station.of.kind == "generator":
        return  # its `timeout` ends the answers too
    asked = await station.busy()
    asked.append(station.ask(1, priority=4, timeout=1))
    await station.pending(1)
    queue = queue_of(station)
    await station.until(lambda: bool(queue._levels[3].delayed))
    asked.append(station.ask(2, priority=4))
    await station.pending(2)
    station.gate.free(99)
    await asyncio.gather(*asked)

    assert [2, 1] == [value for value in station.gate.values if value]


async def who_cancels_leaves_the_queue(station: Station) -> None:
    asked = await station.busy()
    left = station.ask(1)
    await station.pending(1)
    asked.append(station.ask(2))
    await station.pending(2)
    left.cancel()
    await station.pending(1)
    station.gate.free(99)
    await asyncio.gather(*asked)

    assert [2] == [value for value in station.gate.values if value]


async def a_deadline_passes_in_the_queue(station: Station) -> None:
    asked = await station.busy()
    late = station.ask(1, seconds=0.05)
    asked.append(station.ask(2))
    text = await _refused(late)
    await station.pending(1)
    station.gate.free(99)
    await asyncio.gather(*asked)

    assert text.startswith("DEADLINE_EXCEEDED"), text
    assert [2] == [value for value in station.gate.values if value]


def queue_of(station: Station) -> Any:
    """Return the queue itself, to see what no client can."""
    found: Any = station.instance.station
    while hasattr(found, "within"):
        found = found.within
    batcher = getattr(found, "_batcher", None) or getattr(found, "_queue", None) or found.queue
    return batcher._queue


Check = Callable[[Station], Coroutine[Any, Any, None]]

CHECKS: dict[str, tuple[Check, ...]] = {
    "priority_levels": (a_higher_level_goes_first,),
    "default_priority_level": (a_higher_level_goes_first,),
    "priority_queue_policy": (a_level_has_so_many_at_most, a_request_expires_in_the_queue),
    "default_queue_policy": (a_level_has_so_many_at_most,),
    "max_queue_size": (a_level_has_so_many_at_most,),
    "default_timeout_microseconds": (a_request_expires_in_the_queue,),
    "allow_timeout_override": (a_request_may_say_its_own_timeout,),
    "delays_expired": (a_delayed_request_goes_last,),
    "(cancelled)": (who_cancels_leaves_the_queue,),
    "(deadline)": (a_deadline_passes_in_the_queue,),
}
"""By the field that it is of."""

IN_ORDER: dict[str, Any] = {
    "default_queue_policy": {"max_queue_size": 3, "allow_timeout_override": True}
}
"""What a queue can be told whose answers keep their order: it has no levels."""

IN_ORDER_CHECKS: tuple[Check, ...] = (
    a_queue_has_so_many_at_most,
    a_request_may_say_its_own_timeout,
    who_cancels_leaves_the_queue,
    a_deadline_passes_in_the_queue,
)

OF_BATCHES = {"preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"}
"""Fields that tests below are of."""


def test_every_station_and_every_policy_has_a_row() -> None:
    named = {one.name for policy in (DynamicBatching, QueuePolicy) for one in fields(policy)}

    assert {kind.name for kind in KINDS} == {one.kind for one in ROWS} | NOT_HERE.keys()
    assert {one.name for one in WRAPPINGS} == {one.around for one in SHORT_CUTS if one.around}
    assert named == {name for name in CHECKS if name[0] != "("} | OF_BATCHES


async def what_waits_is_answered_before_an_unload(station: Station) -> None:
    asked = await station.busy()
    asked.append(station.ask(1))
    await station.pending(1)
    unload = asyncio.ensure_future(station.client.unload_model(station.model))
    version = station.server.application.registry.version(station.model, "1")
    await station.until(lambda: version.state is State.UNLOADING or version.instance is None)
    station.gate.free(99)
    answers = await asyncio.gather(*asked)
    await unload

    assert station.of.factor == answers[-1]


@asynccontextmanager
async def started(row: Row, serve: Serve, path: Path) -> AsyncIterator[tuple[Station, Path]]:
    """Run a server for a row, whose model is not loaded."""
    root = path / "models"
    root.mkdir()
    async with (
        gate(path / "gate") as opened,
        serve(root, allow_python_models=True, **row.settings) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield Station(server, client, opened, row), root


_ALL = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.is_slow else [])
    for row in (*ROWS, *SHORT_CUTS, *ENSEMBLES)
]


@pytest.mark.parametrize("row", _ALL)
async def test_policies_hold(row: Row, serve: Serve, tmp_path: Path) -> None:
    async with started(row, serve, tmp_path) as (station, root):
        policies, checks = LEVELS, [check for checks in CHECKS.values() for check in checks]
        if row.batching:
            policies, checks = IN_ORDER, [*IN_ORDER_CHECKS]
        await station.load(root, **policies)
        assert station.of.kind == station.kind
        assert bool(row.around) == hasattr(station.instance.station, "within")
        for check in dict.fromkeys(checks):
            print(check.__name__)
            await check(station)
            await station.idle()
        await what_waits_is_answered_before_an_unload(station)


IN_PROCESSES = [one for one in ROWS if one.name.endswith("in a process")]
"""They take a second to start, and their queue is that of code in threads."""

GATHERING = [one for one in ROWS if one.gathers and one not in IN_PROCESSES]


@pytest.mark.parametrize("row", GATHERING, ids=NAME)
async def test_batches_wait_for_preferred_sizes(row: Row, serve: Serve, tmp_path: Path) -> None:
    """And what waits behind an execution stays in the queue, where it grows."""
    async with started(row, serve, tmp_path) as (station, root):
        delay: dict[str, Any] = {"max_queue_delay_microseconds": 1_000_000_000}
        await station.load(root, 4, preferred_batch_size=[2, 4], **delay)
        asked = [station.ask(1)]
        await station.pending(1)
        before = station.gate.held
        for number in range(2, 2 * row.in_progress + 2):
            asked.append(station.ask(number))
            await station.in_progress(number)
        await station.until(lambda: station.gate.held > 0)
        await station.pending(1)
        for number in range(2 * row.in_progress + 2, 2 * row.in_progress + 5):
            asked.append(station.ask(number))
            await station.in_progress(number)
        await station.pending(4)
        station.gate.free(99)
        answers = await asyncio.gather(*asked)

    assert 0 == before
    assert [2] * row.in_progress + [4] == [len(one) for one in station.gate.executed]
    assert [row.factor * (number + 1) for number in range(len(asked))] == answers


@pytest.mark.parametrize("row", GATHERING, ids=NAME)
async def test_a_batch_waits_for_the_delay_and_no_longer(
    row: Row, serve: Serve, tmp_path: Path
) -> None:
    async with started(row, serve, tmp_path) as (station, root):
        await station.load(root, 4, max_queue_delay_microseconds=1000)
        station.gate.free(99)

        assert row.factor == await station.ask(1)


ORDERED = [one for one in ROWS if one.may_be_two and one not in IN_PROCESSES]


@pytest.mark.parametrize("row", ORDERED, ids=NAME)
async def test_answers_keep_the_order_of_their_requests(
    row: Row, serve: Serve, tmp_path: Path
) -> None:
    """The second copy is done first, and its answer waits for that of the first."""
    async with started(row, serve, tmp_path) as (station, root):
        await station.load(root, copies=2, preserve_ordering=True)
        first = station.ask(1)
        await station.until(lambda: station.gate.held == 1)
        second = station.ask(2)
        await station.until(lambda: station.gate.held == 2)
        station.gate.let(2)
        ordered: Any = station.instance.station
        await station.until(lambda: bool(ordered._results))
        is_answered = second.done()
        station.gate.free(9)
        answers = [await first, await second]

    assert not is_answered
    assert [row.factor, 2 * row.factor] == answers


def test_all_rows_that_have_copies_are_asked_for_order() -> None:
    one_answer = {one.name for one in ROWS if not one.many and not one.device}

    assert {"jax on demand", "ragged"} == one_answer - {one.name for one in ROWS if one.may_be_two}
