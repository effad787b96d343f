"""Failed handshakes end with the TLS alert that says why, as seen on the wire."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from support.tls import write_certificate

from xlaserve.net.accepting import Acceptor, Handshakes
from xlaserve.net.alerts import NO_APPLICATION_PROTOCOL, offered_protocols
from xlaserve.net.tls import ServerTls
from xlaserve.settings import Settings
from xlaserve.settings.choices import TlsEndpoint

SECONDS = 30
AUTHORITY = trustme.CA()
V2, V3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
VERSIONS = pytest.mark.parametrize("version", [V2, V3], ids=["1.2", "1.3"])


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    found: Callable[[Coroutine[Any, Any, Any]], Any] = request.param
    return found


@asynccontextmanager
async def accepting(
    folder: Path, endpoint: TlsEndpoint, *, asks: bool = False
) -> AsyncIterator[tuple[str, int]]:
    """Accept connections over TLS; with `asks`, only from clients with a certificate."""
    settings: dict[str, Any] = write_certificate(AUTHORITY, folder)
    if asks:
        (folder / "ca.pem").write_bytes(AUTHORITY.cert_pem.bytes())
        settings["tls_client_ca"] = str(folder / "ca.pem")
    tls = ServerTls(Settings(repository=folder, **settings))
    tls.reload()
    make_context = tls.of(endpoint)
    assert make_context is not None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        handshakes = Handshakes(make_context, SECONDS)
        acceptor = Acceptor(listening, asyncio.Protocol, handshakes=handshakes)
        yield listening.getsockname()
        acceptor.stop()
        await acceptor.aborted()


def trusting(
    version: ssl.TLSVersion, *, alpn: tuple[str, ...] = (), names_authority: bool = True
) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if names_authority:
        AUTHORITY.configure_trust(context)
    context.minimum_version = context.maximum_version = version
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


async def told(address: tuple[str, int], context: ssl.SSLContext) -> str:
    """Return the client library's name for the alert that ended a connection."""

    def ask() -> str:
        with socket.create_connection(address, timeout=SECONDS) as connection:
            try:
                with context.wrap_socket(connection, server_hostname="localhost") as tls:
                    tls.send(b"GET / HTTP/1.1\r\n\r\n")
                    tls.recv(1)
            except ssl.SSLError as error:
                return str(error.reason)
        return "no alert"

    return await asyncio.to_thread(ask)


MISSING = {V2: "SSLV3_ALERT_HANDSHAKE_FAILURE", V3: "TLSV13_ALERT_CERTIFICATE_REQUIRED"}
# Older versions of OpenSSL name alerts of TLS 1.2 with SSLV3.


@VERSIONS
def test_a_client_without_a_certificate_is_told(
    run: Any, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    async def ask() -> str:
        async with accepting(tmp_path, TlsEndpoint.HTTP, asks=True) as address:
            return await told(address, trusting(version))

    assert MISSING[version] == run(ask())


@VERSIONS
def test_a_client_of_another_authority_is_told(
    run: Any, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    context = trusting(version)
    trustme.CA().issue_cert("client.example").configure_cert(context)

    async def ask() -> str:
        async with accepting(tmp_path, TlsEndpoint.HTTP, asks=True) as address:
            return await told(address, context)

    assert run(ask()).endswith("ALERT_UNKNOWN_CA")


def test_a_client_of_an_old_version_is_told(run: Any, tmp_path: Path) -> None:
    """A TLS 1.1 ClientHello, which OpenSSL would not send itself."""
    hello = (
        bytes.fromhex("16 0301 002d 01 000029 0302")
        + bytes(32)
        + bytes.fromhex("00 0002 002f 0100")
    )

    async def ask() -> bytes:
        async with accepting(tmp_path, TlsEndpoint.HTTP) as address:
            return await answered(address, hello)

    assert b"\x02\x46" == run(ask())[-2:]  # fatal, protocol_version


async def answered(address: tuple[str, int], said: bytes) -> bytes:
    """Return all bytes that the server sends on a connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(said)
    async with asyncio.timeout(SECONDS):
        found = await reader.read()
    writer.close()
    return found


@VERSIONS
@pytest.mark.parametrize(
    ("endpoint", "alpn", "refused"),
    [
        (TlsEndpoint.GRPC, ("http/1.1",), True),
        (TlsEndpoint.GRPC, ("http/1.1", "h2"), False),
        (TlsEndpoint.HTTP, ("h2", "spdy/3"), True),
        (TlsEndpoint.HTTP, ("h2", "http/1.1"), False),
        (TlsEndpoint.HTTP, (), False),
    ],
)
def test_protocols_that_have_none_of_the_endpoint_are_refused(
    tmp_path: Path,
    version: ssl.TLSVersion,
    endpoint: TlsEndpoint,
    alpn: tuple[str, ...],
    refused: bool,
) -> None:
    """RFC 7301, 3.2: the alert no_application_protocol, in both versions of TLS."""

    async def ask() -> tuple[bytes, bool]:
        context = trusting(version, alpn=alpn)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        async with accepting(tmp_path, endpoint) as address, asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(outgoing.read())
            first = await reader.read(7)
            writer.transport.abort()
            return first, first[:1] == b"\x16"

    found, goes_on = uvloop.run(ask())

    assert (refused, not refused) == (found == NO_APPLICATION_PROTOCOL, goes_on)


def hello(*protocols: str) -> bytes:
    context = ssl.create_default_context()
    context.set_alpn_protocols(list(protocols))
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def test_what_a_hello_offers_is_read() -> None:
    whole = hello("h2", "http/1.1")

    assert [b"h2", b"http/1.1"] == offered_protocols(whole)
    # OpenSSL handles half a ClientHello, or another protocol.
    assert all(offered_protocols(whole[:count]) is None for count in range(len(whole) - 1))
    assert offered_protocols(b"GET / HTTP/1.1\r\n\r\n") is None


def test_a_hello_with_any_octet_changed_is_read_or_left() -> None:
    """No length in it makes the parser raise an exception."""
    whole = hello("h2")
    for at in range(5, len(whole)):
        for octet in (0, 255):
            changed = whole[:at] + bytes([octet]) + whole[at + 1 :]
            offered = offered_protocols(changed)
            assert offered is None or all(isinstance(one, bytes) for one in offered)
