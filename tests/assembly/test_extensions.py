"""A server built without one of its extensions starts, and answers everything else."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import identity_models
from support.server import RunningServer, serving

from xlaserve.app import extensions

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = extensions.EXTENSIONS
FOLDERS = {
    "openai": "xlaserve.openai",
    "grpc_web": "xlaserve.grpc_web",
    "dashboard": "xlaserve.http.dashboard",
}
"""The folder that would be deleted along with the extension's row."""
ROUTES = {
    "openai": ("/v1/", "/openai/v1/"),
    "grpc_web": (),
    "dashboard": (
        *("/page/", "/status.json", "/model.json", "/history.json", "/events.json"),
        *("/hosting.json", "/v2/docs"),
    ),
}
"""Path prefixes of an extension, in addition to the page at `/`."""
ORIGIN = "https://app.example"
WEB = "application/grpc-web+proto"
LIVE = "/inference.GRPCInferenceService/ServerLive"
MISSING = {
    "openai": (
        ("GET", "/v1/models"),
        ("GET", "/openai/v1/models/fp32"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
    ),
    "grpc_web": (("POST", LIVE),),
    "dashboard": (
        ("GET", "/"),
        ("GET", "/status.json"),
        ("GET", "/page/status.js"),
        ("GET", "/v2/docs"),
    ),
}
INPUTS = {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[RunningServer]:
    identity_models.write(folder / "models", "fp32", "FP32")
    settings: dict[str, Any] = {
        "http_endpoint": "port:0",
        "load_model": ("fp32",),
        "cors_origin": (ORIGIN,),
    }
    async with serving(folder, folder / "models", **settings) as server:
        yield server


def paths_of(server: RunningServer) -> frozenset[str]:
    return frozenset(route.path for route in server.application.http_routes().routes)


@dataclass(frozen=True)
class Running:
    """A server, and the paths that it serves."""

    server: RunningServer
    paths: frozenset[str]
    name: str = ""
    """The missing extension; empty for the complete server."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="whole")
async def _whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(tmp_path_factory.mktemp("whole")) as server:
        yield Running(server, paths_of(server))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", name="cut", params=sorted(FOLDERS), ids=str
)
async def _cut(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    # Assembled before the row is removed.
    whole: Running,
) -> AsyncIterator[Running]:
    """Run without a row, and with its folder not importable."""
    name = request.param
    left = tuple(row for row in ROWS if row.name != name)
    folder = FOLDERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extensions, "EXTENSIONS", left)
        for module in [*sys.modules]:
            if module == folder or module.startswith(f"{folder}."):
                patch.setitem(sys.modules, module, None)
        patch.setitem(sys.modules, folder, None)
        async with running(tmp_path_factory.mktemp(name)) as server:
            yield Running(server, paths_of(server), name)


async def asked(
    server: RunningServer, method: str, path: str, **given: Any
) -> tuple[int, str, str]:
    """Return status, content type and text of an answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{server.http}{path}", **given) as answer,
    ):
        return answer.status, answer.content_type, await answer.text(errors="replace")


async def test_every_extension_is_cut() -> None:
    """A new row must list its folder and its paths here."""
    assert list(FOLDERS) == [row.name for row in ROWS]
    assert FOLDERS.keys() == ROUTES.keys() == MISSING.keys()


async def test_all_other_routes_are_there(cut: Running, whole: Running) -> None:
    gone = whole.paths - cut.paths
    others = {path for path in gone if not path.startswith(ROUTES[cut.name])}

    assert ({"/"} if cut.name == "dashboard" else set()) == others
    assert bool(ROUTES[cut.name]) == bool(gone)
    assert set() == cut.paths - whole.paths


async def test_models_answer(cut: Running) -> None:
    status, _, text = await asked(cut.server, "POST", "/v2/models/fp32/infer", json=INPUTS)
    array = np.array([1, 2], np.float32)
    given = triton.InferInput("x", [2], "FP32")
    given.set_data_from_numpy(array)
    async with triton.InferenceServerClient(cut.server.url) as client:
        answer: Any = await client.infer("fp32", [given])

    assert (200, True) == (status, '"data":[1.0,2.0]' in text)
    assert array.tolist() == answer.as_numpy("y").tolist()
    assert 200 == (await asked(cut.server, "GET", "/metrics"))[0]


async def test_what_is_missing_is_nothing(cut: Running, whole: Running) -> None:
    """It is answered like any unknown path; a server with the extension answers differently."""
    for name, requests in MISSING.items():
        for method, path in requests:
            headers = {"Content-Type": WEB, "Origin": ORIGIN} if path == LIVE else {}
            given: dict[str, Any] = {"data": bytes(5), "headers": headers} if headers else {}
            nothing = (404, "application/json", f'{{"error":"there is nothing at \'{path}\'"}}')

            assert (name == cut.name) is (nothing == await asked(cut.server, method, path, **given))
            assert nothing != await asked(whole.server, method, path, **given)


async def test_the_description_is_of_what_is_there(cut: Running) -> None:
    status, _, text = await asked(cut.server, "GET", "/v2/docs/openapi.json")

    assert (404 if cut.name == "dashboard" else 200) == status
    for said in ("as OpenAI does", '{"name":"OpenAI"', '"/v1/models"'):
        assert (cut.name == "grpc_web") is (said in text)
