"""A load that fails has its reason in every place that shows models, until one succeeds."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
from support import identity_models
from support.doubling import export_double
from support.http import ask
from support.server import RunningServer, serving
from typer.testing import CliRunner

from xlaserve.cli import application
from xlaserve.client import AsyncClient
from xlaserve.settings.choices import Readiness

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOAD = "/v2/repository/models/{}/load"
STEP = {
    "max_batch_size": 4,
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [2]}],
    "ensemble_scheduling": {
        "step": [{"model_name": "typo", "input_map": {"x": "IN"}, "output_map": {"y": "OUT"}}]
    },
}
POLICY = {"version_policy": {"specific": {"versions": [7]}}}


def typo(root: Path) -> None:
    (root / "1").mkdir(parents=True)
    (root / "config.pbtxt").write_text("max_batch_size: many\n")


def wrong_json(root: Path) -> None:
    (root / "1").mkdir(parents=True)
    (root / "config.json").write_text('{"no_such_field": 1}')


def no_version(root: Path) -> None:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(POLICY))


def empty_version(root: Path) -> None:
    (root / "1").mkdir(parents=True)


def damaged_version(root: Path) -> None:
    export_double(root.parent)
    (root.parent / "double").rename(root)
    for file in (root / "1").iterdir():
        file.write_bytes(b"no model")


def ensemble(root: Path) -> None:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(STEP))


def unreadable(root: Path) -> None:
    root.mkdir()
    (root / "config.json").symlink_to("config.json")


KINDS: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "typo": (typo, ""),
    "wrong_json": (wrong_json, ""),
    "no_version": (no_version, ""),
    "ensemble": (ensemble, ""),
    "unreadable": (unreadable, ""),
    "empty_version": (empty_version, "1"),
    "damaged_version": (damaged_version, "1"),
}
"""Each kind of failure: how it is made, and the version that it comes to (empty for none)."""


@pytest.fixture(scope="module", name="root")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (make, _) in KINDS.items():
        make(root / name)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningServer]:
    scratch = tmp_path_factory.mktemp("scratch")
    settings: dict[str, Any] = {
        "http_endpoint": "port:0",
        "load_model": ("*",),
        "readiness": Readiness.MODELS,
        "probe_socket": str(scratch / "probe"),
    }
    async with serving(scratch, root, **settings) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="said")
async def _said(server: RunningServer) -> Mapping[str, str]:
    """Return the text of each failure, as whoever asks for the load is told."""
    said = {}
    for kind in KINDS:
        answer = await ask(str(server.http), "POST", LOAD.format(kind), body=b"{}")
        assert 400 == answer.status
        said[kind] = answer.json["error"]
    return said


async def run(*arguments: str) -> str:
    """Run a command in a thread, and return what it says: it has an event loop of its own."""

    def invoke() -> str:
        environment = {"COLUMNS": "4000", "NO_COLOR": "1"}
        result = CliRunner().invoke(application(), list(arguments), env=environment)
        return result.output + str(result.exception or "")

    return await asyncio.to_thread(invoke)


async def http(server: RunningServer, method: str, path: str) -> str:
    return (await ask(str(server.http), method, path)).body.decode()


Shown: TypeAlias = Mapping[str, str]
"""What a place says of each model."""


def by_model(rows: Iterable[Mapping[str, Any]]) -> Shown:
    return {row["name"]: row.get("reason", "") for row in rows}


def by_part(text: str) -> Shown:
    """Return the parts of a line about several models: `'name' version 1: reason; ...`."""
    parts = re.split(r"(?:; |: )(?='\w+'(?: version \d+)?: failed to load)", text)
    return {part.split("'")[1]: part for part in parts[1:]}


async def grpc_index(server: RunningServer) -> Shown:
    async with AsyncClient(server.url) as client:
        return {row.name: row.reason for row in await client.index()}


async def rest_index(server: RunningServer) -> Shown:
    return by_model(json.loads(await http(server, "POST", "/v2/repository/index")))


async def listed(server: RunningServer) -> Shown:
    shown = await run("models", "list", "--json", "--failed", "--url", server.url)
    return by_model(json.loads(shown))


async def table(server: RunningServer) -> Shown:
    shown = await run("models", "list", "--url", f"http://{server.http}")
    return {kind: line for kind in KINDS for line in shown.splitlines() if f" {kind} " in line}


async def page(server: RunningServer) -> Shown:
    return by_model(json.loads(await http(server, "GET", "/status.json"))["models"])


async def model_pages(server: RunningServer) -> Shown:
    shown = {}
    for kind in KINDS:
        found = json.loads(await http(server, "GET", f"/page/models/{kind}"))
        shown[kind] = "".join([found["reason"], *(one["reason"] for one in found["versions"])])
    return shown


async def ready_body(server: RunningServer) -> Shown:
    answer = await ask(str(server.http), "GET", "/v2/health/ready")
    return by_part(answer.json["reason"]) if answer.status == 400 else {}


async def health(server: RunningServer) -> Shown:
    return by_part(await run("health", "--url", server.url))


async def rest_health(server: RunningServer) -> Shown:
    return by_part(await run("health", "--url", f"http://{server.http}"))


async def probe(server: RunningServer) -> Shown:
    path = server.application.settings.probe_socket
    return by_part(await run("health", "--socket", path))


async def metrics(server: RunningServer) -> Shown:
    text = await http(server, "GET", "/metrics")
    row = re.compile(r'xlaserve_model_failure\{model="(\w+)",version="1?",reason="(.*)"\} 1\n')
    return {name: reason.replace(r"\"", '"') for name, reason in row.findall(text)}


async def inference(server: RunningServer) -> Shown:
    shown = {}
    for kind in KINDS:
        path = f"/v2/models/{kind}/infer"
        answer = await ask(str(server.http), "POST", path, body=b'{"inputs": []}')
        assert 404 == answer.status
        shown[kind] = answer.json["error"]
    return shown


PLACES: Mapping[str, Callable[[RunningServer], Awaitable[Shown]]] = {
    "index over gRPC": grpc_index,
    "index over REST": rest_index,
    "models list --failed": listed,
    "models list": table,
    "page": page,
    "page of the model": model_pages,
    "ready": ready_body,
    "health over gRPC": health,
    "health over REST": rest_health,
    "health by the probe socket": probe,
    "metrics": metrics,
    "inference": inference,
}


@pytest.mark.parametrize("place", PLACES)
async def test_every_failure_is_shown_with_its_reason(
    server: RunningServer, said: Mapping[str, str], place: str
) -> None:
    shown = await PLACES[place](server)

    assert all(f"failed to load '{kind}', " in said[kind] for kind in KINDS)
    assert {} == {kind: shown.get(kind) for kind in KINDS if said[kind] not in shown.get(kind, "")}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("a%2F..%2Fb", {}),
        ("nowhere", {}),
        ("elsewhere", {"parameters": {"config": 7}}),
        ("elsewhere", {"parameters": {"file:1/model.onnx": "no base64"}}),
        ("elsewhere", {"parameters": {"file:../x": ""}}),
    ],
)
async def test_what_only_a_client_says_has_no_place(
    server: RunningServer, name: str, body: Mapping[str, Any]
) -> None:
    """It chooses the names, which others would read."""
    path = LOAD.format(name)
    refused = await ask(str(server.http), "POST", path, body=json.dumps(body).encode())
    names = {row["name"] for row in json.loads(await http(server, "POST", "/v2/repository/index"))}

    assert refused.status in (400, 404)
    assert set(KINDS) == names


async def test_the_index_has_one_row_of_a_failure(server: RunningServer) -> None:
    rows = json.loads(await http(server, "POST", "/v2/repository/index"))

    assert {(kind, version) for kind, (_, version) in KINDS.items()} == {
        (row["name"], row.get("version", "")) for row in rows
    }
    assert len(KINDS) == len(rows)
    assert {"UNAVAILABLE"} == {row["state"] for row in rows}


# --- until the next success ---


@pytest_asyncio.fixture(loop_scope="module", name="mended")
async def _mended(tmp_path: Path) -> AsyncIterator[tuple[RunningServer, Path]]:
    """A server that is not ready, since its one model has an error in its configuration."""
    root = tmp_path / "models"
    root.mkdir()
    export_double(root)
    (root / "double" / "config.json").write_text('{"max_batch_size": "many"}')
    settings: dict[str, Any] = {
        "http_endpoint": "port:0",
        "load_model": ("double",),
        "readiness": Readiness.MODELS,
        "probe_socket": str(tmp_path / "probe"),
    }
    async with serving(tmp_path, root, **settings) as found:
        yield found, root / "double" / "config.json"


async def load(server: RunningServer, name: str) -> tuple[int, str]:
    answer = await ask(str(server.http), "POST", LOAD.format(name), body=b"{}")
    return answer.status, answer.json["error"] if answer.status != 200 else ""


GENERAL = [name for name in PLACES if name not in {"models list", "page of the model", "inference"}]
"""Places that show any model."""


async def test_a_success_ends_a_failure_everywhere(mended: tuple[RunningServer, Path]) -> None:
    server, config = mended
    before = {place: (await PLACES[place](server)).get("double", "") for place in GENERAL}
    config.unlink()
    loaded = await load(server, "double")
    after = {place: (await PLACES[place](server)).get("double", "") for place in GENERAL}

    assert [] == [place for place, text in before.items() if "expected" not in text]
    assert (200, "") == loaded
    assert dict.fromkeys(GENERAL, "") == after


async def test_a_model_that_answers_shows_that_its_reload_failed(
    mended: tuple[RunningServer, Path],
) -> None:
    server, config = mended
    config.unlink()
    await load(server, "double")
    config.write_text("{")
    status, said = await load(server, "double")
    shown = {place: (await PLACES[place](server)).get("double", "") for place in LISTS}
    ready = await ask(str(server.http), "GET", "/v2/health/ready")

    assert 400 == status
    told = f"serves the earlier version, its reload failed: {said}"
    assert dict.fromkeys(LISTS, told) == shown
    assert {"ready": True} == ready.json


LISTS = ("index over gRPC", "index over REST", "page", "metrics")


async def test_a_failure_of_files_takes_the_place_of_an_earlier_unload(
    mended: tuple[RunningServer, Path],
) -> None:
    server, config = mended
    config.unlink()
    await load(server, "double")
    unload = LOAD.format("double").removesuffix("load") + "unload"
    await ask(str(server.http), "POST", unload, body=b"{}")
    unloaded = (await rest_index(server))["double"]
    config.write_text("{")
    _, said = await load(server, "double")

    assert "unloaded" == unloaded
    assert dict.fromkeys(LISTS, said) == {
        place: (await PLACES[place](server)).get("double") for place in LISTS
    }


async def test_a_model_of_the_start_that_is_nowhere_is_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "http_endpoint": "port:0",
        "load_model": ("nowhere",),
        "readiness": Readiness.MODELS,
    }
    (tmp_path / "models").mkdir()
    async with serving(tmp_path, tmp_path / "models", **settings) as server:
        ready = await ask(str(server.http), "GET", "/v2/health/ready")
        shown = await rest_index(server)

    said = "Request for unknown model: 'nowhere' is not in the model repository, failed to load it"
    assert 400 == ready.status
    assert f"1 model of the start not loaded: 'nowhere': {said}" == ready.json["reason"]
    assert {"nowhere": said} == shown


async def test_what_nobody_has_loaded_is_told_alike_on_its_page_and_in_lists(
    tmp_path: Path,
) -> None:
    root = tmp_path / "models"
    identity_models.write(root, "m", "FP32")
    async with serving(tmp_path, root, http_endpoint="port:0") as server:
        shown = json.loads(await http(server, "GET", "/page/models/m"))
        listed = by_model(json.loads(await http(server, "POST", "/v2/repository/index")))
        (row,) = json.loads(await http(server, "GET", "/status.json"))["models"]

    assert ([], "not loaded") == (shown["versions"], shown["reason"])
    assert {"m": "not loaded"} == listed
    assert "not loaded" == row["reason"]
