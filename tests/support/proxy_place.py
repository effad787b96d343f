"""A server behind a reverse proxy, and clients of that proxy."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc.aio

from support.conditions import MOST_SECONDS
from support.generating import Generation
from support.http import Answer
from support.proxy_programs import NAME, Proxy
from support.server import RunningServer

SOURCE = "127.0.0.3"
"""Source address of HTTP clients, different from the proxy's."""
Headers: TypeAlias = Sequence[tuple[str, str]]


class Client:
    """An HTTP/1.1 connection to a proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.interim: list[int] = []

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read the status and the header fields by lower-case name."""
        while True:
            block = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = block.decode("latin-1").rstrip().split("\r\n")
            status = int(first.split(" ")[1])
            if status >= 200:
                break
            self.interim.append(status)
        pairs = (line.partition(":") for line in lines)
        return status, {name.lower(): value.strip() for name, _, value in pairs}

    async def answer(self, *, head: bool = False) -> Answer:
        """Read a response, however its body is delimited."""
        async with asyncio.timeout(MOST_SECONDS):
            status, headers = await self.head()
            if head or status in (204, 304):
                body = b""
            elif "chunked" in headers.get("transfer-encoding", ""):
                body = b"".join([chunk async for chunk in self.chunks()])
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
            return Answer(status, headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield chunks as they arrive."""
        while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readuntil(b"\r\n")

    async def ask(
        self,
        method: str,
        path: str,
        *headers: tuple[str, str],
        body: bytes | None = None,
        host: str = NAME,
    ) -> Answer:
        """Send a request and read the response."""
        await self.send(method, path, *headers, body=body, host=host)
        return await self.answer(head=method == "HEAD")

    async def send(
        self,
        method: str,
        path: str,
        *headers: tuple[str, str],
        body: bytes | None = None,
        host: str = NAME,
    ) -> None:
        """Send a request."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        await self.writer.drain()


@dataclass
class Place:
    """A proxy and the server behind it."""

    proxy: Proxy
    server: RunningServer
    generation: Generation
    port: int
    authority: Path
    log: Path
    """The server's access log."""
    folder: Path
    found: dict[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Connect to the proxy for the duration of a block."""
        context = None
        if self.proxy.has_tls:
            context = ssl.create_default_context(cafile=str(self.authority))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self.port,
            ssl=context,
            server_hostname=NAME if context else None,
            local_addr=(SOURCE, 0),
            limit=1 << 26,
        )
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """Open a gRPC channel to the proxy for the duration of a block."""
        credentials = grpc.ssl_channel_credentials(self.authority.read_bytes())
        options = [
            ("grpc.ssl_target_name_override", NAME),
            ("grpc.default_authority", NAME),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        address = f"127.0.0.1:{self.port}"
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            yield channel

    async def try_all(self, checks: Mapping[str, Callable[["Place"], Awaitable[None]]]) -> None:
        """Run each check and record "yes" or the error."""
        for name, check in checks.items():
            self.generation.may_go_on.set()
            await self.try_one(name, check)
        self.generation.may_go_on.set()

    async def try_one(
        self,
        name: str,
        check: Callable[["Place"], Awaitable[None]],
        seconds: float = MOST_SECONDS,
    ) -> None:
        """Run one check and record the result."""
        try:
            async with asyncio.timeout(seconds):
                await check(self)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.found[name] = f"{text[:300]}"
        else:
            self.found[name] = "yes"
        print(f"{self.proxy.name}: {name}: {self.found[name]}")
