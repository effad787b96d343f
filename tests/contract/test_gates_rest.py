"""Every request to every REST route passes the gates, on every path."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from support import identity_models
from support.gate_watch import RULE, Watch
from support.http import Connection as Client
from support.http import connect, message
from support.server import RunningServer, serving

from xlaserve.app.server import Application
from xlaserve.http.connection.connection import Connection
from xlaserve.http.routing import Route
from xlaserve.serving.call import Operation
from xlaserve.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMES = 5
CONNECTIONS = 3
REFUSED = 403
INFERENCE = json.dumps(
    {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}
).encode()


def every_route() -> list[Route]:
    """Return a server's routes without starting it."""
    settings = Settings.read({}, repository=Path(__file__).parent)
    return list(Application(settings).http_routes().routes)


ROUTES = every_route()
INFERRING = [
    route for route in ROUTES if route.path.endswith(("/infer", "/invoke", "/invocations"))
]
EXPECTED = {
    "GET /v2/health/live": Operation.HEALTH,
    "GET /v2/health/ready": Operation.HEALTH,
    "GET /v2/models/{model}/ready": Operation.READINESS,
    "GET /ping": Operation.HEALTH,
    "GET /v2": Operation.METADATA,
    "GET /v2/models": Operation.METADATA,
    "GET /v2/models/{model}": Operation.METADATA,
    "GET /v2/models/{model}/config": Operation.METADATA,
    "GET /v2/models/{model}/stats": Operation.METADATA,
    "POST /v2/repository/index": Operation.METADATA,
    "GET /models": Operation.METADATA,
    "GET /models/{model}": Operation.METADATA,
    "POST /v2/models/{model}/infer": Operation.INFER,
    "POST /v2/models/{model}/versions/{version}/infer": Operation.INFER,
    "POST /models/{model}/invoke": Operation.INFER,
    "POST /invocations": Operation.INFER,
    "POST /v2/repository/models/{model}/load": Operation.MANAGE,
    "POST /v2/repository/models/{model}/unload": Operation.MANAGE,
    "POST /models": Operation.MANAGE,
    "DELETE /models/{model}": Operation.MANAGE,
    "POST /v2/logging": Operation.MANAGE,
    "GET /v2/logging": Operation.METADATA,
    "GET /metrics": Operation.METRICS,
    "GET /": Operation.SHELL,
    "GET /status.json": Operation.PAGE,
    "GET /history.json": Operation.PAGE,
}
"""Expected operation of each route, written by hand."""


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


async def test_each_route_says_what_a_permission_for_it_is_given_for() -> None:
    found = {name_of(route): route.operation for route in ROUTES}

    assert EXPECTED == {name: found[name] for name in EXPECTED}


# --- Server --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A server with watched gates."""

    server: RunningServer
    address: str
    watch: Watch


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("gates")
    for name in ("fp32", "other"):
        identity_models.write(folder / "models", name, "FP32")
    watch = Watch()
    with watch.watching():
        running = serving(
            folder,
            folder / "models",
            http_endpoint="port:0",
            load_model=("fp32",),
            default_model="fp32",
        )
        async with running as server:
            assert server.http is not None
            yield Place(server, server.http, watch)


@pytest.fixture(autouse=True)
def _cleared(place: Place) -> None:
    place.watch.clear()


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Requests that took the general path."""
    noted: list[bytes] = []
    take_over = Connection.take_over

    def note(self: Connection, data: bytes) -> None:
        noted.append(data)
        take_over(self, data)

    monkeypatch.setattr(Connection, "take_over", note)
    return noted


# --- Tests ---------------------------------------------------------------------------------------


def request_for(route: Route, *headers: tuple[str, str]) -> bytes:
    """Return a request that has no side effects on other tests."""
    model = "other" if route.operation is Operation.MANAGE else "fp32"
    names = {"model": model, "version": "1", "repository": "r", "region": "s"}
    body = INFERENCE if route in INFERRING else b""
    path = route.path.format_map(names)
    return message(route.method, path, *headers, body=body, length=len(body))


async def status(client: Client, request: bytes) -> int:
    return (await client.ask(request)).status


on_every_route = pytest.mark.parametrize("route", ROUTES, ids=name_of)


@on_every_route
async def test_equal_requests_are_counted_every_time(place: Place, route: Route) -> None:
    """Each begins and ends once, and states the operation, the caller, and its address."""
    request = request_for(route)
    async with connect(place.address) as first, connect(place.address) as second:
        found = [await status(client, request) for client in [first] * TIMES + [second]]
    calls = place.watch.gate

    assert REFUSED not in found
    # A second load or unload finds another state.
    assert route.operation is Operation.MANAGE or 1 == len(set(found))
    assert len(found) == len(calls) == len(set(calls))
    assert {route.operation} == {call.operation for call in calls}
    assert Counter(calls) == Counter(place.watch.begun) == Counter(place.watch.ended_calls)
    assert {"http_endpoint"} == {call.peer.listener for call in calls}
    assert [TIMES, 1] == list(Counter(id(call.peer) for call in calls).values())
    named = "{model}" in route.path
    assert not named or {"fp32", "other"} >= {call.model for call in calls}


RULES = ("refuse", "pass", "refuse", "refuse", "pass", "pass")


def varying(number: int) -> list[tuple[str, str]]:
    """Return headers that differ for each request, as with real clients."""
    trace = f"00-{number:032x}-{number:016x}-01"
    return [("traceparent", trace), ("X-Request-Id", str(number))]


@on_every_route
@pytest.mark.parametrize("varies", [False, True], ids=["equal", "varying"])
async def test_a_header_refuses_every_time(place: Place, route: Route, *, varies: bool) -> None:
    """With and without admitted requests in between, on one connection or several."""
    found = []
    async with connect(place.address) as one, connect(place.address) as two:
        for number, rule in enumerate(RULES):
            others = varying(number) if varies else []
            client = two if varies and number % 2 else one
            found.append(await status(client, request_for(route, (RULE, rule), *others)))

    refused = [answer == REFUSED for answer in found]
    assert [rule == "refuse" for rule in RULES] == refused
    assert len(RULES) == len(place.watch.gate)
    assert Counter(place.watch.begun) == Counter(place.watch.ended_calls)


@pytest.mark.parametrize("route", [r for r in INFERRING if r.prepare is not None], ids=name_of)
async def test_the_fast_path_gives_each_call_its_own_headers(
    place: Place, general: list[bytes], route: Route
) -> None:
    """Several headers of one name form a list (RFC 9110, 5.3)."""
    numbers = range(1, 6)
    async with connect(place.address) as client:
        for number in numbers:
            twice = [("Same", "a"), ("Same", "b")]
            request = request_for(route, ("X-Fast", "1"), *varying(number), *twice)
            assert 200 == await status(client, request)
    calls = place.watch.gate

    assert 1 == len(general)
    assert [str(n) for n in numbers] == [call.headers.get("x-request-id") for call in calls]
    assert ["a, b"] * len(calls) == [call.headers.get("same") for call in calls]
    assert [None] * len(calls) == [call.headers.get("x-absent") for call in calls]


@pytest.mark.parametrize(
    ("method", "path", "expected"), [("GET", "/nowhere", 404), ("PATCH", "/v2", 405)]
)
async def test_what_is_nowhere_passes_the_gates_too(
    place: Place, method: str, path: str, expected: int
) -> None:
    async with connect(place.address) as client:
        found = [await status(client, message(method, path, (RULE, rule))) for rule in RULES]

    assert [REFUSED if rule == "refuse" else expected for rule in RULES] == found
    assert Counter(place.watch.begun) == Counter(place.watch.ended_calls)


async def test_a_request_whose_client_leaves_is_a_call_that_is_cancelled(place: Place) -> None:
    """While its body is awaited; all of its resources are released."""
    route = next(route for route in INFERRING if route.path == "/invocations")
    async with connect(place.address) as client:
        await client.send(request_for(route)[:-5])
        while not place.watch.begun:
            await client.writer.drain()
            async with connect(place.address):
                pass
    while not place.watch.ended_calls:
        async with connect(place.address):
            pass
    (call,) = place.watch.gate

    assert call.is_cancelled
