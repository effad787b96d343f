"""Request bodies: read within the limits of size, chunks and time, and decompressed."""

import asyncio
from dataclasses import dataclass
from functools import partial

import numpy as np
from aiohttp import ClientPayloadError, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from xlaserve.errors import BodyTimeout, InvalidBody, TooLarge
from xlaserve.transport.rest import compression
from xlaserve.transport.rest.threads import OffLoop

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAULTS = (web.RequestPayloadError, ClientPayloadError, HttpProcessingError)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may cost."""

    max_bytes: int
    """Before and after its decompression."""
    max_chunks: int
    timeout_seconds: float


class BodyReader:
    """Reads the bodies of requests; one for a server."""

    def __init__(self, limits: BodyLimits, threads: OffLoop) -> None:
        self._limits = limits
        self._threads = threads

    async def read(self, request: web.BaseRequest, waited_seconds: float = 0.0) -> memoryview:
        """Return the whole body, decompressed; some of its time may have passed already.

        Raises TooLarge before a byte of a body is read that announces more than the limit,
        BodyTimeout, InvalidBody or UnsupportedEncoding.
        """
        if not request.body_exists:
            return memoryview(b"")
        coding = compression.request_coding(request.headers.get("Content-Encoding", ""))
        length = request.content_length
        if length is not None and length > self._limits.max_bytes:
            self._raise_too_large()
        await _let_it_come(request)
        timeout = asyncio.timeout(self._limits.timeout_seconds - waited_seconds)
        try:
            async with timeout:
                body = await self._receive(request.content, length)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise BodyTimeout(self._limits.timeout_seconds) from None
        except _FAULTS as error:
            raise InvalidBody(f"the body is broken: {error}") from error
        if coding == compression.IDENTITY:
            return body
        return await self._inflate(coding, body)

    async def _receive(self, content: StreamReader, length: int | None) -> memoryview:
        if length is None:
            return await self._receive_chunks(content)
        first = await content.readany()
        if len(first) == length:
            return memoryview(first)
        # Not zeroed: what a client only announces never becomes resident.
        whole = np.empty(length, np.uint8).data
        filled, piece = 0, first
        while piece:
            whole[filled : filled + len(piece)] = piece
            filled += len(piece)
            piece = await content.readany()
        return whole[:filled]

    async def _receive_chunks(self, content: StreamReader) -> memoryview:
        whole, chunks = bytearray(), 0
        while True:
            piece, ends_chunk = await content.readchunk()
            if not piece and not ends_chunk:
                return memoryview(whole)
            whole += piece
            chunks += ends_chunk
            if len(whole) > self._limits.max_bytes:
                self._raise_too_large()
            if chunks > self._limits.max_chunks:
                raise InvalidBody(
                    f"expected a body of at most {self._limits.max_chunks} chunks "
                    "(max_http_chunks), got more"
                )

    def _raise_too_large(self) -> None:
        raise TooLarge("the body", self._limits.max_bytes, "max_message_bytes")

    async def _inflate(self, coding: str, body: memoryview) -> memoryview:
        call = partial(compression.inflate, coding, body, self._limits.max_bytes)
        # A few bytes can unpack to as many as are allowed.
        return await self._threads.run(self._limits.max_bytes, call)


async def _let_it_come(request: web.BaseRequest) -> None:
    # Only now: a request that is refused before its body is wanted need not send it.
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0
