"""Calls to other models from a Python model in a separate process."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import python_models
from support.python_models import Start, starting, write
from support.server import Serve

PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
COUNT = """
made = 0
closed = 0

class Model(PythonModel):
    def infer(self, inputs):
        global made, closed
        try:
            for number in range(int(inputs["x"][0])):
                made += 1
                yield {"y": np.array([number], np.float32)}
            if inputs["x"][0] == 7:
                raise InferenceError("seven is enough")
        finally:
            closed += 1
"""
SEEN = """
import sys

class Model(PythonModel):
    def infer(self, inputs):
        module = next(m for n, m in list(sys.modules.items())
                      if n.startswith("xlaserve_model_") and hasattr(m, "made"))
        return {"y": np.array([module.made, module.closed], np.float32)}
"""
TRITON = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    {kind} execute(self, requests):
        answers = []
        for request in requests:
            call = pb_utils.InferenceRequest(model_name="count", inputs=request.inputs(),
                                             requested_output_names=["y"])
            total, errors = 0, ""
            for answer in {answers}:
                if answer.has_error():
                    errors = answer.error().message()
                elif len(answer.output_tensors()) > 0:
                    y = pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()
                    total += float(y[0])
            if errors:
                answers.append(pb_utils.InferenceResponse(
                    error=pb_utils.TritonError(errors, pb_utils.TritonError.INVALID_ARG)))
            else:
                y = pb_utils.Tensor("y", np.array([total], np.float32))
                answers.append(pb_utils.InferenceResponse([y]))
        return answers
"""
STREAM = """
class Model(PythonModel):
    def load(self, context):
        self.context = context

    def infer(self, inputs):
        x, found = inputs["x"], []
        for answer in self.context.stream("count", {{"x": x}}):
            found.append(answer["y"][0])
            {then}
        return {{"y": np.array([sum(found)], np.float32)}}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def numbers(*values: float) -> "np.ndarray[Any, Any]":
    return np.array(values, np.float32)


@pytest.mark.slow
async def test_the_many_answers_of_another_model_reach_a_process(start: Any, root: Path) -> None:
    """Answers, their end and their error arrive; unwanted answers are not computed."""
    config = python_models.VECTORS + PROCESS
    write(root, "count", COUNT, python_models.VECTORS)
    write(root, "seen", SEEN, python_models.VECTORS)
    sync = {"kind": "def", "answers": "call.exec(decoupled=True)"}
    awaits = {"kind": "async def", "answers": "await call.async_exec(decoupled=True)"}
    write(root, "sync", TRITON.format(**sync), config, begin="")
    write(root, "awaits", TRITON.format(**awaits), config, begin="")
    write(root, "own", STREAM.format(then="pass"), config)
    write(root, "some", STREAM.format(then="if len(found) == 3: break"), config)
    async with start() as client:
        found, failed = {}, {}
        for name in ("sync", "awaits", "own"):
            found[name] = [float((await client.infer(name, x=numbers(n)))["y"][0]) for n in (0, 50)]
            failed[name] = await client.fails(name, x=numbers(7))
        before = (await client.infer("seen", x=numbers(0)))["y"].tolist()
        few = await client.infer("some", x=numbers(100_000))
        async with asyncio.timeout(60):
            while (after := (await client.infer("seen", x=numbers(0)))["y"].tolist())[1] < 10:
                await asyncio.sleep(0.01)

    assert {key: [0.0, 1225.0] for key in ("sync", "awaits", "own")} == found
    for text in failed.values():
        assert "INVALID_ARGUMENT: model " in text
        assert "seven is enough" in text
    assert [3 * 57, 9] == before
    assert 3 == few["y"][0]
    assert after[0] - before[0] < 200


@pytest.mark.slow
async def test_a_process_is_told_that_a_request_is_cancelled(start: Any, root: Path) -> None:
    code = """
    import pathlib, time

    class Model(PythonModel):
        def infer(self, inputs, request):
            place = pathlib.Path(__file__).parent
            if inputs["x"][0]:
                (place / "begun").touch()
                while not request.is_cancelled:
                    time.sleep(0.01)
                (place / "cancelled").touch()
            return {"y": inputs["x"]}
    """
    place = write(root, "m", code, python_models.VECTORS + PROCESS)
    async with start() as client:
        asking = asyncio.ensure_future(client.infer("m", x=numbers(1)))
        async with asyncio.timeout(60):
            while not (place / "begun").exists():
                await asyncio.sleep(0.01)
            asking.cancel()
            answer = await client.infer("m", x=numbers(0))

    assert [0] == answer["y"].tolist()
    assert (place / "cancelled").exists()
