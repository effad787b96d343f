"""connect-web and grpc-web, the standard browser clients, over gRPC-Web in Node.js."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from support import identity_models
from support.browser import browsing
from support.npm_tools import node_program
from support.server import RunningServer, serving
from support.tls import write_certificate
from tritonclient.grpc import model_config_pb2, service_pb2

from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 60
INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
TOKEN = new_token()
ANSWER = {
    "model_name": "fp32",
    "model_version": "1",
    "outputs": [{"name": "y", "datatype": "FP32", "shape": ["2"]}],
    "raw_output_contents": ["AACAPwAAAEA="],
}


@asynccontextmanager
async def web_server(folder: Path, **settings: str) -> AsyncIterator[RunningServer]:
    """Run a server for pages of any origin, with a caller who may not manage models."""
    identity_models.write(folder / "models", "fp32", "FP32")
    rules = folder / "rules.json"
    allow = ["infer", "metadata", "health"]
    caller = {"name": "page", "token": digest_of(TOKEN), "allow": allow}
    rules.write_text(json.dumps({"caller": [caller]}))
    running = serving(
        folder,
        folder / "models",
        http_endpoint="port:0",
        load_model=("fp32",),
        cors_origin=("*",),
        access_rules=str(rules),
        **settings,
    )
    async with running as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    async with web_server(tmp_path_factory.mktemp("web")) as server:
        yield server


def infer(model: str = "fp32", **more: Any) -> dict[str, Any]:
    message = {
        "model_name": model,
        "inputs": [{"name": "x", "datatype": "FP32", "shape": ["2"]}],
        "raw_input_contents": ["AACAPwAAAEA="],
    }
    return call(INFERENCE, "modelInfer", message, **more)


def call(service: str, method: str, message: Any, **more: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    return {"service": service, "method": method, "message": message, "headers": headers} | more


def name_fields(messages: Iterable[descriptor_pb2.DescriptorProto]) -> None:
    """Set the JSON names of fields to their names, which Python's descriptors omit."""
    for message in messages:
        for field in message.field:
            field.json_name = field.name
        name_fields(message.nested_type)


async def made(
    pytestconfig: pytest.Config, url: str, calls: Sequence[Any], folder: Path, **environment: str
) -> list[Any]:
    """Return the answers received by the clients in Node.js."""
    program = node_program(pytestconfig, Path(__file__).parent / "web_client", "client.mjs")
    files = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2, health_pb2):
        file = files.file.add()
        module.DESCRIPTOR.CopyToProto(file)
        name_fields(file.message_type)
    (folder / "descriptors").write_bytes(files.SerializeToString())
    (folder / "calls").write_text("\n".join(map(json.dumps, calls)))
    running = await asyncio.create_subprocess_exec(
        *program,
        url,
        str(folder / "descriptors"),
        str(folder / "calls"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    async with asyncio.timeout(SECONDS):
        printed, _ = await running.communicate()
    return [json.loads(line) for line in printed.splitlines()]


async def test_the_stock_client_calls_every_kind_of_method(
    pytestconfig: pytest.Config, server: RunningServer, tmp_path: Path
) -> None:
    """Unary and server-streaming calls; errors, deadlines, and an unknown caller."""
    calls = [
        infer(),
        infer("none"),
        infer(headers={}),
        call(INFERENCE, "repositoryIndex", {}),
        call(INFERENCE, "repositoryModelLoad", {"model_name": "fp32"}),
        call(HEALTH, "check", {"service": "fp32"}),
        call(HEALTH, "watch", {"service": "fp32"}, timeoutMs=2000),
    ]
    found = await made(pytestconfig, f"http://{server.http}", calls, tmp_path)

    assert ["OK", "NotFound", "Unauthenticated", "OK", "PermissionDenied", "OK"] == [
        one["code"] for one in found[:-1]
    ]
    assert [ANSWER] == found[0]["answers"]
    assert "Request for unknown model: 'none' is not found" == found[1]["text"]
    assert "READY" == found[3]["answers"][0]["models"][0]["state"]
    assert [{"status": "SERVING"}] == found[5]["answers"]
    assert ("DeadlineExceeded", [{"status": "SERVING"}]) == (
        found[6]["code"],
        found[6]["answers"],
    )


@pytest.mark.slow
async def test_both_stock_clients_call_over_tls(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """connect-web, and the package grpc-web in both its formats."""
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    async with web_server(tmp_path, **write_certificate(authority, tmp_path)) as server:
        calls = [
            one | more
            # grpc-web's binary format does not support server streaming.
            for more, asked in (({}, 5), ({"format": "text"}, 5), ({"format": "binary"}, 4))
            for one in (
                infer(),
                infer("none"),
                infer(headers={}),
                call(HEALTH, "check", {"service": "fp32"}),
                call(HEALTH, "watch", {"service": "fp32"}, timeoutMs=2000),
            )[:asked]
        ]
        url = f"https://localhost:{str(server.http).rpartition(':')[2]}"
        trusted = {"NODE_EXTRA_CA_CERTS": str(tmp_path / "ca.pem")}
        found = await made(pytestconfig, url, calls, tmp_path, **trusted)
        strange = await made(pytestconfig, url, calls[:1], tmp_path)

    unary = ["OK", "NotFound", "Unauthenticated", "OK"]
    stream = "DeadlineExceeded"
    assert [*unary, stream, *unary, stream, *unary] == [one["code"] for one in found]
    assert [[ANSWER]] * 3 == [found[place]["answers"] for place in (0, 5, 10)]
    assert [[{"status": "SERVING"}]] * 5 == [found[place]["answers"] for place in (3, 4, 8, 9, 13)]
    assert ["Unknown"] == [one["code"] for one in strange]


@pytest.mark.slow
async def test_a_page_of_another_origin_asks_in_a_browser(
    server: RunningServer, tmp_path: Path
) -> None:
    """The browser sends a preflight request; the page may read the trailers in the body."""

    async def page_of_another(_: web.Request) -> web.Response:
        return web.Response(text="<title>page</title>", content_type="text/html")

    application = web.Application()
    application.router.add_get("/{any:.*}", page_of_another)
    script = """(async () => {
        const answer = await fetch(URL, {
            method: "POST",
            headers: {"content-type": "application/grpc-web+proto", "x-grpc-web": "1",
                      "grpc-timeout": "20S", "x-user-agent": "test", "authorization": TOKEN},
            body: new Uint8Array(5),
        });
        return [answer.status, ...new Uint8Array(await answer.arrayBuffer())];
    })()"""
    target = f"http://{server.http}/grpc.health.v1.Health/Check"
    script = script.replace("URL", json.dumps(target))
    script = script.replace("TOKEN", json.dumps(f"Bearer {TOKEN}"))
    async with TestServer(application) as site, browsing(tmp_path / "profile") as page:
        await page.open(str(site.make_url("/")))
        status, *body = await page.evaluate(script)

    assert 200 == status
    assert b"\0\0\0\0\2\x08\x01\x80\0\0\0\x0fgrpc-status:0\r\n" == bytes(body)
    assert [] == page.complaints
