"""Batching in a whole server: the answers that clients get, and the statistics."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import xlaserve

CLIENTS = 48


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that benefits from batches, because an execution reads its parameters only once."""
    root = tmp_path_factory.mktemp("models")
    weights = np.random.default_rng(0).standard_normal((256, 2048)).astype(np.float32) / 16
    xlaserve.export_model(
        lambda p, x: {"y": (x @ p["w"]) @ p["w"].T},
        {"w": weights},
        {"x": ("FP32", [-1, 256])},
        root / "wide" / "1",
        max_batch_size=32,
    )
    return root


def request(rows: int, value: float) -> Any:
    data = np.full((rows, 256), value, np.float32)
    message = pb.ModelInferRequest(model_name="wide", raw_input_contents=[data.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[rows, 256])
    return message


async def infer(stub: Any, rows: int, value: float) -> Any:
    answer = await stub.ModelInfer(request(rows, value))
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(rows, 256)


def totals(server: RunningServer) -> Any:
    (report,) = server.application.control.catalog.statistics("wide")
    return report.totals


async def test_many_clients_share_executions_and_get_their_own_rows(
    serve: Serve, repository: Path
) -> None:
    """One to four rows each, on one connection; no other request's rows and no padding."""
    async with serve(repository, load_model=("wide",)) as server:
        server.gather("wide", 32)
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            alone = await infer(stub, 1, 1.0)
            sizes = [1 + n % 4 for n in range(CLIENTS)]
            answers = await asyncio.gather(
                *(infer(stub, rows, float(n)) for n, rows in enumerate(sizes))
            )
        counted = totals(server)

    for n, (rows, answer) in enumerate(zip(sizes, answers, strict=True)):
        assert (rows, 256) == answer.shape
        np.testing.assert_allclose(np.repeat(alone * n, rows, axis=0), answer, rtol=1e-4, atol=1e-3)
    assert CLIENTS + 1 == counted.success.count
    assert 1 + sum(sizes) == counted.inference_count
    assert counted.execution_count < counted.success.count


async def test_without_batching_every_request_is_executed_by_itself(
    serve: Serve, repository: Path
) -> None:
    async with serve(repository, load_model=("wide",), dynamic_batching=False) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await asyncio.gather(*(infer(stub, 1, 1.0) for _ in range(8)))
        counted = totals(server)

    assert (8, 8) == (counted.success.count, counted.execution_count)


async def test_the_rest_is_compiled_while_the_model_serves(
    serve: Serve, repository: Path, compilations: list[str]
) -> None:
    """The model is ready with two batch sizes; others are compiled in the background."""
    async with serve(repository, background_compile=True) as server:
        await server.application.control.load("wide")
        _, instance = server.application.registry.resolve("wide")
        first = [bucket.rows for bucket in instance.info.buckets]
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while len(instance.info.buckets) < 10:
                await infer(stub, 3, 1.0)
            complete = [bucket.rows for bucket in instance.info.buckets]
            compiled = len(compilations)
            for rows in (1, 2, 3, 5, 9, 32):
                await infer(stub, rows, 1.0)

    assert {1, 32} <= set(first) < set(complete)
    assert [1, 2, 3, 4, 6, 8, 12, 16, 24, 32] == complete
    assert compiled == len(compilations)
