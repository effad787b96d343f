"""`xlaserve models` against a server, over gRPC and REST."""

import asyncio
import io
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from support.process import command
from support.server import RunningServer, serving
from typer.testing import CliRunner, Result

from xlaserve.cli import application
from xlaserve.cli.asking import models_display
from xlaserve.client import AsyncClient
from xlaserve.dialing.interface import CallFailed, IndexEntry

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(
    example_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningServer]:
    scratch = tmp_path_factory.mktemp("scratch")
    settings: dict[str, Any] = {"load_model": ("identity", "simple"), "http_endpoint": "port:0"}
    async with serving(scratch, example_models, **settings) as found:
        yield found


@pytest.fixture(params=["grpc", "http"], name="url")
def _url(server: RunningServer, request: pytest.FixtureRequest) -> str:
    return server.url if request.param == "grpc" else f"http://{server.http}"


async def invoke(*arguments: str) -> Result:
    """Run a command in a thread, because it has its own event loop."""

    def _invoke() -> Result:
        return CliRunner().invoke(
            application(), ["models", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"}
        )

    return await asyncio.to_thread(_invoke)


async def answered(*arguments: str) -> str:
    """Return the output of a command, which must succeed."""
    result = await invoke(*arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


async def test_list_has_state_and_memory(url: str) -> None:
    listed = {
        row["name"]: row for row in json.loads(await answered("list", "--json", "--url", url))
    }
    shown = await answered("list", "--url", url)
    ready = json.loads(await answered("list", "--ready", "--json", "--url", url))

    assert ("1", "READY") == (listed["simple"]["version"], listed["simple"]["state"])
    assert listed["simple"]["size_bytes"] > 0
    # No test loads it.
    assert "size_bytes" not in listed["digits"]
    assert "not loaded" in next(line for line in shown.splitlines() if "digits" in line)
    assert {"identity", "simple"} == {row["name"] for row in ready}


async def test_show_says_tensors_versions_and_configuration(url: str) -> None:
    shown = (await answered("show", "simple", "--url", url)).splitlines()

    assert "  INPUT0 INT32[-1,16]" in shown
    assert "  1 READY" in shown
    assert any(line.startswith("  batches of up to ") for line in shown)


async def test_config_is_json(url: str) -> None:
    assert "simple" == json.loads(await answered("config", "simple", "--url", url))["name"]


async def test_stats_count_requests(url: str) -> None:
    def _count(rows: Any) -> int:
        (row,) = rows
        return models_display.duration(row, "success")[0]

    before = json.loads(await answered("stats", "identity", "--json", "--url", url))
    async with AsyncClient(url) as client:
        await client.infer("identity", {"x": np.ones((1, 16), np.float32)})
    after = json.loads(await answered("stats", "identity", "--json", "--url", url))
    shown = await answered("stats", "--url", url)

    assert _count(before) + 1 == _count(after)
    row = next(line for line in shown.splitlines() if "identity" in line)
    assert str(_count(after)) == row.split()[2]


async def test_statistics_fit_a_terminal_of_80_columns() -> None:
    """Long names are wrapped, and no heading or number is truncated."""
    took = {"count": 1_234_567, "ns": 98_765_432_109}
    row = {
        "name": "a-model-of-somebody-who-likes-long-names",
        "version": "1763856000",
        "inference_count": 9_999_999,
        "execution_count": 9_999_999,
        "inference_stats": dict.fromkeys(("success", "fail", "queue", "compute_infer"), took),
        "memory_usage": [{"byte_size": 5 << 30}],
    }
    written = io.StringIO()
    longer = {**row, "inference_count": 10**12, "execution_count": 10**12}
    for rows in ([row], [longer]):
        Console(width=80, file=written).print(models_display.statistics_table(rows))
    shown = written.getvalue()

    assert "…" not in shown
    for heading in ("requests", "failed", "rows", "runs", "queue", "compute", "memory"):
        assert heading in shown.splitlines()[0]
    assert shown.count("9999999") == 2


async def test_load_and_unload(url: str) -> None:
    loaded = await answered("load", "mlp", "--url", url)
    listed = json.loads(await answered("list", "--json", "--url", url))
    unloaded = await answered("unload", "mlp", "--url", url)
    after = json.loads(await answered("list", "--ready", "--json", "--url", url))

    # The log of the server in this process may precede it.
    assert loaded.endswith("mlp: loaded\n")
    assert unloaded.endswith("mlp: unloaded\n")
    assert ["READY"] == [row["state"] for row in listed if row["name"] == "mlp"]
    assert "mlp" not in {row["name"] for row in after}


async def test_one_of_several_loads_may_fail(url: str) -> None:
    result = await invoke("load", "nnn", "simple", "--url", url)

    assert 1 == result.exit_code
    assert "[2/2] simple: loaded" in result.output
    assert "[1/2] error: " in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "simpel"), "; did you mean 'simple'?"),
        (("stats", "zzzzzzzz"), "; to see its models: xlaserve models list"),
        (("show", "digits"), "; to load it: xlaserve models load digits"),
    ],
)
async def test_errors_end_in_what_to_type_next(
    url: str, arguments: tuple[str, ...], text: str
) -> None:
    with pytest.raises(CallFailed) as caught:
        await answered(*arguments, "--url", url)

    assert str(caught.value).endswith(text)


async def test_a_configuration_must_be_json(url: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    result = await invoke("load", "mlp", "--config", str(path), "--url", url)

    assert f"--config: '{path}' is not a JSON file" in str(result.exception)


async def test_a_load_takes_a_configuration(url: str, example_models: Path, tmp_path: Path) -> None:
    config = json.loads(await answered("config", "identity", "--url", url))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "identity", "max_batch_size": 2}))
    await answered("load", "identity", "--config", str(path), "--url", url)
    changed = json.loads(await answered("config", "identity", "--url", url))
    await answered("load", "identity", "--url", url)

    assert 2 != config["max_batch_size"]
    assert 2 == changed["max_batch_size"]


HEARS_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a command that handles Ctrl-C, even if the test runner ignores it."""


async def test_watch_tells_changes_until_interrupted(server: RunningServer) -> None:
    """The initial states, then the changes; Ctrl-C is a clean end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HEARS_INTERRUPTS),
        *command("models", "watch", "--interval", "0.05", "--json", "--url", server.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None

    async def _until(holds: Callable[[Any], bool]) -> None:
        assert process.stdout is not None
        while not holds(json.loads(await process.stdout.readline())):
            pass

    try:
        async with asyncio.timeout(SECONDS):
            await _until(lambda row: (row["name"], row["state"]) == ("simple", "READY"))
            await answered("unload", "simple", "--url", server.url)
            await _until(lambda row: (row["name"], row["state"]) == ("simple", "UNAVAILABLE"))
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await answered("load", "simple", "--url", server.url)

    assert (0, b"") == (process.returncode, err)


async def test_a_server_without_the_extensions_is_listed_and_shown() -> None:
    """MLServer has no statistics, and a plain V2 server no index either."""

    async def _index(_: web.Request) -> web.Response:
        return web.json_response([{"name": "m", "state": "READY", "reason": ""}])

    async def _metadata(_: web.Request) -> web.Response:
        return web.json_response({"name": "m\x1b[2J", "inputs": [], "versions": ["3"]})

    made = web.Application()
    made.router.add_post("/v2/repository/index", _index)
    made.router.add_get("/v2/models/m", _metadata)
    async with TestServer(made) as server:
        url = f"http://127.0.0.1:{server.port}"
        listed = json.loads(await answered("list", "--json", "--url", url))
        shown = await answered("show", "m", "--url", url)

    assert [{"name": "m", "version": "", "state": "READY", "reason": ""}] == listed
    assert "not reported by the server" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("body", [b"[1]", b"{", b"null", b'{"model_stats": 3}'])
async def test_an_answer_that_is_none_is_an_error_of_one_line(body: bytes) -> None:
    async def _any(_: web.Request) -> web.Response:
        return web.Response(body=body)

    made = web.Application()
    made.router.add_route("*", "/{path:.*}", _any)
    async with TestServer(made) as server:
        url = f"http://127.0.0.1:{server.port}"
        for arguments in (("list",), ("stats",)):
            with pytest.raises(CallFailed, match=f"{url}: "):
                await answered(*arguments, "--url", url)


async def test_changes_are_new_states_and_versions_that_are_gone() -> None:
    old = {("a", "1"): IndexEntry("a", "1", "READY"), ("b", "1"): IndexEntry("b", "1", "READY")}
    new = {("a", "1"): IndexEntry("a", "1", "UNAVAILABLE", "unloaded")}

    assert ["a version 1 UNAVAILABLE: unloaded", "b version 1 gone"] == [
        models_display.state_line(entry) for entry in models_display.changes(old, new)
    ]


async def test_a_configuration_in_words() -> None:
    config = {
        "max_batch_size": 8,
        "dynamic_batching": {"max_queue_delay_microseconds": "100", "preferred_batch_size": [4]},
        "instance_group": [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}],
        "response_cache": {"enable": True},
        "model_transaction_policy": {"decoupled": False},
        "parameters": {"k": {"string_value": "v"}},
    }

    assert [
        "batches of up to 8 rows",
        "requests are batched, waiting up to 100 µs, preferably to 4 rows",
        "2 instances on GPU 0,1",
        "answers are cached",
        "parameter k = v",
    ] == list(models_display.config_lines(config))
