"""A whole server with accelerator scheduling; CPU devices are declared to be accelerators."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.held import held
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import xlaserve
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.exported.jax_export import JaxExportModel

CLIENTS = 24
COLUMNS = 300
ON_ALL = '{"parameters": {"devices": {"string_value": "all"}}}'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batched and an unbatched model, both on all devices."""
    root = tmp_path_factory.mktemp("models")
    weights = np.random.default_rng(0).standard_normal((COLUMNS, COLUMNS)).astype(np.float32)
    for name, batch in (("batched", 8), ("single", 0)):
        xlaserve.export_model(
            lambda p, x: {"y": x @ p["w"]},
            {"w": weights},
            {"x": ("FP32", [-1 if batch else 2, COLUMNS])},
            root / name / "1",
            max_batch_size=batch,
        )
        (root / name / "config.json").write_text(ON_ALL)
    np.save(root / "w.npy", weights)
    return root


@pytest.fixture(autouse=True)
def _accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "is_accelerator", True)


async def infer(stub: Any, name: str, rows: int, value: float) -> Any:
    data = np.full((rows, COLUMNS), value, np.float32)
    message = pb.ModelInferRequest(model_name=name, raw_input_contents=[data.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[rows, COLUMNS])
    answer = await stub.ModelInfer(message)
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(rows, COLUMNS)


@pytest.mark.parametrize("name", ["batched", "single"])
async def test_many_clients_get_their_own_rows_and_nothing_is_left(
    serve: Serve, repository: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    executed: list[int] = []
    dispatch = JaxExportModel.dispatch

    def noting(self: JaxExportModel, inputs: Any, **options: Any) -> Any:
        executed.append(options["replica"])
        return dispatch(self, inputs, **options)

    monkeypatch.setattr(JaxExportModel, "dispatch", noting)
    one_row = np.load(repository / "w.npy").sum(axis=0)
    async with serve(repository) as server:
        await server.application.control.load(name)
        await server.application.control.unload(name)
        before = held(server.application)
        await server.application.control.load(name)
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            sizes = [2 if name == "single" else 1 + n % 4 for n in range(CLIENTS)]
            answers = await asyncio.gather(
                *(infer(stub, name, rows, float(n)) for n, rows in enumerate(sizes))
            )
        await server.application.control.unload(name)
        after = held(server.application)

    for n, (rows, answer) in enumerate(zip(sizes, answers, strict=True)):
        np.testing.assert_allclose(np.tile(one_row * n, (rows, 1)), answer, rtol=1e-3, atol=1e-2)
    assert {0, 1} == set(executed)
    assert len(executed) <= CLIENTS if name == "batched" else len(executed) == CLIENTS
    assert before == after
