"""A model that compiles requested shapes on demand, as clients see it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
import pytest
from support.http import Answer, ask
from support.server import Serve

from xlaserve import export_model


def total(params: None, x: jax.Array) -> dict[str, jax.Array]:
    return {"y": x.sum(axis=1)}


@pytest.fixture
async def address(tmp_path: Path, serve: Serve) -> AsyncIterator[str]:
    """A server with two models that sum FP32[-1,-1]; one allows shapes on demand."""
    said: dict[str, dict[str, Any]] = {
        "closed": {"compiled_shapes": {"s": [2]}},
        "open": {"max_on_demand_shapes": 2},
    }
    for name, options in said.items():
        path = tmp_path / "models" / name / "1"
        export_model(total, None, {"x": ("FP32", [-1, "s"])}, path, max_batch_size=2, **options)
    async with serve(
        tmp_path / "models",
        http_endpoint="port:0",
        model_control_mode="none",
    ) as running:
        assert running.http is not None
        yield running.http


async def infer(address: str, name: str, size: int) -> Answer:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, size], "data": [1.0] * size}
    body = json.dumps({"inputs": [tensor]}).encode()
    return await ask(address, "POST", f"/v2/models/{name}/infer", body=body)


async def test_shapes_are_compiled_as_they_are_asked_for(
    address: str, compilations: list[str]
) -> None:
    """Six requests for three shapes, and one for the first shape, which was evicted."""
    sizes = [3, 3, 4, 4, 5, 5]
    answers = [
        await asyncio.gather(*(infer(address, "open", size) for size in sizes[i : i + 2]))
        for i in (0, 2, 4)
    ]
    counted = len(compilations)
    again = await infer(address, "open", 3)
    metrics = (await ask(address, "GET", "/metrics")).body.decode()

    assert [[s, s] for s in (3, 4, 5)] == [
        [answer.json["outputs"][0]["data"][0] for answer in pair] for pair in answers
    ]
    assert (200, 3, 4) == (again.status, counted, len(compilations))
    row = 'xlaserve_model_on_demand_compilations_total{model="open",version="1"} 4'
    assert row in metrics.splitlines()


async def test_without_it_another_shape_is_refused(address: str, compilations: list[str]) -> None:
    answer = await infer(address, "closed", 3)

    assert (400, []) == (answer.status, compilations)
    assert "'x': expected dimension 1 of size 2 (compiled_shapes)" in answer.error
