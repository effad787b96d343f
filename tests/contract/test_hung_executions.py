"""D6: an execution that hangs, or a device that fails, as clients and platforms see it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
import pytest
from support.doubling import export_double
from support.http import Answer, ask
from support.server import RunningServer, serving

from xlaserve.serving.stations import health

BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()
SECONDS = 0.3


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hung")
    export_double(root)
    return root


@pytest.fixture
async def server(repository: Path, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with serving(
        tmp_path,
        repository,
        load_model=("double",),
        http_endpoint="port:0",
        inline_execution_seconds=0.0,
        execution_seconds=SECONDS,
    ) as running:
        yield running


async def get(server: RunningServer, path: str) -> int:
    assert server.http is not None
    return (await ask(server.http, "GET", path)).status


async def infer(server: RunningServer) -> Answer:
    assert server.http is not None
    return await ask(server.http, "POST", "/v2/models/double/infer", body=BODY)


async def index(server: RunningServer) -> Any:
    assert server.http is not None
    answer = await ask(server.http, "POST", "/v2/repository/index")
    return next(row for row in answer.json if row["name"] == "double")


async def until_ready(server: RunningServer) -> None:
    async with asyncio.timeout(30):
        while await get(server, "/v2/models/double/ready") != 200:
            await asyncio.sleep(0.01)


async def test_an_execution_that_hangs(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients are answered, its model is not ready, the server is live; until it ends."""
    _, instance = server.application.registry.resolve("double")
    execute, released = type(instance.runner).execute, threading.Event()  # type: ignore[attr-defined]

    def hang(self: Any, *arguments: Any, **options: Any) -> Any:
        released.wait(60)
        return execute(self, *arguments, **options)

    monkeypatch.setattr(type(instance.runner), "execute", hang)
    try:
        answers = await asyncio.gather(*(infer(server) for _ in range(20)))
        later = await infer(server)
        live, ready = await get(server, "/v2/health/live"), await get(server, "/v2/health/ready")
        of_model, row = await get(server, "/v2/models/double/ready"), await index(server)
    finally:
        released.set()
    await until_ready(server)

    assert {500} == {answer.status for answer in answers}
    assert "has been running for 0.3 seconds (execution_seconds)" in answers[0].error
    assert 503 == later.status
    assert (200, 200, 400) == (live, ready, of_model)
    assert "UNAVAILABLE" == row["state"]
    assert "execution_seconds" in row["reason"]
    assert 200 == (await infer(server)).status


async def test_a_device_that_fails(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients are told that there was an error, and not which; then it is tried again."""
    _, instance = server.application.registry.resolve("double")
    # As long as the test looks.
    monkeypatch.setattr(health, "_FIRST_PAUSE_SECONDS", 3600.0)

    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS at 0x7f")

    with monkeypatch.context() as patched:
        patched.setattr(type(instance.runner), "execute", fail)
        answer = await infer(server)
        of_model, row = await get(server, "/v2/models/double/ready"), await index(server)
        live = await get(server, "/v2/health/live")
    instance.resume()

    assert 500 == answer.status
    assert "0x7f" not in answer.error
    assert (200, 400) == (live, of_model)
    assert "execution failed on the device" == row["reason"]
    assert 200 == (await infer(server)).status
