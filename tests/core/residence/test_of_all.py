"""Requests that one worker answers on behalf of all workers."""

import pytest
from support.calls import NotedCall
from support.core import AddModel, Core
from support.others import PlayedOthers

from xlaserve.concurrency.others import Question
from xlaserve.errors import ModelNotFound, Overloaded, ShuttingDown, WorkersSilent
from xlaserve.residence.catalog import IndexEntry
from xlaserve.residence.of_all import OfAll
from xlaserve.residence.reports.monitor import VersionReport
from xlaserve.serving.call import current_call
from xlaserve.serving.statistics import VersionStatistics

SILENT = {"2": "no answer within 2 s"}


class Sight:
    """The visibility of a caller that may see one model."""

    def permits(self, model: str) -> bool:
        return model == "a"

    shows = permits


def report(name: str, failures: int) -> VersionReport:
    statistics = VersionStatistics()
    for _ in range(failures):
        statistics.failed(ShuttingDown(), 1)
    return VersionReport(name, "1", statistics.totals(), ())


async def loaded(core: Core, add_model: AddModel, *names: str) -> None:
    for name in names:
        add_model(name, {1: 1})
        await core.control.load(name)


async def test_statistics_are_of_all_workers(core: Core, add_model: AddModel) -> None:
    await loaded(core, add_model, "a")
    core.registry.version("a", "1").statistics.failed(Overloaded("m", 1, "setting"), 1)
    others = PlayedOthers({"1": [report("a", 2), report("b", 3)]})
    reports = await OfAll(core.control.catalog, others).statistics()

    assert [("a", 3), ("b", 3)] == [(each.name, each.totals.fail.count) for each in reports]
    assert [(Question.STATISTICS, {"model": "", "version": ""})] == others.asked


async def test_statistics_of_one_model_ask_for_that_alone(core: Core, add_model: AddModel) -> None:
    await loaded(core, add_model, "a")
    others = PlayedOthers({"1": []})
    (found,) = await OfAll(core.control.catalog, others).statistics("a", "1")

    assert ("a", "1") == (found.name, found.version)
    assert [(Question.STATISTICS, {"model": "a", "version": "1"})] == others.asked
    with pytest.raises(ModelNotFound):
        await OfAll(core.control.catalog, others).statistics("c")


async def test_another_worker_is_told_what_this_one_has(core: Core, add_model: AddModel) -> None:
    """A worker without the model reports no requests for it."""
    await loaded(core, add_model, "a")
    others = PlayedOthers({})
    OfAll(core.control.catalog, others)
    ask = others.answering[Question.STATISTICS]

    assert core.control.catalog.statistics() == await ask({"model": "", "version": ""})
    assert [] == await ask({"model": "b", "version": ""})
    assert await core.control.catalog.index() == await others.answering[Question.INDEX]({})


async def test_the_index_is_of_all_workers(core: Core, add_model: AddModel) -> None:
    await loaded(core, add_model, "a", "b")
    add_model("c", {1: 1})
    never = IndexEntry("c", "", "UNAVAILABLE", "not loaded")
    theirs = [never, IndexEntry("a", "1", "READY", ""), IndexEntry("b", "1", "LOADING", "reading")]
    of_all = OfAll(core.control.catalog, PlayedOthers({"1": theirs}))

    assert [
        IndexEntry("a", "1", "READY", ""),
        IndexEntry("b", "1", "LOADING", "worker 1: reading"),
        never,
    ] == await of_all.index()
    assert [IndexEntry("a", "1", "READY", "")] == await of_all.index(ready=True)


async def test_no_answer_is_better_than_one_of_some_workers(
    core: Core, add_model: AddModel
) -> None:
    """Readers compute differences of counts; the error names the worker that did not answer."""
    await loaded(core, add_model, "a")
    of_all = OfAll(core.control.catalog, PlayedOthers({"1": []}, SILENT))

    with pytest.raises(WorkersSilent, match="worker 2: no answer within 2 s"):
        await of_all.statistics()
    with pytest.raises(WorkersSilent, match="worker 2: no answer within 2 s"):
        await of_all.index()


async def test_other_workers_show_no_model_that_a_caller_may_not_see(
    core: Core, add_model: AddModel
) -> None:
    await loaded(core, add_model, "a")
    rows = [IndexEntry("a", "1", "READY", ""), IndexEntry("secret", "1", "READY", "")]
    call = NotedCall()
    call.sight = Sight()  # type: ignore[assignment]
    token = current_call.set(call)
    try:
        of_index = OfAll(core.control.catalog, PlayedOthers({"1": rows}))
        of_counts = OfAll(core.control.catalog, PlayedOthers({"1": [report("secret", 1)]}))
        index, reports = await of_index.index(), await of_counts.statistics()
    finally:
        current_call.reset(token)

    assert {"a"} == {row.name for row in index} == {each.name for each in reports}
