"""Model reports for clients, and rows for the status page."""

import numpy as np
import pytest
from support.core import FP32, AddModel, Core

from xlaserve.errors import LoadFailed, ModelNotFound, VersionNotFound
from xlaserve.residence.reports.monitor import MemoryUse, report, status_rows
from xlaserve.serving.inference import InferInput, InferRequest

ALL: dict[str, object] = {"version_policy": {"all": {}}}


async def infer(core: Core, model: str, version: str = "") -> None:
    tensor = InferInput("x", FP32, np.zeros((1, 2), np.float32))
    await core.engine.infer(InferRequest(model, version, inputs=(tensor,)))


async def add_two(core: Core, add_model: AddModel) -> None:
    add_model("a", {2: 1, 10: 1}, ALL)
    add_model("b", {1: 1})
    await core.control.load("b")
    await core.control.load("a")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("", ""), [("a", "2"), ("a", "10"), ("b", "1")]),
        (("a", ""), [("a", "2"), ("a", "10")]),
        (("a", "2"), [("a", "2")]),
    ],
)
async def test_versions_are_reported_by_name_and_number(
    core: Core, add_model: AddModel, asked: tuple[str, str], expected: list[tuple[str, str]]
) -> None:
    await add_two(core, add_model)
    reports = report(core.registry, *asked)

    assert expected == [(each.name, each.version) for each in reports]


async def test_a_report_holds_the_memory_and_the_requests_of_its_version(
    core: Core, add_model: AddModel
) -> None:
    await add_two(core, add_model)
    await infer(core, "a", "2")
    old, new, _ = core.control.catalog.statistics()

    assert (1, 0) == (old.totals.success.count, new.totals.success.count)
    assert (MemoryUse("CPU", 0, 100),) == old.memory


async def test_what_does_not_answer_is_not_reported(core: Core, add_model: AddModel) -> None:
    await add_two(core, add_model)
    await core.control.unload("a")
    reports = report(core.registry)

    assert ["b"] == [each.name for each in reports]
    with pytest.raises(ModelNotFound):
        report(core.registry, "a")
    with pytest.raises(ModelNotFound):
        report(core.registry, "nope")
    with pytest.raises(VersionNotFound):
        report(core.registry, "b", "7")


async def test_rows_show_every_version_with_its_state(core: Core, add_model: AddModel) -> None:
    (add_model("bad", {1: 1}) / "1" / "amount.json").write_text("broken")
    with pytest.raises(LoadFailed):
        await core.control.load("bad")
    await add_two(core, add_model)
    await core.control.unload("b")
    await infer(core, "a")
    old, new, gone, bad = status_rows(core.registry)

    assert ("bad", "UNAVAILABLE", None, 0) == (
        bad.name,
        bad.state,
        bad.size_bytes,
        bad.success_count,
    )
    assert "is not a number" in bad.reason
    assert ("2", "READY", 100, 0) == (old.version, old.state, old.size_bytes, old.success_count)
    assert ("10", "READY", 1) == (new.version, new.state, sum(new.request_buckets))
    assert 0 < new.request_ns
    assert 0 < new.last_inference_ms
    assert ("b", "UNAVAILABLE", "unloaded") == (gone.name, gone.state, gone.reason)
