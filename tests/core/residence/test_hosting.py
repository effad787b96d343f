"""Reports about models that a platform has loaded."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.core import AddModel, Core, World
from support.others import PlayedOthers

from xlaserve.concurrency.others import NOBODY, Others, Question
from xlaserve.http.dashboard.hosting_page import HostingRoutes
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.residence.platforms.hosting import (
    HostedReading,
    HostingBoard,
    HostingReading,
    LoadReading,
    Platform,
)
from xlaserve.residence.platforms.multi_model import MultiModelContainer
from xlaserve.residence.platforms.runtime import RuntimeLimits

LIMITS = RuntimeLimits(1000, 2, 90_000, 50, limit_concurrency=False)


async def shown(board: HostingBoard, others: Others = NOBODY) -> dict[str, Any]:
    (route,) = HostingRoutes(board, others).table()
    answer = await route.handle(HttpRequest())
    assert isinstance(answer, HttpResponse)
    told: dict[str, Any] = json.loads(b"".join(map(bytes, answer.parts)))
    return told


def mesh(told: dict[str, int]) -> Any:
    """A fake mesh that counts models with these sizes."""
    return SimpleNamespace(limits=LIMITS, unreported_bytes=5, reported_bytes=told.get)


async def test_a_mesh_counts_models_with_what_it_was_told(core: Core, add_model: AddModel) -> None:
    """The largest model comes first; models that are not loaded are left out."""
    for name in ("a", "b", "c"):
        add_model(name, {1: 1})
        await core.control.load(name)
    await core.control.unload("c")
    told = await shown(HostingBoard(core.registry, core.capacity, mesh=mesh({"b": 120})))

    assert ("ModelMesh", 1000, 5, 2) == (
        told["platform"],
        told["limits"]["capacity_bytes"],
        told["untold_bytes"],
        told["model_count"],
    )
    assert [("a", 100, None, ""), ("b", 100, 120, "")] == [
        (one["name"], one["held_bytes"], one["told_bytes"], one["url"]) for one in told["models"]
    ]
    assert all(one["loaded_at_ns"] for one in told["models"])
    assert told["used_bytes"] == core.capacity.used_bytes


async def test_loads_in_progress_are_named_with_their_stage(
    core: Core, world: World, add_model: AddModel
) -> None:
    add_model("m", {3: 1})
    world.may_load.clear()
    board = HostingBoard(core.registry, core.capacity)
    loading = asyncio.create_task(core.control.load("m"))
    await asyncio.to_thread(world.loading.wait, 30)
    told = await shown(board)
    world.may_load.set()
    await loading

    assert [("m", "3")] == [(one["name"], one["version"]) for one in told["loading"]]
    assert [] == told["models"]
    assert ("", None) == (told["platform"], told["limits"])
    assert [] == (await shown(board))["loading"]


async def test_sagemaker_knows_the_url_of_each_model(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    container = MultiModelContainer(core.control, core.registry, core.repository)
    board = HostingBoard(core.registry, core.capacity, container=container)
    told = await shown(board)

    assert Platform.SAGEMAKER == told["platform"]
    assert [container.get("m").url] == [one["url"] for one in told["models"]]
    assert told["models"][0]["url"]


async def test_what_workers_hold_is_added_up_and_only_one_was_told(
    core: Core, add_model: AddModel
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    theirs = HostingReading(
        Platform.MODELMESH,
        LIMITS,
        9,
        70,
        1000,
        2,
        [HostedReading("m", 30, 44, "", 10**19), HostedReading("n", 500, 501, "", 7)],
        [LoadReading("o", "1", "compiling")],
    )
    others = PlayedOthers({"1": theirs}, {"2": "no answer"})
    own: Any = SimpleNamespace(limits=None, unreported_bytes=0, reported_bytes={}.get)
    told = await shown(HostingBoard(core.registry, core.capacity, mesh=own), others)

    assert [(Question.HOSTING, {})] == others.asked
    assert [("n", 500, 501), ("m", 130, 44)] == [
        (one["name"], one["held_bytes"], one["told_bytes"]) for one in told["models"]
    ]
    assert 10**19 == told["models"][1]["loaded_at_ns"]
    assert (9, 1000, ["o"]) == (
        told["untold_bytes"],
        told["limits"]["capacity_bytes"],
        [one["name"] for one in told["loading"]],
    )
    assert {"2": "no answer"} == told["missing"]
    assert told["used_bytes"] == 70 + core.capacity.used_bytes
    assert isinstance(await others.answering[Question.HOSTING]({}), HostingReading)


@pytest.mark.parametrize("total", [None, 1000])
async def test_memory_is_known_where_all_workers_know_it(core: Core, total: int | None) -> None:
    core.capacity.limit({"cpu:0": 500})
    theirs = HostingReading(Platform.NONE, None, 0, 0, total, 0, [], [])
    told = await shown(HostingBoard(core.registry, core.capacity), PlayedOthers({"1": theirs}))

    assert told["total_bytes"] == (None if total is None else 1500)
