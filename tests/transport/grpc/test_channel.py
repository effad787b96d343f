"""Our gRPC client closes its connections, even if the server ignores a TLS shutdown."""

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trustme
from support.tls import write_certificate

from xlaserve.dialing import channel
from xlaserve.dialing.address import TlsFiles, parse_address
from xlaserve.dialing.interface import CallFailed
from xlaserve.dialing.over_grpc import Client


class Silent(asyncio.Protocol):
    """A server that sends nothing; unless it reads, it does not answer close_notify either."""

    def __init__(self, reads: bool, made: list[asyncio.WriteTransport]) -> None:
        self._reads = reads
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(cast(asyncio.WriteTransport, transport))
        if not self._reads:
            cast(asyncio.ReadTransport, transport).pause_reading()


@asynccontextmanager
async def silent_server(context: ssl.SSLContext | None, *, reads: bool) -> AsyncIterator[int]:
    loop = asyncio.get_running_loop()
    made: list[asyncio.WriteTransport] = []
    server = await loop.create_server(lambda: Silent(reads, made), "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for transport in made:
            transport.abort()


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("tls", [True, False])
def test_no_socket_is_left_open(
    tls: bool, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open socket fails the test: its ResourceWarning is an error."""
    monkeypatch.setattr(channel, "_CLOSE_SECONDS", 0.05)
    authority = trustme.CA()
    files = write_certificate(authority, tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["tls_certificate"], files["tls_key"])
    scheme, tls_files = ("grpcs", TlsFiles(insecure=True)) if tls else ("grpc", TlsFiles())
    made: list[Any] = []
    connected = channel._Connection.connection_made

    def noted(self: channel._Connection, transport: asyncio.BaseTransport) -> None:
        made.append(transport.get_extra_info("socket"))
        connected(self, transport)

    monkeypatch.setattr(channel._Connection, "connection_made", noted)

    async def ask() -> int:
        async with silent_server(context if tls else None, reads=reads) as port:
            address = parse_address(f"{scheme}://localhost:{port}", tls_files)
            with pytest.raises(CallFailed, match="no answer in time"):
                async with Client(address, timeout=0.2) as client:
                    await client.live()
            (socket,) = made
            return int(socket.fileno())

    assert asyncio.run(ask()) == -1
    gc.collect()
