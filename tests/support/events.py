"""Reads server-sent events as they arrive."""

import asyncio
import json
from typing import Any

from support.http import SECONDS, Connection


class EventReader:
    """Reads events from a chunked body, one event per chunk."""

    def __init__(self, client: Connection) -> None:
        self._reader = client.reader
        self.headers: dict[str, str] = {}

    async def head(self) -> None:
        """Read the header block of a stream."""
        first, *lines = (await self._line(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        self.headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }
        assert first == "HTTP/1.1 200 OK"

    async def event(self) -> Any | None:
        """Read one event; return its name and data, or None at the end of the body."""
        size = int(await self._line(b"\r\n"), 16)
        chunk = (await self._reader.readexactly(size + 2))[:-2]
        if not chunk:
            return None
        assert chunk.endswith(b"\n\n")
        fields = dict(line.split(b": ", 1) for line in chunk.rstrip().split(b"\n"))
        return fields.get(b"event", b"message").decode(), json.loads(fields[b"data"])

    async def events(self) -> list[Any]:
        """Read all remaining events."""
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        return found

    async def _line(self, end: bytes) -> bytes:
        async with asyncio.timeout(SECONDS):
            return await self._reader.readuntil(end)
