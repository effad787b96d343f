"""TLS on every endpoint of a server: who is admitted, and who a call is attributed to."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from structlog.testing import capture_logs
from support.conditions import until
from support.http import connect, message
from support.server import RunningServer, serving
from support.tls import write_certificate
from support.wire import Wire, request_headers

from xlaserve.app import server as app
from xlaserve.serving.call import Call
from xlaserve.serving.gates import Gates

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 20
LIVE = request_headers("/inference.GRPCInferenceService/ServerLive")
AUTHORITY = trustme.CA()
CLIENT = AUTHORITY.issue_cert("client.example", common_name="client")
ENDPOINTS = ("grpc_endpoint", "grpc_data_endpoint", "http_endpoint", "metrics_endpoint")


class Everywhere:
    """A server with four endpoints that requires client certificates."""

    def __init__(self, server: RunningServer, calls: list[Call], files: dict[str, str]) -> None:
        self.server = server
        self.calls = calls
        self.files = files
        self.ports: dict[str, int] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def everywhere(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Everywhere]:
    folder, calls = tmp_path_factory.mktemp("tls"), list[Call]()
    (folder / "models").mkdir()
    (folder / "ca.pem").write_bytes(AUTHORITY.cert_pem.bytes())
    files = {**write_certificate(AUTHORITY, folder), "tls_client_ca": str(folder / "ca.pem")}
    with pytest.MonkeyPatch.context() as patched, capture_logs() as log:
        patched.setattr(app, "Gates", lambda **_: Gates(permission=calls.append))
        patched.setattr(app, "CHECK_SECONDS", 0.05)
        # Equal endpoints would be one endpoint.
        endpoints = dict.fromkeys(ENDPOINTS, "port:0") | {"grpc_data_endpoint": "port:00"}
        timeouts = {"preface_seconds": 1.0}
        async with serving(folder, folder / "models", **endpoints, **files, **timeouts) as server:
            found = Everywhere(server, calls, files)
            listening = next(record for record in log if "listening" == record["event"])
            for endpoint in ENDPOINTS:
                address = listening[endpoint.removesuffix("_endpoint")]
                found.ports[endpoint] = int(address.rpartition(":")[2])
            yield found


def context(client: trustme.LeafCert | None = CLIENT) -> ssl.SSLContext:
    found = ssl.create_default_context()
    AUTHORITY.configure_trust(found)
    if client is not None:
        client.configure_cert(found)
    return found


@asynccontextmanager
async def opened(port: int, tls: ssl.SSLContext) -> AsyncIterator[Any]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost"
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(endpoint: str, port: int, tls: ssl.SSLContext) -> str:
    """Send a request to an endpoint; return its status."""
    async with asyncio.timeout(SECONDS):
        if endpoint.startswith("grpc"):
            tls.set_alpn_protocols(["h2"])
            async with opened(port, tls) as (reader, writer):
                wire = Wire(reader, writer)
                return str(dict(await wire.trailers(wire.send(LIVE)))["grpc-status"])
        async with opened(port, tls) as (reader, writer):
            writer.write(message("GET", "/metrics" if endpoint[0] == "m" else "/v2/health/live"))
            return str((await reader.readline()).split()[1].decode())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_call_is_from_the_certificate_of_its_connection(
    everywhere: Everywhere, endpoint: str
) -> None:
    everywhere.calls.clear()
    status = await ask(endpoint, everywhere.ports[endpoint], context())
    peer = everywhere.calls[0].peer

    assert status in ("0", "200")
    assert (endpoint, ("DNS:client.example",)) == (peer.listener, peer.tls_names)
    assert "commonName=client" in str(peer.tls_identity).split(",")


YESTERDAY = datetime.now(UTC) - timedelta(days=1)
STRANGERS: dict[str, Callable[[], trustme.LeafCert | None]] = {
    "no certificate": lambda: None,
    "another authority": lambda: trustme.CA().issue_cert("client.example"),
    "expired": lambda: AUTHORITY.issue_cert("client.example", not_after=YESTERDAY),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stranger", STRANGERS)
async def test_strangers_are_not_let_in(
    everywhere: Everywhere, endpoint: str, stranger: str
) -> None:
    everywhere.calls.clear()
    with pytest.raises((ssl.SSLError, ConnectionError, IndexError, AssertionError)):
        # In TLS 1.3 the client notices a rejection when it first reads.
        await ask(endpoint, everywhere.ports[endpoint], context(STRANGERS[stranger]()))

    assert not everywhere.calls


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("text", ["", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET / HTTP/1.1\r\n\r\n"])
async def test_what_begins_no_handshake_is_dropped(
    everywhere: Everywhere, endpoint: str, text: str
) -> None:
    """Plain text on a TLS port, or silence: dropped within preface_seconds."""
    async with connect(f"127.0.0.1:{everywhere.ports[endpoint]}") as client:
        await client.send(text.encode())
        async with asyncio.timeout(SECONDS):
            with suppress(ConnectionError):
                assert b"HTTP" not in await client.reader.read()


async def test_a_renewed_certificate_is_shown_soon(everywhere: Everywhere) -> None:
    """On every endpoint, without a signal; an invalid pair before it changes nothing."""
    folder = Path(everywhere.files["tls_certificate"]).parent

    async def serials() -> set[str]:
        found = set()
        for port in everywhere.ports.values():
            async with opened(port, context()) as (_, writer):
                found.add(writer.get_extra_info("peercert")["serialNumber"])
        return found

    before = await serials()
    with capture_logs() as log:
        Path(everywhere.files["tls_key"]).write_text("garbage")
        await until(lambda: any("not reloaded" == record["event"] for record in log))
        assert before == await serials()
        write_certificate(AUTHORITY, folder)
        await until(lambda: any("reloaded" == record["event"] for record in log))
    after = await serials()

    assert 1 == len(before) == len(after)
    assert before != after


async def test_silent_connections_count_and_make_room(everywhere: Everywhere) -> None:
    """H10: connections without a handshake are counted, and dropped in time."""
    grpc = everywhere.server.application.grpc
    (port, *_) = everywhere.ports.values()
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    await until(lambda: 20 == grpc.in_handshake)
    await until(lambda: 0 == grpc.in_handshake)
    for _, writer in silent:
        writer.close()

    assert "0" == await ask("grpc_endpoint", port, context())
