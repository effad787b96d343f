"""Every RPC and HTTP route of the server, and a client for them, generated from its tables."""

import asyncio
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

import h2.events
import numpy as np
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from support.conditions import MOST_SECONDS
from support.http import Answer, Connection, connect, message
from support.wire import connect as connect_grpc
from support.wire import framed, request_headers
from xlaserve.app.server import Application
from xlaserve.grpc.methods import ROWS
from xlaserve.http.routing import Route
from xlaserve.serving.access.objects import DOORS, Doors, Rule
from xlaserve.serving.access.tokens import digest_of
from xlaserve.serving.call import OPEN, Operation
from xlaserve.settings import Settings
from xlaserve_proto.mmesh import LoadModelRequest, UnloadModelRequest

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

GRPC, WEB, HTTP = "gRPC", "gRPC-Web", "HTTP"
WEB_TYPE = ("Content-Type", "application/grpc-web+proto")
_numbers = count()


def every_route() -> list[Route]:
    settings = Settings.read({}, repository=Path(__file__).parent)
    return list(Application(settings).http_routes().routes)


ROUTES = {f"{route.method} {route.path}": route for route in every_route()}
OPERATIONS: dict[str, Operation] = {
    **{path: row.operation for path, row in ROWS.items()},
    **{name: route.operation for name, route in ROUTES.items()},
}
"""Every RPC and HTTP route, from the server's own tables."""


OF_A_TENANT = ("infer", "metadata", "manage", "health")
"""Operations of a tenant on its own models."""

NOTHING_BEHIND = {
    # Without CUDA, no CUDA region can exist.
    "/inference.GRPCInferenceService/CudaSharedMemoryRegister": "12",
    "POST /v2/cudasharedmemory/region/{region}/register": "501",
    "/inference.GRPCInferenceService/CudaSharedMemoryStatus": "5",
    "GET /v2/cudasharedmemory/region/{region}/status": "404",
    "POST /v2/repository/{repository}/index": "501",
    "POST /v2/repository/{repository}/models/{model}/load": "501",
    "POST /v2/repository/{repository}/models/{model}/unload": "501",
    "/mmesh.ModelRuntime/modelSize": "5",
}
"""Status that an authorized caller gets from routes whose backend is missing in tests."""


def rules(operator: str, tenants: Mapping[str, str], *more: str, pages: bool = False) -> str:
    """Return the access rules of an operator, and of tenants by name, with their tokens.

    A tenant uses the models that begin with its name, and `more`; with `pages`, the pages too.
    """
    callers: list[dict[str, Any]] = [
        {
            "name": "operator",
            "token": digest_of(operator),
            "allow": [operation.value for operation in Operation if operation not in OPEN],
        }
    ]
    for name, token in tenants.items():
        own = {"name": name, "allow": OF_A_TENANT, "models": [f"{name}-*", *more]}
        page = {"name": f"{name}-page", "allow": ["page"]}
        callers += [one | {"token": digest_of(token)} for one in (own, *([page] if pages else ()))]
    return json.dumps({"caller": callers})


def protocols(door: str) -> tuple[str, ...]:
    """Return the protocols of a route: the ModelMesh RPCs speak gRPC only."""
    return (HTTP,) if " " in door else (GRPC,) if "/mmesh" in door else (GRPC, WEB)


def cells() -> Iterator[tuple[Doors, str, str]]:
    """Yield each row of the table of objects with each of its routes and protocols."""
    for row in DOORS:
        for path in row.paths:
            for door in OPERATIONS:
                if fnmatchcase(door, path.replace("[", "[[]")):
                    for protocol in protocols(door):
                        yield row, door, protocol


@dataclass(frozen=True)
class Seen:
    """An answer without the parts that change over time."""

    status: str
    text: str
    data: bytes

    def without(self, name: str) -> "Seen":
        """Return a copy with the requested name removed."""
        return Seen(self.status, self.text.replace(name, ""), self.data.replace(name.encode(), b""))


@dataclass(frozen=True)
class Asking:
    """A client of one server that can send any token."""

    url: str
    http: str
    key: str
    """Key of the shared memory to register."""
    model: str
    """A model of the repository, as named in the URL of a load."""
    directory: Path
    id: str = ""
    """Request id of its inferences; none if empty."""
    value: float = 1.5
    """Input value of its inferences."""
    version: str = "1"
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
    """TLS contexts for gRPC and for HTTP/1.1."""

    async def send(
        self, method: str, path: str, token: str, body: bytes = b"", *more: tuple[str, str]
    ) -> Answer:
        """Send an HTTP request; read only the first chunk of an endless stream."""
        shown = [("authorization", f"Bearer {token}")] if token else []
        async with connect(self.http, self.tls and self.tls[1]) as client:
            text = message(method, path, *shown, *more, body=body)
            answer = await client.ask(text, head=method == "HEAD")
            if "transfer-encoding" not in answer.headers or method == "HEAD":
                return answer
            body = await read_chunks(client, first=path.endswith("/Watch"))
            return Answer(answer.status, answer.headers, body)

    async def ask(self, row: Doors, door: str, protocol: str, token: str, name: str) -> Seen:
        """Call a route for a named object over one of its protocols."""
        how = {GRPC: self.over_grpc, WEB: self.over_web, HTTP: self.over_http}[protocol]
        return await how(row, door, token, name)

    async def over_http(self, row: Doors, door: str, token: str, name: str) -> Seen:
        method, _, path = door.partition(" ")
        names = {"model": name, "version": self.version, "repository": "r", "region": name}
        body = b"" if method == "GET" else json.dumps(self.json(door, name)).encode()
        answer = await self.send(method, path.format_map(names), token, body)
        headers = {k: v for k, v in answer.headers.items() if k not in ("date", "content-length")}
        return Seen(str(answer.status), str(headers), answer.body)

    async def over_grpc(self, row: Doors, door: str, token: str, name: str) -> Seen:
        shown = [("authorization", f"Bearer {token}")] if token else []
        async with connect_grpc(self.url, self.tls and self.tls[0]) as wire:
            stream = wire.open(request_headers(door, *shown))
            body = framed(self.message(row, door, name))
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
        body = framed(self.message(row, door, name))
        answer = await self.send("POST", door, token, body, WEB_TYPE)
        data, mark, trailers = answer.body.rpartition(b"\x80\0\0")
        if not mark:
            assert door.endswith("/Watch"), answer
            return Seen("0", "", answer.body)
        lines = trailers[2:].decode().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return Seen(fields["grpc-status"], fields.get("grpc-message", ""), data)

    @property
    def region(self) -> dict[str, Any]:
        """Return the parameters that register the memory region."""
        return {"key": self.key, "offset": 0, "byte_size": 16}

    def json(self, door: str, name: str) -> Any:
        """Return the JSON body of a request to an HTTP route."""
        tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [self.value, 2]}
        said: dict[str, Any] = {"id": self.id} if self.id else {}
        infer = {"inputs": [tensor], **said}
        for ending, body in (
            ("/infer", infer),
            ("/invoke", infer),
            ("/invocations", infer),
            ("/generate", {"x": self.value, **said}),
            ("/generate_stream", {"x": self.value, **said}),
            ("/v1/completions", {"model": name, "prompt": "a0"}),
            ("/chat/completions", {"model": name, "messages": [{"role": "user", "content": "0"}]}),
            ("/v1/responses", {"model": name, "input": "0"}),
            ("/v1/embeddings", {"model": name, "input": "a"}),
            ("POST /v2/trace/setting", {"trace_rate": "7"}),
            ("/trace/setting", {}),
            ("POST /v2/logging", {"log_verbose_level": 0}),
            ("POST /models", {"model_name": f"u-{next(_numbers)}", "url": self._url}),
            ("systemsharedmemory/region/{region}/register", self.region),
        ):
            if door.endswith(ending):
                return body
        if door.endswith("cudasharedmemory/region/{region}/register"):
            return {"raw_handle": {"b64": "A" * 88}, "device_id": 0, "byte_size": 64}
        return {}

    @property
    def _url(self) -> str:
        return str(self.directory / self.model)

    def message(self, row: Doors, door: str, name: str) -> bytes:
        """Return the request message for an RPC."""
        method = door.rpartition("/")[2]
        is_of_all = row.rule in (Rule.LIST, Rule.FOR_ALL, Rule.OF_THE_SERVER)
        if door.startswith("/mmesh"):
            return self._of_mesh(method)
        if "reflection" in door:
            return b"\x3a\x01*"  # list_services
        request: Any
        if "health" in door:
            request = health_pb2.HealthCheckRequest(service="" if is_of_all else name)
        elif "Infer" in method:
            request = self.infer_request(name)
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

    def _of_mesh(self, method: str) -> bytes:
        load = LoadModelRequest(model_id="mesh", model_type="identity", model_path=self.model)
        other: dict[str, Any] = {
            "loadModel": load,
            "predictModelSize": load,
            "modelSize": UnloadModelRequest(model_id="none"),
        }
        return bytes(other.get(method, UnloadModelRequest(model_id="mesh")))

    def infer_request(self, model: str) -> Any:
        """Return an inference request."""
        tensor = np.array([self.value, 2], np.float32)
        request = pb.ModelInferRequest(
            model_name=model, id=self.id, raw_input_contents=[tensor.tobytes()]
        )
        request.inputs.add(name="x", datatype="FP32", shape=[2])
        return request


def setting_request(method: str, model: str) -> Any:
    """Return a request that changes settings only if they are global, not one model's."""
    if method == "LogSettings":
        logging = pb.LogSettingsRequest()
        logging.settings["log_verbose_level"].uint32_param = 0
        return logging
    trace = pb.TraceSettingRequest(model_name=model)
    if not model:
        trace.settings["trace_rate"].value.append("7")
    return trace


async def read_chunks(client: Connection, *, first: bool) -> bytes:
    """Read a chunked body: only the first chunk of an endless stream, or everything."""
    found = b""
    async with asyncio.timeout(MOST_SECONDS):
        while size := int(await client.reader.readline(), 16):
            found += (await client.reader.readexactly(size + 2))[:-2]
            if first:
                break
        else:
            await client.reader.readline()  # after the last chunk
    return found
