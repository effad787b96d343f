"""Triton's model loading API in Python models: `load_model`, `unload_model`, `is_model_ready`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.python_models import VECTORS, Start, starting, write, write_function
from support.server import Serve

from xlaserve.settings.choices import ModelControlMode

PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
USER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

IDENTITY = json.dumps({{
    "backend": "identity",
    "input": [{{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}}],
    "output": [{{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}}],
}})

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        {initialize}

    def execute(self, requests):
        def ask(model):
            call = pb_utils.InferenceRequest(model_name=model, inputs=requests[0].inputs(),
                                             requested_output_names=["y"])
            answer = call.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            return float(pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()[0])

        def refused(call, **arguments):
            try:
                call(**arguments)
            except pb_utils.TritonModelException as error:
                return str(error)

        found = []
        {execute}
        text = json.dumps(found)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([text], np.object_))])]
"""
CONFIG = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "y", data_type: TYPE_STRING, dims: [ 1 ] }]
"""
USES = """
        # As initialize left it, then with another configuration, then not at all.
        found.append(ask("inner"))
        pb_utils.load_model(model_name="inner", config=IDENTITY,
                            files={"file:1/none": b"x" * 200_000})
        found.append(ask("inner"))
        pb_utils.unload_model(model_name="inner", unload_dependents=True)
        found.append(pb_utils.is_model_ready(model_name="inner"))
        found.append(refused(pb_utils.load_model, model_name="none_such"))
        found.append(refused(pb_utils.load_model, model_name="inner", files={"other": b""}))
        found.append(refused(pb_utils.unload_model, model_name=self.name))
"""
LOADS = """
        if not pb_utils.is_model_ready(model_name="inner", model_version="1"):
            pb_utils.load_model(model_name="inner")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def user(root: Path, name: str, initialize: str, execute: str = "pass", more: str = "") -> None:
    code = USER.format(initialize=initialize.strip(), execute=execute.strip())
    write(root, name, code, CONFIG + more, begin="")


one = np.ones(1, np.float32)


@pytest.mark.parametrize("where", ["threads", pytest.param("process", marks=pytest.mark.slow)])
async def test_code_loads_and_unloads_other_models(start: Any, root: Path, where: str) -> None:
    """Even during its own load, on a server with a single load thread."""
    write_function(root, "inner", "return {'y': x + 4}")
    user(root, "user", LOADS, USES, PROCESS if where == "process" else "")
    async with start(load="user", load_threads=1) as client:
        ready = await client.grpc.is_model_ready("inner")
        first, second, still, *refused = json.loads((await client.infer("user", x=one))["y"][0])

    assert ready
    assert (5, 1, False) == (first, second, still)
    assert "none_such" in refused[0]
    assert "expected 'config' or 'file:<version>/<name>'" in refused[1]
    assert (
        "model 'user': deadlock: its code cannot unload 'user', because it would wait for itself"
        in refused[2]
    )


async def test_loads_that_wait_for_each_other_are_refused(start: Any, root: Path) -> None:
    user(root, "a", "pb_utils.load_model('b')")
    user(root, "b", "pb_utils.load_model('c')")
    user(root, "c", "pb_utils.load_model('a')")
    async with start(load="none_such", load_threads=1) as client:
        text = await client.refused("a")

    assert "model 'c': deadlock: its code cannot load 'a', because it would wait for itself" in text


async def test_code_may_not_what_clients_may_not(start: Any, root: Path) -> None:
    write_function(root, "inner", "return {'y': x}")
    user(root, "user", "pass", "found.append(refused(pb_utils.unload_model, model_name='inner'))")
    settings = {"load_model": (), "model_control_mode": ModelControlMode.NONE}
    async with start(**settings) as client:
        answer = await client.infer("user", x=one)
        ready = await client.grpc.is_model_ready("inner")

    assert b"--model-control-mode explicit" in answer["y"][0]
    assert ready


@pytest.mark.parametrize("where", ["threads", pytest.param("process", marks=pytest.mark.slow)])
async def test_a_request_that_ends_waits_for_no_load(start: Any, root: Path, where: str) -> None:
    place = root / "begun"
    code = f"""
    import pathlib, time

    class Model(PythonModel):
        def load(self, context):
            place = pathlib.Path({str(place)!r})
            place.touch()
            while place.exists():
                time.sleep(0.01)

        def infer(self, inputs):
            return {{"y": inputs["x"]}}
    """
    write(root, "slow", code, VECTORS)
    execute = "found.append(refused(pb_utils.load_model, model_name='slow') if float(x) else 0)"
    begin = "x = requests[0].inputs()[0].as_numpy()[0]\n        "
    user(root, "user", "pass", begin + execute, PROCESS if where == "process" else "")
    async with start(load="user") as client:
        asking = asyncio.ensure_future(client.infer("user", x=one))
        async with asyncio.timeout(60):
            while not place.exists():
                await asyncio.sleep(0.01)
            asking.cancel()
            # The load that it waits for has not completed, so its only copy is busy.
            answer = await client.infer("user", x=0 * one)
        still = place.exists()
        place.unlink()

    assert b"[0]" == answer["y"][0]
    assert still
