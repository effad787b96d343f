"""`reshape` in a whole server, with the stock clients over both transports."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from support.server import Serve

import xlaserve

CONFIG = {
    "max_batch_size": 8,
    "dynamic_batching": {"max_queue_delay_microseconds": 2000},
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4], "reshape": {"shape": [2, 2]}}],
    "output": [
        {"name": "s", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}},
        {"name": "y", "data_type": "TYPE_FP32", "dims": [2, 2]},
    ],
}


async def test_clients_see_the_dims_and_the_model_the_shape(serve: Serve, tmp_path: Path) -> None:
    """Metadata and configuration show the dims; requests of many clients share batches."""
    root = tmp_path / "models"
    xlaserve.export_model(
        lambda p, x: {"s": x.sum((1, 2)), "y": x * 2},
        {},
        {"x": ("FP32", [-1, 2, 2])},
        root / "m" / "1",
        max_batch_size=8,
    )
    (root / "m" / "config.json").write_text(json.dumps(CONFIG))
    async with (
        serve(root, load_model=("m",), http_endpoint="port:0") as server,
        triton.InferenceServerClient(server.url) as grpc,
        triton_http.InferenceServerClient(str(server.http)) as http,
    ):
        metadata: Any = await grpc.get_model_metadata("m", as_json=True)
        written: Any = await http.get_model_config("m")

        async def ask(client: Any, module: Any, rows: int, value: float) -> Any:
            data = np.full((rows, 4), value, np.float32)
            given = module.InferInput("x", data.shape, "FP32")
            given.set_data_from_numpy(data)
            return await client.infer("m", [given])

        answers = await asyncio.gather(
            *(
                ask(*pair, rows=1 + n % 2, value=float(n))
                for n, pair in enumerate([(grpc, triton), (http, triton_http)] * 4)
            )
        )

    assert ["-1", "4"] == metadata["inputs"][0]["shape"]
    shapes = {one["name"]: one["shape"] for one in metadata["outputs"]}
    assert {"s": ["-1", "1"], "y": ["-1", "2", "2"]} == shapes
    assert {"shape": [2, 2]} == written["input"][0]["reshape"]
    for n, answer in enumerate(answers):
        rows = 1 + n % 2
        np.testing.assert_array_equal(np.full((rows, 1), 4.0 * n), answer.as_numpy("s"))
        np.testing.assert_array_equal(np.full((rows, 2, 2), 2.0 * n), answer.as_numpy("y"))
