"""Inference for Python code inside the server."""

import numpy as np
import pytest
from support.calls import CountedHeaders, NotedCall
from support.core import AddModel, Core

from xlaserve.errors import InvalidTensor, ModelNotFound, ShuttingDown, UnknownTensor
from xlaserve.serving.call import Call, Operation
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.models_api import Models


@pytest.fixture
async def models(core: Core, add_model: AddModel) -> Models:
    add_model("m", {1: 5})
    await core.control.load("m")
    return Models(core.engine)


async def test_arrays_go_in_and_come_out_by_name(models: Models) -> None:
    outputs = await models.infer("m", {"x": np.zeros((1, 2), np.float32)}, outputs=["y"])

    assert {"y": [[5, 5]]} == {name: array.tolist() for name, array in outputs.items()}


async def test_a_model_describes_itself(models: Models) -> None:
    assert ["x"] == [spec.name for spec in models.describe("m").inputs]
    assert (True, False) == (models.ready("m"), models.ready("nope"))


async def test_errors_are_those_of_every_client(models: Models) -> None:
    array = np.zeros((1, 2), np.float32)
    with pytest.raises(ModelNotFound):
        await models.infer("nope", {"x": array})
    with pytest.raises(UnknownTensor):
        await models.infer("m", {"q": array})
    with pytest.raises(InvalidTensor, match="got complex64"):
        await models.infer("m", {"x": array.astype(np.complex64)})


async def test_a_service_asks_for_its_client(core: Core, models: Models) -> None:
    """Its inferences pass the gates as its client does, even while the server drains."""
    array = np.zeros((1, 2), np.float32)
    seen: list[tuple[Operation, str | None]] = []

    def permit(call: Call) -> None:
        seen.append((call.operation, call.headers.get("authorization")))

    gates = Gates(permission=permit)
    service = Models(Engine(core.registry, gates, core.workers.host))
    headers = CountedHeaders({"authorization": "Bearer right"})
    with gates.passing(NotedCall(operation=Operation.SERVICE, headers=headers)):
        gates.drain()
        await service.infer("m", {"x": array})
    with pytest.raises(ShuttingDown):
        await service.infer("m", {"x": array})

    right = "Bearer right"
    assert [(Operation.SERVICE, right), (Operation.INFER, right)] == seen
