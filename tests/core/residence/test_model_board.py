"""The status page of a model, with one process or several, and the actions it permits."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.core import FP32, AddModel, Core
from support.others import PlayedOthers

from xlaserve.concurrency.others import NOBODY, Others, Question
from xlaserve.errors import InvalidBody, ModelNotFound
from xlaserve.http.dashboard.model_page import ModelPageRoutes
from xlaserve.http.dashboard.permits import Permits, permit_everything
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.residence.reports.model_board import GeneratorReading, ModelBoard, ModelReading
from xlaserve.serving.access.sight import Sees, everything, nothing
from xlaserve.serving.call import Call, Operation
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.observability.failures import Failures


@pytest.fixture
def failures() -> Failures:
    return Failures()


async def shown(
    core: Core,
    failures: Failures,
    model: str = "m",
    others: Others = NOBODY,
    permits: Permits = permit_everything,
    *,
    controllable: bool = True,
) -> dict[str, Any]:
    board = ModelBoard(core.registry, failures)
    (route,) = ModelPageRoutes(
        board, core.control.catalog, others, permits=permits, controllable=controllable
    ).table()
    answer = await route.handle(HttpRequest({"model": model}))
    assert isinstance(answer, HttpResponse)
    told: dict[str, Any] = json.loads(b"".join(bytes(part) for part in answer.parts))
    return told


async def load_and_ask(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    tensor = InferInput("x", FP32, np.zeros((3, 2), np.float32))
    await core.engine.infer(InferRequest("m", inputs=(tensor,)))


async def test_a_loaded_model_is_told_with_its_tensors_memory_and_counts(
    core: Core, add_model: AddModel, failures: Failures
) -> None:
    await load_and_ask(core, add_model)
    told = await shown(core, failures)
    (version,) = told["versions"]

    assert ("1", "READY", 1) == (version["version"], version["state"], version["loads"])
    assert {"name": "x", "datatype": "FP32", "shape": [-1, 2]} == version["loaded"]["inputs"][0]
    assert {"cpu:0": 100} == version["loaded"]["devices"]
    assert 100 == version["loaded"]["memory"]["parameters"]
    assert 1 == version["statistics"]["inference_stats"]["success"]["count"]
    assert (3, 0) == (version["executed_rows"], version["padding_rows"])


async def test_a_model_that_was_never_loaded_has_no_versions_and_an_unknown_one_is_not_found(
    core: Core, add_model: AddModel, failures: Failures
) -> None:
    add_model("m", {1: 1})

    assert [] == (await shown(core, failures))["versions"]
    with pytest.raises(ModelNotFound):
        await shown(core, failures, "nowhere")


async def test_errors_are_those_of_the_model(
    core: Core, add_model: AddModel, failures: Failures
) -> None:
    add_model("m", {1: 1})
    for model in ("m", "other"):
        call = Call()
        call.model = model
        failures.note(call, InvalidBody("bad"), 5)
    told = await shown(core, failures)

    assert [("m", "InvalidBody")] == [(one["model"], one["reason"]) for one in told["errors"]]


async def test_what_the_client_may_do_is_told(
    core: Core, add_model: AddModel, failures: Failures
) -> None:
    add_model("m", {1: 1})

    def permits(call: Call, operation: Operation) -> Sees:
        return everything if operation is Operation.INFER else nothing

    told = await shown(core, failures, permits=permits)
    fixed = await shown(core, failures, controllable=False)

    assert {"infer": True, "metadata": False, "manage": False} == told["may"]
    assert {"infer": True, "metadata": True, "manage": False} == fixed["may"]


async def test_workers_are_added_up_and_who_is_missing_is_named(
    core: Core, add_model: AddModel, failures: Failures
) -> None:
    await load_and_ask(core, add_model)
    own = ModelBoard(core.registry, failures).read("m")
    absent = ModelReading(
        "m", is_known=False, in_progress=2, dependents=("e",), versions=(), failures=()
    )
    others = PlayedOthers({"1": own, "2": absent}, {"3": "no answer"})
    told = await shown(core, failures, others=others)
    (version,) = told["versions"]

    assert [(Question.MODEL, {"model": "m"})] == others.asked
    assert {"cpu:0": 200} == version["loaded"]["devices"]
    assert 2 == version["statistics"]["inference_stats"]["success"]["count"]
    assert ("UNAVAILABLE", 2) == (version["state"], version["loads"])
    assert (2, ["e"], {"3": "no answer"}) == (
        told["in_progress"],
        told["dependents"],
        told["missing"],
    )
    assert own == await others.answering[Question.MODEL]({"model": "m"})


async def test_slots_and_positions_of_all_workers_are_added_up(
    core: Core, add_model: AddModel, failures: Failures
) -> None:
    await load_and_ask(core, add_model)
    own = ModelBoard(core.registry, failures).read("m")
    generator = GeneratorReading(
        4, 1, 64, 9, 5, 4, 16, has_text=True, has_template=False, no_text=""
    )
    (version,) = own.versions
    assert version.loaded is not None
    loaded = replace(version.loaded, generator=generator)
    theirs = replace(own, versions=(replace(version, loaded=loaded),))
    told = await shown(core, failures, others=PlayedOthers({"1": theirs, "2": theirs}))
    (both,) = told["versions"]

    assert both["loaded"]["generator"] == {
        "slots": 8,
        "running": 2,
        "positions": 128,
        "positions_used": 18,
        "prompt_tokens": 10,
        "output_tokens": 8,
        "max_length": 16,
        "has_text": True,
        "has_template": False,
        "no_text": "",
    }
    assert (await shown(core, failures))["versions"][0]["loaded"]["generator"] is None
