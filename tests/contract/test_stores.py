"""Failing stores and common web servers: each request is retried and counted."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support import tools
from support.conditions import MOST_SECONDS, until
from support.http import ask
from support.object_server import Handler, Shelves, serving_objects
from support.server import RunningServer, Serve
from support.store_failures import FAILURES, STALL_SECONDS

from xlaserve.settings.choices import ModelControlMode
from xlaserve.storage import fetching
from xlaserve.storage.http_store import HttpStore

MODEL = "simple"
FAILING, OTHER = (f"root/{MODEL}/1/model.{kind}" for kind in ("stablehlo", "jaxexp"))
"""Files that only a load reads."""
STORE = "xlaserve_store_readable"
QUICK = {
    *[("403", kind) for kind in ("page", "mark", "object")],
    *[("short body", kind) for kind in ("page", "object")],
    ("reset in the middle", "object"),
    ("reset", "mark"),
    ("404", "object"),
    ("429 with Retry-After", "page"),
    ("wrong length", "object"),
}
"""Covers each message and each outcome once; the other cases are `slow`."""
QUICK_LISTINGS = {"short body", "chunk without end", "reset", "403"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between attempts."""
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def model(example_models: Path, tmp_path: Path) -> Path:
    """A repository with one model that compiles a single executable."""
    root = tmp_path / "root"
    shutil.copytree(example_models / MODEL, root / MODEL)
    config = root / MODEL / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 1"))
    return root


@pytest.fixture
def place(model: Path) -> Iterator[tuple[str, Shelves]]:
    files = {
        f"root/{path.relative_to(model)}": path.read_bytes()
        for path in model.rglob("*")
        if path.is_file()
    }
    with serving_objects(**files) as made:
        yield made


def settings(url: str, tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "repository": url,
        "http_endpoint": "port:0",
        "remote_schemes": ("http",),
        "remote_cache_directory": str(tmp_path / "cache"),
        **more,
    }


async def load(server: RunningServer) -> tuple[int, str]:
    path = f"/v2/repository/models/{MODEL}/load"
    answer = await ask(str(server.http), "POST", path)
    return answer.status, answer.body.decode()


async def index(server: RunningServer) -> list[str]:
    answer = await ask(str(server.http), "POST", "/v2/repository/index")
    return [row["name"] for row in answer.json]


async def metric(server: RunningServer, name: str) -> float | None:
    text = (await ask(str(server.http), "GET", "/metrics")).body.decode()
    rows = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return float(rows[0].rsplit(" ", 1)[1]) if rows else None


REQUESTS = {
    "the page of the root": ("GET", "root/"),
    "the page of a model": ("GET", f"root/{MODEL}/"),
    "the page of a version": ("GET", f"root/{MODEL}/1/"),
    "the mark of a file": ("HEAD", f"root/{MODEL}/config.pbtxt"),
    "the mark of weights": ("HEAD", f"root/{MODEL}/1/params.safetensors"),
    "a file beside the versions": ("GET", f"root/{MODEL}/config.pbtxt"),
    "weights": ("GET", f"root/{MODEL}/1/params.safetensors"),
}
"""Every kind of store request in a listing and a load."""


@pytest.mark.parametrize("request_of", REQUESTS)
async def test_every_request_to_a_store_is_tried_again(
    serve: Serve, place: tuple[str, Shelves], tmp_path: Path, request_of: str
) -> None:
    url, shelves = place
    kind = REQUESTS[request_of]
    async with serve(**settings(url, tmp_path)) as server:
        shelves.failing[kind] = fetching.ATTEMPTS - 1
        await asyncio.to_thread(server.application.repository.remotes.refresh)
        assert [MODEL] == await index(server)
        assert (200, "{}") == await load(server)
        assert 0 == shelves.failing[kind]
        assert fetching.ATTEMPTS - 1 == await metric(server, "xlaserve_fetch_retries_total")
        assert 0 == await metric(server, "xlaserve_store_request_failures_total")
        assert 1 == await metric(server, STORE)


@pytest.mark.parametrize("request_of", REQUESTS)
async def test_the_failure_of_a_store_is_no_fault_of_the_model(
    serve: Serve, place: tuple[str, Shelves], tmp_path: Path, request_of: str
) -> None:
    """Reported as 503 and UNAVAILABLE, in counters, and by a metric, without polling."""
    url, shelves = place
    kind = REQUESTS[request_of]
    async with serve(**settings(url, tmp_path)) as server:
        shelves.failing[kind] = 1000
        if kind == ("GET", "root/"):
            await asyncio.to_thread(server.application.repository.remotes.refresh)
            assert [] == await index(server)
        else:
            status, text = await load(server)
            assert 503 == status, text
            assert "answered 503" in json.loads(text)["error"]
        assert 0 == await metric(server, STORE)
        counted = "xlaserve_fetch_failures_total", "xlaserve_store_request_failures_total"
        assert 1 == sum([await metric(server, name) or 0 for name in counted])
        shelves.failing.clear()
        await asyncio.to_thread(server.application.repository.remotes.refresh)
        assert [MODEL] == await index(server)
        assert (200, "{}") == await load(server)
        assert 1 == await metric(server, STORE)


async def test_a_store_that_fails_a_load_is_away_though_a_later_request_succeeded(
    serve: Serve, place: tuple[str, Shelves], tmp_path: Path
) -> None:
    """Files are fetched at the same time: another one is confirmed after the failure."""
    url, shelves = place
    reading, confirming, failed = (threading.Event() for _ in range(3))
    async with serve(**settings(url, tmp_path)) as server:

        def answer(handler: Handler) -> None:
            if handler.name == FAILING:
                reading.set()
                assert confirming.wait(MOST_SECONDS)
                handler.head("", 0, 403)
                handler.connection.recv(1)  # the server closes the connection
                failed.set()
                return
            content = handler.content(handler.name)
            assert reading.wait(MOST_SECONDS)
            if handler.command == "HEAD":
                confirming.set()
                assert failed.wait(MOST_SECONDS)
            else:
                # Its next HEAD confirms that it has not changed.
                shelves.failing["HEAD", OTHER] = 1000
            handler.head(handler.name, len(content))
            if handler.command == "GET":
                handler.wfile.write(content)

        shelves.failure = answer
        shelves.failing |= {("GET", FAILING): 1000, ("GET", OTHER): 1000}
        status, text = await load(server)
        assert 503 == status, text
        assert 0 == await metric(server, STORE)


KINDS = {
    "page": ("GET", f"root/{MODEL}/1/"),
    "mark": ("HEAD", f"root/{MODEL}/1/params.safetensors"),
    "object": ("GET", f"root/{MODEL}/1/params.safetensors"),
}
CASES = [
    pytest.param(
        failure,
        kind,
        # One case per kind tells most; statuses are rows of one table.
        marks=[] if (failure, kind) in QUICK else [pytest.mark.slow],
    )
    for failure, row in FAILURES.items()
    for kind in sorted(row.of)
]


@pytest.mark.parametrize(("failure", "kind"), CASES)
async def test_a_load_meets_each_failure_of_a_store(
    serve: Serve, place: tuple[str, Shelves], tmp_path: Path, failure: str, kind: str
) -> None:
    """Requests are retried where that may help; the failure is reported and counted."""
    url, shelves = place
    row, asked = FAILURES[failure], KINDS[kind]
    shelves.failure = row.answer
    more = {"remote_stall_seconds": STALL_SECONDS} if "slow" in failure else {}
    async with serve(**settings(url, tmp_path, **more)) as server:
        shelves.failing[asked] = 1000
        status, text = await load(server)
        tried = 1000 - shelves.failing[asked]
        assert row.status == status, text
        assert url in json.loads(text)["error"]
        assert row.text in json.loads(text)["error"]
        counted = "xlaserve_fetch_failures_total", "xlaserve_store_request_failures_total"
        if row.status == 503:
            assert 1 == sum([await metric(server, name) or 0 for name in counted])
            assert 0 == await metric(server, STORE)
        # Half of an object counts as progress the first time.
        most = fetching.ATTEMPTS + 2
        assert tried in (range(fetching.ATTEMPTS, most + 1) if kind in row.again else (1,))

        shelves.failing[asked] = fetching.ATTEMPTS - 1
        status, text = await load(server)
        assert (200 if kind in row.again else row.status) == status, text
        shelves.failing.clear()
        shelves.released.set()
        # On a busy machine, even an answered request may exceed the second.
        while "slow" in failure and (await load(server))[0] == 503:
            pass
        assert (200, "{}") == await load(server)
        assert 1 == await metric(server, STORE)


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(name, marks=[] if name in QUICK_LISTINGS else [pytest.mark.slow])
        for name, row in FAILURES.items()
        if "page" in row.of
    ],
)
async def test_a_listing_meets_each_failure_of_a_store(
    serve: Serve, place: tuple[str, Shelves], tmp_path: Path, failure: str
) -> None:
    """At the start nothing is ready; later, loaded models stay; both recover by themselves."""
    url, shelves = place
    shelves.failure = FAILURES[failure].answer
    root = "GET", "root/"
    more: dict[str, Any] = {"model_control_mode": ModelControlMode.POLL}
    more |= {"remote_stall_seconds": STALL_SECONDS} if "slow" in failure else {}
    shelves.failing[root] = 1000
    async with serve(**settings(url, tmp_path, **more)) as server:
        poll = server.application.control.follower.poll
        assert 200 != (await ask(str(server.http), "GET", "/v2/health/ready")).status
        answer = await ask(str(server.http), "GET", f"/v2/models/{MODEL}")
        assert 503 == answer.status, answer.body
        assert 0 == await metric(server, STORE)

        shelves.failing.clear()
        await poll()
        assert 200 == (await ask(str(server.http), "GET", "/v2/health/ready")).status
        assert 200 == (await ask(str(server.http), "GET", f"/v2/models/{MODEL}/ready")).status
        assert 1 == await metric(server, STORE)

        shelves.failing[root] = 1000
        with capture_logs() as log:
            await poll()
            await poll()
        told = [row for row in log if row["event"].startswith("repository unreadable")]
        assert told
        assert {url} == {row["path"] for row in told}
        assert 200 == (await ask(str(server.http), "GET", f"/v2/models/{MODEL}/ready")).status
        assert 0 == await metric(server, STORE)
        shelves.failing.clear()
        shelves.released.set()


async def test_a_metric_says_that_a_store_is_away_though_nobody_asks_it(
    serve: Serve, place: tuple[str, Shelves], tmp_path: Path
) -> None:
    url, shelves = place
    more = {"model_control_mode": ModelControlMode.NONE, "poll_interval_seconds": 0.1}
    async with serve(**settings(url, tmp_path, **more)) as server:
        look = server.application.control.follower.check_stores
        assert 1 == await metric(server, STORE)
        shelves.is_away = True
        with capture_logs() as log:
            await look()
            await look()
        told = [line for line in log if line["event"] == "store unreachable"]
        assert [url] == [line["store"] for line in told]
        assert 0 == await metric(server, STORE)
        shelves.is_away = False
        with capture_logs() as log:
            await look()
        assert ["store reachable again"] == [line["event"] for line in log if "store" in line]
        assert 1 == await metric(server, STORE)


async def test_a_server_looks_at_its_stores_by_itself(
    serve: Serve, place: tuple[str, Shelves], tmp_path: Path
) -> None:
    url, shelves = place
    more = {"model_control_mode": ModelControlMode.NONE, "poll_interval_seconds": 0.1}
    async with serve(**settings(url, tmp_path, **more)) as server:
        serving = asyncio.ensure_future(server.application.serve())
        try:
            shelves.is_away = True
            problems = server.application.repository.remotes
            await until(lambda: any(problems.problems.values()))
            shelves.is_away = False
            await until(lambda: not any(problems.problems.values()))
        finally:
            serving.cancel()


def test_a_store_is_listed_several_requests_at_a_time_within_a_limit() -> None:
    """Each HEAD waits until the limit of concurrent requests is reached; it is never exceeded."""
    files = {f"root/m/{number}/w": b"x" for number in range(1, 13)}
    with serving_objects(**files) as (url, shelves):
        shelves.turns = threading.Semaphore(0)
        store = HttpStore(url, seconds=60, max_objects=100, threads=3)
        found: list[str] = []
        listing = threading.Thread(target=lambda: found.extend(one.name for one in store.objects()))
        listing.start()
        for _ in range(6000):
            if shelves.heads_at_once[0] == 3:
                break
            threading.Event().wait(0.01)
        assert 3 == shelves.heads_at_once[0]
        for _ in files:
            shelves.turns.release()
        listing.join(60)

    assert sorted(name.removeprefix("root/") for name in files) == found
    assert 3 == shelves.heads_at_once[1]


@contextmanager
def python_server(root: Path) -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--directory", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield f"http://127.0.0.1:{line.split(' port ')[1].split()[0]}"
    finally:
        process.kill()
        process.communicate()


@contextmanager
def nginx_server(root: Path) -> Iterator[str]:
    """nginx inherits a listening socket through NGINX, so no port has to be guessed."""
    nginx = tools.program("nginx")
    home = root.parent / "nginx"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        places = "\n".join(
            f"{name}_temp_path {home}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;" if os.geteuid() == 0 else ""
        (home / "nginx.conf").write_text(
            f"""{user} daemon off; worker_processes 1; pid {home}/pid; error_log {home}/log;
            events {{}}
            http {{ access_log off; {places}
              server {{ listen 127.0.0.1:{port}; root {root}; autoindex on; }} }}"""
        )
        process = subprocess.Popen(
            [nginx, "-p", str(home), "-c", str(home / "nginx.conf"), "-e", f"{home}/log"],
            env={**os.environ, "NGINX": f"{listening.fileno()};"},
            pass_fds=[listening.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()  # wait for its worker
            process.wait()


SERVERS = {"python -m http.server": python_server, "nginx": nginx_server}


@pytest.mark.parametrize("kind", SERVERS)
async def test_servers_that_the_page_names_serve_models(
    serve: Serve, model: Path, tmp_path: Path, kind: str
) -> None:
    """With and without range requests: listed, downloaded, and changes detected."""
    with SERVERS[kind](model) as url:
        async with serve(**settings(url, tmp_path)) as server:
            assert [MODEL] == await index(server)
            assert (200, "{}") == await load(server)
            config = model / MODEL / "config.pbtxt"
            config.write_text(config.read_text() + "# changed\n")
            assert (200, "{}") == await load(server)
            data = [1] * 16
            inputs = [
                {"name": name, "datatype": "INT32", "shape": [1, 16], "data": data}
                for name in ("INPUT0", "INPUT1")
            ]
            answer = await ask(
                str(server.http),
                "POST",
                f"/v2/models/{MODEL}/infer",
                body=json.dumps({"inputs": inputs}).encode(),
            )
            assert [2] * 16 == answer.json["outputs"][0]["data"]
            assert 2 == await metric(server, "xlaserve_fetched_models_total")
