"""Proxies in front of a server: which of them may state a client's address, on each route."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import h2.events
import numpy as np
import pytest
from support import identity_models
from support.http import Answer, Connection, message
from support.server import RunningServer, Serve, serving
from support.wire import Wire, framed, request_headers
from tritonclient.grpc import service_pb2 as pb

# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.
# pyright: reportAttributeAccessIssue=false

PROXY, OTHER = "127.0.0.2", "127.0.0.1"
CLIENT = "203.0.113.9"
HERE = "127.0.0.1"
SERVICE = "/inference.GRPCInferenceService/"
WEB = ("Content-Type", "application/grpc-web+proto")

Headers = tuple[tuple[str, str], ...]
FOR, PREFIX = "X-Forwarded-For", "X-Forwarded-Prefix"
SAID: dict[Headers, str] = {
    ((FOR, CLIENT),): CLIENT,
    ((FOR, f"198.51.100.1, {CLIENT}"),): CLIENT,
    ((FOR, "198.51.100.1"), (FOR, f"{CLIENT}, {PROXY}")): CLIENT,
    ((FOR, "2001:db8::1"),): "[2001:db8::1]",
    (("Forwarded", f'for="{CLIENT}:81";proto=https'),): f"{CLIENT}:81",
    (("Forwarded", f"for=198.51.100.1, for={CLIENT}"),): CLIENT,
    ((FOR, CLIENT), ("Forwarded", "for=198.51.100.1")): CLIENT,
    ((FOR, "nobody"),): PROXY,
    (("X-Real-IP", CLIENT), ("Via", "1.1 proxy")): PROXY,
    (): PROXY,
}
"""Header set by a proxy -> client address that the server must use; without port if the proxy's."""


@asynccontextmanager
async def connected(address: str, source: str) -> AsyncIterator[Any]:
    """Connect to a server from a local source address, or to a Unix socket."""
    if address.startswith("unix:"):
        pair = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        pair = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        yield pair
    finally:
        pair[1].close()


class Asking:
    """Sends requests from one address to all routes of a server."""

    def __init__(self, server: RunningServer, source: str) -> None:
        self.server, self.source = server, source

    async def rest(self, data: bytes) -> Answer:
        assert self.server.http is not None
        async with connected(self.server.http, self.source) as pair:
            return await Connection(*pair).ask(data)

    async def grpc(self, method: str, request: Any, said: Headers) -> str:
        """Return status and message."""
        async with connected(self.server.url, self.source) as pair:
            wire = Wire(*pair)
            fields = [(name.lower(), value) for name, value in said]
            stream = wire.send(request_headers(SERVICE + method, *fields), _bytes(request))
            await wire.until(h2.events.StreamEnded, stream)
            block: Any = [e for e in wire.events if hasattr(e, "headers")][-1]
            found = dict(block.headers)
            return f"{found['grpc-status']} {found.get('grpc-message', '')}"

    async def web(self, method: str, request: Any, said: Headers) -> str:
        """Return status and message."""
        assert self.server.http is not None
        async with connected(self.server.http, self.source) as pair:
            client, body = Connection(*pair), framed(_bytes(request))
            await client.ask(message("POST", SERVICE + method, WEB, *said, body=body))
            lines = (await client.reader.readuntil(b"\r\n0\r\n\r\n")).partition(b"grpc-status:")[2]
            status, _, rest = lines.decode().partition("\r\n")
            return f"{status} {rest}"


def tensors(**parameters: Any) -> Any:
    """Return an inference request; with parameters, its input has these instead of data."""
    data = [] if parameters else [np.ones(2, np.float32).tobytes()]
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=data)
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[2])
    for name, value in parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(tensor.parameters[name], kind, value)
    return request


def asked_in_json(**more: Any) -> bytes:
    tensor = {"name": "x", "shape": [2], "datatype": "FP32"} | (more or {"data": [1, 2]})
    return json.dumps({"inputs": [tensor]}).encode()


async def a_page(asking: Asking, said: Headers) -> None:
    assert 200 == (await asking.rest(message("GET", "/v2/models/m", *said))).status


async def an_inference(asking: Asking, said: Headers) -> None:
    body = asked_in_json()
    asked = message("POST", "/v2/models/m/infer", *said, body=body)
    assert 200 == (await asking.rest(asked)).status


async def a_call(asking: Asking, said: Headers) -> None:
    assert "0 " == await asking.grpc("ModelInfer", tensors(), said)


async def a_method(asking: Asking, said: Headers) -> None:
    request = pb.ModelMetadataRequest(name="m")
    assert "0 " == await asking.grpc("ModelMetadata", request, said)


async def a_call_of_a_page(asking: Asking, said: Headers) -> None:
    assert (await asking.web("ModelInfer", tensors(), said)).startswith("0 ")


DOORS: tuple[Callable[[Asking, Headers], Awaitable[None]], ...] = (
    a_page,
    an_inference,
    a_call,
    a_method,
    a_call_of_a_page,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "m", "FP32")
    return root


async def seen(
    tmp_path: Path, models: Path, senders: tuple[str, ...], **settings: Any
) -> tuple[list[str], list[str]]:
    """Call every route three times in mixed order; return expected and logged addresses."""
    log, wanted = tmp_path / "access.jsonl", []
    rows = [(door, sender, said) for door in DOORS for sender in senders for said in SAID] * 3
    random.Random(31).shuffle(rows)
    endpoints = {"http_endpoint": "port:0"} | settings
    async with serving(
        tmp_path,
        models,
        load_model=("*",),
        access_log=str(log),
        cors_origin=("https://app.example",),  # gRPC-Web is off without it
        **endpoints,
    ) as server:
        for door, sender, said in rows:
            await door(Asking(server, sender), said)
            believed = SAID[said] if sender in settings["trusted_proxy"] else sender
            wanted.append(believed.replace(PROXY, sender))
    logged = [json.loads(line)["peer"] for line in log.read_text().splitlines()]
    return wanted, [address.removesuffix(_port(address)) for address in logged]


def _port(address: str) -> str:
    """Return the ephemeral port of a direct connection, or nothing for a forwarded client."""
    host, mark, port = address.rpartition(":")
    return f":{port}" if mark and host in (PROXY, OTHER) else ""


async def test_a_client_is_whom_a_trusted_proxy_names(tmp_path: Path, models: Path) -> None:
    wanted, logged = await seen(tmp_path, models, (PROXY, OTHER), trusted_proxy=(PROXY,))

    assert wanted == logged


async def test_a_socket_is_believed_where_it_is_trusted(tmp_path: Path, models: Path) -> None:
    for trusted in ((PROXY, "unix"), (PROXY,)):
        folder = tmp_path / trusted[-1]
        folder.mkdir()
        wanted, logged = await seen(
            folder,
            models,
            ("unix",),
            trusted_proxy=trusted,
            http_endpoint=f"unix:{folder}/http",
            grpc_endpoint=f"unix:{folder}/grpc",
        )

        assert wanted == logged


# --- Operations for local clients only -----------------------------------------------------------

LOCAL: dict[tuple[str, Headers], bool] = {
    (OTHER, ()): True,
    (OTHER, ((FOR, CLIENT),)): False,
    (OTHER, ((FOR, HERE),)): False,
    (OTHER, (("Forwarded", "for=127.0.0.1"),)): False,
    (OTHER, (("Via", "1.1 cache"),)): False,
    (PROXY, ()): False,
    (PROXY, ((FOR, CLIENT),)): False,
    (PROXY, ((FOR, HERE),)): False,
    (PROXY, (("Forwarded", "for=127.0.0.1"),)): False,
}
"""Sender and its header -> whether the client counts as local; behind a proxy it never does."""


@contextmanager
def memory() -> Any:
    region = shared_memory.SharedMemory(create=True, size=16)
    try:
        yield region.name
    finally:
        region.close()
        region.unlink()


async def test_who_comes_through_a_proxy_of_this_machine_is_not_local(
    serve: Serve, models: Path
) -> None:
    """Register a region, and name one in an inference, on each route that accepts it."""
    found, region = {}, "/v2/systemsharedmemory/region/r"
    named: dict[str, Any] = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    settings: dict[str, Any] = {"cors_origin": ("https://app.example",), "trusted_proxy": (PROXY,)}
    with memory() as key:
        asked = json.dumps({"key": key, "offset": 0, "byte_size": 16}).encode()
        register = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=16)
        infer = tensors(**named)
        async with serve(models, load_model=("*",), http_endpoint="port:0", **settings) as server:
            for (sender, said), _ in sorted(LOCAL.items(), key=lambda _: random.Random(7).random()):
                asking = Asking(server, sender)
                results = []
                for _ in range(2):
                    drop = message("POST", f"{region}/unregister", body=b"{}")
                    done = message("POST", f"{region}/register", body=asked)
                    by_name = ("POST", "/v2/models/m/infer")
                    body = asked_in_json(parameters=named)
                    results += [
                        (await Asking(server, OTHER).rest(drop)).status == 200,
                        (
                            await asking.rest(
                                message("POST", f"{region}/register", *said, body=asked)
                            )
                        ).status
                        == 200,
                        (await Asking(server, OTHER).rest(drop)).status == 200,
                        (await asking.grpc("SystemSharedMemoryRegister", register, said)) == "0 ",
                        (await Asking(server, OTHER).rest(drop)).status == 200,
                        (await asking.web("SystemSharedMemoryRegister", register, said))[:2]
                        == "0 ",
                        (await Asking(server, OTHER).rest(drop)).status == 200,
                        (await Asking(server, OTHER).rest(done)).status == 200,
                        (await asking.rest(message(*by_name, *said, body=body))).status == 200,
                        (await asking.grpc("ModelInfer", infer, said)) == "0 ",
                        (await asking.web("ModelInfer", infer, said))[:2] == "0 ",
                    ]
                found[sender, said] = results

    wanted = {
        row: [True, ok, True, ok, True, ok, True, True, ok, ok, ok] * 2 for row, ok in LOCAL.items()
    }
    assert wanted == found


def _bytes(request: Any) -> bytes:
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("has_rules", [True, False])
async def test_clients_of_a_socket_are_not_the_user_of_its_proxy(
    tmp_path: Path, models: Path, *, has_rules: bool
) -> None:
    """The host is checked there, too: a browser behind the proxy may be misled."""
    rules = tmp_path / "rules.json"
    caller = {"name": "me", "unix_user": os.getuid(), "allow": ["metadata"]}
    rules.write_text(json.dumps({"caller": [caller]}))
    found = {}
    for trusted in ((), ("unix",)):
        settings: dict[str, Any] = {"http_endpoint": f"unix:{tmp_path}/http"}
        if has_rules:
            settings["access_rules"] = str(rules)
        async with serving(tmp_path, models, trusted_proxy=trusted, **settings) as server:
            for host in (b"localhost", b"evil.example"):
                asked = message("GET", "/v2").replace(b"localhost", host)
                found[trusted, host] = (await Asking(server, "unix").rest(asked)).status

    assert {
        ((), b"localhost"): 200,
        ((), b"evil.example"): 200,
        (("unix",), b"localhost"): 401 if has_rules else 200,
        (("unix",), b"evil.example"): 401 if has_rules else 421,
    } == found


# --- Addresses that the server reports -----------------------------------------------------------


@pytest.fixture
async def server(serve: Serve, models: Path) -> AsyncIterator[RunningServer]:
    async with serve(models, http_endpoint="port:0", trusted_proxy=(PROXY,)) as running:
        yield running


@pytest.mark.parametrize("sender", [PROXY, OTHER])
async def test_a_description_names_the_path_that_a_trusted_proxy_tells(
    server: RunningServer, sender: str
) -> None:
    found = []
    for said in ("/ml", "//evil.example", "/a/b/", "/ml"):
        asked = message("GET", "/v2/docs/openapi.json", (PREFIX, said))
        answer = await Asking(server, sender).rest(asked)
        found.append(answer.json["servers"][0]["url"])

    told = ["/ml", "../..", "/a/b", "/ml"]
    assert (told if sender == PROXY else ["../.."] * 4) == found


@pytest.mark.parametrize("sender", [PROXY, OTHER])
async def test_a_place_is_a_relative_one_whatever_is_told(
    server: RunningServer, sender: str
) -> None:
    said = ((FOR, CLIENT), ("X-Forwarded-Proto", "https"), (PREFIX, "/ml"))
    answer = await Asking(server, sender).rest(message("GET", "/v2/docs/", *said))

    assert (308, "../docs") == (answer.status, answer.headers["location"])


async def test_a_page_is_of_this_server_by_the_scheme_that_its_proxy_saw(
    server: RunningServer,
) -> None:
    found = {}
    for sender in (PROXY, OTHER):
        for scheme in ("https", "http"):
            said = ((FOR, CLIENT), ("X-Forwarded-Proto", "https"))
            asked = message("GET", "/v2", ("Origin", f"{scheme}://localhost"), *said)
            found[sender, scheme] = (await Asking(server, sender).rest(asked)).status

    assert {
        (PROXY, "https"): 200,
        (PROXY, "http"): 403,
        (OTHER, "https"): 200,
        (OTHER, "http"): 200,
    } == found
