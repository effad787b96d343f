"""Repeated loads and unloads: nothing fails, and no memory leaks."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import time, invisible to type checkers.

import asyncio
import os
import shutil
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from support.process import served
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import xlaserve

CLIENTS, ROUNDS = 32, int(os.environ.get("STRESS_ROUNDS", "64"))
CYCLES, SETTLED_AFTER = 50, 10
RESIDENT_GROWTH = 1.05
HUNDRED_MEGABYTES = (5000, 5000)


@pytest.mark.slow
async def test_32_clients_load_and_unload_one_model_again_and_again(
    serve: Serve, example_models: Path, tmp_path: Path
) -> None:
    """Every call succeeds, the server stays live, and an inference works afterwards."""
    shutil.copytree(example_models / "identity", tmp_path / "models" / "identity")
    # Only one bucket to compile per load: this test is about races.
    (tmp_path / "models/identity/config.json").write_text('{"max_batch_size": 1}')
    outcomes: Counter[str] = Counter()

    async def client(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        for _ in range(ROUNDS):
            for call, request in (
                (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="identity")),
                (
                    stub.RepositoryModelUnload,
                    pb.RepositoryModelUnloadRequest(model_name="identity"),
                ),
            ):
                try:
                    await call(request)
                    outcomes["ok"] += 1
                except grpc.aio.AioRpcError as error:
                    outcomes[f"{error.code().name}: {error.details()}"] += 1

    async with serve(tmp_path / "models") as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await asyncio.gather(*(client(stub) for _ in range(CLIENTS)))

            assert {"ok": CLIENTS * ROUNDS * 2} == outcomes
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live

            await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="identity"))

            assert (await stub.ModelReady(pb.ModelReadyRequest(name="identity"))).ready


@pytest.mark.slow
async def test_memory_comes_back_after_each_unload(tmp_path: Path) -> None:
    """50 loads and unloads of 100 MB: after the tenth, resident memory no longer grows."""
    weights = {"w": np.ones(HUNDRED_MEGABYTES, np.float32)}
    xlaserve.export_model(
        lambda params, x: {"y": x + params["w"][:1]},
        weights,
        {"x": ("FP32", [-1, HUNDRED_MEGABYTES[1]])},
        tmp_path / "models" / "large" / "1",
        max_batch_size=2,
    )
    del weights
    async with served(tmp_path / "models", "--model-control-mode", "explicit") as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            resident = []
            for _ in range(CYCLES):
                await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="large"))
                await stub.RepositoryModelUnload(
                    pb.RepositoryModelUnloadRequest(model_name="large")
                )
                resident.append(psutil.Process(server.process.pid).memory_info().rss)
    print("resident MB after each unload:", [round(r / 1e6) for r in resident])

    assert resident[-1] <= resident[SETTLED_AFTER - 1] * RESIDENT_GROWTH
