"""What every answer over REST says of caches, codings and places, from a server as it is."""

import gzip
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support import identity_models
from support.http import Answer, Connection, connect, message
from support.server import Serve

GZIP = ("Accept-Encoding", "gzip")
COUNT = 50_000


@pytest.fixture
async def client(serve: Serve, tmp_path: Path) -> AsyncIterator[Connection]:
    identity_models.write(tmp_path / "models", "m", "FP32", (1, COUNT))
    async with serve(
        tmp_path / "models",
        http_endpoint="port:0",
        load_model=("*",),
        cors_origin=("https://app.example",),
    ) as server:
        assert server.http is not None
        async with connect(server.http) as client:
            yield client


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/m",
        "/v2/models/m/ready",
        "/v2/models/m/config",
        "/v2/models/m/stats",
        "/v2/models/stats",
        "/metrics",
        "/v2/models/nobody",
        "/nowhere",
        "/status.json",
    ],
)
async def test_no_cache_tells_of_a_server_that_is_gone(client: Connection, path: str) -> None:
    for method in ("GET", "HEAD", "GET"):
        answer = await client.ask(message(method, path), head=method == "HEAD")

        assert "no-store" == answer.headers["cache-control"]


async def test_an_answer_names_all_that_it_depends_on(client: Connection) -> None:
    origin = ("Origin", "https://app.example")
    asked = [(), (GZIP,), (GZIP, origin), (origin,)]
    varies = [
        {*(await client.ask(message("GET", "/metrics", *headers))).headers["vary"].split(", ")}
        for headers in asked
    ]
    coded = {"Accept", "Accept-Encoding"}

    assert [coded, coded, coded | {"Origin"}, coded | {"Origin"}] == varies


@pytest.mark.parametrize("query", ["", "?a=b"])
async def test_a_page_is_where_its_links_are_right(client: Connection, query: str) -> None:
    """By a place that is right behind a proxy which has put something before the path."""
    answer = await client.ask(message("GET", f"/v2/docs/{query}"))
    page = await client.ask(message("GET", "/v2/docs"))
    data = await client.ask(message("GET", "/v2/models/m/"))

    assert (308, f"../docs{query}") == (answer.status, answer.headers["location"])
    assert (200, 200) == (page.status, data.status)


def infer(values: np.ndarray, *headers: tuple[str, str]) -> bytes:
    """Write a request for values, to be answered in octets."""
    data = values.astype("<f4").tobytes()
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, COUNT],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = ("Inference-Header-Content-Length", str(len(head)))
    return message("POST", "/v2/models/m/infer", length, *headers, body=head + data)


def values_of(answer: Answer) -> np.ndarray:
    packed = answer.headers.get("content-encoding") == "gzip"
    body = gzip.decompress(answer.body) if packed else answer.body
    return np.frombuffer(body[int(answer.headers["inference-header-content-length"]) :], "<f4")


async def test_only_what_becomes_shorter_is_compressed(client: Connection) -> None:
    noise = np.frombuffer(os.urandom(4 * COUNT), "<u4").astype(np.float32)
    codings = []
    for values in (noise, np.zeros(COUNT, np.float32), noise, noise[::-1]):
        answer = await client.ask(infer(values, GZIP))
        codings.append(answer.headers.get("content-encoding"))
        np.testing.assert_array_equal(values_of(answer), values)

    assert [None, "gzip", None, None] == codings
