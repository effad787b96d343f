"""Two fine-tunes of one model sharing programs, as a mesh and its clients see them."""

import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.runtime import StartRuntime
from support.shelf import Shelf
from tritonclient.grpc import service_pb2 as pb

import xlaserve

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.


def _export(path: Path, factor: float, *, minus: bool = False) -> Path:
    def fn(params: jax.Array, x: jax.Array) -> jax.Array:
        return x - params if minus else x * params

    params = np.float32(factor)
    inputs = {"x": ("FP32", [-1, 1])}
    xlaserve.export_model(fn, params, inputs, path / "1", outputs=["y"], max_batch_size=2)
    return path


def _asking(value: float) -> Any:
    request = pb.ModelInferRequest(raw_input_contents=[struct.pack("<f", value)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return request


@pytest.mark.parametrize("endpoint", ["port:0"])
async def test_fine_tunes_share_what_is_compiled_and_nothing_else(
    start: StartRuntime, models: Shelf, tmp_path: Path, endpoint: str
) -> None:
    """Answers use their own parameters; the mesh gets each model's additional size."""
    root = tmp_path / "tunes"
    double, triple = _export(root / "double", 2), _export(root / "triple", 3)
    minus = _export(root / "minus", 4, minus=True)
    async with start(model_root=(root,)) as runtime:

        async def answer(model: str) -> float:
            response = await runtime.mesh.infer(model, _asking(5))
            (found,) = struct.unpack("<f", response.raw_output_contents[0])
            return float(found)

        await runtime.mesh.load("double", double)
        alone = runtime.held().booked_bytes
        second = await runtime.mesh.load("triple", triple)
        both = runtime.held().booked_bytes

        assert (10, 15) == (await answer("double"), await answer("triple"))
        assert both - alone == second.sizeInBytes < alone / 100

        await runtime.mesh.unload("double")

        assert 15 == await answer("triple")
        assert alone == runtime.held().booked_bytes
        # It is charged for the programs now, covered by slack: the mesh keeps the reported size.
        assert second.sizeInBytes == (await runtime.mesh.size("triple")).sizeInBytes

        await runtime.mesh.load("minus", minus)
        await runtime.mesh.unload("triple")

        assert 1 == await answer("minus")
        await runtime.mesh.unload("minus")
        assert 0 == runtime.held().booked_bytes
