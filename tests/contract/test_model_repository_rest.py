"""The model repository extension over HTTP, in the order of its document."""

import base64
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.curl import curl
from support.doubling import export_double
from support.http import Answer, ask
from support.server import RunningServer, Serve

ENSEMBLE = {
    "max_batch_size": 4,
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [2]}],
    "ensemble_scheduling": {
        "step": [{"model_name": "double", "input_map": {"x": "IN"}, "output_map": {"y": "OUT"}}]
    },
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JAX model, an ensemble of it, and a model that cannot be loaded."""
    root = tmp_path_factory.mktemp("models")
    export_double(root)
    (root / "twice").mkdir()
    (root / "twice/config.json").write_text(json.dumps(ENSEMBLE))
    (root / "broken/1").mkdir(parents=True)
    return root


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    async with serve(repository, http_endpoint="port:0") as running:
        yield running


@pytest.fixture
def address(server: RunningServer) -> str:
    assert server.http is not None
    return server.http


async def post(address: str, path: str, body: object = None) -> Answer:
    data = b"" if body is None else json.dumps(body).encode()
    return await ask(address, "POST", f"/v2/repository/{path}", body=data)


async def index(address: str, **asked: bool) -> list[dict[str, str]]:
    answer = await post(address, "index", asked or None)
    assert 200 == answer.status
    rows: list[dict[str, str]] = answer.json
    return rows


async def double(address: str, values: list[float]) -> Any:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": values}
    body = json.dumps({"inputs": [tensor]}).encode()
    answer = await ask(address, "POST", "/v2/models/double/infer", body=body)
    return answer.json["outputs"][0]["data"] if answer.status == 200 else answer.status


# --- Index -------------------------------------------------------------------------------------


async def test_the_index_lists_what_is_not_loaded(address: str) -> None:
    """The entry of a model that was never loaded has no version."""
    assert [
        {"name": name, "state": "UNAVAILABLE", "reason": "not loaded"}
        for name in ("broken", "double", "twice")
    ] == await index(address)


async def test_the_index_by_curl(address: str) -> None:
    """The document requires the request object; here it is optional."""
    url = f"http://{address}/v2/repository/index"
    empty = await curl("--request", "POST", url)
    asked = await curl("--data", '{"ready": true}', url)

    assert 3 == len(empty.json)
    assert [] == asked.json


async def test_the_index_of_what_is_ready(address: str) -> None:
    await post(address, "models/double/load")

    assert [{"name": "double", "version": "1", "state": "READY", "reason": ""}] == await index(
        address, ready=True
    )


async def test_the_index_tells_why_a_load_failed(address: str) -> None:
    failed = await post(address, "models/broken/load")
    (row,) = [row for row in await index(address) if row["name"] == "broken"]

    assert 400 == failed.status
    assert failed.error.startswith("failed to load 'broken'")
    assert "UNAVAILABLE" == row["state"]
    assert row["reason"]


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"ready": 1}', b"\xff", b"[" * 10000])
async def test_an_index_request_that_is_none(address: str, body: bytes) -> None:
    answer = await ask(address, "POST", "/v2/repository/index", body=body)

    assert 400 == answer.status
    assert answer.error


# --- Load --------------------------------------------------------------------------------------


async def test_a_load_answers_when_the_model_does(address: str) -> None:
    answer = await post(address, "models/double/load")

    assert (200, {}) == (answer.status, answer.json)
    assert [2, 4] == await double(address, [1, 2])


@pytest.mark.parametrize("as_text", [True, False])
async def test_a_load_with_a_configuration(address: str, as_text: bool) -> None:
    config: Any = {"max_batch_size": 2}
    answer = await post(
        address,
        "models/double/load",
        {"parameters": {"config": json.dumps(config) if as_text else config}},
    )

    assert 200 == answer.status
    assert [2, 4] == await double(address, [1, 2])


async def test_the_example_of_the_document(address: str, repository: Path) -> None:
    """`mymodel` with the document's keys: inputs, datatype, shape, and a file in base64.

    The document uses another backend and a configuration in a JSON string.
    """
    folder = repository / "double" / "1"
    tensor = {"datatype": "FP32", "shape": [2]}
    config = {
        "name": "mymodel",
        "backend": "jax_export",
        "max_batch_size": 4,
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
    }
    files = {
        f"file:1/{file.name}": base64.b64encode(file.read_bytes()).decode()
        for file in folder.iterdir()
    }
    answer = await post(
        address, "models/mymodel/load", {"parameters": {"config": json.dumps(config), **files}}
    )
    ready = await ask(address, "GET", "/v2/models/mymodel/ready")
    unloaded = await post(address, "models/mymodel/unload")

    assert (200, 200, 200) == (answer.status, ready.status, unloaded.status)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, 507), (errno.EMFILE, 503)],
    ids=["ENOSPC", "EMFILE"],
)
async def test_files_that_the_disk_has_no_room_for_are_507(
    server: RunningServer,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: int,
) -> None:
    """No files remain, and the old version keeps serving."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    await post(address, "models/double/load")
    parameters = {"config": "{}", "file:1/model.json": "AAAA"}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        answer = await post(address, "models/double/load", {"parameters": parameters})

    assert expected == answer.status
    said = (
        ", no disk space left for its files:"
        if expected == 507
        else "the server reached its limit of open files"
    )
    assert answer.error.startswith("failed to load 'double', ")
    assert said in answer.error
    assert os.strerror(number) in answer.error
    assert [] == list(server.application.settings.scratch_directory.iterdir())
    assert [2, 4] == await double(address, [1, 2])


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"config": 1}, "config"),
        ({"config": "{"}, "double"),
        ({"config": None}, "config"),
        ({"file:1/model.json": "AAAA"}, "config"),
        ({"config": "{}", "file:1/model.json": "no base64!"}, "file:1/model.json"),
        ({"config": "{}", "file:1/model.json": 1}, "file:1/model.json"),
        ({"config": "{}", "file:../../etc/x": "AAAA"}, ".."),
        ({"config": "{}", "file:1/../../x": "AAAA"}, "path separator"),
        ({"something": "else"}, "something"),
        ({"config": 1.5}, "config"),
        ({"config": []}, "config"),
    ],
)
async def test_parameters_of_a_load_that_are_wrong(
    address: str, parameters: dict[str, Any], named: str
) -> None:
    answer = await post(address, "models/double/load", {"parameters": parameters})

    assert 400 == answer.status
    assert named in answer.error


async def test_a_load_of_what_there_is_not(address: str) -> None:
    answer = await post(address, "models/nope/load")

    assert 404 == answer.status
    assert "failed to load" in answer.error


@pytest.mark.parametrize("path", ["index", "models/double/load", "models/double/unload"])
async def test_a_repository_cannot_be_chosen(address: str, path: str) -> None:
    answer = await post(address, f"other/{path}")

    assert 501 == answer.status


async def test_a_server_that_does_not_let_itself_be_told(serve: Serve, repository: Path) -> None:
    async with serve(repository, http_endpoint="port:0", model_control_mode="none") as server:
        assert server.http is not None
        load = await post(server.http, "models/double/load")
        unload = await post(server.http, "models/double/unload")

    assert (503, 503) == (load.status, unload.status)
    assert "--model-control-mode explicit" in load.error


# --- Unload ------------------------------------------------------------------------------------


async def test_an_unload_answers_when_the_model_is_gone(
    server: RunningServer, address: str
) -> None:
    await post(address, "models/double/load")
    answer = await post(address, "models/double/unload")

    assert (200, {}) == (answer.status, answer.json)
    assert 0 == server.application.capacity.used_bytes
    assert 404 == await double(address, [1, 2])


async def test_an_unload_of_what_is_not_loaded_is_no_error(address: str) -> None:
    assert 200 == (await post(address, "models/double/unload")).status
    assert 404 == (await post(address, "models/nope/unload")).status


@pytest.mark.parametrize("dependents", [True, False])
async def test_unload_dependents(address: str, dependents: bool) -> None:
    await post(address, "models/twice/load")
    answer = await post(
        address, "models/double/unload", {"parameters": {"unload_dependents": dependents}}
    )
    states = {row["name"]: row["reason"] for row in await index(address)}

    assert 200 == answer.status
    assert ("unloaded" if dependents else "its step 'double' is not ready") == states["twice"]


async def test_parameters_of_an_unload_that_are_wrong(address: str) -> None:
    await post(address, "models/double/load")
    for parameters in ({"unload_dependents": "yes"}, {"something": True}, {"x": None}):
        answer = await post(address, "models/double/unload", {"parameters": parameters})

        assert 400 == answer.status
        assert next(iter(parameters)) in answer.error
