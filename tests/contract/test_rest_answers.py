"""Cache-Control, Content-Encoding and Location of all REST answers, in a default server."""

import gzip
import json
import os
import re
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import pytest
from support import identity_models
from support.http import Answer, Connection, connect, message
from support.server import RunningServer, Serve

from xlaserve.http.routing import Route

GZIP = ("Accept-Encoding", "gzip")
COUNT = 50_000


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    identity_models.write(tmp_path / "models", "m", "FP32", (1, COUNT))
    async with serve(
        tmp_path / "models",
        http_endpoint="port:0",
        load_model=("*",),
        cors_origin=("https://app.example",),
        sagemaker=True,
        sagemaker_multi_model=True,
        host="127.0.0.1",
    ) as server:
        yield server


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[Connection]:
    assert server.http is not None
    async with connect(server.http) as client:
        yield client


PARTS = ("/page/*.js", "/page/*.css", "/page/*.svg", "/v2/docs", "/v2/docs/*", "/")
"""Responses that only change with the server: caches may store and revalidate them."""


def said_by(route: Route) -> str | None:
    """Return the Cache-Control header that a route must send."""
    return "no-cache" if any(fnmatchcase(route.path, part) for part in PARTS) else "no-store"


@pytest.mark.parametrize("name", ["m", "nobody"])
async def test_no_cache_tells_of_a_server_that_is_gone(
    server: RunningServer, client: Connection, name: str
) -> None:
    """Each route by all its methods, with an existing and a nonexistent model."""
    said, told = {}, {}
    for route in server.application.http_routes().routes:
        path = re.sub(r"\{[a-z]+\}", name, route.path)
        if route.method != "GET" and name == "m":
            continue  # it would unload the model
        for method in {"GET": ("GET", "HEAD", "GET")}.get(route.method, (route.method,)):
            answer = await client.ask(message(method, path, length=None), head=method == "HEAD")
            key = f"{method} {route.path}"
            said[key], told[key] = said_by(route), answer.headers.get("cache-control")
            if answer.status >= HTTPStatus.BAD_REQUEST:
                said[key] = "no-store"

    assert said == told
    assert {"no-cache", "no-store"} == set(told.values())
    assert len(told) > 100 or name == "m"


ELSEWHERE = [
    ("GET", "/nowhere"),
    ("HEAD", "/nowhere"),
    ("DELETE", "/v2"),
    ("GET", "/v2/models/m/infer"),
    ("POST", "/nowhere"),
    ("GET", "/v2/docs/"),
    ("PATCH", "/v2"),
]


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
async def test_no_cache_keeps_what_is_not_there(client: Connection, method: str, path: str) -> None:
    for _ in range(3):
        answer = await client.ask(message(method, path), head=method == "HEAD")

        assert "no-store" == answer.headers["cache-control"]


async def test_no_cache_keeps_a_refused_inference(client: Connection) -> None:
    """Neither the first ones nor those answered on the fast path."""
    request = message("POST", "/v2/models/m/infer", body=b'{"inputs": []}')
    answers = [await client.ask(request) for _ in range(5)]

    assert [(400, "no-store")] * 5 == [(a.status, a.headers["cache-control"]) for a in answers]


async def test_no_cache_keeps_what_is_no_request(client: Connection) -> None:
    answer = await client.ask(b"GET /v2 HTTP/9.9\r\nHost: localhost\r\n\r\n")

    assert (505, "no-store") == (answer.status, answer.headers["cache-control"])


@pytest.mark.parametrize("below", ["", "/ml", "/a/b"])
async def test_a_description_is_right_below_a_path(client: Connection, below: str) -> None:
    answer = await client.ask(message("GET", "/v2/docs/openapi.json"))
    (server,) = answer.json["servers"]
    found = urljoin(f"http://host{below}/v2/docs/openapi.json", server["url"])

    assert f"http://host{below}/" == found


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
    """A relative Location also works behind a proxy that adds a path prefix."""
    answer = await client.ask(message("GET", f"/v2/docs/{query}"))
    page = await client.ask(message("GET", "/v2/docs"))
    data = await client.ask(message("GET", "/v2/models/m/"))

    assert (308, f"../docs{query}") == (answer.status, answer.headers["location"])
    assert (200, 200) == (page.status, data.status)


def infer(values: np.ndarray, *headers: tuple[str, str]) -> bytes:
    """Return a request with these values, to be answered in binary."""
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
