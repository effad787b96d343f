"""Texts for newcomers end with an action: each command or interface, and its text."""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from support.server import Serve
from typer.testing import CliRunner

import xlaserve
from xlaserve.cli import application
from xlaserve.errors import InvalidSettings

COMMANDS: Mapping[str, tuple[list[str], str]] = {
    "serve alone": (
        ["serve"],
        "expected a directory, as in `xlaserve serve DIRECTORY` (`xlaserve init` makes one)",
    ),
    "a value without a name": (
        ["infer", "m", "--input", "1"],
        "--input: expected NAME=JSON, NAME=@FILE.npy, NAME=zeros or NAME=random, got '1'",
    ),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_says_what_to_type(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLASERVE_REPOSITORY", "XLASERVE_MODEL_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    arguments, text = COMMANDS[what]
    result = CliRunner().invoke(application(), arguments)

    assert text in str(result.exception)


@pytest.mark.parametrize("text", ["8001", "0.0.0.0:8001", "localhost:8001"])
@pytest.mark.parametrize("setting", ["grpc_endpoint", "http_endpoint", "metrics_endpoint"])
async def test_an_endpoint_without_its_kind_says_how_it_is_written(
    serve: Serve, tmp_path: Path, setting: str, text: str
) -> None:
    with pytest.raises(InvalidSettings) as raised:
        async with serve(tmp_path, **{setting: text}):
            pass

    assert str(raised.value).endswith(f"(did you mean port:8001?), got '{text}'")


def beside(root: Path) -> None:
    root.mkdir()
    (root / "model.onnx").write_bytes(b"x")


def named(root: Path) -> None:
    (root / "v1").mkdir(parents=True)
    (root / "config.json").write_text("{}")


def empty(root: Path) -> None:
    root.mkdir()
    (root / "config.json").write_text("{}")


def not_picked(root: Path) -> None:
    for number in ("1", "3"):
        (root / number).mkdir(parents=True)
    policy = '{"version_policy": {"specific": {"versions": [7]}}}'
    (root / "config.json").write_text(policy)


LAYOUTS: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "beside": (
        beside,
        "its files are not in a version directory: move them from beside/ to beside/1/",
    ),
    "named": (named, "'v1' is not a version number: move named/v1/ to named/1/"),
    "empty": (empty, "it has no version directory: put its files into empty/1/"),
    "not_picked": (
        not_picked,
        "no version directory matches its version_policy: change the policy, or add a version to "
        "1, 3",
    ),
}


async def test_a_model_without_a_version_says_where_its_files_go(
    serve: Serve, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    for name, (make, _) in LAYOUTS.items():
        make(root / name)
    async with serve(root, load_model=("*",)) as server:
        shown = {row.name: row.reason for row in await server.application.control.catalog.index()}

    assert {
        name: f"failed to load '{name}', {text}" for name, (_, text) in LAYOUTS.items()
    } == shown


def test_an_export_over_a_version_says_how(tmp_path: Path) -> None:
    def export() -> Path:
        params = {"v": np.ones((1, 2), np.float32)}
        inputs = {"x": ("FP32", [-1, 2])}
        return xlaserve.export_model(
            lambda p, x: {"y": x * p["v"]}, params, inputs, tmp_path / "m" / "1"
        )

    export()
    with pytest.raises(
        FileExistsError,
        match="already exists: choose another version number, or replace it with overwrite=True",
    ):
        export()


async def test_a_port_in_use_says_how_to_have_a_free_one(serve: Serve, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidSettings) as raised:
            async with serve(tmp_path, http_endpoint=f"port:{port}"):
                pass

    assert (
        "setting http_endpoint: expected a free port: stop what listens there, or use"
        f" --http-endpoint port:0, got '127.0.0.1:{port}, which is in use'"
    ) == str(raised.value)


PATHS: Mapping[str, str] = {
    "/v1/models/m:predict": "send a V2 request to /v2/models/m/infer",
    "/v1/models/m/versions/2:classify": "send a V2 request to /v2/models/m/infer",
    "/predictions/m": "send a V2 request to /v2/models/m/infer",
    "/metrics": "metrics are served at the setting metrics_endpoint",
    "/api/chat": "use OpenAI's at /v1/chat/completions",
    "/nothing": "there is nothing at '/nothing'",
}


async def test_a_path_of_another_server_says_where_to_send_it(serve: Serve, tmp_path: Path) -> None:
    told = {}
    async with (
        serve(tmp_path, http_endpoint="port:0", metrics_endpoint="port:0") as server,
        aiohttp.ClientSession(f"http://{server.http}") as session,
    ):
        for path in PATHS:
            async with session.post(path, data=b"{}") as answer:
                error = (await answer.json())["error"]
                told[path] = (answer.status, error["message"] if path[:4] == "/v1/" else error)

    for path, text in PATHS.items():
        assert told[path][0] in (404, 405)
        assert told[path][1].endswith(text)


async def test_a_wrong_method_where_metrics_are_is_not_sent_elsewhere(
    serve: Serve, tmp_path: Path
) -> None:
    async with (
        serve(tmp_path, http_endpoint="port:0") as server,
        aiohttp.ClientSession(f"http://{server.http}") as session,
        session.post("/metrics", data=b"{}") as answer,
    ):
        assert 405 == answer.status
        assert (await answer.json())["error"].endswith("expected GET")
