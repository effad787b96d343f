"""A model whose first execution never ends: its load fails, and nothing waits for it."""

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import mesh
from support.http import Answer, ask
from support.process import ServerProcess, served

import xlaserve

SECONDS = ("--load-seconds", "5")
STUCK = ("it was still ", " after 5 seconds (load_seconds)")


def endless(params: None, x: jax.Array) -> dict[str, jax.Array]:
    """Loop for billions of years on zeros, which is what warm-up requests contain.

    The trip counts are constants, because models whose loops depend on inputs are not warmed
    up.
    """

    def twice(_: int, c: jax.Array) -> jax.Array:
        halved: jax.Array = jax.lax.fori_loop(0, 1 << 30, lambda i, d: d * 0.5 + x, c)
        return halved

    def long(c: jax.Array) -> jax.Array:
        halved: jax.Array = jax.lax.fori_loop(0, 1 << 30, twice, c)
        return halved

    return {"y": jax.lax.cond(abs(x).max() == 0, long, lambda c: c, x)}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, function in {"endless": endless, "other": lambda params, x: {"y": x + 1}}.items():
        xlaserve.export_model(function, None, {"x": ("FP32", [2])}, root / name / "1")
    return root


def halved(params: None, x: jax.Array) -> dict[str, jax.Array]:
    """Halve until no element exceeds 1: endless for infinity. Its rows are not proved."""

    def half(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        trips, y = carried
        return trips + 1, jnp.where(y > 1, y * 0.5, y)

    first = jnp.zeros((), jnp.float32), x
    trips, y = jax.lax.while_loop(lambda c: (c[1] > 1).any(), half, first)
    return {"y": y + 0 * trips}


@pytest.mark.slow
async def test_what_does_not_end_is_ended_where_processes_compile(
    repository: Path, tmp_path: Path
) -> None:
    """No thread keeps running, neither after a warm-up nor after a trial of declared rows."""
    root = tmp_path / "models"
    shutil.copytree(repository / "endless", root / "endless")
    xlaserve.export_model(
        halved,
        None,
        {"x": ("FP32", [-1, 2])},
        root / "other" / "1",
        batch_independent=True,
        trial_seconds=2,
    )
    flags = ("--compile-processes", "1", "--trial-seconds", "2")
    async with served(root, *flags, "--model-control-mode", "explicit") as server:
        other = await post(server, "/v2/repository/models/other/load", {})
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [3, 8]}
        answers = [
            await post(server, "/v2/models/other/infer", {"inputs": [tensor]}) for _ in range(3)
        ]
        endless = await post(server, "/v2/repository/models/endless/load", {})
        metrics = (await ask(server.http, "GET", "/metrics")).body.decode()
        status = await server.stop()

    assert 200 == other.status, other.body
    assert [[0.75, 1]] * 3 == [one.json["outputs"][0]["data"] for one in answers]
    assert 400 == endless.status
    assert (
        "it did not end in 2 seconds of each core (its first execution, on zeros" in endless.error
    )
    assert "xlaserve_abandoned_work 0" in metrics
    assert 0 == status


async def post(server: ServerProcess, path: str, said: Any) -> Answer:
    return await ask(server.http, "POST", path, body=json.dumps(said).encode())


async def none_abandoned(server: ServerProcess) -> None:
    """Wait until no load thread is abandoned: the process that executed the model was killed."""
    metrics = ""
    while "\nxlaserve_abandoned_work 0" not in metrics:
        metrics = (await ask(server.http, "GET", "/metrics")).body.decode()


async def infer(server: ServerProcess) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    answer = await post(server, "/v2/models/other/infer", {"inputs": [tensor]})
    return answer.json["outputs"][0]["data"]


@pytest.mark.slow
async def test_a_load_that_does_not_end_fails_and_others_go_on(repository: Path) -> None:
    """The server becomes ready, reports the error over every protocol, and exits on SIGTERM."""
    flags = ("--model-control-mode", "explicit", "--load-model", "*", "--model-root")
    async with served(repository, *SECONDS, *flags, str(repository)) as server:
        ready = await ask(server.http, "GET", "/v2/health/ready")
        answered = await infer(server)
        index = (await post(server, "/v2/repository/index", {})).json
        await none_abandoned(server)
        again = await post(server, "/v2/repository/models/endless/load", {})
        sagemaker = await post(
            server, "/models", {"model_name": "mine", "url": str(repository / "endless")}
        )
        other = await post(
            server, "/models", {"model_name": "fine", "url": str(repository / "other")}
        )
        unloaded = await post(server, "/v2/repository/models/endless/unload", {})
        await none_abandoned(server)
        status = await server.stop()

    (entry,) = [row for row in index if row["name"] == "endless"]
    assert 200 == ready.status
    assert [2, 3] == answered
    assert "UNAVAILABLE" == entry["state"]
    assert all(part in entry["reason"] for part in STUCK), entry
    assert 400 == again.status
    assert all(part in again.error for part in STUCK), again.error
    assert 400 == sagemaker.status
    assert all(part in sagemaker.body.decode() for part in STUCK)
    assert 200 == other.status
    assert 200 == unloaded.status
    assert 0 == status


@pytest.mark.slow
async def test_a_mesh_is_told_that_a_load_did_not_end(repository: Path) -> None:
    flags = ("--modelmesh", "--model-root", str(repository))
    async with served(repository, *SECONDS, *flags) as server, mesh.dial(server.url) as sidecar:
        await sidecar.status()
        loads = await asyncio.gather(
            mesh.outcome(sidecar.load("bad", str(repository / "endless"))),
            mesh.outcome(sidecar.load("good", str(repository / "other"))),
        )
        await sidecar.unload("bad")
        status = await server.stop(signal.SIGINT)

    assert ["FAILED_PRECONDITION", "OK"] == [code for code, _ in loads]
    assert all(part in loads[0][1] for part in STUCK), loads
    assert 0 == status


@pytest.mark.slow
async def test_a_server_ends_though_a_load_does_not(repository: Path) -> None:
    """While a process is executing the endless model."""
    flags = ("--model-control-mode", "explicit", "--drain-seconds", "1")
    async with served(repository, *flags) as server:
        loading = asyncio.ensure_future(post(server, "/v2/repository/models/endless/load", {}))
        reason = ""
        while not reason.startswith("proving"):
            index = (await post(server, "/v2/repository/index", {})).json
            reason = next(row["reason"] for row in index if row["name"] == "endless")
        status = await server.stop()
        loading.cancel()

    assert 0 == status
