"""A low-level HTTP/2 client, for requests and observations that gRPC clients do not support."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import h2.config
import h2.connection
import h2.events

Headers: TypeAlias = Sequence[tuple[str, str]]

_ANSWER_SECONDS = 20


def request_headers(path: str, *more: tuple[str, str], **changes: str) -> list[tuple[str, str]]:
    """Return the request headers of a call; keywords change pseudo-headers."""
    plain = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return [*(plain | {f":{name}": value for name, value in changes.items()}).items(), *more]


def base64_unpadded(value: str) -> str:
    """Encode the value of a header whose name ends in -bin."""
    return base64.b64encode(value.encode()).decode().rstrip("=")


def framed(message: bytes) -> bytes:
    """Prefix a message with its gRPC frame header."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class Wire:
    """A client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.h2.initiate_connection()
        self.flush()
        self.events: list[Any] = []
        """Events received but not yet consumed."""
        self.acknowledges = True
        """Whether to send WINDOW_UPDATE for received data."""

    def flush(self) -> None:
        """Send pending output."""
        self.writer.write(self.h2.data_to_send())

    def open(self, headers: Headers) -> int:
        """Start a call and leave it open; return its stream id."""
        stream: int = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers)
        self.flush()
        return stream

    def send(self, headers: Headers, message: bytes = b"") -> int:
        """Make a call with one message; return its stream id."""
        stream = self.open(headers)
        self.h2.send_data(stream, framed(message), end_stream=True)
        self.flush()
        return stream

    def send_nothing(self, headers: Headers) -> int:
        """Make a call that ends without a message; return its stream id."""
        stream = self.open(headers)
        self.h2.end_stream(stream)
        self.flush()
        return stream

    async def until(self, kind: type[Any], stream: int | None = None) -> Any:
        """Return the next event of this type, and of this stream if given."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            while (event := self._take(kind, stream)) is None:
                data = await self.reader.read(65536)
                assert data, f"closed without {kind.__name__}"
                for received in self.h2.receive_data(data):
                    if isinstance(received, h2.events.DataReceived) and self.acknowledges:
                        size = received.flow_controlled_length
                        self.h2.acknowledge_received_data(size, received.stream_id)
                    self.events.append(received)
                self.flush()
        return event

    def _take(self, kind: type[Any], stream: int | None) -> Any:
        for index, event in enumerate(self.events):
            if isinstance(event, kind) and stream in (None, getattr(event, "stream_id", None)):
                return self.events.pop(index)
        return None

    async def trailers(self, stream: int) -> dict[str, str]:
        """Return the trailers of a call."""
        await self.until(h2.events.StreamEnded, stream)
        blocks = [
            event
            for event in self.events
            if getattr(event, "stream_id", None) == stream and hasattr(event, "headers")
        ]
        self.events = [e for e in self.events if getattr(e, "stream_id", None) != stream]
        return dict(blocks[-1].headers)

    async def ping(self) -> None:
        """Send a PING and await its acknowledgement; earlier answers have then arrived."""
        self.h2.ping(b"xlaserve")
        self.flush()
        await self.until(h2.events.PingAckReceived)


class _Recorded:
    def __init__(self) -> None:
        self.octets = b""

    def write(self, octets: bytes) -> None:
        self.octets += octets


def sent(headers: Headers, message: bytes = b"", *, whole: bool = True) -> bytes:
    """Return a client's bytes for one call (or its headers only) on a new connection."""
    recorded: Any = _Recorded()
    wire = Wire(asyncio.StreamReader(), recorded)
    if whole:
        wire.send(headers, message)
    else:
        wire.open(headers)
    octets: bytes = recorded.octets
    return octets


@asynccontextmanager
async def connect(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """Connect to `host:port` or `unix:path`; with TLS, the server must be named localhost."""
    name = None if tls is None else "localhost"
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(path, ssl=tls, server_hostname=name)
    else:
        host, _, port = url.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host.strip("[]"), int(port), ssl=tls, server_hostname=name
        )
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def size_of_headers(headers: Headers) -> int:
    """Return the size of a header list as defined for its limit (RFC 9113, 10.5.1)."""
    return sum(len(name.encode()) + len(value.encode()) + 32 for name, value in headers)
