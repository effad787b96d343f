"""HTTP/2 clients without gRPC on the gRPC port get an error, whatever they wait for."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset
from support.conditions import MOST_SECONDS
from support.engines import own_engine_only
from support.server import RunningServer, Serve

JSON = ("content-type", "application/json")
EXPECT = ("expect", "100-continue")


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with serve(tmp_path) as running:
        yield running


class Client:
    """An HTTP/2 connection without a request library."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()

    async def ask(self, method: str, *headers: tuple[str, str], ends: bool) -> dict[str, str]:
        """Send a request's headers; return the answer's headers, with its body as `body`."""
        stream = self.h2.get_next_available_stream_id()
        fields = ((":method", method), (":scheme", "http"), (":path", "/v2"), (":authority", "a"))
        self.h2.send_headers(stream, [*fields, *headers], end_stream=ends)
        found, body = {}, b""
        async with asyncio.timeout(MOST_SECONDS):
            while True:
                self.writer.write(self.h2.data_to_send())
                data = await self.reader.read(1 << 16)
                assert data, "the connection has ended"
                for event in self.h2.receive_data(data):
                    match event:
                        case ResponseReceived():
                            found = {str(k): str(v) for k, v in event.headers}
                        case DataReceived():
                            body += event.data
                        case StreamEnded() | StreamReset():
                            return found | {"body": body.decode()}


@own_engine_only
@pytest.mark.parametrize("ends", [True, False], ids=["whole", "waiting"])
@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", (), "405"),
        ("HEAD", (), "405"),
        ("PUT", (JSON, EXPECT), "405"),
        ("POST", (JSON, EXPECT), "415"),
        ("POST", (JSON,), "415"),
        ("POST", (), "415"),
        ("HEAD", (("x", "y" * 20_000),), "431"),
        ("POST", (("x", "y" * 20_000),), "431"),
    ],
)
async def test_who_is_wrong_here_is_told_without_a_body(
    server: RunningServer,
    method: str,
    headers: tuple[tuple[str, str], ...],
    status: str,
    ends: bool,
) -> None:
    """A client may wait for the server before it sends its body (RFC 9110, 10.1.1)."""
    host, _, port = server.url.rpartition(":")
    client = Client(*await asyncio.open_connection(host, int(port)))
    answers = [await client.ask(method, *headers, ends=ends) for _ in range(3)]
    client.writer.close()

    assert [status] * 3 == [answer[":status"] for answer in answers]
    assert ["no-store"] * 3 == [answer["cache-control"] for answer in answers]
    assert [method == "HEAD"] * 3 == [not answer["body"] for answer in answers]
    if status == "405":
        assert "POST" == answers[0]["allow"]
