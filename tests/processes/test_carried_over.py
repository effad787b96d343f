"""What clients changed is in the server that replaces theirs (SIGUSR2), as in a replaced worker."""

import asyncio
import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import identity_models, several
from support.process import served
from support.replacing import MOST_SECONDS, ending, records, replace

TENSOR = {"data_type": "TYPE_FP32", "dims": [-1]}
CONFIG = {
    "name": "changed",
    "backend": "identity",
    "max_batch_size": 4,
    "input": [{"name": "x", **TENSOR}],
    "output": [{"name": "y", **TENSOR}],
    "dynamic_batching": {"priority_levels": 3, "default_priority_level": 2},
}
FROM_FILES = {
    "name": "files",
    "backend": "identity",
    "input": [{"name": "x", **TENSOR}],
    "output": [{"name": "y", **TENSOR}],
}
X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


def repository(root: Path) -> Path:
    """Return a repository of models that are loaded, and of such as only clients load."""
    several.repository(root)
    for name in ("changed", "unloaded", "left"):
        identity_models.write(root, name, "FP32", [-1, 2])
    return root


class Client:
    """A client of whatever serves at an address now; a connection for each request."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def ask(self, method: str, path: str, said: Any = None) -> Any:
        async with (
            aiohttp.ClientSession(f"http://{self._url}") as session,
            session.request(method, path, json=said) as response,
        ):
            text = await response.text()
            assert response.status == 200, (path, text)
            return json.loads(text or "null")

    async def change(self, region: Path) -> None:
        """Change everything that clients can change."""
        ask = self.ask
        config = json.dumps(CONFIG)
        await ask("POST", "/v2/repository/models/changed/load", {"parameters": {"config": config}})
        said = {
            "config": json.dumps(FROM_FILES),
            "file:1/notes.txt": base64.b64encode(b"made by a client").decode(),
        }
        await ask("POST", "/v2/repository/models/files/load", {"parameters": said})
        await ask("POST", "/v2/repository/models/unloaded/unload", {})
        # What is loaded and unloaded again is not there either.
        await ask("POST", "/v2/repository/models/left/load", {})
        await ask("POST", "/v2/repository/models/left/unload", {})
        await ask("POST", "/v2/logging", {"log_verbose_level": 1})
        await ask(
            "POST",
            "/v2/systemsharedmemory/region/mine/register",
            {"key": region.name, "offset": 0, "byte_size": 8},
        )

    async def seen(self) -> dict[str, Any]:
        """Return what a client sees of what it has changed."""
        ask = self.ask
        index = await ask("POST", "/v2/repository/index", {})
        return {
            "ready": sorted(one["name"] for one in index if one.get("state") == "READY"),
            "config": await ask("GET", "/v2/models/changed/config"),
            "answer": (await ask("POST", "/v2/models/files/infer", X))["outputs"],
            "logging": await ask("GET", "/v2/logging"),
            "regions": await ask("GET", "/v2/systemsharedmemory/status"),
        }


@pytest.fixture(name="region")
def a_region() -> Any:
    path = Path(f"/dev/shm/xlaserve-test-{os.getpid()}")
    path.write_bytes(bytes(8))
    yield path
    path.unlink()


EXPLICIT = ("--model-control-mode", "explicit", "--allow-python-models")
LOADED = ("--load-model", "who", "--load-model", "unloaded")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_what_clients_changed_is_there_in_each_successor(
    tmp_path: Path, region: Path, processes: int
) -> None:
    """Loads, configurations, files, unloads, log settings, regions; in the second one too."""
    models = repository(tmp_path / "models")
    flags = (*EXPLICIT, *LOADED, "--processes", str(processes))
    async with served(models, *flags) as server, asyncio.timeout(2 * MOST_SECONDS):
        if processes > 1:
            await server.until(several.READY)
        async with ending(server):
            client = Client(server.http)
            await client.change(region)
            before = await client.seen()
            first = await replace(server, server.process.pid)
            once = await client.seen()
            second = await replace(server, first)
            twice = await client.seen()
            # It goes on to take changes.
            await client.ask("POST", "/v2/repository/models/left/load", {})
            os.kill(second, signal.SIGTERM)

    assert ["changed", "files", "who"] == before["ready"]
    assert 3 == before["config"]["dynamic_batching"]["priority_levels"]
    assert [1.0, 2.0] == before["answer"][0]["data"]
    assert before == once
    assert before == twice
    # Loaded twice, unloaded twice, the log and the region.
    assert [6, 6] == [one["changes"] for one in records(server, "changes of clients taken over")]
