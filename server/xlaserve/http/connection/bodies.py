"""Request bodies: read within the limits of size, chunks and time, and decompressed."""

import asyncio
from dataclasses import dataclass
from functools import partial

from xlaserve.errors import BodyTimeout, InvalidBody, ShuttingDown, TooLarge
from xlaserve.grpc.http2.messages import Allocate
from xlaserve.http import compression
from xlaserve.http.connection.chunks import BodyFault
from xlaserve.http.connection.held import Held
from xlaserve.http.connection.request import Request
from xlaserve.http.connection.request_body import Body
from xlaserve.http.threads import OffLoop
from xlaserve.serving.call import outside_call

_FIRST_BYTES = 64 << 10
"""Bytes reserved for a body of unknown length."""
_AROUND_A_BODY = 64 << 10
_AROUND_A_CHUNK = 32
"""Bytes allowed besides a body in chunks: sizes, line ends, extensions, trailers."""
_STALL_SECONDS = 1.0
"""Seconds that a draining server waits for the next bytes of a body."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a body."""

    max_bytes: int
    """Bytes before and after decompression."""
    max_chunks: int
    timeout_seconds: float


class BodyReader:
    """Reads the bodies of requests; one for a server."""

    def __init__(self, limits: BodyLimits, threads: OffLoop, allocate: Allocate) -> None:
        self._limits = limits
        self._allocate = allocate
        self._threads = threads
        self._is_draining = False
        self._is_over = False
        """Whether no body is waited for."""
        self._timeouts: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        """Refuse each body from now on as soon as nothing of it comes for a second."""
        self._is_draining = True
        for timeout in self._timeouts:
            self._expect_more(timeout)

    def refuse(self) -> None:
        """Refuse every body that has not come by now: the server ends."""
        self._is_draining = self._is_over = True
        for timeout in self._timeouts:
            self._expect_more(timeout)

    def _expect_more(self, timeout: asyncio.Timeout) -> None:
        """Give a body so long for its next bytes; asked while the server drains."""
        if timeout.expired():
            return  # its task has yet to see that, and is then over
        now = asyncio.get_running_loop().time()
        timeout.reschedule(now if self._is_over else now + _STALL_SECONDS)

    async def read(self, request: Request, held: Held) -> memoryview:
        """Return the whole body, decompressed; some of its time may have passed already.

        What is held is counted, and is for the caller to end. Raises TooLarge before a byte of a
        body is read that announces more than the limit, BudgetExhausted where there is no memory
        in time, BodyTimeout, InvalidBody, UnsupportedEncoding, or ShuttingDown where the server
        drains and the body does not come.
        """
        length = request.body.length
        if length == 0:
            return memoryview(b"")
        coding = compression.request_coding(request.headers.get("Content-Encoding", ""))
        if length is not None and length > self._limits.max_bytes:
            self._raise_too_large()
        # Only now: a request that is refused before its body is wanted need not send it.
        request.let_body_come()
        seconds = self._limits.timeout_seconds - request.waited_seconds
        body = await self._receive_in_time(request.body, length, held, seconds)
        if coding == compression.IDENTITY:
            return body
        return await self._inflate(coding, body, held)

    async def _receive_in_time(
        self, content: Body, length: int | None, held: Held, seconds: float
    ) -> memoryview:
        timeout = asyncio.timeout(None)
        due = asyncio.get_running_loop().time() + seconds
        try:
            async with timeout:
                outside_call().run(timeout.reschedule, due)
                self._timeouts.add(timeout)
                if self._is_draining:
                    self._expect_more(timeout)
                return await self._receive(content, length, held, timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            if held.is_waiting:
                raise held.account.refusal("the body", length or 0) from None
            if self._is_draining:
                raise ShuttingDown from None
            raise BodyTimeout(self._limits.timeout_seconds) from None
        except BodyFault as error:
            raise InvalidBody(f"the body is broken: {error}") from error
        finally:
            self._timeouts.discard(timeout)

    async def _receive(
        self, content: Body, length: int | None, held: Held, timeout: asyncio.Timeout
    ) -> memoryview:
        if length is None:
            return await self._receive_bounded(content, held, timeout)
        # All of it, so that it can always come to its end, whatever others do.
        await held.reserve(length)
        first = await content.read()
        if len(first) == length:
            return memoryview(first)
        # Not zeroed: what a client only announces never becomes resident.
        whole = self._allocate(length).data
        filled, piece = 0, first
        while piece:
            whole[filled : filled + len(piece)] = piece
            filled += len(piece)
            if self._is_draining:
                self._expect_more(timeout)
            piece = await content.read()
        return whole[:filled]

    async def _receive_bounded(
        self, content: Body, held: Held, timeout: asyncio.Timeout
    ) -> memoryview:
        """Receive a body in chunks, with no more around them than they need."""
        overran = False

        def overrun() -> None:
            nonlocal overran
            if not timeout.expired():
                overran = True
                timeout.reschedule(asyncio.get_running_loop().time())

        around = _AROUND_A_BODY + self._limits.max_chunks * _AROUND_A_CHUNK
        held.bound_wire(self._limits.max_bytes + around, overrun)
        try:
            return await self._receive_chunks(content, held, timeout)
        except asyncio.CancelledError:
            if not overran:
                raise
            raise InvalidBody(
                f"expected at most {around} bytes of sizes, extensions and trailers around "
                f"{self._limits.max_bytes} bytes in chunks (max_http_chunks), got more"
            ) from None
        finally:
            held.unbound_wire()

    async def _receive_chunks(
        self, content: Body, held: Held, timeout: asyncio.Timeout
    ) -> memoryview:
        whole, reserved = bytearray(), _FIRST_BYTES
        await held.reserve(reserved)
        while True:
            piece = await content.read()
            if content.chunks > self._limits.max_chunks:
                raise InvalidBody(
                    f"expected a body of at most {self._limits.max_chunks} chunks "
                    "(max_http_chunks), got more"
                )
            if not piece:
                held.grow(len(whole) - reserved)
                return memoryview(whole)
            if len(whole) + len(piece) > reserved:
                # Half as much again: the bytes are copied seldom, and little is reserved in vain.
                more = max(len(whole) + len(piece), reserved * 3 // 2) - reserved
                held.grow(more)
                reserved += more
            if self._is_draining:
                self._expect_more(timeout)
            whole += piece
            if len(whole) > self._limits.max_bytes:
                self._raise_too_large()

    def _raise_too_large(self) -> None:
        raise TooLarge("the body", self._limits.max_bytes, "max_message_bytes")

    async def _inflate(self, coding: str, body: memoryview, held: Held) -> memoryview:
        run = partial(self._threads.run, self._limits.max_bytes)  # however short the body is
        inflated = await compression.inflate_within(
            coding, body, self._limits.max_bytes, held.grow, run
        )
        held.grow(-len(body))
        return inflated
