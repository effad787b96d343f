"""Access rules for every operation, over each protocol, by each caller."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h2.events
import pytest
import pytest_asyncio
import trustme
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs
from support import echo_service, identity_models
from support.http import Answer, Connection, connect, message
from support.server import RunningServer, serving
from support.tls import trusting, write_certificate
from support.wire import Wire, framed, request_headers
from support.wire import connect as connect_grpc
from tritonclient.grpc import service_pb2 as pb

from xlaserve.app import server as app
from xlaserve.app.server import Application
from xlaserve.errors.access import Unauthenticated
from xlaserve.grpc.methods import ROWS
from xlaserve.http.routing import Route
from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.serving.call import OPEN, Operation
from xlaserve.settings import Settings
from xlaserve.settings.choices import Http2Engine
from xlaserve_proto.mmesh import LoadModelRequest

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

WATCH = "/grpc.health.v1.Health/Watch"
UNAUTHENTICATED, PERMISSION_DENIED = "16", "7"
PERMITTED = [operation for operation in Operation if operation not in OPEN]
OF_ALL = [operation.value for operation in PERMITTED]


@dataclass(frozen=True)
class Who:
    """A caller in the access rules, with its token."""

    name: str
    token: str
    allow: tuple[str, ...]

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.token}")] if self.token else []


ALLOWED = {
    operation: Who(operation.value, new_token(), (operation.value,)) for operation in PERMITTED
}
"""For each operation, a caller that may do nothing else."""
OTHERS = {
    operation: Who(
        f"not {operation.value}",
        new_token(),
        tuple(
            other
            for other in OF_ALL
            # readiness is implied by these
            if other != operation.value
            and not (operation is Operation.READINESS and other in ("infer", "metadata"))
        ),
    )
    for operation in PERMITTED
}
"""For each operation, a caller that may do everything else."""
NOBODY = Who("", "", ())
WRONG = Who("", "xla_wrong", ())


def rules(*more: dict[str, Any]) -> str:
    callers = [
        {"name": who.name, "token": digest_of(who.token), "allow": list(who.allow)}
        for who in (*ALLOWED.values(), *OTHERS.values())
    ]
    return json.dumps({"caller": [*callers, *more]})


# --- RPCs and routes -----------------------------------------------------------------------------


def every_route() -> list[Route]:
    settings = Settings.read({}, repository=Path(__file__).parent)
    return list(Application(settings).http_routes().routes)


ROUTES = every_route()
METHODS = {
    **{path: row.operation for path, row in ROWS.items()},
    "/test.Echo/Unary": Operation.SERVICE,
    "/test.Echo/Chat": Operation.SERVICE,
    "/nobody.Knows/This": Operation.SERVICE,
}


@dataclass(frozen=True)
class Place:
    server: RunningServer
    file: Path

    @property
    def http(self) -> str:
        assert self.server.http is not None
        return self.server.http


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", name="place", params=list(Http2Engine), ids=str
)
async def _place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("access")
    identity_models.write(folder / "models", "fp32", "FP32")
    file = folder / "rules.json"
    file.write_text(rules())
    running = serving(
        folder,
        folder / "models",
        http_endpoint="port:0",
        http2_engine=request.param,
        service=(echo_service.REFERENCE,),
        modelmesh=True,
        access_rules=str(file),
    )
    async with running as server:
        yield Place(server, file)


async def load_for_mesh(server: RunningServer) -> None:
    """Load the model as a mesh does, in case another test has unloaded it."""
    who = ALLOWED[Operation.RUNTIME]
    asked = bytes(LoadModelRequest(model_id="fp32", model_type="identity", model_path="fp32"))
    async with connect_grpc(server.url) as wire:
        headers = request_headers("/mmesh.ModelRuntime/loadModel", *who.headers)
        assert "0" == (await wire.trailers(wire.send(headers, asked)))["grpc-status"]


async def ask_grpc(wire: Wire, path: str, who: Who, body: bytes = b"") -> tuple[str, str]:
    """Return the gRPC status and message of a request."""
    stream = wire.send(request_headers(path, *who.headers), body)
    block: Any = await wire.until(h2.events.ResponseReceived, stream)
    fields = dict(block.headers)
    if path == WATCH and "grpc-status" not in fields:
        wire.h2.reset_stream(stream, 8)
        await wire.ping()
        return "0", ""
    if "grpc-status" not in fields:
        fields = await wire.trailers(stream)
    return fields["grpc-status"], fields.get("grpc-message", "")


async def ask_http(address: str, route: Route, who: Who) -> Answer:
    names = {"model": "fp32", "version": "1", "repository": "r", "region": "s"}
    async with connect(address) as client:
        path = route.path.format_map(names)
        return await client.ask(message(route.method, path, *who.headers, length=0))


def callers_for(operation: Operation) -> dict[str, Who]:
    return {
        "nobody": NOBODY,
        "wrong": WRONG,
        "other": OTHERS[operation],
        "allowed": ALLOWED[operation],
    }


@pytest.mark.parametrize("path", METHODS)
async def test_every_method_asks_for_its_permission(place: Place, path: str) -> None:
    operation = METHODS[path]
    async with connect_grpc(place.server.url) as wire:
        found = {
            name: (await ask_grpc(wire, path, who))[0]
            for name, who in callers_for(operation).items()
        }

    assert UNAUTHENTICATED == found["nobody"] == found["wrong"]
    assert PERMISSION_DENIED == found["other"]
    assert found["allowed"] not in (UNAUTHENTICATED, PERMISSION_DENIED)


only_own_engine = pytest.mark.parametrize(
    "place", [Http2Engine.OWN], indirect=True, scope="module", ids=str
)


@only_own_engine
@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.operation not in OPEN],
    ids=lambda route: f"{route.method} {route.path}",
)
async def test_every_route_asks_for_its_permission(place: Place, route: Route) -> None:
    found = {
        name: await ask_http(place.http, route, who)
        for name, who in callers_for(route.operation).items()
    }

    assert 401 == found["nobody"].status == found["wrong"].status
    assert "Bearer" == found["nobody"].headers["www-authenticate"]
    assert 403 == found["other"].status
    assert f"may not {route.operation.value}" in found["other"].error
    assert found["allowed"].status not in (401, 403)


@only_own_engine
async def test_files_of_the_page_are_for_everybody(place: Place) -> None:
    """A browser has no token before a page has asked for one."""
    files = [route for route in ROUTES if route.operation in OPEN]
    answers = [await ask_http(place.http, route, NOBODY) for route in files]

    assert "/" in {route.path for route in files}
    assert {200} == {answer.status for answer in answers}


# --- What unknown callers learn ------------------------------------------------------------------


def infer_body(model: str) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata", "ModelReady", "ModelConfig"])
async def test_a_model_that_is_there_and_one_that_is_not_are_refused_alike(
    place: Place, method: str
) -> None:
    path = f"/inference.GRPCInferenceService/{method}"
    await load_for_mesh(place.server)
    async with connect_grpc(place.server.url) as wire:
        found = [
            await ask_grpc(wire, path, NOBODY, infer_body(model)) for model in ("fp32", "none")
        ]

    assert {(UNAUTHENTICATED, str(Unauthenticated()))} == set(found)


@only_own_engine
async def test_nothing_over_http_tells_what_is_there(place: Place) -> None:
    """The same answer for any path, model, method and body."""
    asked = [
        ("POST", "/v2/models/fp32/infer"),
        ("POST", "/v2/models/none/infer"),
        ("GET", "/v2/models/fp32"),
        ("GET", "/nowhere"),
        ("PATCH", "/v2"),
        ("GET", "/metrics"),
        ("GET", "/v2/docs"),
        ("GET", "/v2/docs/openapi.json"),
    ]
    found = set()
    for method, path in asked:
        async with connect(place.http) as client:
            answer = await client.ask(message(method, path, length=0))
            headers = {name: value for name, value in answer.headers.items() if name != "date"}
            found.add((answer.status, answer.body, tuple(headers.items())))

    assert 1 == len(found)


async def test_health_for_anyone_names_no_model(tmp_path: Path) -> None:
    """Without permission, health of a model and the list of models are hidden."""
    identity_models.write(tmp_path / "models", "fp32", "FP32")
    file = tmp_path / "rules.json"
    file.write_text(rules({"name": "anyone", "anyone": True, "allow": ["health"]}))
    running = serving(tmp_path, tmp_path / "models", access_rules=str(file), load_model=("fp32",))
    asked = {name: health_pb2.HealthCheckRequest(service=name) for name in ("", "fp32", "none")}
    found: dict[str, list[tuple[str, str]]] = {}
    async with running as server, connect_grpc(server.url) as wire:
        for who in (NOBODY, ALLOWED[Operation.INFER]):
            found[who.name] = [
                await ask_grpc(wire, "/grpc.health.v1.Health/Check", who, body.SerializeToString())
                for body in asked.values()
            ]
        stream = wire.send(request_headers("/grpc.health.v1.Health/List"))
        listed: Any = await wire.until(h2.events.DataReceived, stream)

    assert ["0", "5", "5"] == [status for status, _ in found[""]]
    assert ["0", "0", "5"] == [status for status, _ in found["infer"]]
    assert b"fp32" not in listed.data
    assert found[""][1][1].replace("fp32", "none") == found[""][2][1]


# --- Connection credentials ----------------------------------------------------------------------


async def test_the_user_of_a_unix_socket_is_a_caller(tmp_path: Path) -> None:
    """Like a mesh, it needs no token."""
    (tmp_path / "models").mkdir()
    file = tmp_path / "rules.json"
    found = []
    for user in (os.getuid(), os.getuid() + 1):
        mesh = {"name": "mesh", "unix_user": user, "allow": ["runtime"]}
        file.write_text(rules(mesh))
        running = serving(
            tmp_path,
            tmp_path / "models",
            grpc_endpoint=f"unix:{tmp_path}/socket",
            modelmesh=True,
            access_rules=str(file),
        )
        async with running as server, connect_grpc(server.url) as wire:
            found += [
                (await ask_grpc(wire, path, NOBODY))[0]
                for path in (
                    "/mmesh.ModelRuntime/runtimeStatus",
                    "/inference.GRPCInferenceService/ServerMetadata",
                )
            ]

    assert ["0", PERMISSION_DENIED, UNAUTHENTICATED, UNAUTHENTICATED] == found


async def test_a_listener_may_be_needed_too(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    file = tmp_path / "rules.json"
    who = ALLOWED[Operation.METADATA]
    entry = {"name": "a", "token": digest_of(who.token), "allow": ["metadata"]}
    here = {**entry, "listener": "grpc_data_endpoint"}
    file.write_text(json.dumps({"caller": [here]}))
    running = serving(
        tmp_path,
        tmp_path / "models",
        grpc_endpoint=f"unix:{tmp_path}/one",
        grpc_data_endpoint=f"unix:{tmp_path}/two",
        access_rules=str(file),
    )
    found = []
    async with running:
        for name in ("one", "two"):
            async with connect_grpc(f"unix:{tmp_path}/{name}") as wire:
                path = "/inference.GRPCInferenceService/ServerMetadata"
                found.append((await ask_grpc(wire, path, who))[0])

    assert [UNAUTHENTICATED, "0"] == found


async def test_a_certificate_is_a_caller_over_every_protocol(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    authority = trustme.CA()
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(authority.cert_pem.bytes())
    by_name = {"name": "a", "tls": "DNS:a.example", "allow": ["metadata"]}
    subject = "subject:organizationName=o,organizationalUnitName=u,commonName=b"
    by_subject = {"name": "b", "tls": subject, "allow": ["page"]}
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"caller": [by_name, by_subject]}))
    settings = write_certificate(authority, tmp_path)
    running = serving(
        tmp_path,
        tmp_path / "models",
        http_endpoint="port:0",
        access_rules=str(file),
        tls_client_ca=str(authorities),
        **settings,
    )

    def showing(name: str, *, protocol: str) -> ssl.SSLContext:
        context = trusting(authority)
        context.set_alpn_protocols([protocol])
        authority.issue_cert(
            f"{name}.example", organization_name="o", organization_unit_name="u", common_name=name
        ).configure_cert(context)
        return context

    found = {}
    async with running as server:
        for name in ("a", "b", "c"):
            async with connect_grpc(server.url, showing(name, protocol="h2")) as wire:
                path = "/inference.GRPCInferenceService/ServerMetadata"
                over_grpc = (await ask_grpc(wire, path, NOBODY))[0]
            assert server.http is not None
            host, _, port = server.http.rpartition(":")
            reader, writer = await asyncio.open_connection(
                host,
                int(port),
                ssl=showing(name, protocol="http/1.1"),
                server_hostname="localhost",
            )
            answer = await Connection(reader, writer).ask(message("GET", "/v2", length=0))
            writer.close()
            found[name] = (over_grpc, answer.status)

    assert {"a": ("0", 200), "b": (PERMISSION_DENIED, 403), "c": (UNAUTHENTICATED, 401)} == found


# --- Reloading rules -----------------------------------------------------------------------------


@pytest.mark.parametrize("because", ["SIGHUP", "a file changed"])
async def test_new_rules_hold_for_connections_that_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, because: str
) -> None:
    """Invalid rules are logged and not applied."""
    if because == "a file changed":
        monkeypatch.setattr(app, "CHECK_SECONDS", 0.02)
    (tmp_path / "models").mkdir()
    file = tmp_path / "rules.json"
    file.write_text(rules())
    who, path = ALLOWED[Operation.METADATA], "/inference.GRPCInferenceService/ServerMetadata"
    running = serving(tmp_path, tmp_path / "models", access_rules=str(file))
    with capture_logs() as log:
        async with running as server, connect_grpc(server.url) as wire:

            async def change(text: str, event: str) -> str:
                log.clear()
                file.write_text(text)
                if because == "SIGHUP":
                    server.application.reloads.request()
                async with asyncio.timeout(20):
                    while event not in [
                        record["event"] for record in log if record.get("what") == "access rules"
                    ]:
                        await asyncio.sleep(0.01)
                return (await ask_grpc(wire, path, who))[0]

            found = [(await ask_grpc(wire, path, who))[0]]
            found.append(await change("{ nonsense", "not reloaded"))
            found.append(await change(json.dumps({"caller": []}), "reloaded"))
            found.append(await change(rules(), "reloaded"))

    assert ["0", "0", UNAUTHENTICATED, "0"] == found


# --- Fast paths ----------------------------------------------------------------------------------


@only_own_engine
async def test_a_fast_path_asks_every_time(place: Place) -> None:
    """Regardless of the previous requests and their header blocks."""
    who, other = ALLOWED[Operation.INFER], OTHERS[Operation.INFER]
    order = [who, who, NOBODY, who, WRONG, other, who, NOBODY]
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    ).encode()
    over_http, over_grpc = [], []
    await load_for_mesh(place.server)
    async with connect(place.http) as client, connect_grpc(place.server.url) as wire:
        for one in order:
            text = message("POST", "/v2/models/fp32/infer", *one.headers, body=body)
            over_http.append((await client.ask(text)).status)
            path = "/inference.GRPCInferenceService/ModelInfer"
            over_grpc.append((await ask_grpc(wire, path, one, infer_body("fp32")))[0])

    statuses = {who: (200, "0"), other: (403, "7"), NOBODY: (401, "16"), WRONG: (401, "16")}
    assert [statuses[one] for one in order] == list(zip(over_http, over_grpc, strict=True))


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Basic {}")],
        [("authorization", "{}")],
        [("authorization", "Bearer {}, Bearer {}")],
        [("authorization", "Bearer {}"), ("authorization", "Bearer {}")],
        [("authorization", "Bearer {}"), ("authorization", "Bearer wrong")],
        [("x-authorization", "Bearer {}")],
        [("authorization", "Bearer " + "x" * 8000)],
    ],
    ids=["scheme", "bare", "list", "twice", "two", "name", "long"],
)
async def test_a_token_in_another_form_is_none(
    place: Place, headers: list[tuple[str, str]]
) -> None:
    token = ALLOWED[Operation.METADATA].token
    shown = [(name, value.replace("{}", token)) for name, value in headers]
    path = "/inference.GRPCInferenceService/ServerMetadata"
    async with connect_grpc(place.server.url) as wire:
        status = (await wire.trailers(wire.send(request_headers(path, *shown))))["grpc-status"]
    async with connect(place.http) as client:
        answer = await client.ask(message("GET", "/v2", *shown))

    assert (UNAUTHENTICATED, 401) == (status, answer.status)


# --- Quotas --------------------------------------------------------------------------------------


async def test_quotas_are_told_with_when_to_come_again(tmp_path: Path) -> None:
    """A stream counts by its requests, not as a request itself."""
    identity_models.write(tmp_path / "models", "fp32", "FP32")
    token = new_token()
    quota = {"requests_per_second": 0.001, "burst": 3}
    entry = {"name": "slow", "token": digest_of(token), "allow": ["infer", "metadata"], **quota}
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"caller": [entry]}))
    who = Who("slow", token, ())
    running = serving(
        tmp_path,
        tmp_path / "models",
        http_endpoint="port:0",
        load_model=("fp32",),
        access_rules=str(file),
    )
    async with running as server, connect_grpc(server.url) as wire:
        path = "/inference.GRPCInferenceService/ModelStreamInfer"
        stream = wire.open(request_headers(path, *who.headers))
        for _ in range(2):
            wire.h2.send_data(stream, framed(infer_body("fp32")))
            wire.flush()
        wire.h2.end_stream(stream)
        wire.flush()
        await wire.trailers(stream)
        path = "/inference.GRPCInferenceService/ModelInfer"
        third = await ask_grpc(wire, path, who, infer_body("fp32"))
        fourth = await ask_grpc(wire, path, who, infer_body("fp32"))
        assert server.http is not None
        async with connect(server.http) as client:
            answer = await client.ask(message("GET", "/v2", *who.headers))

    assert ("0", "") == third
    assert "8" == fourth[0]
    assert "caller 'slow' has exceeded 0.001 requests per second" in fourth[1]
    assert 429 == answer.status
    assert 900 < int(answer.headers["retry-after"]) <= 1000


# --- Restrictions --------------------------------------------------------------------------------


async def test_restrictions_hold_by_their_groups(tmp_path: Path) -> None:
    """With Triton's restriction groups, and for SageMaker's routes, too."""
    identity_models.write(tmp_path / "models", "fp32", "FP32")
    running = serving(
        tmp_path,
        tmp_path / "models",
        http_endpoint="port:0",
        grpc_restricted_protocol=["health,model-repository:admin=secret"],
        http_restricted_api=["model-repository,statistics:admin=secret"],
    )
    key = ("triton-grpc-protocol-admin", "secret")
    rpcs = [
        ("ServerLive", [], "14"),
        ("ServerLive", [key], "0"),
        ("RepositoryIndex", [], "14"),
        ("RepositoryIndex", [key], "0"),
        ("ServerMetadata", [], "0"),
        ("ModelStatistics", [], "0"),
    ]
    routes = [
        ("GET", "/v2/health/live", [], 200),
        ("POST", "/v2/repository/index", [], 403),
        ("POST", "/v2/repository/index", [("Admin", "secret")], 200),
        ("POST", "/v2/repository/index", [("Admin", "wrong")], 403),
        ("GET", "/v2/models/stats", [], 403),
        ("GET", "/models", [], 403),
        ("POST", "/models", [], 403),
        ("GET", "/models", [("Admin", "secret")], 200),
        ("GET", "/v2", [], 200),
    ]
    async with running as server, connect_grpc(server.url) as wire:
        statuses, texts = [], set()
        for method, headers, _ in rpcs:
            path = f"/inference.GRPCInferenceService/{method}"
            fields = await wire.trailers(wire.send(request_headers(path, *headers)))
            statuses.append(fields["grpc-status"])
            texts.add(fields.get("grpc-message", ""))
        assert server.http is not None
        answers = []
        async with connect(server.http) as client:
            for method, target, headers, _ in routes:
                answers.append(await client.ask(message(method, target, *headers, length=0)))

    expected = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin'"
    assert [status for _, _, status in rpcs] == statuses
    assert {"", expected} == texts
    assert [status for *_, status in routes] == [answer.status for answer in answers]
    assert "This API is restricted, expecting header 'admin'" == answers[1].error


# --- Hosts and origins ---------------------------------------------------------------------------

APP = "https://app.example"


async def test_pages_of_other_sites_change_and_infer_nothing(tmp_path: Path) -> None:
    """Even if requests with otherwise identical header blocks are cached."""
    identity_models.write(tmp_path / "models", "fp32", "FP32")
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    ).encode()
    infer = message("POST", "/v2/models/fp32/infer", body=body)
    running = serving(
        tmp_path,
        tmp_path / "models",
        http_endpoint="port:0",
        load_model=("fp32",),
        cors_origin=[APP],
    )

    def by(request: bytes, host: str, *origin: str) -> bytes:
        lines = "".join(f"Origin: {one}\r\n" for one in origin)
        return request.replace(b"Host: localhost\r\n", f"Host: {host}\r\n{lines}".encode(), 1)

    load = message("POST", "/v2/repository/models/fp32/load", length=0)
    asked = [
        (infer, 200),
        (infer, 200),
        (by(infer, "evil.example"), 421),
        (by(infer, "localhost", "https://evil.example"), 403),
        (by(infer, "localhost", APP), 200),
        (by(infer, "localhost", APP), 200),
        (by(infer, "localhost", "https://evil.example"), 403),
        (by(infer, "localhost", APP, "https://evil.example"), 403),
        (infer, 200),
        (by(load, "evil.example"), 421),
        (by(load, "localhost", "null"), 403),
        (by(load, "localhost", "http://localhost"), 200),
        (by(message("GET", "/v2/docs", length=0), "evil.example"), 421),
    ]
    answers = []
    async with running as server:
        assert server.http is not None
        async with connect(server.http) as client:
            for request, _ in asked:
                answers.append(await client.ask(request))
            preflight = await client.ask(
                message(
                    "OPTIONS",
                    "/v2/models/none/infer",
                    ("Origin", APP),
                    ("Access-Control-Request-Method", "POST"),
                    ("Access-Control-Request-Headers", "authorization"),
                    length=None,
                )
            )

    assert [status for _, status in asked] == [answer.status for answer in answers]
    assert [APP] * 2 == [
        answer.headers["access-control-allow-origin"]
        for answer in answers
        if "access-control-allow-origin" in answer.headers
    ]
    assert (204, b"") == (preflight.status, preflight.body)
    assert "authorization" == preflight.headers["access-control-allow-headers"]
    assert APP == preflight.headers["access-control-allow-origin"]
