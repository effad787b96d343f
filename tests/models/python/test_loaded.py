from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from xlaserve.errors.code import ModelFailed
from xlaserve.python_models.loaded import LoadedPython
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.tensors import DATATYPES, TensorSpec

INPUTS = {"x": np.zeros((3, 2), np.float32)}


class Copied:
    """A stand-in for a model's process that runs a given function on each request."""

    def __init__(self, does: Callable[[Any], None]) -> None:
        self._does = does

    def handle(
        self, requests: list[Any], freed: Callable[[], None], *, together: bool = True
    ) -> None:
        for request in requests:
            self._does(request)
        freed()


def execute(does: Callable[[Any], None], max_batch_size: int = 4) -> Mapping[str, Any]:
    specs = (TensorSpec("x", DATATYPES["FP32"], (-1, 2)),)
    info = ModelInfo("python", specs, specs, max_batch_size)
    copies: Any = [Copied(does)]
    model = LoadedPython("m", info, copies, is_batched=True, concurrency=1, forget=lambda: None)
    return model.execute(INPUTS)


def test_the_server_itself_waits_for_the_answer_of_the_code() -> None:
    def answer(request: Any) -> None:
        request.begin()
        request.answer({"y": np.array([request.rows, len(request.outputs)])})
        request.end()

    assert [3, 1] == execute(answer)["y"].tolist()
    assert [1, 1] == execute(answer, max_batch_size=0)["y"].tolist()


def test_the_server_itself_gets_the_error_of_the_code() -> None:
    with pytest.raises(ValueError, match="no such row"):
        execute(lambda request: request.fail(ValueError("no such row")))
    with pytest.raises(ModelFailed, match="its code returned no answer"):
        execute(lambda request: request.end())
