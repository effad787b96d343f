"""A minimal HTTP/1.1 client that repeats one POST, and only parses where answers end."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

from xlaserve.bench.load import OK, Load

_HEAD_END = b"\r\n\r\n"
_MAX_HEAD = 1 << 16
"""Maximum length of an answer's headers in bytes; longer ones are an error."""
_MAX_CHUNK_LINE = 1 << 10
_SUCCESS = 200
_CHUNKED = -1


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A serialized POST."""

    host: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)

    def encode(self) -> bytes:
        """Return the bytes of the request (RFC 9112 3)."""
        headers = {"Host": self.host, **self.headers, "Content-Length": str(len(self.body))}
        lines = [
            f"POST {self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode() + _HEAD_END + self.body


class RestConnection(asyncio.Protocol):
    """One connection, with one request in flight."""

    def __init__(self, request: bytes, load: Load) -> None:
        self._request, self._load = request, load
        self._started: float | None = None
        self._status = 0
        self._left = 0
        """Number of missing bytes of the body, or _CHUNKED for chunked encoding."""
        self._in_body = False
        self._input = bytearray()
        self._transport: asyncio.Transport | None = None

    def request(self) -> None:
        """Send the request."""
        self._started = self._load.clock()
        if self._transport is None:
            self._fail("connection closed")
        else:
            self._transport.write(self._request)

    def close(self) -> None:
        """Close the connection without reporting the request in flight to the load."""
        self._started = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for requests."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the request in flight to the load as lost."""
        self._transport = None
        self._fail("connection closed")

    def data_received(self, data: bytes) -> None:
        """Parse data of the answer, and report the answer to the load when it is complete."""
        if self._in_body and self._left != _CHUNKED:
            self._left -= len(data)
        else:
            self._input += data
        try:
            ended = self._read()
        except ValueError as error:
            self._fail(f"not HTTP/1.1: {error}")
            return
        if ended:
            self._answered()

    def _read(self) -> bool:
        if not self._in_body and not self._read_head():
            return False
        if self._left == _CHUNKED:
            return self._read_chunks()
        if self._left < 0:
            raise ValueError("unexpected data after the answer")
        return not self._left

    def _read_head(self) -> bool:
        end = self._input.find(_HEAD_END)
        if end < 0:
            if len(self._input) > _MAX_HEAD:
                raise ValueError("unterminated headers")
            return False
        status, _, fields = bytes(self._input[:end]).lower().partition(b"\r\n")
        if not status.startswith(b"http/1."):
            raise ValueError(f"expected an HTTP/1.x status line, got {status[:16]!r}")
        self._status = int(status[9:12])
        headers = dict(_field(line) for line in fields.split(b"\r\n"))
        self._in_body = True
        del self._input[: end + len(_HEAD_END)]
        if headers.get(b"transfer-encoding") == b"chunked":
            self._left = _CHUNKED
        else:
            self._left = int(headers.get(b"content-length", b"0")) - len(self._input)
            self._input.clear()
        return True

    def _read_chunks(self) -> bool:
        """Remove complete chunks; return whether the last chunk was found (RFC 9112 7.1)."""
        data = self._input
        while (line := data.find(b"\r\n")) >= 0:
            size = int(data[:line].partition(b";")[0], 16)
            end = line + 2 + size + 2
            if len(data) < end:
                return False
            del data[:end]
            if not size:
                return True
        if len(data) > _MAX_CHUNK_LINE:
            raise ValueError("expected the size of a chunk, got an overlong line")
        return False

    def _answered(self) -> None:
        started, self._started, self._in_body = self._started, None, False
        if started is None:
            self._fail("an unsolicited answer")
            return
        status = OK if self._status == _SUCCESS else f"HTTP {self._status}"
        self._load.answered(self, started, status)

    def _fail(self, reason: str) -> None:
        started = self._started
        self.close()
        if started is not None:
            self._load.lost(started, reason)


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name, value.strip()
