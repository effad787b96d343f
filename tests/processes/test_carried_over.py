"""Client changes survive the replacement of a server (SIGUSR2), as they do that of a worker."""

import asyncio
import base64
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import identity_models, sequence_models, several
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
    """Return a repository with models loaded at startup and models that only clients load."""
    several.repository(root)
    for name in ("changed", "unloaded", "left"):
        identity_models.write(root, name, "FP32", [-1, 2])
    return root


class Client:
    """A client of whichever server owns the address; uses a new connection per request."""

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
        # A model that is loaded and unloaded again is not loaded in the successor either.
        await ask("POST", "/v2/repository/models/left/load", {})
        await ask("POST", "/v2/repository/models/left/unload", {})
        await ask("POST", "/v2/logging", {"log_verbose_level": 1})
        await ask(
            "POST",
            "/v2/systemsharedmemory/region/mine/register",
            {"key": region.name, "offset": 0, "byte_size": 8},
        )

    async def seen(self) -> dict[str, Any]:
        """Return the state that a client sees of its changes."""
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
EACH_LAYOUT = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name != "1" else [])
        for name in several.LAYOUTS
    ],
)


@EACH_LAYOUT
async def test_what_clients_changed_is_there_in_each_successor(
    tmp_path: Path, region: Path, layout: str
) -> None:
    """Loads, configurations, files, unloads, log settings and regions; in the second one too."""
    models = repository(tmp_path / "models")
    flags: tuple[str, ...] = (*EXPLICIT, *LOADED, *several.LAYOUTS[layout])
    async with served(models, *flags) as server, asyncio.timeout(2 * MOST_SECONDS):
        if layout != "1":
            await server.until(several.READY)
        async with ending(server):
            client = Client(server.http)
            await client.change(region)
            before = await client.seen()
            first = await replace(server, server.process.pid)
            once = await client.seen()
            second = await replace(server, first)
            twice = await client.seen()
            # The server continues to accept changes.
            await client.ask("POST", "/v2/repository/models/left/load", {})
            os.kill(second, signal.SIGTERM)

    assert ["changed", "files", "who"] == before["ready"]
    assert 3 == before["config"]["dynamic_batching"]["priority_levels"]
    assert [1.0, 2.0] == before["answer"][0]["data"]
    assert before == once
    assert before == twice
    # Loaded twice, unloaded twice, the log and the region.
    assert [6, 6] == [one["changes"] for one in records(server, "client changes taken over")]


def versions(root: Path, name: str, policy: str, **more: Any) -> str:
    """Add a model with versions 1 and 2; return a configuration that a client may send for it."""
    identity_models.write(root, name, "FP32", [-1])
    (root / name / "2").mkdir()
    file = root / name / "config.json"
    config = {**json.loads(file.read_text()), "name": name, "version_policy": {policy: more}}
    file.write_text(json.dumps(config))
    return json.dumps(config)


def labelled(root: Path) -> None:
    """Add a model whose configuration names a file of labels."""
    identity_models.write(root, "labelled", "FP32", [-1])
    file = root / "labelled" / "config.json"
    config = json.loads(file.read_text())
    config["output"][0]["label_filename"] = "labels.txt"
    file.write_text(json.dumps(config))
    (root / "labelled" / "labels.txt").write_text("a\nb\n")


def with_step(root: Path) -> None:
    """Add an ensemble of the model `deleted`."""
    step = {"model_name": "deleted", "model_version": -1}
    step |= {"input_map": {"x": "x"}, "output_map": {"y": "y"}}
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "platform": "ensemble",
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {"step": [step]},
    }
    (root / "whole" / "1").mkdir(parents=True)
    (root / "whole" / "config.json").write_text(json.dumps(config))


GONE = {
    "deleted": "it is not in the model repository",
    "begun": "Request for unknown model: 'begun' is not in the model repository",
    "emptied": "it has no version directory",
    "labelled": "label_filename of output 'y': labels.txt is missing",
    "whole": "its step failed: Request for unknown model: 'deleted'",
    "beside": "Request for unknown model: 'beside' is not in the model repository",
    "files": "it is not in the model repository",
}
"""Models that the old server has but the new one lacks, and why."""


@EACH_LAYOUT
async def test_what_is_gone_is_named_and_does_not_block_the_rest(
    tmp_path: Path, layout: str
) -> None:
    """A broken model delays the replacement until it is fixed, unless clients unloaded it."""
    models, other, scratch = (tmp_path / name for name in ("models", "other", "scratch"))
    repository(models)
    scratch.mkdir()
    identity_models.write(models, "deleted", "FP32", [-1])
    identity_models.write(models, "begun", "FP32", [-1])
    identity_models.write(other, "beside", "FP32", [-1])
    labelled(models)
    with_step(models)
    versions(models, "emptied", "all")
    of_versions = versions(models, "versions", "specific", versions=[1, 2])
    flags: tuple[str, ...] = (
        *EXPLICIT,
        *LOADED,
        *several.LAYOUTS[layout],
        "--model-repository",
        str(other),
    )
    flags += (
        "--scratch-directory",
        str(scratch),
        "--load-model",
        "emptied",
        "--load-model",
        "begun",
    )
    config = models / "left" / "config.json"
    async with served(models, *flags) as server, asyncio.timeout(2 * MOST_SECONDS):
        if layout != "1":
            await server.until(several.READY)
        async with ending(server):
            client = Client(server.http)
            for name in ("left", "whole", "labelled", "beside"):
                await client.ask("POST", f"/v2/repository/models/{name}/load", {})
            said = {"parameters": {"config": of_versions}}
            await client.ask("POST", "/v2/repository/models/versions/load", said)
            sent = {
                "config": json.dumps(FROM_FILES),
                "file:1/n.txt": base64.b64encode(b"a").decode(),
            }
            await client.ask("POST", "/v2/repository/models/files/load", {"parameters": sent})
            await client.ask("POST", "/v2/repository/models/unloaded/unload", {})
            for gone in ("unloaded", "deleted", "begun", "emptied/1", "emptied/2", "versions/2"):
                shutil.rmtree(models / gone)
            (models / "labelled" / "labels.txt").unlink()
            shutil.rmtree(other)
            for kept in scratch.iterdir():
                shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
            whole = config.read_text()
            config.write_text("{")
            os.kill(server.process.pid, signal.SIGUSR2)
            await server.until("server not replaced")
            # The old server continues to serve and to accept changes.
            await client.ask("POST", "/v2/repository/models/changed/load", {})
            server.log.remove(server.event("server not replaced"))
            config.write_text(whole)
            new = await replace(server, server.process.pid)
            index = await client.ask("POST", "/v2/repository/index", {})
            os.kill(new, signal.SIGTERM)

    ready = sorted((one["name"], one["version"]) for one in index if one.get("state") == "READY")
    assert [(name, "1") for name in ("changed", "left", "versions", "who")] == ready
    told = {one["model"]: one["reason"] for one in records(server, "model not taken over")}
    assert GONE.keys() == told.keys()
    assert {} == {name: told[name] for name, reason in GONE.items() if reason not in told[name]}
    (left,) = records(server, "model versions not taken over")
    assert ("versions", ["2"], ["1"]) == (left["model"], left["versions"], left["instead"])
    assert {str(other)} == {one["path"] for one in records(server, "model repository not served")}
    lost = records(server, "not handed over")
    assert {"files"} == {one["model"] for one in lost if one["what"] == "client load"}


@EACH_LAYOUT
async def test_what_is_left_behind_is_named_with_counts(tmp_path: Path, layout: str) -> None:
    """Sequences in progress, cached responses, and what to do about each."""
    models = several.repository(tmp_path / "models")
    sequence_models.write_keeper(models, "sums", "oldest { }", batched=False)
    identity_models.write(models, "cached", "FP32", [-1])
    file = models / "cached" / "config.json"
    config = {**json.loads(file.read_text()), "response_cache": {"enable": True}}
    file.write_text(json.dumps(config))
    flags = ("--allow-python-models", *several.LAYOUTS[layout])
    async with served(models, *flags) as server, asyncio.timeout(2 * MOST_SECONDS):
        if layout != "1":
            await server.until(several.READY)
        async with ending(server):
            client = Client(server.http)
            for number in range(1, 4):
                ends = number == 3
                said = {"sequence_id": number, "sequence_start": True, "sequence_end": ends}
                one = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [number]}
                asked = {"inputs": [one], "parameters": said}
                await client.ask("POST", "/v2/models/sums/infer", asked)
                one = {"name": "x", "datatype": "FP32", "shape": [1], "data": [number]}
                await client.ask("POST", "/v2/models/cached/infer", {"inputs": [one]})
            new = await replace(server, server.process.pid)
            while len(records(server, "not handed over")) < 2:
                assert await server.read()
            os.kill(new, signal.SIGTERM)

    left = {one["what"]: one for one in records(server, "not handed over")}
    assert {"sequences": 2, "cached_responses": 3} == {
        what: one["count"] for what, one in left.items()
    }
    assert "sequence_start" in left["sequences"]["to_do"]
