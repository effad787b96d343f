"""Sending of general-path responses, complete or in chunks."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType

from multidict import CIMultiDict

from xlaserve.http.connection.request import Request
from xlaserve.http.connection.response_head import Fields, any_head
from xlaserve.http.messages import JOINED_BYTES, HttpResponse
from xlaserve.residence.server import NAME
from xlaserve.tensors import Buffer

_WRITTEN_BYTES = 512 << 10
"""Bytes of a response written before the event loop serves other connections."""
_EMPTY = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})
"""Statuses without a body or headers that describe one (RFC 9110, 8.6)."""


def joined(*several: Mapping[str, str]) -> dict[str, str]:
    """Merge headers; later values replace earlier ones, except that Vary accumulates."""
    headers: dict[str, str] = {}
    for some in several:
        varies = headers.get("Vary"), some.get("Vary")
        headers |= some
        if all(varies):
            headers["Vary"] = ", ".join(dict.fromkeys(", ".join(map(str, varies)).split(", ")))
    return headers


async def send(
    request: Request, answer: HttpResponse, headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Send a complete response with additional headers; raises ConnectionError."""
    every = [("Server", NAME), *joined(headers, answer.headers).items()]
    if answer.status in _EMPTY:
        begin(request, answer.status, every)
        return
    size = answer.size
    every.insert(0, ("Content-Type", answer.content_type))
    if request.method == "HEAD":
        begin(request, answer.status, every, size)
    elif size <= JOINED_BYTES:
        begin(request, answer.status, every, size, b"".join(answer.parts))
    else:
        begin(request, answer.status, every, size)
        await _write_in_turns(request, answer.parts)


async def _write_in_turns(request: Request, parts: Iterable[Buffer]) -> None:
    """Write a body in pieces, yielding to the event loop between them.

    The kernel copies written bytes synchronously, and on loopback delivers them as well: writing 10
    MB in one call blocked the event loop for 4.5 ms.
    """
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _WRITTEN_BYTES):
            if start:
                await asyncio.sleep(0)
            await request.connection.write(view[start : start + _WRITTEN_BYTES])


def begin(
    request: Request, status: HTTPStatus, fields: Fields, size: int | None = None, body: bytes = b""
) -> None:
    """Send the header block of a response, and its body if given; `size` is None for no body.

    Raises ConnectionError if the client has disconnected.
    """
    framing = () if size is None else (("Content-Length", str(size)),)
    _begin(request, status, fields, framing, body)


def _begin(
    request: Request, status: HTTPStatus, fields: Fields, framing: Fields, body: bytes
) -> None:
    connection = request.connection
    request.is_last = request.is_last or connection.ends_with(request)
    persistence: Fields = ()
    if request.is_last:
        persistence = (("Connection", "close"),)
    elif not request.is_1_1:
        persistence = (("Connection", "keep-alive"),)
    head = any_head(status, (*fields, *persistence, *framing), int(time.time()))
    connection.check_open()
    request.is_begun = True
    connection.transport.write(head + body)


class Stream:
    """A response sent in chunks (RFC 9112, 7.1)."""

    __slots__ = ("_in_chunks", "_request", "headers")

    def __init__(self, request: Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._in_chunks = request.is_1_1
        self.headers = CIMultiDict(headers)
        """Headers of the response, which may be changed until `begin`."""

    def begin(self) -> None:
        """Send the header block; for HTTP/1.0, the end of the connection delimits the body.

        Raises ConnectionError.
        """
        request = self._request
        if not self._in_chunks:
            request.is_last = True
        framing = (("Transfer-Encoding", "chunked"),) if self._in_chunks else ()
        _begin(request, HTTPStatus.OK, self.headers.items(), framing, b"")

    async def write(self, part: Buffer) -> None:
        """Send a part, and wait while the write buffer is full; raises ConnectionError."""
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        if self._request.method == "HEAD" or not size:
            return
        if self._in_chunks:
            part = b"".join((b"%x\r\n" % size, part, b"\r\n"))
        await self._request.connection.write(part)

    def end(self) -> None:
        """Send the final chunk."""
        request = self._request
        if self._in_chunks and request.method != "HEAD":
            with suppress(ConnectionError):
                request.connection.check_open()
                request.transport.write(b"0\r\n\r\n")
        # The server may have begun to drain after the header block was sent.
        request.is_last = request.is_last or request.connection.ends_with(request)
