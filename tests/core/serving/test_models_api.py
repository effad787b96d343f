"""Inference for Python code inside the server."""

import numpy as np
import pytest
from support.core import AddModel, Core

from xlaserve.core.serving.models_api import Models
from xlaserve.errors import InvalidTensor, ModelNotFound, UnknownTensor


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
