"""gRPC-Web on the HTTP port: gRPC's services, the same gates, and hostile web pages.

See gRPC's PROTOCOL-WEB.md. `tests/interop/test_grpc_web.py` uses the stock client.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs
from support import echo_service, identity_models
from support.conditions import until
from support.grpc_web import frame, plain, read
from support.http import connect, message
from support.server import RunningServer, Serve, serving
from tritonclient.grpc import service_pb2 as pb

from xlaserve.net.ledger import Kind
from xlaserve.serving.access.tokens import digest_of, new_token

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN = "https://app.example"
BINARY, TEXT = "application/grpc-web+proto", "application/grpc-web-text+proto"
TYPES = ["application/grpc-web", BINARY, "application/grpc-web-text", TEXT]
SERVICE = "/inference.GRPCInferenceService/"
TOKEN = new_token()
MOST = 1 << 20
NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Answer:
    """A decoded gRPC-Web answer."""

    http: int
    headers: dict[str, str]
    messages: list[bytes]
    trailers: dict[str, str]

    @property
    def status(self) -> str:
        return self.trailers["grpc-status"]

    @property
    def text(self) -> str:
        return self.trailers.get("grpc-message", "")


@dataclass
class Browser:
    """The HTTP client of a web page."""

    url: str
    session: aiohttp.ClientSession

    async def ask(
        self, path: str, message: bytes, kind: str = BINARY, headers: Mapping[str, str] = NONE
    ) -> Answer:
        """Send a message."""
        body = frame(message)
        return await self.send(
            path, base64.b64encode(body) if "text" in kind else body, kind, headers
        )

    async def send(
        self, path: str, body: bytes, kind: str = BINARY, headers: Mapping[str, str] = NONE
    ) -> Answer:
        """Send a body unmodified."""
        own = {"Content-Type": kind, "X-Grpc-Web": "1", "Origin": ORIGIN, **headers}
        url = f"{self.url}{path}"
        async with self.session.post(url, data=BytesIO(body), headers=own) as answer:
            data = await answer.read()
            assert kind.partition("+")[0] + "+proto" == answer.headers["Content-Type"], data
            found = read(plain(data) if "text" in kind else data)
            return Answer(answer.status, dict(answer.headers), *found)


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("web")
    identity_models.write(folder / "models", "fp32", "FP32")
    running = serving(
        folder,
        folder / "models",
        http_endpoint="port:0",
        load_model=("fp32",),
        cors_origin=(ORIGIN,),
        service=(echo_service.REFERENCE,),
        max_message_bytes=MOST,
    )
    async with running as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module", name="browser")
async def _browser(server: RunningServer) -> AsyncIterator[Browser]:
    async with aiohttp.ClientSession() as session:
        yield Browser(f"http://{server.http}", session)


def infer_message(values: Any = (1, 2), model: str = "fp32") -> bytes:
    data = np.array(values, np.float32)
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[data.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[len(data)])
    return bytes(request.SerializeToString())


# --- Services ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
async def test_an_inference(browser: Browser, kind: str) -> None:
    answer = await browser.ask(f"{SERVICE}ModelInfer", infer_message(), kind)
    response = pb.ModelInferResponse.FromString(answer.messages[0])

    assert (200, "0", 1) == (answer.http, answer.status, len(answer.messages))
    assert np.array([1, 2], np.float32).tobytes() == response.raw_output_contents[0]
    assert ORIGIN == answer.headers["Access-Control-Allow-Origin"]


async def test_large_messages_travel_as_bytes_and_as_text(browser: Browser) -> None:
    values = np.arange(100_000, dtype=np.float32)
    for kind in (BINARY, TEXT):
        answer = await browser.ask(f"{SERVICE}ModelInfer", infer_message(values), kind)
        response = pb.ModelInferResponse.FromString(answer.messages[0])
        assert values.tobytes() == response.raw_output_contents[0]


async def test_every_kind_of_service_answers(browser: Browser) -> None:
    """Model repository, health, reflection, and a custom service."""
    index = await browser.ask(f"{SERVICE}RepositoryIndex", b"")
    health = await browser.ask("/grpc.health.v1.Health/Check", b"")
    echo = await browser.ask("/test.Echo/Unary", b"\x0a\x02hi")

    assert "fp32" == pb.RepositoryIndexResponse.FromString(index.messages[0]).models[0].name
    assert 1 == health_pb2.HealthCheckResponse.FromString(health.messages[0]).status
    assert ("0", [b""]) == (echo.status, echo.messages)


@pytest.mark.parametrize("kind", [BINARY, TEXT])
async def test_a_stream_has_its_messages_one_by_one(
    browser: Browser, server: RunningServer, kind: str
) -> None:
    """A watch reports the first status immediately and each change; leaving ends the call."""
    body = frame(health_pb2.HealthCheckRequest(service="fp32").SerializeToString())
    headers = {"Content-Type": kind, "Origin": ORIGIN}
    url = f"{browser.url}/grpc.health.v1.Health/Watch"
    data = base64.b64encode(body) if kind == TEXT else body
    async with browser.session.post(url, data=data, headers=headers) as answer:
        first = await answer.content.readany()
        instance = server.application.registry.resolve("fp32")[1]
        instance.suspend("a test")
        second = await answer.content.readany()
        instance.resume()
        third = await answer.content.readany()
    watched = [plain(part) if kind == TEXT else part for part in (first, second, third)]

    assert [frame(b"\x08\x01"), frame(b"\x08\x02"), frame(b"\x08\x01")] == watched


async def test_a_stream_of_requests_may_come_whole(browser: Browser) -> None:
    """`ModelStreamInfer` with two requests in one body, as browsers cannot stream them."""
    body = frame(infer_message([1])) + frame(infer_message([2], model="none"))
    answer = await browser.send(f"{SERVICE}ModelStreamInfer", body)
    found = [pb.ModelStreamInferResponse.FromString(one) for one in answer.messages]

    assert "0" == answer.status
    assert ["", "Request for unknown model: 'none' is not found"] == [
        one.error_message for one in found
    ]


# --- Errors --------------------------------------------------------------------------------------


async def test_an_error_is_in_the_trailers(browser: Browser) -> None:
    answer = await browser.ask(f"{SERVICE}ModelInfer", infer_message(model="none"))

    assert (200, [], "5") == (answer.http, answer.messages, answer.status)
    assert "Request for unknown model: 'none' is not found" == answer.text


@pytest.mark.parametrize(
    "path", ["/test.Echo/Nothing", "/nobody.Knows/This", "/v2/models/fp32/infer", "/", "//"]
)
async def test_a_method_that_is_not_there(browser: Browser, path: str) -> None:
    answer = await browser.ask(path, b"")

    assert ("12", "Method not found") == (answer.status, answer.text)


HOSTILE: dict[str, tuple[str, bytes, str, str]] = {
    "nothing": (BINARY, b"", "12", "needs one message, got none"),
    "half a prefix": (BINARY, b"\0\0\0", "13", "ended within a message"),
    "a length too long": (BINARY, frame(b"ab", length=3), "13", "ended within a message"),
    "a length too short": (BINARY, frame(b"abc", length=2), "12", "takes one message, got more"),
    "two messages": (BINARY, frame(b"") * 2, "12", "takes one message, got more"),
    "a length of 4 GiB": (BINARY, frame(b"", length=2**32 - 1), "8", "has 4294967295 bytes"),
    "above the limit": (BINARY, frame(b"", length=MOST + 1), "8", "(max_message_bytes)"),
    "a body above the limit": (BINARY, frame(bytes(MOST)), "8", "raise max_message_bytes"),
    "compressed": (BINARY, frame(b"", flag=1), "12", "compressed messages are not supported"),
    "another flag": (BINARY, frame(b"", flag=2), "13", "is neither 0 nor 1"),
    "trailers": (BINARY, frame(b"grpc-status:0\r\n", flag=0x80), "13", "is neither 0 nor 1"),
    "compressed trailers": (BINARY, frame(b"", flag=0x81), "13", "is neither 0 nor 1"),
    "trailers behind": (
        BINARY,
        frame(b"") + frame(b"a:b\r\n", flag=0x80),
        "12",
        "takes one message, got more",
    ),
    "no protobuf": (BINARY, frame(b"\xff"), "13", ""),
    "a cut quantum": (TEXT, base64.b64encode(frame(b""))[:-1], "3", "got 7 characters"),
    "no base64": (TEXT, b"****", "3", "expected base64"),
    "padding alone": (TEXT, b"====", "3", "expected base64"),
    "much padding": (TEXT, b"AA==" + b"=" * 400, "3", "expected base64"),
    "a break": (TEXT, base64.b64encode(frame(b""))[:-1] + b"\n", "3", "expected base64"),
    "of another alphabet": (TEXT, b"__--", "3", "expected base64"),
    "binary as text": (TEXT, frame(b"abc"), "3", "expected base64"),
}


@pytest.mark.parametrize(("kind", "body", "status", "text"), HOSTILE.values(), ids=list(HOSTILE))
async def test_hostile_bodies_are_refused_and_nothing_stays(
    browser: Browser, server: RunningServer, kind: str, body: bytes, status: str, text: str
) -> None:
    answer = await browser.send(f"{SERVICE}ModelInfer", body, kind)
    again = await browser.ask(f"{SERVICE}ModelInfer", infer_message(), kind)

    assert (status, "0") == (answer.status, again.status)
    assert text in answer.text.replace("%2C", ",")
    ledger = server.application.ledger
    await until(lambda: ledger.held_for(Kind.REQUESTS) == 0)


async def test_text_may_be_padded_part_by_part(browser: Browser) -> None:
    """As from a proxy that encodes whatever bytes it has at the time."""
    body = frame(infer_message())
    cut = [body[:1], body[1:6], body[6:]]
    text = b"".join(map(base64.b64encode, cut))
    answer = await browser.send(f"{SERVICE}ModelInfer", text, TEXT)

    assert b"=" in text[:-2]
    assert "0" == answer.status


# --- Headers -------------------------------------------------------------------------------------


async def test_a_deadline_is_kept(browser: Browser) -> None:
    """An expired deadline, an invalid one, and one within an endless stream."""
    asked = {
        "at once": ("/grpc.health.v1.Health/Check", "1n", "4"),
        "none": ("/grpc.health.v1.Health/Check", "soon", "3"),
        "in time": ("/grpc.health.v1.Health/Check", "20S", "0"),
        "a stream": ("/grpc.health.v1.Health/Watch", "50m", "4"),
    }
    found = {}
    for name, (path, timeout, _) in asked.items():
        found[name] = (await browser.ask(path, b"", headers={"grpc-timeout": timeout})).status

    assert {name: status for name, (_, _, status) in asked.items()} == found


async def test_a_browser_may_send_the_headers_of_its_clients(browser: Browser) -> None:
    """CORS preflights (Fetch 4.8) from an allowed origin and from another one."""
    wanted = "authorization,content-type,grpc-timeout,x-grpc-web,x-user-agent"
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": wanted,
    }
    url = f"{browser.url}{SERVICE}ModelInfer"
    async with browser.session.options(url, headers=headers) as answer:
        allowed = answer.headers
        assert 204 == answer.status
    async with browser.session.options(url, headers=headers | {"Origin": "https://b"}) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert answer.status in (403, 405)
    other = {"Content-Type": BINARY, "Origin": "https://b.example"}
    async with browser.session.post(url, data=frame(infer_message()), headers=other) as answer:
        assert 403 == answer.status

    assert ORIGIN == allowed["Access-Control-Allow-Origin"]
    assert wanted == allowed["Access-Control-Allow-Headers"]
    assert "POST" in allowed["Access-Control-Allow-Methods"]


async def test_it_is_off_unless_pages_of_others_may_ask(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    async with serve(tmp_path / "models", http_endpoint="port:0") as server:
        async with aiohttp.ClientSession() as session:
            url = f"http://{server.http}/grpc.health.v1.Health/Check"
            headers = {"Content-Type": BINARY}
            async with session.post(url, data=frame(b""), headers=headers) as answer:
                found = answer.status, await answer.json()

    assert (404, {"error": "there is nothing at '/grpc.health.v1.Health/Check'"}) == found


async def test_the_same_rules_quotas_and_runtime_of_a_mesh(serve: Serve, tmp_path: Path) -> None:
    """An unknown caller, a known one, and one over its quota; web pages may not act as a mesh."""
    (tmp_path / "models").mkdir()
    file = tmp_path / "rules.json"
    allow = ["health", "runtime", "service"]
    caller = {"name": "a", "token": digest_of(TOKEN), "allow": allow}
    quota = {"requests_per_second": 0.001, "burst": 4}
    file.write_text(json.dumps({"caller": [caller | quota]}))
    settings: dict[str, Any] = {
        "http_endpoint": "port:0",
        "cors_origin": ("*",),
        "modelmesh": True,
        "access_rules": str(file),
    }
    check = "/grpc.health.v1.Health/Check"
    shown = {"authorization": f"Bearer {TOKEN}"}
    asked = [
        (check, NONE),
        ("/mmesh.ModelRuntime/runtimeStatus", NONE),
        ("/nobody.Knows/This", NONE),
        (f"{SERVICE}ServerMetadata", shown),
        ("/mmesh.ModelRuntime/runtimeStatus", shown),
        *[(check, shown)] * 4,
    ]
    async with serve(tmp_path / "models", **settings) as server:
        async with aiohttp.ClientSession() as session:
            browser = Browser(f"http://{server.http}", session)
            found = [
                (await browser.ask(path, b"", headers=headers)).status for path, headers in asked
            ]

    assert ["16", "16", "16", "7", "12", "0", "0", "0", "8"] == found


# --- Clients that leave --------------------------------------------------------------------------


async def test_a_client_that_leaves_ends_its_call(browser: Browser, server: RunningServer) -> None:
    """While sending its body, and during an answer; nothing stays allocated or is logged."""
    http = server.http
    assert http is not None
    headers = [("Content-Type", BINARY), ("Origin", ORIGIN)]
    watch = message("POST", "/grpc.health.v1.Health/Watch", *headers, body=frame(b""))
    with capture_logs() as log:
        for text in (watch[:-2], watch):
            async with connect(http) as client:
                await client.send(text)
                if text == watch:
                    await asyncio.wait_for(client.reader.readuntil(frame(b"\x08\x01")), 20)
        ledger = server.application.ledger
        await until(lambda: ledger.held_for(Kind.REQUESTS) == 0)
        answer = await browser.ask("/grpc.health.v1.Health/Check", b"")

    assert "0" == answer.status
    assert [] == [record for record in log if record["log_level"] == "error"]
