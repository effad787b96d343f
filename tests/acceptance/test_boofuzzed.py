"""Findings of the boofuzz runs: wrong statuses, invalid answers, and hanging servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from acceptance import boofuzzed
from acceptance.figures import Outcome

REQUEST = b"GET / HTTP/1.1\r\n\r\n"


@asynccontextmanager
async def answering(octets: bytes, *, waits: bool) -> AsyncIterator[str]:
    """Serve these bytes to each client, or nothing; then close, unless it `waits`."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(octets)
        if waits:
            await over.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
        over.set()


@pytest.mark.parametrize(
    ("octets", "waits", "failing"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", False, []),
        (b"HTTP/1.1 503 Busy\r\n\r\n", False, []),
        (b"HTTP/1.1 500 Oh\r\n\r\n", False, ["5xx but 501, 503, 505, 507, to boofuzz"]),
        (b"HTTP/1.1 OK\r\n\r\n", False, ["5xx but 501, 503, 505, 507, to boofuzz"]),
        (b"", True, ["longer than 0.05 s, to boofuzz"]),
        (b"", False, []),
    ],
    ids=["answers", "is busy", "fails", "speaks no HTTP", "hangs", "closes"],
)
async def test_a_server_is_judged_by_how_it_ends(
    monkeypatch: pytest.MonkeyPatch, octets: bytes, failing: list[str], *, waits: bool
) -> None:
    monkeypatch.setattr(boofuzzed, "_PATIENCE_SECONDS", 0.05)
    if waits:
        monkeypatch.setattr(boofuzzed, "_HANG_SECONDS", 0.05)
    outcome = Outcome()
    async with answering(octets, waits=waits) as address:
        await boofuzzed.send(address, iter([REQUEST] * 3), outcome)

    answered = "requests of boofuzz that were answered"
    assert failing == [what for what in outcome.failing if what != answered]
    assert (answered in outcome.failing) is (b" 5" not in octets and b" 2" not in octets)
