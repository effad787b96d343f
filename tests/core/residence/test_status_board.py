"""Readings for a status page that refreshes every second."""

import asyncio
from dataclasses import replace

import pytest
from support.clock import HandClock
from support.core import AddModel, Core, MakeCore

from xlaserve.concurrency.in_turns import AT_A_TIME
from xlaserve.residence.reports.status_board import (
    MAX_ROWS,
    REPOSITORY_SECONDS,
    TICK_SECONDS,
    StatusBoard,
    status_in_sight,
)
from xlaserve.serving.call import Call, current_call
from xlaserve.settings.choices import ModelControlMode

MANY = 640


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def core(make_core: MakeCore) -> Core:
    return make_core(model_control_mode=ModelControlMode.EXPLICIT)


@pytest.fixture
def board(core: Core, clock: HandClock) -> StatusBoard:
    mode = core.settings.model_control_mode
    return StatusBoard(core.control, core.registry, core.capacity, mode, clock=clock)


async def test_models_that_are_loaded_and_models_that_could_be_are_shown(
    core: Core, board: StatusBoard, add_model: AddModel
) -> None:
    for name in ("a", "b"):
        add_model(name, {1: 1, 2: 2}, {"version_policy": {"all": {}}})
    await core.control.load("b")
    reading = await board.read()

    assert [("a", "", "UNAVAILABLE"), ("b", "1", "READY"), ("b", "2", "READY")] == [
        (row.name, row.version, row.state) for row in reading.rows
    ]
    assert (1, 2, 3) == (reading.ready_models, reading.model_count, reading.matching)


async def test_a_reading_is_that_of_all_who_ask_within_a_tick(
    core: Core, board: StatusBoard, add_model: AddModel, clock: HandClock
) -> None:
    """A state change of a model ends the sharing: a client that loads one looks immediately."""
    add_model("m", {1: 1})
    first = await board.read()
    statistics = core.registry.version("m", "1").statistics
    statistics.failed(ValueError(), 5)
    same = await board.read()
    await core.control.load("m")
    loaded = await board.read()
    statistics.failed(ValueError(), 5)
    clock.now += TICK_SECONDS
    later = await board.read()

    assert first is same
    assert [("m", "READY")] == [(row.name, row.state) for row in loaded.rows]
    assert [0, 1, 2] == [one.totals.fail_count for one in (first, loaded, later)]


async def test_a_reading_of_many_models_is_taken_in_turns_with_requests(
    core: Core, board: StatusBoard
) -> None:
    """This covers loaded models, models of the repository, and a search."""
    for number in range(MANY):
        core.registry.version(f"known-{number}", "1")
        (core.root / f"other-{number}").mkdir()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    reading = await board.read()
    taken, turns = turns, 0
    found = await board.read("known")
    searched = turns
    beside.cancel()

    assert (2 * MANY, MANY) == (len(reading.rows), len(found.rows))
    # Four passes over the models: the repository, unknown models, known models and the rows of
    # both.
    assert taken >= 5 * MANY // AT_A_TIME - 5
    assert searched >= 3 * MANY // AT_A_TIME - 3


async def test_memory_and_time_are_told(core: Core, board: StatusBoard, clock: HandClock) -> None:
    core.capacity.limit({"cpu:0": 600, "cpu:1": 400})
    core.capacity.reserve("somebody", "m", {"cpu:0": 200, "cpu:1": 100})
    clock.now += 4
    reading = await board.read()

    assert (300, 1000, 4) == (reading.used_bytes, reading.total_bytes, reading.uptime_seconds)


async def test_the_disk_is_asked_once_in_a_while(
    board: StatusBoard, add_model: AddModel, clock: HandClock
) -> None:
    """Many pages may be open, and each refreshes every second."""
    await board.read()
    add_model("late", {1: 1})
    early = await board.read()
    clock.now += REPOSITORY_SECONDS
    later = await board.read()

    assert [] == [row.name for row in early.rows]
    assert ["late"] == [row.name for row in later.rows]


async def test_a_model_that_was_just_loaded_is_shown_once(
    core: Core, board: StatusBoard, add_model: AddModel
) -> None:
    add_model("m", {1: 1})
    await board.read()
    await core.control.load("m")

    assert [("m", "1")] == [(row.name, row.version) for row in (await board.read()).rows]


async def test_names_are_searched_in_any_case(board: StatusBoard, add_model: AddModel) -> None:
    for name in ("Straße", "street"):
        add_model(name, {1: 1})
    reading = await board.read("STRASSE")

    assert ["Straße"] == [row.name for row in reading.rows]
    assert (2, 1) == (reading.model_count, reading.matching)


async def test_there_are_never_more_rows_than_can_be_shown_and_loaded_models_come_first(
    core: Core, board: StatusBoard, add_model: AddModel
) -> None:
    for number in range(MAX_ROWS):
        (core.root / f"a{number}").mkdir()
    add_model("z", {1: 1})
    await core.control.load("z")
    reading = await board.read()

    assert MAX_ROWS == len(reading.rows)
    assert MAX_ROWS + 1 == reading.matching
    assert "z" == reading.rows[-1].name


@pytest.mark.parametrize("mode", list(ModelControlMode))
async def test_only_explicit_control_is_offered(
    make_core: MakeCore, mode: ModelControlMode
) -> None:
    core = make_core(model_control_mode=mode)
    board = StatusBoard(core.control, core.registry, core.capacity, mode)

    assert (mode is ModelControlMode.EXPLICIT) == (await board.read()).controllable


async def test_requests_of_all_versions_are_summed(
    core: Core, board: StatusBoard, add_model: AddModel
) -> None:
    for name in ("a", "b"):
        add_model(name, {1: 1})
        await core.control.load(name)
        statistics = core.registry.version(name, "1").statistics
        statistics.failed(ValueError(), 5)
    totals = (await board.read()).totals

    assert (0, 2, 0) == (totals.success_count, totals.fail_count, sum(totals.request_buckets))


async def test_a_search_among_some_models_changes_no_sum_and_none_is_cut_for_others(
    core: Core, board: StatusBoard, add_model: AddModel
) -> None:
    for number in range(MAX_ROWS):
        (core.root / f"a{number}").mkdir()
    for name in ("own-1", "own-2", "own-3"):
        add_model(name, {1: 1})
    await core.control.load("own-1")
    core.registry.version("own-1", "1").statistics.failed(ValueError(), 5)
    whole = await board.whole()
    seen, one = [
        status_in_sight(whole, lambda model: model.startswith("own"), search)
        for search in ("", "OWN-2")
    ]

    assert ["own-1", "own-2", "own-3"] == [row.name for row in seen.rows]
    assert ["own-2"] == [row.name for row in one.rows]
    assert (3, 1) == (seen.matching, one.matching)
    assert 0 < seen.used_bytes == one.used_bytes
    assert (1, 3) == (one.ready_models, one.model_count)
    assert 1 == seen.totals.fail_count == one.totals.fail_count
    assert (1, 3) == (seen.ready_models, seen.model_count)


async def test_what_all_read_is_read_for_no_caller(
    core: Core, board: StatusBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons are worded for the current caller, but all callers share a reading."""
    asking: list[Call | None] = []
    names = core.control.catalog.names

    async def noted() -> object:
        asking.append(current_call.get())
        return await names()

    monkeypatch.setattr(core.control.catalog, "names", noted)
    call = Call()
    token = current_call.set(call)
    await board.read()

    assert [None] == asking
    assert call is current_call.get()
    current_call.reset(token)


async def test_who_sees_some_models_is_told_of_no_process_that_is_missing(
    board: StatusBoard,
) -> None:
    """What a process of the server is called, and why it is silent, is of those who run it."""
    whole = replace(await board.whole(), missing={"worker 1": "its process is stopped (SIGSTOP)"})

    assert {} == status_in_sight(whole, lambda model: True).missing
    assert 1 == len(whole.missing)
