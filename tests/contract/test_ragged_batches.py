"""`allow_ragged_batch`: requests of different shapes are handed to code together."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from support import asking
from support.python_models import write
from support.server import Serve

CONFIG = """
max_batch_size: 4
input [{ name: "x", data_type: TYPE_FP32, dims: [ -1 ], allow_ragged_batch: RAGGED }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ -1 ] }]
batch_input [{
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "index"
  data_type: TYPE_FP32 source_input: "x"
}]
dynamic_batching { max_queue_delay_microseconds: 500000 preferred_batch_size: [ 4 ] }
"""
TOGETHER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        assert all(len(one.inputs()) == 1 for one in requests)
        ends = np.cumsum([x.size for x in inputs])
        # Each gets its own back, with where it ends among those of its execution.
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.c_[x, [[end]]].astype("f4"))])
            for x, end in zip(inputs, ends)
        ]
"""
BATCHED = """
class Model(PythonModel):
    batched = True

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["threads", "process"])
async def test_code_is_handed_requests_of_different_shapes_together(
    serve: Serve, tmp_path: Path, execution: str
) -> None:
    """Triton's python backend makes no batch inputs either: its code sees the requests."""
    said = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    write(tmp_path, "ragged", TOGETHER, CONFIG.replace("RAGGED", "true") + said, begin="")
    write(tmp_path, "alike", TOGETHER, CONFIG.replace("RAGGED", "false") + said, begin="")
    settings = {"load_model": ("*",), "allow_python_models": True}
    async with serve(tmp_path, **settings) as server, asking.client(server) as client:
        found = {}
        for model in ("ragged", "alike"):
            answers = await asyncio.gather(
                *(client.infer(model, x=np.ones((1, size), np.float32)) for size in (1, 2, 3, 4))
            )
            found[model] = sorted(one["y"][0, -1] for one in answers)
            assert [2, 3, 4, 5] == sorted(one["y"].shape[1] for one in answers)

    # The last one ends behind all of its execution.
    assert 10 == found["ragged"][-1]
    assert [1, 2, 3, 4] == found["alike"]


async def test_rows_of_different_shapes_are_not_put_together(serve: Serve, tmp_path: Path) -> None:
    write(tmp_path, "batched", BATCHED, CONFIG.replace("RAGGED", "true"))
    settings = {"allow_python_models": True}
    async with serve(tmp_path, **settings) as server, asking.client(server) as client:
        text = await client.refused("batched")

    assert "input 'x': allow_ragged_batch needs a class" in text
