"""Every door of the table of objects, by four callers: what works, is refused, or is not there.

`a-` models are of tenant a, the names of models that are not there have as many characters. What a
hidden name is answered with is what an unknown one is, to the byte, and neither is looked up.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h2.events
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from support import identity_models, tiny_embedding
from support.conditions import MOST_SECONDS
from support.http import Answer, Connection, connect, message
from support.server import RunningServer, serving
from support.wire import connect as connect_grpc
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.app.server import Application
from xlaserve.errors.access import Unauthenticated
from xlaserve.grpc.methods import ROWS
from xlaserve.http.routing import Route
from xlaserve.residence.catalog import Catalog
from xlaserve.residence.registry import Registry
from xlaserve.residence.repository.repository import Repository
from xlaserve.serving.access.objects import DOORS, RULES, Doors, Found, Rule
from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.serving.call import OPEN, Operation
from xlaserve.settings import Settings
from xlaserve_proto.mmesh import LoadModelRequest, UnloadModelRequest

# pyright: reportAttributeAccessIssue=false
# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

A, B, OPERATOR = new_token(), new_token(), new_token()
CALLERS = {"nobody": "", "owner": A, "other": B, "operator": OPERATOR}
"""By the columns of the table."""
ONE, WORDS = "a-one", "a-words"
MODELS = (ONE, WORDS, "b-one")
REGION = "region-1"
ABSENT = {ONE: "a-non", WORDS: "a-wordz", REGION: "region-0"}
GRPC, WEB, HTTP = "gRPC", "gRPC-Web", "HTTP"
REFUSALS = ("401", "403", "16", "7")
UNAUTHENTICATED, PERMISSION_DENIED, NOT_FOUND, UNIMPLEMENTED = "16", "7", "5", "12"
WEB_TYPE = ("Content-Type", "application/grpc-web+proto")
OTHERWISE: dict[str, str] = {
    # An embedding model completes nothing, which is said of one that may be seen.
    "POST /v1/completions": "400",
    "POST /v1/chat/completions": "400",
    "POST /v1/responses": "400",
    "POST /openai/v1/responses": "400",
    "POST /openai/v1/completions": "400",
    "POST /openai/v1/chat/completions": "400",
    # There is no CUDA here, and so no region of it.
    "/inference.GRPCInferenceService/CudaSharedMemoryRegister": UNIMPLEMENTED,
    "POST /v2/cudasharedmemory/region/{region}/register": "501",
    "/inference.GRPCInferenceService/CudaSharedMemoryStatus": NOT_FOUND,
    "GET /v2/cudasharedmemory/region/{region}/status": "404",
    "POST /v2/repository/{repository}/index": "501",
    "POST /v2/repository/{repository}/models/{model}/load": "501",
    "POST /v2/repository/{repository}/models/{model}/unload": "501",
    "/mmesh.ModelRuntime/modelSize": NOT_FOUND,
}
"""Statuses of doors that have nothing behind them here, by which a caller is seen to be let in."""
_numbers = count()


def every_route() -> list[Route]:
    settings = Settings.read({}, repository=Path(__file__).parent)
    return list(Application(settings).http_routes().routes)


ROUTES = {f"{route.method} {route.path}": route for route in every_route()}
OPERATIONS: dict[str, Operation] = {
    **{path: row.operation for path, row in ROWS.items()},
    **{name: route.operation for name, route in ROUTES.items()},
}
"""Every door that the server has, by its own tables."""
CELLS = [
    pytest.param(row, door, protocol, id=f"{row.deed} {row.thing} {door} {protocol}")
    for row in DOORS
    for path in row.paths
    for door in OPERATIONS
    if fnmatchcase(door, path.replace("[", "[[]"))
    # A mesh speaks gRPC alone.
    for protocol in ((HTTP,) if " " in door else (GRPC,) if "/mmesh" in door else (GRPC, WEB))
]


@dataclass(frozen=True)
class Seen:
    """An answer, without what differs by the moment."""

    status: str
    text: str
    data: bytes

    def without(self, name: str) -> "Seen":
        """Return it without the name that was asked for."""
        return Seen(self.status, self.text.replace(name, ""), self.data.replace(name.encode(), b""))


@dataclass(frozen=True)
class Place:
    server: RunningServer
    key: str
    """Of memory that may be registered."""

    @property
    def http(self) -> str:
        assert self.server.http is not None
        return self.server.http

    async def send(
        self, method: str, path: str, token: str, body: bytes = b"", *more: tuple[str, str]
    ) -> Answer:
        shown = [("authorization", f"Bearer {token}")] if token else []
        async with connect(self.http) as client:
            text = message(method, path, *shown, *more, body=body)
            answer = await client.ask(text, head=method == "HEAD")
            if "transfer-encoding" not in answer.headers or method == "HEAD":
                return answer
            body = await chunks(client, first=path.endswith("/Watch"))
            return Answer(answer.status, answer.headers, body)

    async def over_http(self, row: Doors, door: str, token: str, name: str) -> Seen:
        method, _, path = door.partition(" ")
        names = {"model": name, "version": "1", "repository": "r", "region": name}
        body = b"" if method == "GET" else json.dumps(self._json(row, door, name)).encode()
        answer = await self.send(method, path.format_map(names), token, body)
        headers = {k: v for k, v in answer.headers.items() if k not in ("date", "content-length")}
        return Seen(str(answer.status), str(headers), answer.body)

    async def over_grpc(self, row: Doors, door: str, token: str, name: str) -> Seen:
        shown = [("authorization", f"Bearer {token}")] if token else []
        async with connect_grpc(self.server.url) as wire:
            stream = wire.open(request_headers(door, *shown))
            body = framed(self._message(row, door, name))
            wire.h2.send_data(stream, body, end_stream=True)
            wire.flush()
            if door.endswith("/Watch") and token:
                told: Any = await wire.until(h2.events.DataReceived, stream)
                return Seen("0", "", told.data)
            await wire.until(h2.events.StreamEnded, stream)
            mine = [e for e in wire.events if getattr(e, "stream_id", None) == stream]
            data = b"".join(e.data for e in mine if isinstance(e, h2.events.DataReceived))
            block: Any = [e for e in mine if hasattr(e, "headers")][-1]
            fields = dict(block.headers)
            return Seen(fields["grpc-status"], fields.get("grpc-message", ""), data)

    async def over_web(self, row: Doors, door: str, token: str, name: str) -> Seen:
        body = framed(self._message(row, door, name))
        answer = await self.send("POST", door, token, body, WEB_TYPE)
        data, mark, trailers = answer.body.rpartition(b"\x80\0\0")
        if not mark:
            assert door.endswith("/Watch"), answer
            return Seen("0", "", answer.body)
        lines = trailers[2:].decode().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return Seen(fields["grpc-status"], fields.get("grpc-message", ""), data)

    async def prepare(self, door: str) -> None:
        """Have every model loaded, and the region that a door is for, whatever was asked before."""
        for name in MODELS:
            if not self.server.application.registry.ready(name):
                path = f"/v2/repository/models/{name}/load"
                assert 200 == (await self.send("POST", path, OPERATOR, b"{}")).status
        if "sharedmemory" in door.lower():
            path = f"/v2/systemsharedmemory/region/{REGION}"
            await self.send("POST", f"{path}/unregister", OPERATOR, b"{}")
            if not door.lower().endswith("memoryregister") and not door.endswith("/register"):
                body = json.dumps(self._region).encode()
                assert 200 == (await self.send("POST", f"{path}/register", OPERATOR, body)).status

    async def ask(self, row: Doors, door: str, protocol: str, token: str, name: str) -> Seen:
        how = {GRPC: self.over_grpc, WEB: self.over_web, HTTP: self.over_http}[protocol]
        return await how(row, door, token, name)

    def _json(self, row: Doors, door: str, name: str) -> Any:
        tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
        for ending, body in (
            ("/infer", {"inputs": [tensor]}),
            ("/invoke", {"inputs": [tensor]}),
            ("/invocations", {"inputs": [tensor]}),
            ("/generate", {"x": 1.5}),
            ("/generate_stream", {"x": 1.5}),
            ("/v1/completions", {"model": name, "prompt": "a"}),
            ("/chat/completions", {"model": name, "messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"model": name, "input": "a"}),
            ("/v1/embeddings", {"model": name, "input": "a"}),
            ("POST /v2/trace/setting", {"trace_rate": "7"}),
            ("/trace/setting", {}),
            ("POST /v2/logging", {"log_verbose_level": 0}),
            ("POST /models", {"model_name": f"u-{next(_numbers)}", "url": self._url}),
            ("systemsharedmemory/region/{region}/register", self._region),
        ):
            if door.endswith(ending):
                return body
        if door.endswith("cudasharedmemory/region/{region}/register"):
            return {"raw_handle": {"b64": "A" * 88}, "device_id": 0, "byte_size": 64}
        return {}

    @property
    def _region(self) -> dict[str, Any]:
        return {"key": self.key, "offset": 0, "byte_size": 16}

    @property
    def _url(self) -> str:
        return str(self.server.application.settings.repository / ONE)

    def _message(self, row: Doors, door: str, name: str) -> bytes:
        method = door.rpartition("/")[2]
        is_of_all = row.rule in (Rule.LIST, Rule.FOR_ALL, Rule.OF_THE_SERVER)
        if door.startswith("/mmesh"):
            return bytes(_OF_MESH.get(method, UnloadModelRequest(model_id="mesh")))
        if "reflection" in door:
            return b"\x3a\x01*"  # list_services
        request: Any
        if "health" in door:
            request = health_pb2.HealthCheckRequest(service="" if is_of_all else name)
        elif "Infer" in method:
            request = infer_request(name)
        elif "Setting" in method:
            request = setting_request(method, "" if is_of_all else name)
        else:
            request = getattr(pb, f"{method}Request")()
            field = ROWS[door].model or ("name" if "SharedMemory" in method else "")
            if field and row.rule is not Rule.LIST:
                setattr(request, field, name)
            if method == "SystemSharedMemoryRegister":
                request.key, request.byte_size = self.key, 16
        return bytes(request.SerializeToString())


_OF_MESH: dict[str, Any] = {
    "loadModel": LoadModelRequest(model_id="mesh", model_type="identity", model_path=ONE),
    "predictModelSize": LoadModelRequest(model_id="mesh", model_type="identity", model_path=ONE),
    "modelSize": UnloadModelRequest(model_id="none"),
}


def setting_request(method: str, model: str) -> Any:
    """Return a change of what is of all models, and none of one model's."""
    if method == "LogSettings":
        logging = pb.LogSettingsRequest()
        logging.settings["log_verbose_level"].uint32_param = 0
        return logging
    trace = pb.TraceSettingRequest(model_name=model)
    if not model:
        trace.settings["trace_rate"].value.append("7")
    return trace


def infer_request(model: str) -> Any:
    request = pb.ModelInferRequest(
        model_name=model, raw_input_contents=[np.ones(2, np.float32).tobytes()]
    )
    request.inputs.add(name="x", datatype="FP32", shape=[2])
    return request


async def chunks(client: Connection, *, first: bool) -> bytes:
    """Read a body in chunks: the first one of a stream that goes on, or all."""
    found = b""
    async with asyncio.timeout(MOST_SECONDS):
        while size := int(await client.reader.readline(), 16):
            found += (await client.reader.readexactly(size + 2))[:-2]
            if first:
                break
    return found


def rules() -> str:
    some = ["infer", "metadata", "manage", "health"]
    callers = [
        {
            "name": "operator",
            "token": digest_of(OPERATOR),
            "allow": [operation.value for operation in Operation if operation not in OPEN],
        },
        {"name": "a", "token": digest_of(A), "allow": some, "models": "a-*"},
        {"name": "b", "token": digest_of(B), "allow": some, "models": "b-*"},
    ]
    return json.dumps({"caller": callers})


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("doors")
    models = folder / "models"
    for name in (ONE, "b-one"):
        identity_models.write(models, name, "FP32")
    tiny_embedding.export(models / WORDS, dimensions=[2, 4], pad=7)
    (folder / "rules.json").write_text(rules())
    running = serving(
        folder,
        models,
        http_endpoint="port:0",
        modelmesh=True,
        shared_memory="all",
        default_model=ONE,
        cors_origin=("https://app.example",),  # without which there is no gRPC-Web
        trace_file=str(folder / "traces"),
        access_rules=str(folder / "rules.json"),
    )
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        async with running as server:
            yield Place(server, memory.name)
    finally:
        memory.close()
        memory.unlink()


# --- the table is complete --------------------------------------------------------------------


async def test_every_door_of_the_server_is_in_the_table() -> None:
    """With the operation that is asked for there, and no row is of a door that is not there."""
    rows = [(row, path) for row in DOORS for path in row.paths]
    found = {
        door: {row.operation for row, path in rows if fnmatchcase(door, path.replace("[", "[[]"))}
        for door in OPERATIONS
    }
    unused = [path for _, path in rows if not any(fnmatchcase(d, path) for d in OPERATIONS)]

    assert {door: {operation} for door, operation in OPERATIONS.items()} == found
    assert [] == unused


async def test_every_rule_has_a_row() -> None:
    assert set(Rule) == set(RULES) == {row.rule for row in DOORS}


# --- every cell -------------------------------------------------------------------------------


def name_for(door: str) -> str:
    if "haredmemory" in door.lower():
        return REGION
    return WORDS if "/v1/" in door else ONE


@contextmanager
def looked_up(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[str]]:
    """Note which of the names are looked up: in the registry, the catalog, or on the disk."""
    found: list[str] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, name: str, *more: Any, **named: Any) -> Any:
            if name in names:
                found.append(name)
            return call(self, name, *more, **named)

        return noted

    with monkeypatch.context() as patch:
        for owner, method in (
            (Registry, "resolve"),
            (Registry, "find"),
            (Repository, "find"),
            (Repository, "holds"),
            (Catalog, "could_load"),
        ):
            patch.setattr(owner, method, noting(getattr(owner, method)))
        yield found


@pytest.mark.parametrize(("row", "door", "protocol"), CELLS)
async def test_a_door_is_open_to_whom_the_table_says(
    place: Place, monkeypatch: pytest.MonkeyPatch, row: Doors, door: str, protocol: str
) -> None:
    name = name_for(door)
    for caller, token in CALLERS.items():
        wanted: Found = getattr(RULES[row.rule], caller)
        await place.prepare(door)
        if wanted is not Found.NOT_THERE:
            seen = await place.ask(row, door, protocol, token, name)
            CHECKS[wanted](seen, caller, row, door)
            continue
        absent = ABSENT[name]
        with looked_up(monkeypatch, name, absent) as found:
            hidden = await place.ask(row, door, protocol, token, name)
            unknown = await place.ask(row, door, protocol, token, absent)
        assert hidden.without(name) == unknown.without(absent), caller
        assert [] == found
        assert hidden.status not in REFUSALS
        if row.rule is Rule.OF_A_MODEL:
            assert place.server.application.registry.ready(name), "somebody else has changed it"
        elif "{region}" not in door and protocol == HTTP:
            assert name.encode() not in hidden.data


def is_unknown(seen: Seen, caller: str, row: Doors, door: str) -> None:
    assert seen.status in ("401", UNAUTHENTICATED), seen
    assert str(Unauthenticated()) in seen.text + seen.data.decode()


def is_refused(seen: Seen, caller: str, row: Doors, door: str) -> None:
    assert seen.status in ("403", PERMISSION_DENIED), seen


def works(seen: Seen, caller: str, row: Doors, door: str) -> None:
    assert seen.status == OTHERWISE.get(door, "200" if " " in door else "0"), (caller, seen)
    if row.rule is Rule.LIST and "/v1/" not in door:
        assert b"a-one" in seen.data
        assert b"b-one" in seen.data
    if row.rule is Rule.OF_A_CALLER and "cuda" not in door.lower():
        assert REGION.encode() in seen.data
    if door.endswith("StreamInfer"):
        assert not pb.ModelStreamInferResponse.FromString(seen.data[5:]).error_message
    if door.endswith(("Health/Check", "Health/Watch")):
        answer = health_pb2.HealthCheckResponse.FromString(seen.data[5:])
        assert health_pb2.HealthCheckResponse.SERVING == answer.status


def has_its_own(seen: Seen, caller: str, row: Doors, door: str) -> None:
    own, other = (b"a-", b"b-") if caller == "owner" else (b"b-", b"a-")
    assert seen.status in ("200", "0"), (caller, seen)
    assert other not in seen.data, (caller, seen)
    # Of b no model is an encoder.
    assert own in seen.data or (own == b"b-" and "/v1/" in door), (caller, seen)


CHECKS: dict[Found, Callable[[Seen, str, Doors, str], None]] = {
    Found.UNKNOWN: is_unknown,
    Found.REFUSED: is_refused,
    Found.WORKS: works,
    Found.ITS_OWN: has_its_own,
}


# --- methods of HTTP that are in no row -------------------------------------------------------


async def test_head_is_what_get_is(place: Place) -> None:
    """For each route and caller: the same status, and no body."""
    names = {"model": ONE, "version": "1", "repository": "r", "region": REGION}
    found, wanted = {}, {}
    for door in ROUTES:
        method, _, path = door.partition(" ")
        if method == "GET":
            for caller, token in CALLERS.items():
                at = path.format_map(names | ({"model": WORDS} if "/v1/" in path else {}))
                found[door, caller] = (await place.send("HEAD", at, token)).status
                wanted[door, caller] = (await place.send("GET", at, token)).status

    assert wanted == found
    assert {200, 401, 403, 404} == set(wanted.values())


@pytest.mark.parametrize("method", ["OPTIONS", "PATCH", "PUT", "DELETE"])
async def test_a_method_that_a_path_has_not_tells_no_model(
    place: Place, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    found = []
    paths = {p for m, _, p in (door.partition(" ") for door in ROUTES) if "{model}" in p}
    with looked_up(monkeypatch, ONE, ABSENT[ONE]) as asked:
        for path in sorted(paths - {"/models/{model}"}):
            at = [path.format(model=n, version=1, repository="r") for n in (ONE, ABSENT[ONE])]
            both = [await place.send(method, one, B) for one in at]
            found.append([(one.status, one.headers.get("allow")) for one in both])

    assert all(hidden == absent for hidden, absent in found)
    assert [] == asked


# --- names that look like another one ---------------------------------------------------------

ODD = [
    "A-one",
    "a-one ",
    " a-one",
    "a-one%00",
    "b-../a-one",
    "b-%2F..%2Fa-one",
    "b-%252F..%252Fa-one",
    "b-\\..\\a-one",
    "b-/../../models/a-one",
    "./a-one",
    "\uff41-one",
    "a\u2010one",
    "b-*",
    "[a]-one",
    "?-one",
    "",
]


@pytest.mark.parametrize("name", ODD, ids=repr)
async def test_no_other_spelling_of_a_name_reaches_the_model(place: Place, name: str) -> None:
    """Neither for b, who may not see it, nor, by any but its own name, for the operator."""
    await place.prepare("")
    used = place.server.application.registry.resolve(ONE)[0].statistics
    before = used.totals().inference_count
    quoted = quote(name, safe="%")
    statuses = set()
    for token in (B, OPERATOR):
        row, door = next((r, d) for r in DOORS for d in r.paths if d.endswith("/ModelInfer"))
        statuses.add((await place.over_grpc(row, door, token, name)).status)
        for path, body in (
            (f"/v2/models/{quoted}/infer", place._json(row, "/infer", name)),
            (f"/v2/repository/models/{quoted}/load", {}),
            (f"/v2/repository/models/{quoted}/unload", {}),
        ):
            answer = await place.send("POST", path, token, json.dumps(body).encode())
            statuses.add(str(answer.status))
        assert before == used.totals().inference_count
        assert place.server.application.registry.ready(ONE)

    assert not statuses & {"0", "200", "500", "13"}
