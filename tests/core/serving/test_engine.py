"""Inference through the core, with models that need no JAX."""

import asyncio
import threading
from collections.abc import Mapping

import numpy as np
import pytest
from support.calls import NotingObserver
from support.core import FP32, AddModel, Core, MakeCore, World

from xlaserve.errors import LoadFailed, ModelNotReady, Overloaded, ShuttingDown
from xlaserve.runtime.loaded import Value
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse, RequestedOutput


def request(model: str = "m", rows: int = 1, id: str = "", output: str = "y") -> InferRequest:
    data = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    return InferRequest(
        model, id=id, inputs=(InferInput("x", FP32, data),), outputs=(RequestedOutput(output),)
    )


async def loaded(core: Core, add_model: AddModel, name: str = "m", amount: float = 1) -> None:
    add_model(name, {1: amount})
    await core.control.load(name)


async def test_a_response_echoes_the_id_and_names_the_version(
    core: Core, add_model: AddModel
) -> None:
    await loaded(core, add_model)
    response = await core.engine.infer(request(rows=3, id="abc"))

    assert ("m", "1", "abc") == (response.model_name, response.model_version, response.id)
    assert [[1, 2], [3, 4], [5, 6]] == response.outputs[0].data.tolist()


async def test_a_quick_model_runs_on_the_event_loop(
    core: Core, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duration measured in the warm-up decides: a thread hop costs more than a small model."""
    threads: list[threading.Thread] = []
    await loaded(core, add_model)
    model = world.open[0]
    execute = model.execute

    def note_thread(
        inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        threads.append(threading.current_thread())
        return execute(inputs, resident=resident, replica=replica)

    monkeypatch.setattr(model, "execute", note_thread)
    world.seconds = 1e-6
    await core.engine.infer(request())
    world.seconds = 1.0
    await core.engine.infer(request())

    assert [True, False] == [thread is threading.main_thread() for thread in threads]


async def test_requests_over_the_limit_are_refused_at_once(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(max_requests_per_model=2)
    await loaded(core, add_model)
    world.may_execute.clear()
    running = [asyncio.create_task(core.engine.infer(request())) for _ in range(2)]
    while core.registry.requests < 2:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="max_requests_per_model"):
        await core.engine.infer(request())

    world.may_execute.set()
    await asyncio.gather(*running)

    assert 0 == core.registry.requests


async def test_a_stopping_engine_takes_no_requests(core: Core, add_model: AddModel) -> None:
    await loaded(core, add_model)
    core.gates.drain()

    with pytest.raises(ShuttingDown):
        await core.engine.infer(request())


async def test_a_handler_that_infers_has_one_call(core: Core, add_model: AddModel) -> None:
    """It uses the call of its own request; its other inferences are part of that call."""
    await loaded(core, add_model)
    observer = NotingObserver()
    gates = Gates(observers=[observer])
    engine = Engine(core.registry, gates, core.workers.host)
    call = AwaitedInfer()
    with gates.passing(call):
        await engine.infer(request())
        await engine.infer(request())
    first, second = observer.began_with

    assert call is first
    assert call is second.parent
    # The gates observe the answer that the handler makes.
    assert [(second,), (call,)] == [calls for calls, _ in observer.ended_with]


# --- ensembles ---

TENSOR = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}


def ensemble(*steps: tuple[str, str, str], output: str = "y") -> dict[str, object]:
    return {
        "max_batch_size": 4,
        "input": [TENSOR],
        "output": [TENSOR | {"name": output}],
        "ensemble_scheduling": {
            "step": [
                {"model_name": model, "input_map": {"x": source}, "output_map": {"y": target}}
                for model, source, target in steps
            ]
        },
    }


TWO_STEPS = ensemble(("b", "middle", "y"), ("a", "x", "middle"))


async def add_steps(core: Core, add_model: AddModel, config: dict[str, object]) -> None:
    add_model("a", {1: 1})
    add_model("b", {1: 10})
    add_model("e", {}, config)


async def states(core: Core) -> dict[str, str]:
    return {row.name: row.state for row in await core.control.catalog.index()}


async def test_an_ensemble_runs_its_steps_in_the_order_of_their_tensors(
    core: Core, add_model: AddModel
) -> None:
    """The order of the steps in the configuration does not matter."""
    await add_steps(core, add_model, TWO_STEPS)
    await core.control.load("e")
    response: InferResponse = await core.engine.infer(request("e"))

    assert [[11, 12]] == response.outputs[0].data.tolist()
    assert {"a": "READY", "b": "READY", "e": "READY"} == await states(core)
    assert "ensemble" == core.control.catalog.describe("e")[0].platform


async def test_an_ensemble_without_its_step_is_not_ready(core: Core, add_model: AddModel) -> None:
    await add_steps(core, add_model, TWO_STEPS)
    await core.control.load("e")
    await core.control.unload("a")

    assert "UNAVAILABLE" == (await states(core))["e"]
    assert not core.registry.ready("e")
    with pytest.raises(ModelNotReady, match="step 'a' is not ready"):
        await core.engine.infer(request("e"))

    await core.control.load("a")

    assert core.registry.ready("e")


async def test_unload_dependents_takes_the_ensembles_that_use_the_model(
    core: Core, add_model: AddModel
) -> None:
    """Model repository extension, Unload: models loaded with the ensemble are unloaded too."""
    await add_steps(core, add_model, TWO_STEPS)
    await core.control.load("e")
    await core.control.unload("a", {"unload_dependents": True})

    assert {"a": "UNAVAILABLE", "b": "UNAVAILABLE", "e": "UNAVAILABLE"} == await states(core)


async def test_a_step_that_another_ensemble_uses_stays(core: Core, add_model: AddModel) -> None:
    await add_steps(core, add_model, TWO_STEPS)
    add_model("f", {}, ensemble(("a", "x", "y")))
    await core.control.load("e")
    await core.control.load("f")
    await core.control.unload("e", {"unload_dependents": True})

    assert {
        "a": "READY",
        "b": "UNAVAILABLE",
        "e": "UNAVAILABLE",
        "f": "READY",
    } == await states(core)


async def test_a_plain_unload_leaves_the_steps(core: Core, add_model: AddModel) -> None:
    await add_steps(core, add_model, TWO_STEPS)
    await core.control.load("e")
    await core.control.unload("e")

    assert {"a": "READY", "b": "READY", "e": "UNAVAILABLE"} == await states(core)


async def test_ensembles_nest(core: Core, add_model: AddModel) -> None:
    await add_steps(core, add_model, TWO_STEPS)
    add_model("outer", {}, ensemble(("e", "x", "t"), ("a", "t", "y")))
    await core.control.load("outer")
    response = await core.engine.infer(request("outer"))

    assert [[12, 13]] == response.outputs[0].data.tolist()

    await core.control.unload("b")

    assert not core.registry.ready("outer")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ensemble(("e", "x", "y")), "'e' is a step of itself"),
        (ensemble(("missing", "x", "y")), "its step failed"),
        (ensemble(("a", "nowhere", "y")), "nowhere"),
        (ensemble(("a", "x", "y"), output="other"), "other"),
        (ensemble(("a", "x", "y"), ("b", "x", "y")), "y"),
        (ensemble(("a", "x", "y")) | {"max_batch_size": 8}, "max_batch_size"),
        (
            ensemble(("a", "x", "y")) | {"input": [TENSOR | {"data_type": "TYPE_INT32"}]},
            r"'a' expects FP32\[-1,2\]",
        ),
        (ensemble(("a", "x", "y")) | {"input": [TENSOR | {"dims": [3]}]}, r"INT32|FP32\[-1,3\]"),
    ],
)
async def test_an_ensemble_that_does_not_fit_together_fails_to_load(
    core: Core, add_model: AddModel, config: dict[str, object], text: str
) -> None:
    await add_steps(core, add_model, config)
    with pytest.raises(LoadFailed, match=text):
        await core.control.load("e")

    assert not core.registry.ready("e")


async def test_ensembles_in_a_circle_do_not_wait_for_each_other(
    core: Core, add_model: AddModel
) -> None:
    await add_steps(core, add_model, ensemble(("f", "x", "y")))
    add_model("f", {}, ensemble(("e", "x", "y")))
    results = await asyncio.gather(
        core.control.load("e"), core.control.load("f"), return_exceptions=True
    )

    assert [LoadFailed, LoadFailed] == [type(result) for result in results]
