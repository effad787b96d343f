"""One client's failing rows next to valid rows of others: one process, and with front ends."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support import python_models, several
from support.http import Answer, Connection, ask, connect, message
from support.process import ServerProcess, served

from xlaserve.serving.stations.apart import APART_SECONDS

BAD = -1.0
GOOD_CLIENTS, REQUESTS = 4, 40
RECORDED = """
import json, os

def record(values):
    numbers = [float(value) for value in np.ravel(values)]
    with open({path!r}, "a") as file:
        file.write(json.dumps(numbers) + chr(10))
    if {bad} in numbers:
        raise ValueError("one of these is bad")
"""
OWN = """
class Model(PythonModel):
    batched = True
    def infer(self, inputs):
        record(inputs["x"])
        return {"y": inputs["x"] * 2}
"""
TRITON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        record(np.concatenate([np.ravel(one) for one in found]))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one * 2)]) for one in found]
"""
CONFIG = """
max_batch_size: 8
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
GATHERED = "dynamic_batching { max_queue_delay_microseconds: 20000 }\n"
APART = 'parameters { key: "execution" value { string_value: "process" } }\n'
ENSEMBLE = """
ensemble_scheduling { step [{
  model_name: "own" model_version: -1
  input_map { key: "x" value: "x" }
  output_map { key: "y" value: "y" }
}] }
"""
CODE = {"own": (OWN, ""), "own in a process": (OWN, APART), "triton": (TRITON, "")}
MODELS = {"ensemble": "own"} | {name: name for name in CODE}
"""The models, and for each the model that executes."""
PROCESSES: Mapping[str, tuple[str, ...]] = {
    "one process": (),
    "front ends": ("--processes", "2", "--process-roles", "front-ends"),
}


def named(model: str) -> str:
    return model.replace(" ", "-")


@asynccontextmanager
async def running(folder: Path, flags: tuple[str, ...]) -> AsyncIterator[ServerProcess]:
    root = folder / "models"
    for name, (code, more) in CODE.items():
        begin = RECORDED.format(path=str(folder / named(name)), bad=BAD)
        config = CONFIG + GATHERED + more
        python_models.write(root, named(name), begin + code, config)
    (root / "ensemble" / "1").mkdir(parents=True)
    (root / "ensemble" / "config.pbtxt").write_text(f'platform: "ensemble"\n{CONFIG}{ENSEMBLE}')
    async with served(root, "--allow-python-models", *flags) as server:
        if flags:
            await server.until(several.READY)
        yield server


async def infer(client: Connection, model: str, value: float) -> Answer:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    body = json.dumps({"inputs": [tensor]}).encode()
    return await client.ask(message("POST", f"/v2/models/{named(model)}/infer", body=body))


async def asks(server: ServerProcess, model: str, values: list[float]) -> list[Any]:
    """Send values one after the other on one connection; return numbers or statuses."""
    found = []
    async with connect(server.http) as client:
        for value in values:
            answer = await infer(client, model, value)
            is_good = answer.status == 200
            found.append(answer.json["outputs"][0]["data"][0] if is_good else answer.status)
    return found


async def counts(server: ServerProcess, model: str) -> tuple[int, int]:
    """Return how many requests a model has answered, and how many have failed."""
    answer = await ask(server.http, "GET", f"/v2/models/{named(model)}/stats")
    told = answer.json["model_stats"][0]["inference_stats"]
    return told["success"]["count"], told["fail"]["count"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[] if how == "front ends" else [pytest.mark.slow])
        for how in PROCESSES
    ],
)
async def test_rows_that_fail_are_one_clients(tmp_path: Path, how: str) -> None:
    """The others get their answers and are counted; few of their batches fail.

    A client whose rows failed a batch is executed separately for a while, including its queued
    requests: it can fail one batch in that time.
    """
    loop = asyncio.get_running_loop()
    async with running(tmp_path, PROCESSES[how]) as server:
        for model, executing in MODELS.items():
            log = tmp_path / named(executing)
            log.unlink(missing_ok=True)
            began, before = loop.time(), await counts(server, model)
            values = [[float(n * 1000 + i) for i in range(REQUESTS)] for n in range(GOOD_CLIENTS)]
            bad, *good = await asyncio.gather(
                asks(server, model, [BAD] * REQUESTS), *(asks(server, model, v) for v in values)
            )
            after, seconds = await counts(server, model), loop.time() - began
            executed = [json.loads(line) for line in log.read_text().splitlines()]

            assert [[2 * value for value in each] for each in values] == good, model
            assert {500: REQUESTS} == Counter(bad), model
            of_good = GOOD_CLIENTS * REQUESTS
            assert (of_good, REQUESTS) == (after[0] - before[0], after[1] - before[1]), model
            mixed = [one for one in executed if BAD in one and set(one) != {BAD}]
            assert len(mixed) <= 1 + seconds // APART_SECONDS, model
            # Each row is executed once, and once more after a failed batch.
            rows = sum(map(len, executed))
            assert of_good + REQUESTS <= rows <= of_good + REQUESTS + sum(map(len, mixed)), model
