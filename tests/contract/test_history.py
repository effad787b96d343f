"""The last hour of a whole server, as JSON."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from support import identity_models
from support.server import Serve
from support.stock import stock_client


async def test_a_server_remembers_requests_and_errors(
    serve: Serve, tmp_path_factory: Any, tmp_path: Path
) -> None:
    models = tmp_path_factory.mktemp("models")
    identity_models.write(models, "echo", "FP32")
    async with (
        serve(models, load_model=("*",), http_endpoint="port:0") as server,
        stock_client("http.aio", server) as client,
        aiohttp.ClientSession() as session,
    ):
        tensor = client.input("x", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        server.application.history.take()
        await client.ask("infer", "echo", [tensor])
        await client.fault("infer", "nowhere", [tensor])
        server.application.history.take()
        async with asyncio.timeout(20), session.get(f"http://{server.http}/history.json") as got:
            status, shown = got.status, await got.json()

    assert 200 == status
    latest = shown["recent"][-1]
    assert (1, 1) == (latest["success"], sum(latest["buckets"]))
    (model,) = latest["models"]
    assert ("echo", "1", 1) == (model["name"], model["version"], model["success"])
    # A rate needs the preceding sample.
    assert ["echo"] == [each["name"] for each in shown["recent"][-2]["models"]]
    (error,) = shown["errors"]
    assert ("ModelNotFound", "infer", "nowhere") == tuple(
        error[name] for name in ("reason", "operation", "model")
    )
    assert shown["now_seconds"] >= latest["at_seconds"]
