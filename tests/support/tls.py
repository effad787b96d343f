"""A TLS client that controls where its records and segments end."""

import asyncio
import fcntl
import socket
import ssl
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trustme

_ANSWER_SECONDS = 20


def write_certificate(authority: trustme.CA, folder: Path, *names: str) -> dict[str, str]:
    """Write a certificate for `names` (default localhost); return the server's TLS settings."""
    issued = authority.issue_cert(*names or ("localhost",))
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return {"tls_certificate": str(chain), "tls_key": str(key)}


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """Return a client context for HTTP/2 that trusts the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(["h2"])
    return context


class TlsClient:
    """A connection to a server in the same event loop."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    async def shake_hands(self) -> None:
        """Perform the TLS handshake."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.send(self._outgoing.read())
                self._incoming.write(await self._loop.sock_recv(self._socket, 1 << 16))
            else:
                await self.send(self._outgoing.read())
                return

    def record(self, octets: bytes) -> bytes:
        """Return a TLS record with these bytes, without sending it."""
        assert self._tls.write(octets) == len(octets) <= 1 << 14
        return self._outgoing.read()

    def close_notify(self) -> bytes:
        """Return the close_notify record, without sending it."""
        with suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        return self._outgoing.read()

    async def send(self, *segments: bytes) -> None:
        """Send bytes; wait after each segment until the server has read it."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            for segment in segments:
                await self._loop.sock_sendall(self._socket, segment)
                while self._unread_bytes:
                    await asyncio.sleep(0)

    @property
    def _unread_bytes(self) -> int:
        """Return roughly how many sent bytes the server has not read; a zero is exact."""
        count = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(count, sys.byteorder)

    async def receive(self, is_all: Callable[[bytes], bool]) -> bytes:
        """Return the bytes received once they are complete or the connection is closed."""
        received = b""
        async with asyncio.timeout(_ANSWER_SECONDS):
            while not is_all(received) and (octets := await self._read()):
                received += octets
        return received

    async def _read(self) -> bytes:
        while True:
            try:
                return self._tls.read(1 << 18)
            except ssl.SSLWantReadError:
                with suppress(ConnectionError):
                    self._incoming.write(await self._loop.sock_recv(self._socket, 1 << 18))
                if not self._incoming.pending:
                    return b""


@asynccontextmanager
async def connected(url: str, context: ssl.SSLContext) -> AsyncIterator[TlsClient]:
    """Connect to `unix:path`, where the kernel tells what the server has read; shake hands."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        path = url.removeprefix("unix:")
        await asyncio.get_running_loop().sock_connect(connection, path)
        client = TlsClient(connection, context)
        async with asyncio.timeout(_ANSWER_SECONDS):
            await client.shake_hands()
        yield client
