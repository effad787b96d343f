"""Models in remote stores: listed, loaded, reloaded, unloaded, and cached."""

import asyncio
import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.asking import client
from support.conditions import until
from support.http import ask
from support.object_server import Handler, Shelves, serving_objects
from support.server import RunningServer, Serve

from xlaserve.settings.choices import ModelControlMode
from xlaserve.storage import fetching
from xlaserve.storage.cache import ModelCache

MODEL = "simple"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between attempts."""
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_SECONDS", 0.001)


def files_of(model: Path) -> dict[str, bytes]:
    return {
        f"root/{model.name}/{path.relative_to(model)}": path.read_bytes()
        for path in model.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def place(example_models: Path) -> Iterator[tuple[str, Shelves]]:
    files = files_of(example_models / MODEL)
    # Compile a single executable only.
    config = files[f"root/{MODEL}/config.pbtxt"].replace(b"max_batch_size: 8", b"max_batch_size: 1")
    with serving_objects(**{**files, f"root/{MODEL}/config.pbtxt": config}) as made:
        yield made


@pytest.fixture
def remote(tmp_path: Path, place: tuple[str, Shelves]) -> dict[str, Any]:
    """Settings of a server with models on the object server."""
    return {
        "repository": place[0],
        "http_endpoint": "port:0",
        "remote_schemes": ("http",),
        "remote_cache_directory": str(tmp_path / "cache"),
        "remote_stall_seconds": 30.0,
    }


async def index(server: RunningServer) -> dict[str, str]:
    answer = await ask(server.http or "", "POST", "/v2/repository/index")
    return {row["name"]: row["state"] for row in answer.json}


async def load(server: RunningServer, model: str = MODEL, **parameters: Any) -> tuple[int, str]:
    body = json.dumps({"parameters": parameters}).encode()
    path = f"/v2/repository/models/{model}/load"
    answer = await ask(server.http or "", "POST", path, body=body)
    return answer.status, answer.body.decode()


async def total(server: RunningServer) -> int:
    """Return the model's sum of 7 and 3."""
    ones = np.ones((1, 16), np.int32)
    async with client(server) as asking:
        found = await asking.infer(MODEL, INPUT0=7 * ones, INPUT1=3 * ones)
    return int(found["OUTPUT0"][0, 0])


async def test_a_remote_model_loads_serves_and_unloads(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    """The index downloads nothing; over gRPC and REST the model is like any other."""
    async with serve(**remote) as server, client(server) as asking:
        assert {MODEL: "UNAVAILABLE"} == await index(server)
        assert [] == place[1].gets()
        await asking.grpc.load_model(MODEL)
        assert 10 == await total(server)
        fetched = len(place[1].gets())
        assert (200, "{}") == await load(server)
        assert fetched == len(place[1].gets())
        await asking.grpc.unload_model(MODEL)
        assert {MODEL: "UNAVAILABLE"} == await index(server)
        text = await asking.metrics()
    size = sum(map(len, place[1].objects.values()))
    assert "xlaserve_fetched_models_total 1\n" in text
    (line,) = [row for row in text.splitlines() if row.startswith("xlaserve_fetched_bytes_total")]
    assert size <= int(line.split()[1]) < 2 * size


async def test_a_restart_with_a_full_cache_fetches_nothing(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    async with serve(**remote) as server:
        assert (200, "{}") == await load(server)
    place[1].asked.clear()

    async with serve(**remote) as server:
        assert (200, "{}") == await load(server)
        assert 10 == await total(server)
    assert [] == place[1].gets()


async def test_a_corrupted_cache_file_is_fetched_again(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves], tmp_path: Path
) -> None:
    async with serve(**remote) as server:
        assert (200, "{}") == await load(server)
    (weights,) = (tmp_path / "cache").glob("*/files/1/params.safetensors")
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    place[1].asked.clear()

    async with serve(**remote) as server:
        assert (200, "{}") == await load(server)
        assert 10 == await total(server)
    assert f"root/{MODEL}/1/params.safetensors" in place[1].gets()


async def test_a_model_that_cannot_fit_is_refused_before_it_is_fetched(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    """Its size is predicted from the listing and the file headers."""
    async with serve(**remote, capacity_bytes=1000) as server:
        status, text = await load(server)
    assert 507 == status
    assert "it needs" in text
    computation = f"root/{MODEL}/1/model.stablehlo"
    assert computation not in place[1].gets()


async def test_a_model_larger_than_the_cache_is_refused_before_a_byte(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    async with serve(**remote, remote_cache_max_bytes=1000) as server:
        status, text = await load(server)
    assert 400 <= status
    assert MODEL in text
    assert "remote_cache_max_bytes 1000" in text
    assert [] == place[1].gets()


async def test_polling_reloads_what_changed_and_keeps_what_a_store_that_is_away_had(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    shelves = place[1]
    async with serve(**remote, model_control_mode=ModelControlMode.POLL) as server:
        poll = server.application.control.follower.poll
        assert {MODEL: "READY"} == await index(server)
        fetched = len(shelves.gets())
        await poll()
        assert fetched == len(shelves.gets())

        shelves.is_away = True
        with capture_logs() as log:
            await poll()
        (said,) = [row for row in log if row["event"].startswith("repository unreadable")]
        assert "answered 503" in said["reason"]
        assert place[0] == said["path"]
        assert 10 == await total(server)

        shelves.is_away = False
        config = f"root/{MODEL}/config.pbtxt"
        shelves.objects[config] = shelves.objects[config] + b"# changed\n"
        await poll()
        assert config in shelves.gets()[fetched:]
        assert 10 == await total(server)

        for name in list(shelves.objects):
            del shelves.objects[name]
        shelves.objects["root/other"] = b""
        await poll()
        assert {MODEL: "READY"} == await index(server)
        await poll()
        assert {} == await index(server)


async def test_a_load_from_a_store_that_is_away_says_so(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    async with serve(**remote) as server:
        place[1].is_away = True
        status, text = await load(server)
    assert 400 <= status
    assert (
        f"{place[0]}/{MODEL} cannot be read: the server answered 503" in json.loads(text)["error"]
    )


async def test_a_model_with_a_hostile_name_is_refused_and_others_load(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    shelves = place[1]
    shelves.objects["root/bad/config.json"] = b"{}"
    shelves.objects["root/bad/..%2f..%2fescaped".replace("%2f", "/")] = b"x"
    shelves.pages["root/bad/"] = b'<a href="config.json">x</a><a href="..%2F..%2Fescaped">x</a>'
    async with serve(**remote) as server:
        status, text = await load(server, "bad")
        assert 400 <= status
        assert (
            "its object '../../escaped' has an empty name, '.' or '..'" in json.loads(text)["error"]
        )
        assert (200, "{}") == await load(server)


async def test_a_cancelled_load_ends_its_fetch(
    serve: Serve, remote: dict[str, Any], place: tuple[str, Shelves]
) -> None:
    """A stopping server does not wait for a store that does not answer."""
    shelves = place[1]

    def stall(handler: Handler, content: bytes) -> bool:
        if not handler.name.endswith("stablehlo"):
            return False
        handler.head(handler.name, len(content))
        handler.shelves.released.wait()
        return True

    shelves.fault = stall
    async with serve(**remote) as server:
        loading = asyncio.ensure_future(server.application.control.load(MODEL))
        await until(lambda: f"root/{MODEL}/1/model.stablehlo" in shelves.gets())
        assert 404 != (await ask(server.http or "", "GET", "/v2/health/live")).status
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        shelves.fault = None
        shelves.released.set()
        remotes = server.application.repository.remotes
        await until(lambda: not remotes.fetching)
        assert remotes.counts is not None
        assert (0, 0) == (remotes.counts.models, remotes.counts.retries)
        assert (200, "{}") == await load(server)


@pytest.mark.slow
async def test_a_local_model_loads_while_the_store_is_away(
    serve: Serve,
    remote: dict[str, Any],
    place: tuple[str, Shelves],
    example_models: Path,
    tmp_path: Path,
) -> None:
    local = tmp_path / "local"
    shutil.copytree(example_models / "identity", local / "identity")
    place[1].is_away = True
    settings = remote | {"repository": local, "model_repository": [place[0]]}
    async with serve(**settings) as server:
        assert (200, "{}") == await load(server, "identity")
        place[1].is_away = False
        assert (200, "{}") == await load(server)


def test_the_cache_is_of_this_user_alone(tmp_path: Path) -> None:
    ModelCache(tmp_path / "cache", 1, 1).prepare()

    assert 0o700 == stat.S_IMODE((tmp_path / "cache").stat().st_mode)
