"""The identity of the peer: determined once per connection, for every kind of connection."""

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from support.server import Serve
from support.tls import write_certificate
from support.wire import connect, request_headers

from xlaserve.app import server as app
from xlaserve.serving.call import Call, Peer
from xlaserve.serving.gates import Gates
from xlaserve.serving.peers import peer_of

LIVE = request_headers("/inference.GRPCInferenceService/ServerLive")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that pass the gates of the test's servers."""
    passed: list[Call] = []
    monkeypatch.setattr(app, "Gates", lambda **_: Gates(permission=passed.append))
    return passed


async def peers(calls: list[Call], url: str, tls: ssl.SSLContext | None = None) -> list[Peer]:
    """Send two requests on one connection; return the peers of the calls."""
    async with connect(url, tls) as wire:
        for _ in range(2):
            await wire.trailers(wire.send(LIVE))
    return [call.peer for call in calls]


async def test_over_tcp_it_is_an_address(serve: Serve, tmp_path: Path, calls: list[Call]) -> None:
    async with serve(tmp_path) as server:
        first, second = await peers(calls, server.url)
    host, _, port = first.address.rpartition(":")

    assert first is second
    assert ("127.0.0.1", True) == (host, 0 < int(port) < 1 << 16)
    assert (None, None) == (first.tls_identity, first.unix_user)


async def test_over_a_unix_socket_it_is_a_user(
    serve: Serve, tmp_path: Path, calls: list[Call]
) -> None:
    async with serve(tmp_path, grpc_endpoint=f"unix:{tmp_path}/s") as server:
        first, second = await peers(calls, server.url)

    assert first is second
    assert Peer("grpc_endpoint", "unix", None, os.getuid()) == first


async def test_the_listener_is_that_of_the_connection(
    serve: Serve, tmp_path: Path, calls: list[Call]
) -> None:
    ends = {name: f"unix:{tmp_path}/{name}" for name in ("grpc_data_endpoint", "grpc_endpoint")}
    async with serve(tmp_path, **ends):
        for url in ends.values():
            await peers(calls, url)

    assert [name for name in ends for _ in range(2)] == [call.peer.listener for call in calls]


@pytest.mark.parametrize("known", [True, False])
async def test_over_tls_it_is_the_subject_of_a_certificate_that_was_verified(
    serve: Serve, tmp_path: Path, calls: list[Call], known: bool
) -> None:
    """A certificate that was not requested is ignored."""
    authority = trustme.CA()
    settings = write_certificate(authority, tmp_path)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    authority.issue_cert("client.example", common_name="client").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    if known:
        authorities = tmp_path / "authorities.pem"
        authorities.write_bytes(authority.cert_pem.bytes())
        settings["tls_client_ca"] = str(authorities)
    async with serve(tmp_path, **settings) as server:
        first, second = await peers(calls, server.url, context)

    assert first is second
    if known:
        assert "commonName=client" in str(first.tls_identity).split(",")
        assert ("DNS:client.example",) == first.tls_names
    else:
        assert first.tls_identity is None
        assert () == first.tls_names


def test_a_unix_socket_of_uvloop_tells_its_user_too(tmp_path: Path) -> None:
    """Its transports have only a socket-like object, and servers run on it."""

    async def ask() -> Peer:
        found: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

        class Server(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                found.set_result(peer_of(transport, "here"))

        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(Server, f"{tmp_path}/s")
        _, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
        peer = await found
        writer.close()
        server.close()
        return peer

    assert Peer("here", "unix", None, os.getuid()) == uvloop.run(ask())


def test_a_connection_that_is_gone_has_no_address() -> None:
    class Gone:
        def get_extra_info(self, name: str) -> None:
            return None

    gone: Any = Gone()

    assert Peer("here") == peer_of(gone, "here")


@pytest.mark.parametrize(
    ("name", "address"), [(("10.0.0.7", 51), "10.0.0.7:51"), (("::1", 51, 0, 0), "[::1]:51")]
)
def test_an_address_is_text(name: Any, address: str) -> None:
    class Transport:
        def get_extra_info(self, asked: str) -> Any:
            return name if asked == "peername" else None

    transport: Any = Transport()

    assert address == peer_of(transport, "").address


def test_no_value_of_a_subject_reads_as_another_attribute() -> None:
    subject = ((("commonName", "a,organizationName=b\\"),), (("organizationName", "c"),))

    class Tls:
        def getpeercert(self) -> dict[str, Any]:
            return {"subject": subject}

    class Transport:
        def get_extra_info(self, asked: str) -> Any:
            return Tls() if asked == "ssl_object" else None

    transport: Any = Transport()

    expected = r"commonName=a\,organizationName=b\\,organizationName=c"
    assert expected == peer_of(transport, "").tls_identity
