"""Every fault on every route: the status of the table, and `{"error": text}` as the body.

A row of FAULTS says on which routes a fault can happen at all; the routes themselves are those
that the server really has.
"""

import gzip
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.http import Answer, chunked, connect, message
from support.server import RunningServer, Serve

from xlaserve.app.server import Application
from xlaserve.errors import OutOfMemory
from xlaserve.http.routing import Route
from xlaserve.residence.lifecycle import Event
from xlaserve.settings import Settings

LIMIT = 1 << 16
DEEP = b'{"parameters":' + b"[" * 10_000


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is loaded, one that is not, and one that cannot be."""
    root = tmp_path_factory.mktemp("models")
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {
        "backend": "identity",
        "max_batch_size": 4,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }
    for name in ("loaded", "absent"):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def every_route() -> list[Route]:
    """Return the routes of a server, without starting it."""
    settings = Settings.read({}, repository=Path(__file__).parent)
    return list(Application(settings).http_routes().routes)


ROUTES = every_route()


def path_of(route: Route, **names: str) -> str:
    """Fill the names of a path."""
    defaults = {"model": "loaded", "version": "1", "repository": "r", "region": "s"}
    return route.path.format_map(defaults | names)


def takes_body(route: Route) -> bool:
    # Without CUDA its memory is refused whatever a body says.
    refused = "{repository}" in route.path or route.path.startswith("/v2/cudasharedmemory")
    return route.takes is not None and not refused


def takes_json(route: Route) -> bool:
    return takes_body(route) and "application/json" in route.takes.media_types  # type: ignore[union-attr]


def names_model(route: Route) -> bool:
    return "{model}" in route.path and "{repository}" not in route.path


def infers(route: Route) -> bool:
    return route.path.endswith(("/infer", "/invoke", "/invocations"))


@dataclass(frozen=True)
class Fault:
    """One fault: where it can happen, how a request has it, and what answers."""

    status: int
    happens: Callable[[Route], bool]
    request: Callable[[Route], bytes]
    says: str = ""
    """What the text of the error holds."""


def with_body(body: bytes, *headers: tuple[str, str]) -> Callable[[Route], bytes]:
    return lambda route: message(route.method, path_of(route), *headers, body=body)


def in_chunks(*chunks: bytes) -> Callable[[Route], bytes]:
    coding = ("Transfer-Encoding", "chunked")
    return lambda route: (
        message(route.method, path_of(route), coding, length=None) + chunked(*chunks)
    )


def bare(method: str = "", **names: str) -> Callable[[Route], bytes]:
    return lambda route: message(method or route.method, path_of(route, **names), length=0)


FAULTS: Mapping[str, Fault] = {
    "wrong method": Fault(405, lambda route: True, bare("PATCH"), "PATCH is not allowed"),
    "more path": Fault(
        404,
        lambda route: route.path != "/",
        lambda route: message(route.method, path_of(route) + "//..", length=0),
        "there is nothing at",
    ),
    "another site": Fault(
        403,
        lambda route: route.method != "GET",
        lambda route: message(
            route.method, path_of(route), ("Sec-Fetch-Site", "cross-site"), length=0
        ),
        "other sites",
    ),
    "unknown model": Fault(404, names_model, bare(model="nope"), "'nope'"),
    "unknown version": Fault(
        404,
        lambda route: "{version}" in route.path,
        bare(version="77"),
        "version 77",
    ),
    "a name that leads out": Fault(
        404,
        lambda route: names_model(route) and not route.path.endswith("/load"),
        bare(model="..%2F..%2Fetc"),
        "Request for unknown model",
    ),
    "a load of a name that leads out": Fault(
        400,
        lambda route: names_model(route) and route.path.endswith("/load"),
        bare(model="..%2F..%2Fetc"),
        "path separator",
    ),
    "a chosen repository": Fault(
        501, lambda route: "{repository}" in route.path, bare(), "not implemented"
    ),
    "unknown coding": Fault(
        501, takes_body, with_body(b"x", ("Content-Encoding", "br")), "content encoding"
    ),
    "broken coding": Fault(
        400, takes_body, with_body(b"x" * 50, ("Content-Encoding", "gzip")), "decompressed"
    ),
    "not JSON": Fault(400, takes_json, with_body(b"{"), "JSON"),
    "not UTF-8": Fault(400, takes_json, with_body(b'{"id":"\xff"}')),
    "another kind of JSON": Fault(400, takes_json, with_body(b'"text"')),
    "too deep": Fault(400, takes_json, with_body(DEEP), "deep"),
    "too large": Fault(413, takes_body, with_body(bytes(LIMIT + 1)), "max_message_bytes"),
    "too large in chunks": Fault(
        413, takes_body, in_chunks(bytes(LIMIT), b"x"), "max_message_bytes"
    ),
    "a bomb": Fault(
        413,
        takes_body,
        with_body(gzip.compress(bytes(50 << 20)), ("Content-Encoding", "gzip")),
        "decompressed",
    ),
    "too many chunks": Fault(400, takes_body, in_chunks(*[b"x"] * 101), "max_http_chunks"),
    "a body that does not come": Fault(
        408,
        takes_body,
        lambda route: message(route.method, path_of(route), length=10),
        "message_timeout_seconds",
    ),
    "no inputs": Fault(400, infers, with_body(b"{}")),
    "a negative header length": Fault(
        400,
        infers,
        with_body(b"{}", ("Inference-Header-Content-Length", "-1")),
        "Inference-Header-Content-Length",
    ),
}


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    async with serve(
        repository,
        http_endpoint="port:0",
        load_model=("loaded",),
        max_message_bytes=LIMIT,
        max_http_chunks=100,
        message_timeout_seconds=0.3,
    ) as running:
        yield running


async def answer_to(server: RunningServer, request: bytes) -> Answer:
    assert server.http is not None
    async with connect(server.http) as connection:
        return await connection.ask(request)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_every_fault_on_every_route(
    server: RunningServer, fault: Fault, subtests: pytest.Subtests
) -> None:
    """One server has them all: what it refuses on one route changes nothing on the next."""
    routes = [route for route in ROUTES if fault.happens(route)]
    for route in routes:
        with subtests.test(route=f"{route.method} {route.path}"):
            answer = await answer_to(server, fault.request(route))

            assert fault.status == answer.status, answer.body
            assert fault.says in answer.error
    assert routes


def test_every_status_of_a_fault_is_described() -> None:
    """What a route can answer is in its description, for whoever reads it by machine."""
    general = {403, 405, 404}
    undescribed = [
        (name, route.method, route.path)
        for name, fault in FAULTS.items()
        for route in ROUTES
        if fault.happens(route)
        and fault.status not in general | set(route.errors) | set(route.other)
    ]

    assert [] == undescribed


# --- faults of the server ----------------------------------------------------------------------


INFERENCE = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
).encode()

INFERRING = [route for route in ROUTES if infers(route)]


@pytest.mark.parametrize("route", INFERRING, ids=lambda route: str(route.path))
async def test_a_device_without_memory_is_507(
    server: RunningServer, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(*arguments: Any, **options: Any) -> Any:
        raise OutOfMemory("loaded", "RESOURCE_EXHAUSTED")

    _, instance = server.application.registry.resolve("loaded")
    monkeypatch.setattr(type(instance.runner), "execute", execute)
    request = message(route.method, path_of(route), body=INFERENCE)
    answer = await answer_to(server, request)

    assert 507 == answer.status
    assert "out of memory" in answer.error


@pytest.mark.parametrize("route", INFERRING, ids=lambda route: str(route.path))
async def test_a_server_that_ends_is_503(server: RunningServer, route: Route) -> None:
    server.application.gates.drain()
    answer = await answer_to(server, message(route.method, path_of(route), body=INFERENCE))

    assert 503 == answer.status
    assert "shutting down" in answer.error


@pytest.mark.parametrize("route", INFERRING, ids=lambda route: str(route.path))
async def test_an_unexpected_exception_is_500_and_says_nothing(
    server: RunningServer, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("secret")

    _, instance = server.application.registry.resolve("loaded")
    monkeypatch.setattr(type(instance.runner), "execute", execute)
    answer = await answer_to(server, message(route.method, path_of(route), body=INFERENCE))

    assert (500, "internal error") == (answer.status, answer.error)


@pytest.mark.parametrize(
    "route",
    [route for route in INFERRING if "{model}" in route.path],
    ids=lambda route: str(route.path),
)
async def test_a_model_that_is_loading_is_503(server: RunningServer, route: Route) -> None:
    registry = server.application.registry
    registry.change(registry.version("coming", "1"), Event.LOAD)
    answer = await answer_to(
        server, message(route.method, path_of(route, model="coming"), body=INFERENCE)
    )
    registry.change(registry.version("coming", "1"), Event.FAILED)

    assert 503 == answer.status
    assert "'coming'" in answer.error
