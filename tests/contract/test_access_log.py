"""The access log of a whole server: a record for each request over both protocols."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import identity_models
from support.http import connect, message
from support.server import Serve
from support.stock import KINDS, Stock, stock_client
from tritonclient.utils import InferenceServerException

from xlaserve.serving.access.tokens import digest_of, new_token

INFER = "infer"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "echo", "FP32")
    return root


async def infer(client: Stock, model: str, **options: Any) -> None:
    tensor = client.input("x", [4], "FP32")
    tensor.set_data_from_numpy(np.zeros(4, np.float32))
    await client.ask("infer", model, [tensor], **options)


def of_infer(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["operation"] == INFER]


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_have_records(serve: Serve, models: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "access.jsonl"
    async with (
        serve(models, load_model=("*",), http_endpoint="port:0", access_log=str(path)) as server,
        stock_client(kind, server) as client,
    ):
        for number in range(3):
            await infer(client, "echo", request_id=f"r{number}")
        with pytest.raises(InferenceServerException):
            await infer(client, "nowhere")

    lines = of_infer(path)
    is_grpc = kind.startswith("grpc")
    assert ["r0", "r1", "r2"] == [line["id"] for line in lines[:3]]
    for line in lines[:3]:
        assert ("echo", "1", 1) == (line["model"], line["version"], line["batch"])
        assert ("OK" if is_grpc else "200") == line["status"]
        assert ("grpc_endpoint" if is_grpc else "http_endpoint") == line["listener"]
        assert line["bytes_in"] >= 16
        assert line["bytes_out"] >= 16
        assert line["queue_us"] + line["execute_us"] <= line["total_us"]
        assert line["peer"].startswith("127.0.0.1:")
    assert ("NOT_FOUND" if is_grpc else "404") == lines[3]["status"]
    assert "nowhere" in lines[3]["error"]


async def test_requests_of_a_stream_have_records(
    serve: Serve, models: Path, tmp_path: Path
) -> None:
    path = tmp_path / "access.jsonl"
    async with (
        serve(models, load_model=("*",), access_log=str(path)) as server,
        stock_client("grpc.aio", server) as client,
    ):
        tensor = client.input("x", [4], "FP32")
        tensor.set_data_from_numpy(np.zeros(4, np.float32))

        async def requests() -> Any:
            for number in range(2):
                yield {"model_name": "echo", "inputs": [tensor], "request_id": f"r{number}"}

        async with asyncio.timeout(20):
            answers = [answer async for answer in client.client.stream_infer(requests())]

    found = {line.get("id"): line for line in of_infer(path)}
    assert 2 == len(answers)
    assert {"r0", "r1"} <= set(found)
    assert all(found[name]["bytes_out"] >= 16 for name in ("r0", "r1"))


async def test_without_an_access_log_no_call_is_noted(serve: Serve, models: Path) -> None:
    async with serve(models, load_model=("*",), http_endpoint="port:0") as server:
        assert not server.application.gates.are_watched


ECHO = "/v2/models/echo/infer"
REFUSED: dict[str, tuple[str, str, bytes]] = {
    "no such model": ("POST", "/v2/models/none/infer", b"{}"),
    "no JSON": ("POST", ECHO, b"{"),
    "no input": ("POST", ECHO, b'{"inputs": []}'),
    "another shape": (
        "POST",
        ECHO,
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1]}]}',
    ),
    "no such page": ("GET", "/nowhere", b""),
    "no such version": ("GET", "/v2/models/echo/versions/7", b""),
    "a load that fails": ("POST", "/v2/repository/models/none/load", b""),
    "no permission": ("GET", "/metrics", b""),
}


@pytest.mark.parametrize("refused", REFUSED)
async def test_records_of_errors_over_http_say_who_asked_and_what_was_sent(
    serve: Serve, models: Path, tmp_path: Path, refused: str
) -> None:
    """On the general path and the fast path: three times on one connection."""
    method, path, body = REFUSED[refused]
    token = new_token()
    rules = tmp_path / "rules.json"
    allow = ["infer", "metadata", "manage", "page"]
    caller = {"name": "alice", "allow": allow, "token": digest_of(token)}
    rules.write_text(json.dumps({"caller": [caller]}))
    file = tmp_path / "access"
    settings = {"access_log": str(file), "access_rules": str(rules), "http_endpoint": "port:0"}
    bearer = ("Authorization", f"Bearer {token}")
    asked = message(method, path, bearer, body=body, length=len(body))
    async with serve(models, load_model=("*",), **settings) as server:
        async with connect(str(server.http)) as client:
            answers = [await client.ask(asked) for _ in range(3)]
    lines = [json.loads(line) for line in file.read_text().splitlines()]

    assert all(answer.status >= 400 for answer in answers)
    assert [(str(answer.status), len(answer.body), "alice") for answer in answers] == [
        (line["status"], line.get("bytes_out"), line.get("principal")) for line in lines
    ]
