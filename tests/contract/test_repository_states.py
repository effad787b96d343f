"""Every repository state on every route: a model that may still appear is never "not found".

A single new server process goes through each row of `STATES`, starting with its first connection.
The routes come from the server's own tables. `a-one` exists once it has loaded, `a-non` never does,
and `b-one` and `b-non` are hidden from the caller: these two must get byte-identical answers.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from support import identity_models, mesh
from support.conditions import MOST_SECONDS, until
from support.http import Answer, connect, message
from support.object_server import Handler, Shelves, serving_objects
from support.process import ServerProcess, served
from support.several import LAYOUTS
from support.wire import framed
from tritonclient.grpc import service_pb2 as pb

from xlaserve.app.server import Application
from xlaserve.grpc.methods import ROWS
from xlaserve.serving.access.tokens import digest_of, new_token
from xlaserve.serving.call import Operation
from xlaserve.serving.standing import STATES, Row, State
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode
from xlaserve_proto.mmesh import (
    RuntimeStatusRequest,
    RuntimeStatusResponse,
    RuntimeStatusResponseStatus,
    UnloadModelRequest,
)

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

ONE, UNKNOWN, HIDDEN, NOWHERE = "a-one", "a-non", "b-one", "b-non"
CALLER, OPERATOR = new_token(), new_token()
COMING = (503, "UNAVAILABLE")
ABSENT = (404, "NOT_FOUND")
GRPC, WEB, HTTP = "gRPC", "gRPC-Web", "HTTP"
OF_MODELS = {Operation.INFER, Operation.METADATA, Operation.READINESS, Operation.PAGE}
OF_OPERATORS = "GET /page/models/{model}"
"""Part of the status page that restricted callers cannot open."""
LISTS = {
    "GET /v2/models",
    "POST /v2/repository/index",
    "GET /v1/models",
    "GET /openai/v1/models",
    "GET /models",
    "/inference.GRPCInferenceService/RepositoryIndex",
}
"""Routes that list models."""
ASKING = {door for door in LISTS if door.lower().endswith("index")}
"""Lists that query a store."""
OF_THE_DEFAULT = "POST /invocations"
BY_BODY = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"}
"""Last path segments of routes that name the model in the body."""
NOT_TEXT: Mapping[str, int] = {
    "completions": 400,
    "responses": 400,
    "embeddings": 400,
    "/v1/models/{model}": 404,
}
"""Statuses of OpenAI's routes for a model without text, by last path segment."""
OF_VERSION = b"a file of the version"
EACH = 8
"""New connections that must agree before every process is taken to be in a state."""


def http_doors() -> list[str]:
    settings = Settings.read({}, repository=Path(__file__).parent)
    routes = Application(settings).http_routes().routes
    return [
        f"{route.method} {route.path}"
        for route in routes
        if route.operation in OF_MODELS
        and ("{model}" in route.path or route.path.endswith(tuple(BY_BODY)))
    ]


GRPC_DOORS = [
    path
    for path, row in ROWS.items()
    if (row.operation in OF_MODELS and row.model) or path.endswith(("Health/Check", "StreamInfer"))
]
Cells: TypeAlias = Sequence[tuple[str, str]]
"""Pairs of protocol and route."""
CELLS: Cells = [
    *((HTTP, door) for door in http_doors()),
    *((protocol, door) for protocol in (GRPC, WEB) for door in GRPC_DOORS),
]


def test_every_kind_of_door_is_among_those_that_are_asked() -> None:
    """Finding the routes in tables leaves out no part of the server."""
    asked = {door for _, door in CELLS}

    assert {
        "POST /v2/models/{model}/infer",
        "GET /v2/models/{model}/ready",
        "POST /v2/models/{model}/generate_stream",
        "POST /models/{model}/invoke",
        "GET /models/{model}",
        "POST /openai/v1/chat/completions",
        "GET /v1/models/{model}",
        "GET /page/models/{model}",
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/ModelStreamInfer",
        "/inference.GRPCInferenceService/ModelReady",
        "/inference.GRPCInferenceService/ModelStatistics",
        "/grpc.health.v1.Health/Check",
    } < asked


@dataclass(frozen=True)
class Seen:
    """An answer from a route."""

    status: int | str
    retry_after: str
    text: str

    def without(self, name: str) -> "Seen":
        return Seen(self.status, self.retry_after, self.text.replace(name, ""))


@dataclass(frozen=True)
class Doors:
    """A caller of all routes of a server; each request uses a new connection."""

    grpc: str
    http: str

    async def ask(self, protocol: str, door: str, name: str) -> Seen:
        how = {GRPC: self.over_grpc, WEB: self.over_web, HTTP: self.over_http}[protocol]
        return await how(door, name)

    async def send(self, method: str, path: str, body: bytes, *more: tuple[str, str]) -> Answer:
        shown = OPERATOR if path.startswith("/page/") else CALLER
        token = ("authorization", f"Bearer {shown}")
        async with connect(self.http) as client:
            answer = await client.ask(message(method, path, token, *more, body=body))
            if "transfer-encoding" not in answer.headers:
                return answer
            body = without_sizes(await client.ended())
            return Answer(answer.status, answer.headers, body)

    async def over_http(self, door: str, name: str = "") -> Seen:
        method, _, path = door.partition(" ")
        body = b"" if method == "GET" else json.dumps(json_for(path, name)).encode()
        answer = await self.send(
            method, path.format(model=name, version="1"), body, ("connection", "close")
        )
        return Seen(answer.status, answer.headers.get("retry-after", ""), answer.body.decode())

    async def over_web(self, door: str, name: str) -> Seen:
        more = [("content-type", "application/grpc-web+proto"), ("connection", "close")]
        answer = await self.send("POST", door, framed(message_for(door, name)), *more)
        data, mark, trailers = answer.body.rpartition(b"\x80\0\0")
        if not mark:  # a trailers-only response
            fields = answer.headers
            return Seen(name_of(fields["grpc-status"]), "", fields.get("grpc-message", ""))
        lines = trailers[2:].decode().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        status = name_of(fields["grpc-status"])
        return stream_status(status, data[5:], door) or Seen(
            status, "", fields.get("grpc-message", "")
        )

    async def over_grpc(self, door: str, name: str = "") -> Seen:
        token = (("authorization", f"Bearer {CALLER}"),)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(self.grpc, options=options) as channel:
            try:
                if door.endswith("StreamInfer"):
                    calling = channel.stream_stream(door)(
                        iter([message_for(door, name)]), metadata=token
                    )
                    data = b"".join([part async for part in calling])
                else:
                    calling = channel.unary_unary(door)(message_for(door, name), metadata=token)
                    data = await calling
            except grpc.aio.AioRpcError as error:
                return Seen(error.code().name, "", error.details() or "")
        return stream_status("OK", data, door) or Seen("OK", "", repr(data))


def without_sizes(chunks: bytes) -> bytes:
    """Decode a chunked body."""
    found = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        length = int(size, 16)
        found, chunks = found + rest[:length], rest[length + 2 :]
    return found


def name_of(number: str) -> str:
    return str(next(code.name for code in grpc.StatusCode if code.value[0] == int(number)))


def stream_status(status: str, data: bytes, door: str) -> Seen | None:
    """Return the error that Triton sends in a stream message, or None if there is none."""
    if not door.endswith("StreamInfer") or status != "OK":
        return None
    text = pb.ModelStreamInferResponse.FromString(data).error_message
    kinds = {
        "is not available yet": "UNAVAILABLE",
        "is not ready": "UNAVAILABLE",
        "Request for unknown model": "NOT_FOUND",
    }
    return Seen(next((kind for said, kind in kinds.items() if said in text), "OK"), "", text)


def json_for(path: str, name: str) -> Any:
    tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
    for ending, body in (
        ("/generate", {"x": 1.5}),
        ("/generate_stream", {"x": 1.5}),
        ("/v1/completions", {"model": name, "prompt": "a"}),
        ("/chat/completions", {"model": name, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": name, "input": "a"}),
        ("/v1/embeddings", {"model": name, "input": "a"}),
        ("/index", {}),
    ):
        if path.endswith(ending):
            return body
    return {"inputs": [tensor]}


def message_for(door: str, name: str) -> bytes:
    request: Any
    method = door.rpartition("/")[2]
    if "health" in door:
        request = health_pb2.HealthCheckRequest(service=name)
    elif "Infer" in method:
        data = np.ones(2, np.float32).tobytes()
        request = pb.ModelInferRequest(model_name=name, raw_input_contents=[data])
        request.inputs.add(name="x", datatype="FP32", shape=[2])
    else:
        request = getattr(pb, f"{method}Request")()
        if name:
            setattr(request, ROWS[door].model, name)
    return bytes(request.SerializeToString())


def expected(row: Row, door: str, name: str, *, is_loaded: bool) -> tuple[int | str, ...]:
    """Return the permitted statuses of a route."""
    if door.endswith("Health/Check") and (not row.is_settled or is_loaded):
        return ("OK",)
    if door == OF_OPERATORS and name == ONE and row is STATES[State.LOADING]:
        return (200,)  # the index shows it while loading
    if is_loaded:
        return tuple(code for end, code in NOT_TEXT.items() if door.endswith(end)) or (200, "OK")
    return ABSENT if row.is_settled else COMING


async def faults(state: State, doors: Doors, cells: Cells, *, is_loaded: bool) -> Mapping[str, Any]:
    """Call every route in a state; return those that contradict the table."""
    row = STATES[state]
    found: dict[str, Any] = {}
    for protocol, door in cells:
        for name in (ONE, UNKNOWN):
            seen = await doors.ask(protocol, door, name)
            wanted = expected(row, door, name, is_loaded=is_loaded and name == ONE)
            if seen.status not in wanted or (seen.status == 503 and seen.retry_after != "1"):
                found[f"{state} {protocol} {door} {name}"] = seen
        if door == OF_OPERATORS:
            continue
        hidden = await doors.ask(protocol, door, HIDDEN)
        nowhere = await doors.ask(protocol, door, NOWHERE)
        if hidden.without(HIDDEN) != nowhere.without(NOWHERE):
            found[f"{state} {protocol} {door} hidden"] = hidden, nowhere
        if hidden.status not in expected(row, door, HIDDEN, is_loaded=False):
            found[f"{state} {protocol} {door} {HIDDEN}"] = hidden
    found.update(await faults_of_all(state, doors, is_loaded=is_loaded))
    return found


async def faults_of_all(state: State, doors: Doors, *, is_loaded: bool) -> Mapping[str, Any]:
    """Call the routes that name no model."""
    row = STATES[state]
    found: dict[str, Any] = {}
    # An index that queries a store waits for it, and then shows the result of the last poll.
    for door in LISTS - (ASKING if state is State.DOUBTED else set()):
        is_http = " " in door
        seen = await (doors.over_http(door) if is_http else doors.over_grpc(door))
        if seen.status not in ((200, "OK") if row.is_listed else COMING):
            found[f"{state} {door}"] = seen
        if is_loaded and not door.startswith(("GET /v1", "GET /openai")) and ONE not in seen.text:
            found[f"{state} {door} of it"] = seen
    default = await doors.over_http(OF_THE_DEFAULT)
    if (default.status, default.retry_after) != ((200, "") if is_loaded else (503, "1")):
        found[f"{state} {OF_THE_DEFAULT}"] = default
    ready = await doors.over_http("GET /v2/health/ready")
    if (ready.status, ready.retry_after) != ((200, "") if row.is_settled else (400, "1")):
        found[f"{state} ready"] = ready
    return found


async def agree(doors: Doors, holds: Callable[[Seen], bool]) -> None:
    """Wait until every new connection, to any process, gives such an answer to an inference."""

    await until_all(lambda: doors.over_http("POST /v2/models/{model}/infer", ONE), holds)


async def until_all(ask: Callable[[], Awaitable[Seen]], holds: Callable[[Seen], bool]) -> None:
    async with asyncio.timeout(MOST_SECONDS):
        while not all([holds(await ask()) for _ in range(EACH)]):
            await asyncio.sleep(0.01)


def says(state: State) -> Callable[[Seen], bool]:
    return lambda seen: STATES[state].says in seen.text


def models() -> dict[str, bytes]:
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "backend": "identity",
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }
    text = json.dumps(config).encode()
    return {
        path: data
        for name in (ONE, HIDDEN)
        for path, data in (
            (f"root/{name}/config.json", text),
            (f"root/{name}/1/file", OF_VERSION),
        )
    }


def stall(handler: Handler, content: bytes) -> bool:
    """Block the download of a version until the test releases it."""
    if content == OF_VERSION:
        handler.shelves.released.wait()
    return False


@asynccontextmanager
async def starting(
    tmp_path: Path, url: str, *more: str
) -> AsyncIterator[tuple[ServerProcess, Doors]]:
    """Run a server that polls a store; yields before it is ready."""
    allowed = ["infer", "metadata", "health"]
    callers = [
        {"name": "a", "token": digest_of(CALLER), "allow": allowed, "models": "a-*"},
        {"name": "operator", "token": digest_of(OPERATOR), "allow": ["page"]},
    ]
    (tmp_path / "rules.json").write_text(json.dumps({"caller": callers}))
    flags = {
        "model-control-mode": "poll",
        "poll-interval-seconds": "0.05",
        "remote-schemes": "http",
        "remote-cache-directory": str(tmp_path / "cache"),
        "access-rules": str(tmp_path / "rules.json"),
        "cors-origin": "https://app.example",
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", value)]
    async with served(url, *given, *more, until="listening") as server:
        yield server, Doors(server.url, server.http)
        assert 0 == await server.stop()


@pytest.mark.parametrize(
    ("layout", "cells"),
    [
        pytest.param("1", CELLS, id="1"),
        *(
            pytest.param(layout, CELLS[::4], id=layout, marks=pytest.mark.slow)
            for layout in ("2", "front-ends")
        ),
    ],
)
async def test_every_state_answers_at_every_door_as_its_row_says(
    tmp_path: Path, layout: str, cells: Cells
) -> None:
    """From the first connection on, with a store that hangs, fails, is slow, and is emptied.

    Front ends remain in the first state until their engine has loaded the models.
    """
    has_engine = layout == "front-ends"
    away, loading = (State.UNREAD,) * 2 if has_engine else (State.AWAY, State.LOADING)
    with serving_objects(**models()) as (url, shelves):
        shelves.may_list.clear()
        shelves.fault = stall
        async with starting(tmp_path, url, *LAYOUTS[layout]) as (server, doors):
            wrong = {**await faults(State.UNREAD, doors, cells, is_loaded=False)}
            shelves.is_away = True
            shelves.may_list.set()
            if has_engine:
                asked = len(shelves.asked)
                await until(lambda: len(shelves.asked) > asked + EACH)
            else:
                await agree(doors, says(State.AWAY))
            wrong |= await faults(away, doors, cells, is_loaded=False)
            shelves.is_away = False
            if has_engine:
                await until(lambda: any(path.endswith("/1/file") for path in shelves.gets()))
            else:
                await agree(doors, lambda seen: "not ready" in seen.text)
            wrong |= await faults(loading, doors, cells, is_loaded=False)
            shelves.released.set()
            await agree(doors, lambda seen: seen.status == 200)
            await until_all(
                lambda: doors.over_http("GET /v2/health/ready"), lambda seen: seen.status == 200
            )
            wrong |= await faults(State.SETTLED, doors, cells, is_loaded=True)
            shelves.is_away = True
            await server.until("repository unreadable, its models stay loaded")
            wrong |= await faults(State.MISSING, doors, cells, is_loaded=True)
            wrong |= await emptied(server, shelves, doors, cells)

    assert "" == "\n".join(f"{cell}: {seen}" for cell, seen in wrong.items())


async def emptied(
    server: ServerProcess, shelves: Shelves, doors: Doors, cells: Cells
) -> Mapping[str, Any]:
    """Return one empty listing: nothing may be unloaded, and an error must be logged."""
    # Serve one directory page; the next poll blocks on another one.
    left = shelves.pages_left = threading.Semaphore(0)
    objects, shelves.objects = shelves.objects, {}
    shelves.pages["root/"] = b"<html></html>"
    shelves.is_away = False
    left.release()
    await server.until("models missing from the repository, kept until the next poll")
    found = await faults(State.DOUBTED, doors, cells, is_loaded=True)
    shelves.objects = objects
    shelves.pages.clear()
    shelves.pages_left = None
    left.release()
    return found


async def test_a_mesh_is_told_to_ask_elsewhere_until_devices_are_there(tmp_path: Path) -> None:
    """With NOT_FOUND it would forget the model, while it waits during STARTING.

    A load waits for the devices by itself. READY means that nothing is loaded.
    """
    identity_models.write(tmp_path / "models", "m", "FP32")
    settings = Settings.read(
        {},
        repository=tmp_path / "models",
        grpc_endpoint="port:0",
        http_endpoint="none",
        modelmesh=True,
        model_control_mode=ModelControlMode.EXPLICIT,
        model_root=(tmp_path / "models",),
        scratch_directory=tmp_path,
        device="cpu",
        compilation_cache_directory="none",
        compile_processes=0,
    )
    application = Application(settings)
    async with application.running() as addresses:
        before = await asked_by_a_mesh(addresses.grpc)
        managed = await managed_by_a_mesh(addresses.grpc, tmp_path / "models" / "m")
        await application.load()
        after = await asked_by_a_mesh(addresses.grpc)

    assert {"status": "STARTING", "size": "UNAVAILABLE", "infer": "UNAVAILABLE"} == before
    assert {"predict": "OK", "unload": "OK", "load": "OK", "size": "OK"} == managed
    assert {"status": "READY", "size": "NOT_FOUND", "infer": "NOT_FOUND"} == after


async def managed_by_a_mesh(address: str, path: Path) -> Mapping[str, str]:
    """Load a model as a mesh does that was running before the server."""
    async with mesh.dial(address) as sidecar:
        return {
            "predict": await mesh.code(sidecar.predict("m", path)),
            "unload": await mesh.code(sidecar.unload("m")),
            "load": await mesh.code(sidecar.load("m", path)),
            "size": await mesh.code(sidecar.size("m")),
        }


async def asked_by_a_mesh(address: str) -> Mapping[str, str]:
    async with grpc.aio.insecure_channel(address) as channel:

        async def ask(method: str, message: bytes) -> tuple[str, bytes]:
            try:
                return "OK", await channel.unary_unary(method)(message)
            except grpc.aio.AioRpcError as error:
                return error.code().name, b""

        runtime = "/mmesh.ModelRuntime/"
        _, said = await ask(f"{runtime}runtimeStatus", bytes(RuntimeStatusRequest()))
        status = RuntimeStatusResponse().parse(said).status
        size, _ = await ask(f"{runtime}modelSize", bytes(UnloadModelRequest(model_id="m")))
        door = "/inference.GRPCInferenceService/ModelInfer"
        infer, _ = await ask(door, message_for(door, "m"))
        return {
            "status": str(RuntimeStatusResponseStatus(status).name),
            "size": size,
            "infer": infer,
        }
