"""Exported spans of every kind of request, compared to the table of their attributes."""

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import pytest
from support import identity_models, mesh, python_models, tiny_chat, tiny_embedding
from support.otlp import Collector, collecting
from support.process import served
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.serving.observability.span_attributes import ROWS, SCHEMA_URL, Of

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

SERVICE = "inference.GRPCInferenceService"
AGENT = {"User-Agent": "tester/1"}
ROW = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}
MESSAGES = [{"role": "user", "content": "hi"}]
ORIGIN = "http://page.example"
WEB = {"Content-Type": "application/grpc-web+proto", "X-Grpc-Web": "1", "Origin": ORIGIN}
LISTENERS = {"grpc": "grpc_endpoint", "http": "http_endpoint"}


@dataclass
class Client:
    """Sends requests in every way."""

    stub: Any
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any, status: int = 200) -> None:
        async with self.session.post(path, json=body) as answer:
            text = await answer.text()
            assert status == answer.status, text

    async def usage(self, path: str, body: Any) -> dict[str, int | None]:
        """Send a request; return the token usage in the answer."""
        async with self.session.post(path, json=body) as answer:
            used = (await answer.json())["usage"]
        return {"input": used["prompt_tokens"], "output": used.get("completion_tokens")}

    async def web(self, method: str, model: str = "echo") -> None:
        message = infer(model).SerializeToString()
        body = b"\0" + len(message).to_bytes(4, "big") + message
        async with self.session.post(f"/{SERVICE}/{method}", data=body, headers=WEB) as answer:
            octets = await answer.read()
        assert (200, True) == (answer.status, octets[:1] in (b"\0", b"\x80"))

    async def stream(self, model: str = "echo") -> None:
        stream = self.stub.ModelStreamInfer()
        await stream.write(infer(model))
        assert (model == "nowhere") is bool((await stream.read()).error_message)
        await stream.done_writing()
        assert grpc.aio.EOF is await stream.read()

    async def refused(self) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="nowhere"):
            await self.stub.ModelInfer(infer("nowhere"))
        await self.stream("nowhere")
        await self.web("ModelInfer", "nowhere")
        await self.web("ModelStreamInfer", "nowhere")

    async def healthy(self) -> None:
        await self.stub.ServerLive(pb.ServerLiveRequest())
        async with self.session.get("/v2/health/ready") as answer:
            assert 200 == answer.status


def infer(model: str) -> Any:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    return request


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "echo", "FP32")
    tiny_chat.export(root / "chat", max_length=32, slots="1")
    tiny_embedding.export(root / "embeds")
    python_models.write_function(root, "breaks", "raise RuntimeError('no')")
    return root


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


@asynccontextmanager
async def asking(serve: Serve, models: Path) -> AsyncIterator[Client]:
    mode: Any = {"trace_mode": "opentelemetry", "trace_rate": 1, "load_model": ("*",)}
    mode |= {"cors_origin": (ORIGIN,), "sagemaker": True, "host": "127.0.0.1"}
    mode["allow_python_models"] = True
    async with (
        serve(models, http_endpoint="port:0", **mode) as server,
        client_of(server.url, server.http) as client,
    ):
        yield client


@asynccontextmanager
async def client_of(url: str, http: str | None) -> AsyncIterator[Client]:
    options = [("grpc.primary_user_agent", "tester/1")]
    async with (
        grpc.aio.insecure_channel(url, options=options) as channel,
        aiohttp.ClientSession(f"http://{http}", headers=AGENT) as session,
    ):
        yield Client(service_pb2_grpc.GRPCInferenceServiceStub(channel), session)


def told(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def named(spans: list[Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the attributes of spans that have any, by span name and listener."""
    found = {}
    for span in spans:
        if attributes := told(span):
            found[span.name, attributes["xlaserve.listener"]] = attributes
    return found


def ours(model: str, listener: str, **more: Any) -> dict[str, Any]:
    said = {"model": model, "operation": "infer", "listener": LISTENERS[listener], **more}
    return {f"xlaserve.{name}": value for name, value in said.items()}


def rpc(method: str, status: str = "OK") -> dict[str, Any]:
    return {
        "rpc.system.name": "grpc",
        "rpc.method": f"{SERVICE}/{method}",
        "rpc.response.status_code": status,
    }


def http(route: str, path: str = "", status: int = 200) -> dict[str, Any]:
    return {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "url.path": path or route,
        "url.scheme": "http",
    }


COUNTED = ("input", "output")
PHASES = ["receive", "queue", "execute", "encode"]
DONE = {"version": "1", "batch_rows": 1}
ONE = "/v2/models/{model}/infer"
VERSION = "/v2/models/{model}/versions/{version}/infer"
GENERATE = "/v2/models/{model}/generate"
INVOKE = "/models/{model}/invoke"
CHAT = {"max_tokens": 3, "temperature": 0}
TEXT = {"text_input": "hi", "parameters": {"max_tokens": 3}}
STREAMED = {"stream": True, **CHAT}


async def ask_everything(client: Client) -> None:
    await client.healthy()
    await client.stub.ModelInfer(infer("echo"))
    await client.stream()
    await client.web("ModelInfer")
    await client.web("ModelStreamInfer")
    await client.post("/v2/models/echo/infer", ROW)
    await client.post("/v2/models/echo/versions/1/infer", ROW)
    await client.post("/models/echo/invoke", ROW)
    await client.post("/v2/models/chat/generate", TEXT)
    await client.post("/v2/models/chat/generate_stream", TEXT)
    await client.post("/v1/chat/completions", {"model": "chat", "messages": MESSAGES, **STREAMED})
    await client.post("/v1/completions", {"model": "chat", "prompt": "hi", "max_tokens": 3})
    await client.post("/v1/responses", {"model": "chat", "input": "hi", "max_output_tokens": 3})
    await client.post("/v1/embeddings", {"model": "embeds", "input": "hi"})


def check_everything(spans: list[Any]) -> None:
    whole = named([span for span in spans if span.kind == span.SPAN_KIND_SERVER])
    for attributes in whole.values():
        assert "127.0.0.1" == attributes.pop("client.address") == attributes.pop("server.address")
        assert attributes.pop("server.port") > 0
        assert attributes.pop("user_agent.original").startswith("tester/1")
        attributes.pop("xlaserve.request_id", None)
    rpcs = {
        (f"{SERVICE}/{method}", LISTENERS[listener]): rpc(method) | ours("echo", listener, **DONE)
        for method in ("ModelInfer", "ModelStreamInfer")
        for listener in LISTENERS
    }
    asked = {
        ONE: http(ONE, "/v2/models/echo/infer") | ours("echo", "http", **DONE),
        VERSION: http(VERSION, "/v2/models/echo/versions/1/infer") | ours("echo", "http", **DONE),
        INVOKE: http(INVOKE, "/models/echo/invoke") | ours("echo", "http", **DONE),
        GENERATE: http(GENERATE, "/v2/models/chat/generate") | ours("chat", "http", **DONE),
        f"{GENERATE}_stream": http(f"{GENERATE}_stream", "/v2/models/chat/generate_stream")
        | ours("chat", "http", **DONE),
        "/v1/chat/completions": http("/v1/chat/completions") | ours("chat", "http", **DONE),
        "/v1/completions": http("/v1/completions") | ours("chat", "http", **DONE),
        "/v1/responses": http("/v1/responses") | ours("chat", "http", **DONE),
        "/v1/embeddings": http("/v1/embeddings") | ours("embeds", "http", batch_rows=1),
    }
    assert whole == rpcs | {(f"POST {route}", "http_endpoint"): asked[route] for route in asked}


async def test_the_spans_of_every_kind_of_request(
    serve: Serve, models: Path, collector: Collector
) -> None:
    async with asking(serve, models) as client:
        await ask_everything(client)

    check_everything(collector.spans)


Usage = Mapping[str, Mapping[str, int | None]]


async def generate_and_embed(client: Client) -> Usage:
    """Send generation and embedding requests; return the reported token usage, by span."""
    used = {}
    asked = {"model": "chat", "messages": MESSAGES, **CHAT}
    used["chat chat"] = await client.usage("/v1/chat/completions", asked)
    asked = {"model": "chat", "prompt": "hi", **CHAT}
    used["text_completion chat"] = await client.usage("/v1/completions", asked)
    asked = {"model": "embeds", "input": "hi"}
    used["embeddings embeds"] = await client.usage("/v1/embeddings", asked)
    return used


def check_generated(spans: list[Any], used: Usage) -> None:
    found = {
        span.name: told(span)
        for span in spans
        if any(one.key.startswith("gen_ai.") for one in span.attributes)
    }
    for name, usage in used.items():
        counted = {kind: found[name].pop(f"gen_ai.usage.{kind}_tokens", None) for kind in COUNTED}
        assert usage == counted, name
    assert found == {
        "chat chat": gen_ai("chat", "chat", max_tokens=3, temperature=0.0),
        "text_completion chat": gen_ai("text_completion", "chat", max_tokens=3, temperature=0.0),
        "embeddings embeds": gen_ai("embeddings", "embeds"),
    }


async def test_the_spans_of_what_generates_and_embeds(
    serve: Serve, models: Path, collector: Collector
) -> None:
    async with asking(serve, models) as client:
        used = await generate_and_embed(client)

    check_generated(collector.spans, used)


def gen_ai(operation: str, model: str, **asked: Any) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "xlaserve",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        **{f"gen_ai.request.{name}": value for name, value in asked.items()},
    }


RUNTIME = "mmesh.ModelRuntime"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def pass_through_a_mesh(sidecar: mesh.Mesh, models: Path) -> None:
    """Act as a sidecar: manage a model, ask for an unknown one, and forward requests."""
    await sidecar.status()
    await sidecar.predict("echo-id", models / "echo")
    await sidecar.load("echo-id", models / "echo")
    await sidecar.size("echo-id")
    assert "NOT_FOUND" == await mesh.code(sidecar.size("nowhere"))
    headers = [("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")]
    await sidecar.infer("echo-id", infer("of the client"), headers=headers)
    await sidecar.unload("echo-id")


def check_mesh(spans: list[Any]) -> None:
    whole = {}
    for span in spans:
        if span.kind == span.SPAN_KIND_SERVER:
            said = told(span)
            key = span.name, said["rpc.response.status_code"]
            whole[key] = said.get("xlaserve.model"), said["xlaserve.operation"], span.status.code
            assert ("grpc", span.name) == (said["rpc.system.name"], said["rpc.method"])
            inner = [one.name for one in spans if one.parent_span_id == span.span_id]
            is_infer = said["xlaserve.operation"] == "infer"
            assert (PHASES if is_infer else ["receive"]) == inner
            assert (span.trace_id.hex() == TRACE) is is_infer
    assert whole == {
        (f"{RUNTIME}/runtimeStatus", "OK"): (None, "runtime", UNSET),
        (f"{RUNTIME}/predictModelSize", "OK"): ("echo-id", "runtime", UNSET),
        (f"{RUNTIME}/loadModel", "OK"): ("echo-id", "runtime", UNSET),
        (f"{RUNTIME}/modelSize", "OK"): ("echo-id", "runtime", UNSET),
        (f"{RUNTIME}/modelSize", "NOT_FOUND"): ("nowhere", "runtime", UNSET),
        (f"{SERVICE}/ModelInfer", "OK"): ("echo-id", "infer", UNSET),
        (f"{RUNTIME}/unloadModel", "OK"): ("echo-id", "runtime", UNSET),
    }


async def test_the_spans_of_a_mesh(serve: Serve, models: Path, collector: Collector) -> None:
    mode: Any = {"trace_mode": "opentelemetry", "trace_rate": 1, "modelmesh": True}
    async with serve(models, **mode) as server, mesh.dial(server.url) as sidecar:
        await pass_through_a_mesh(sidecar, models)

    check_mesh(collector.spans)


LOAD = "/v2/repository/models/{model}/load"


async def test_the_spans_of_loads(serve: Serve, models: Path, collector: Collector) -> None:
    async with asking(serve, models) as client:
        await client.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="echo"))
        await client.post("/v2/repository/models/nowhere/load", {}, 404)

    found = {
        (span.name, told(span)["xlaserve.model"], told(span).get("error.type"))
        for span in collector.spans
        if span.kind == span.SPAN_KIND_SERVER
    }
    assert found == {
        (f"{SERVICE}/RepositoryModelLoad", "echo", None),
        (f"POST {LOAD}", "nowhere", "ModelNotFound"),
    }


async def be_refused(client: Client) -> None:
    """Call each route for an unknown model, and one with invalid input."""
    await client.refused()
    for path, body in (
        ("/v2/models/nowhere/infer", ROW),
        ("/models/nowhere/invoke", ROW),
        ("/v2/models/nowhere/generate", TEXT),
        ("/v2/models/nowhere/generate_stream", TEXT),
        ("/v1/chat/completions", {"model": "nowhere", "messages": MESSAGES}),
        ("/v1/completions", {"model": "nowhere", "prompt": "hi"}),
        ("/v1/responses", {"model": "nowhere", "input": "hi"}),
        ("/v1/embeddings", {"model": "nowhere", "input": "hi"}),
    ):
        await client.post(path, body, 404)
    await client.post("/v2/models/breaks/infer", ROW, 500)


UNSET, ERROR = 0, 2
"""OpenTelemetry status codes of a span."""
ROUTES = (
    *(ONE, INVOKE, GENERATE, f"{GENERATE}_stream"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
)


def check_refused(spans: list[Any]) -> None:
    """A client's error leaves the server span unset, but is an error of its child span."""
    found = []
    for span in spans:
        said = told(span)
        if span.kind == span.SPAN_KIND_SERVER:
            status = said.get("rpc.response.status_code", said.get("http.response.status_code"))
            door = said["xlaserve.listener"], span.name
            found.append((*door, status, said["error.type"], span.status.code))
            assert said["xlaserve.error"].startswith(f"{said['error.type']}: "), said
    assert sorted(found, key=str) == sorted(
        [
            *(
                (LISTENERS[name], f"{SERVICE}/{method}", "NOT_FOUND", "ModelNotFound", UNSET)
                for name in LISTENERS
                for method in ("ModelInfer", "ModelStreamInfer")
            ),
            *(("http_endpoint", f"POST {one}", 404, "ModelNotFound", UNSET) for one in ROUTES),
            ("http_endpoint", f"POST {ONE}", 500, "ModelFailed", ERROR),
        ],
        key=str,
    )
    parts = {span.name: span for span in spans if told(span).get("gen_ai.operation.name")}
    assert {"chat nowhere", "text_completion nowhere", "embeddings nowhere"} == set(parts)
    for span in parts.values():
        assert (ERROR, "ModelNotFound") == (span.status.code, told(span)["error.type"])


async def test_the_spans_of_what_is_refused(
    serve: Serve, models: Path, collector: Collector
) -> None:
    async with asking(serve, models) as client:
        await be_refused(client)

    check_refused(collector.spans)


FRONT_ENDS = ("--processes", "2", "--process-roles", "front-ends", "--cors-origin", ORIGIN)
DOORS = ("--sagemaker", "--host", "127.0.0.1", "--allow-python-models")
TRACED = ("--trace-mode", "opentelemetry", "--trace-rate", "1")


@asynccontextmanager
async def asking_front_ends(models: Path, collector: Collector) -> AsyncIterator[Client]:
    """Run an exporting front end before an engine; it has exited after the block."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    async with served(models, *FRONT_ENDS, *DOORS, *TRACED, **variables) as server:
        await server.until("workers ready")
        async with client_of(server.url, server.http) as client:
            yield client
        assert 0 == await server.stop()


async def test_the_spans_of_front_ends_have_the_same_attributes(
    models: Path, collector: Collector
) -> None:
    """The front end knows the request and its caller, and gets the rest from the engine."""
    async with asking_front_ends(models, collector) as client:
        await ask_everything(client)
    everything = collector.spans
    check_everything(everything)
    (whole,) = (
        span
        for span in everything
        if span.name == f"{SERVICE}/ModelInfer"
        and LISTENERS["grpc"] == told(span)["xlaserve.listener"]
    )
    parts = [span for span in everything if span.parent_span_id == whole.span_id]
    assert ["receive", "queue", "execute", "encode"] == [span.name for span in parts]
    assert whole.start_time_unix_nano == parts[0].start_time_unix_nano
    assert sorted(times := [span.start_time_unix_nano for span in parts]) == times
    assert {"chat chat", "text_completion chat", "embeddings embeds"} <= {
        span.name for span in everything
    }


async def test_the_spans_of_what_front_ends_refuse(models: Path, collector: Collector) -> None:
    async with asking_front_ends(models, collector) as client:
        await be_refused(client)

    check_refused(collector.spans)


def conventions() -> Mapping[str, str]:
    """Return every attribute in the semantic conventions package."""
    found = {}
    for package in (f"opentelemetry.semconv.{kind}attributes" for kind in ("", "_incubating.")):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            names = vars(importlib.import_module(f"{package}.{module.name}"))
            found.update(
                {text: name for name, text in names.items() if name.isupper() and type(text) is str}
            )
    return found


def test_every_name_is_one_of_the_conventions_or_of_ours() -> None:
    known = conventions()
    theirs = [row for row in ROWS if not row.name.startswith("xlaserve.")]

    assert [] == [row.name for row in theirs if row.name not in known]
    assert all(row.since and tuple(map(int, row.since.split("."))) for row in theirs)
    latest = tuple(map(int, SCHEMA_URL.rpartition("/")[2].split(".")))
    assert all(tuple(map(int, row.since.split("."))) <= latest for row in theirs)
    assert set(Of) == {row.of for row in ROWS}
