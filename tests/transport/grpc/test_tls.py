"""gRPC over TLS: grpcio as the client, and refused connections (RFC 9113, 9.2)."""

import asyncio
import ssl
from pathlib import Path

import grpc.aio
import pytest
import trustme
from support.server import Serve
from support.tls import write_certificate

LIVE = "/inference.GRPCInferenceService/ServerLive"
ALIVE = b"\x08\x01"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The CA that signs the certificates of the server and its clients."""
    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """Settings of a server with a certificate for localhost."""
    return write_certificate(authority, tmp_path)


async def live(url: str, credentials: grpc.ChannelCredentials) -> bytes:
    port = url.rpartition(":")[2]
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        answer: bytes = await channel.unary_unary(LIVE)(b"", timeout=20)
    return answer


def trusting(
    authority: trustme.CA, client: trustme.LeafCert | None = None
) -> grpc.ChannelCredentials:
    root = authority.cert_pem.bytes()
    if client is None:
        return grpc.ssl_channel_credentials(root)
    chain = b"".join(blob.bytes() for blob in client.cert_chain_pems)
    return grpc.ssl_channel_credentials(root, client.private_key_pem.bytes(), chain)


async def test_a_drain_waits_for_no_handshake(
    serve: Serve, tmp_path: Path, certificate: dict[str, str]
) -> None:
    async with serve(tmp_path, **certificate) as server:
        host, _, port = server.url.rpartition(":")
        _, silent = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await server.application.grpc.drain(5)
        silent.close()


async def test_a_client_that_trusts_the_server_is_answered(
    serve: Serve, tmp_path: Path, authority: trustme.CA, certificate: dict[str, str]
) -> None:
    async with serve(tmp_path, **certificate) as server:
        answer = await live(server.url, trusting(authority))

    assert ALIVE == answer


async def test_clients_show_certificates_where_they_have_to(
    serve: Serve, tmp_path: Path, authority: trustme.CA, certificate: dict[str, str]
) -> None:
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(authority.cert_pem.bytes())
    known = authority.issue_cert("client.example")
    async with serve(tmp_path, **certificate, tls_client_ca=str(authorities)) as server:
        answer = await live(server.url, trusting(authority, known))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await live(server.url, trusting(authority))

    assert ALIVE == answer
    assert grpc.StatusCode.UNAVAILABLE is refused.value.code()


async def test_tls_without_http2_is_sent_away(
    serve: Serve, tmp_path: Path, authority: trustme.CA, certificate: dict[str, str]
) -> None:
    """RFC 9113, 3.2: HTTP/2 over TLS is negotiated by ALPN."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serve(tmp_path, **certificate) as server:
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
        async with asyncio.timeout(20):
            received = await reader.read()
        writer.close()

    assert received.endswith(b"TLS without ALPN h2")
