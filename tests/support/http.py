"""HTTP/1.1 as raw bytes, including requests that no well-behaved client library would send."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.conditions import MOST_SECONDS

SECONDS = MOST_SECONDS
"""Timeout in seconds, longer than anything that tests have a server do."""


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    headers: dict[str, str]
    """Header fields by lower-case name."""
    body: bytes

    @property
    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Return the error text, from `{"error": text}` or from OpenAI's error object.

        Asserts that the body has no other fields.
        """
        assert {"error"} == set(self.json), self.body
        told = self.json["error"]
        return str(told["message"] if isinstance(told, dict) else told)


def message(
    method: str, path: str, *headers: tuple[str, str], body: bytes = b"", length: int | None = -1
) -> bytes:
    """Build a request; a length of None omits Content-Length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length is not None and (body or length >= 0):
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*chunks: bytes) -> bytes:
    """Encode a chunked body, including the last chunk."""
    written = (b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return b"".join(written)


@dataclass
class Connection:
    """A client connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    interim: list[int] = field(default_factory=list)
    """1xx statuses received before the final ones."""

    async def send(self, data: bytes) -> None:
        """Send bytes, ignoring a connection that the server has closed."""
        try:
            self.writer.write(data)
            async with asyncio.timeout(SECONDS):
                await self.writer.drain()
        except ConnectionError:
            pass

    async def answer(self, *, head: bool = False) -> Answer:
        """Read a response."""
        async with asyncio.timeout(SECONDS):
            while True:
                lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                status = int(lines[0].split(" ")[1])
                if status >= 200:
                    break
                self.interim.append(status)
            headers = dict(_header(line) for line in lines[1:] if line)
            length = 0 if head else int(headers.get("content-length", "0"))
            return Answer(status, headers, await self.reader.readexactly(length))

    async def ended(self) -> bytes:
        """Read until the server closes the connection."""
        async with asyncio.timeout(SECONDS):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def ask(self, data: bytes, *, head: bool = False) -> Answer:
        """Send bytes and read a response."""
        await self.send(data)
        return await self.answer(head=head)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.lower(), value.strip()


@asynccontextmanager
async def connect(address: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Connection]:
    """Connect to host:port for the duration of a block; TLS expects a certificate for
    localhost.
    """
    host, _, port = address.rpartition(":")
    name = None if tls is None else "localhost"
    reader, writer = await asyncio.open_connection(
        host, int(port), limit=1 << 26, ssl=tls, server_hostname=name
    )
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


async def ask(
    address: str, method: str, path: str, *headers: tuple[str, str], body: bytes = b""
) -> Answer:
    """Send a request on a new connection."""
    async with connect(address) as connection:
        return await connection.ask(message(method, path, *headers, body=body))
