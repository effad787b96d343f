"""Programs up to the limit of memory mappings: loads are refused one by one, and nothing dies."""

import asyncio
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.http import Answer, ask
from support.process import served
from support.server import RunningServer, Serve

import xlaserve
from xlaserve.runtime.programs.mappings import Mappings

MODELS = 6
ROOM = 160
"""For some of them: each has two programs of about 20 mappings and more."""


def write(root: Path, name: str, number: int, batch_sizes: str = "1,2") -> None:
    """Write a model like no other: those of one computation share their programs."""

    def network(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        hidden = jax.nn.relu(x @ params["w1"])
        hidden = jnp.tanh(hidden @ params["w2"] + number)
        return {"y": jax.nn.softmax(hidden @ params["w3"], axis=1)}

    weights = {
        key: np.full((size, width), 0.01 + number * 1e-4, np.float32)
        for key, (size, width) in {"w1": (64, 128), "w2": (128, 128), "w3": (128, 10)}.items()
    }
    xlaserve.export_model(network, weights, {"x": ("FP32", [-1, 64])}, root / name / "1")
    config = {"parameters": {"batch_sizes": {"string_value": batch_sizes}}}
    (root / name / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for number in range(MODELS):
        write(root, f"m{number:02}", number)
    return root


async def load(server: RunningServer, name: str) -> Answer:
    assert server.http is not None
    return await ask(server.http, "POST", f"/v2/repository/models/{name}/load", body=b"{}")


async def infer(address: str, name: str) -> Answer:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}
    body = json.dumps({"inputs": [tensor]}).encode()
    return await ask(address, "POST", f"/v2/models/{name}/infer", body=body)


def limit() -> int:
    return Mappings().count() + ROOM


@pytest.mark.slow
async def test_a_load_without_mappings_for_its_programs_is_refused(
    serve: Serve, repository: Path
) -> None:
    async with serve(repository, http_endpoint="port:0", max_memory_mappings=limit()) as server:
        answers = [await load(server, f"m{number:02}") for number in range(MODELS)]
        refused = [answer for answer in answers if answer.status != 200]
        loaded = [f"m{n:02}" for n, answer in enumerate(answers) if answer.status == 200]
        assert server.http is not None
        found = [await infer(server.http, name) for name in loaded]
        await ask(server.http, "POST", f"/v2/repository/models/{loaded[0]}/unload", body=b"{}")
        metrics = (await ask(server.http, "GET", "/metrics")).body.decode()

    assert loaded
    assert {507} == {answer.status for answer in refused}
    assert "sysctl vm.max_map_count" in refused[0].error
    assert {200} == {answer.status for answer in found}
    assert "xlaserve_memory_mappings_limit" in metrics


@pytest.mark.slow
async def test_idle_models_are_evicted_for_the_mappings_of_others(
    serve: Serve, repository: Path
) -> None:
    settings = {"http_endpoint": "port:0", "max_memory_mappings": limit(), "evict": True}
    async with serve(repository, **settings) as server:
        with capture_logs() as logs:
            answers = [await load(server, f"m{number:02}") for number in range(MODELS)]
        ready = server.application.registry.ready(f"m{MODELS - 1:02}")

    assert {200} == {answer.status for answer in answers}
    assert any(log["event"] == "model evicted" for log in logs)
    assert ready


@pytest.mark.slow
async def test_what_is_compiled_behind_a_load_stops_at_the_limit(
    serve: Serve, tmp_path: Path
) -> None:
    """The model goes on with the programs that it has."""
    sizes = ",".join(map(str, range(1, 33)))
    write(tmp_path / "many", "m", 1, batch_sizes=sizes)
    settings = {"http_endpoint": "port:0", "max_memory_mappings": Mappings().count() + ROOM}
    with capture_logs() as logs:
        async with serve(tmp_path / "many", background_compile=True, **settings) as server:
            answer = await load(server, "m")
            async with asyncio.timeout(60):
                while not any(log["event"] == "background compilation incomplete" for log in logs):
                    await asyncio.sleep(0.01)
            assert server.http is not None
            found = await infer(server.http, "m")
    (line,) = [log for log in logs if log["event"] == "background compilation incomplete"]

    assert (200, 200) == (answer.status, found.status)
    assert "vm.max_map_count" in line["reason"]


@pytest.mark.large
async def test_four_hundred_models_are_loaded_or_refused(tmp_path: Path) -> None:
    """At the real limit of the system; the process lives, and answers for those that are loaded."""
    for number in range(400):
        write(tmp_path, f"m{number:03}", number, batch_sizes=",".join(map(str, range(1, 13))))
    async with served(tmp_path, "--model-control-mode", "explicit") as server:
        answers = [
            await ask(server.http, "POST", f"/v2/repository/models/m{n:03}/load", body=b"{}")
            for n in range(400)
        ]
        loaded = [n for n, answer in enumerate(answers) if answer.status == 200]
        found = [await infer(server.http, f"m{number:03}") for number in loaded]
        status = await server.stop()

    assert loaded
    assert {200, 507} >= {answer.status for answer in answers}
    assert {200} == {answer.status for answer in found}
    assert 0 == status
