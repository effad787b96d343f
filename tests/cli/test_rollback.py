"""`models load --version` returns to a version in one step, and `events` shows it."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.server import RunningServer, serving
from typer.testing import CliRunner, Result

from xlaserve.cli import application

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(
    example_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningServer]:
    """Serve a model with two versions and its own configuration."""
    repository = tmp_path_factory.mktemp("repository")
    model = repository / "identity"
    shutil.copytree(example_models / "identity", model)
    shutil.copytree(model / "1", model / "2")
    (model / "config.json").write_text(json.dumps({"max_batch_size": 3}))
    settings: dict[str, Any] = {"load_model": ("identity",), "http_endpoint": "port:0"}
    async with serving(tmp_path_factory.mktemp("scratch"), repository, **settings) as found:
        yield found


async def invoke(*arguments: str) -> Result:
    def _invoke() -> Result:
        return CliRunner().invoke(application(), list(arguments), env={"COLUMNS": "120"})

    return await asyncio.to_thread(_invoke)


async def states(server: RunningServer) -> dict[str, str]:
    """Return the state of each version."""
    result = await invoke("models", "list", "--json", "--url", server.url)
    return {row["version"]: row["state"] for row in json.loads(result.output)}


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_version_is_gone_back_to_and_the_configuration_stays(
    server: RunningServer, door: str
) -> None:
    url = server.url if door == "grpc" else f"http://{server.http}"
    await invoke("models", "load", "identity", "--url", url)
    assert "READY" == (await states(server))["2"]

    back = await invoke("models", "load", "identity", "--version", "1", "--url", url)

    assert "identity: version 1 answers" == back.output.strip()
    now = await states(server)
    assert now["1"] == "READY"
    assert now.get("2") != "READY"
    config = json.loads((await invoke("models", "config", "identity", "--url", url)).output)
    assert 3 == config["max_batch_size"]

    await invoke("models", "load", "identity", "--url", url)
    assert "READY" == (await states(server))["2"]


async def test_a_version_that_is_not_there_leaves_what_answers(server: RunningServer) -> None:
    result = await invoke("models", "load", "identity", "--version", "7", "--url", server.url)

    assert 1 == result.exit_code
    assert "version_policy" in str(result.exception)
    assert "READY" in (await states(server)).values()


async def test_events_say_what_was_done_and_by_whom(server: RunningServer) -> None:
    url = f"http://{server.http}"
    await invoke("models", "load", "nothing", "--url", server.url)
    await invoke("models", "load", "identity", "--version", "1", "--url", url)

    shown = (await invoke("events", "--url", url)).output.splitlines()
    failed = (await invoke("events", "--failed", "--model", "nothing", "--url", url)).output
    rows = [
        json.loads(line)
        for line in (await invoke("events", "--json", "--url", url)).output.splitlines()
    ]

    assert [row["number"] for row in rows] == sorted(row["number"] for row in rows)
    assert len(shown) == len(rows)
    assert any("load identity version 1 (from 127.0.0.1" in line for line in shown)
    assert any(line.endswith("by REST)") for line in shown)
    (line,) = failed.splitlines()
    assert " FAILED load nothing " in line


async def test_the_grpc_endpoint_has_no_events(server: RunningServer) -> None:
    result = await invoke("events", "--url", server.url)

    assert "expected the HTTP endpoint" in str(result.exception)


async def test_another_server_is_said_to_have_no_events(server: RunningServer) -> None:
    """Its path answers with other JSON, as another server might."""
    result = await invoke("events", "--url", f"http://{server.http}/v2")

    assert 1 == result.exit_code
    assert "page/events" in str(result.exception) or "no event log" in str(result.exception)
